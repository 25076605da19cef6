"""Reading one token out of a quantized page, in C++: decoded in fp32, rounded once.

The torch twins are the `decode` methods of `codegen/formats`. The product of a code and a scale is
exact in fp32, so it makes no difference whether a compiler joins it with the sum.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.fields import unpack_text
from kvcompile.codegen.cpu.grouped import GroupedPart, grouped_part
from kvcompile.codegen.cpu.pages import record_layout
from kvcompile.codegen.cpu.rotary import add_text
from kvcompile.codegen.cpu.scalars import CTYPE, narrow
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.formats import Role
from kvcompile.codegen.spec import KernelSpec

READ_K = """
// one token of the K part
static inline void read_k(const uint8_t* part, int slot, $ctype* x /* [$head_dim] */) {
  alignas(64) uint8_t codes[$channels];
$unpack  const uint16_t* words = (const uint16_t*)(part + $code_bytes);
  for (int c = 0; c < $head_dim; ++c)
    x[c] = $value;
}
"""

READ_K_AND_MEAN = """
// one token of the K part
static inline void read_k(
    const uint8_t* part, int slot, $ctype* x /* [$head_dim] */, const float* rotary) {
  alignas(64) uint8_t codes[$channels];
  alignas(64) float dense[$head_dim];
$unpack  const uint16_t* words = (const uint16_t*)(part + $code_bytes);
  for (int c = 0; c < $head_dim; ++c)
    dense[c] = $decoded;
  add_mean(part + $mean_offset, rotary, slot, dense);
  for (int c = 0; c < $head_dim; ++c) x[c] = $narrowed;
}
"""

READ_V = """
// one token of the V part
static inline void read_v(const uint8_t* part, int slot, $ctype* x /* [$head_dim] */) {
  alignas(64) uint8_t codes[$channels];
$unpack  const uint16_t* words = (const uint16_t*)(part + $code_bytes) + slot;
  for (int g = 0; g < $groups; ++g, words += $group_words) {
    const float $levels;
    const int end = std::min($head_dim, g * $group_size + $group_size);
    for (int c = g * $group_size; c < end; ++c) x[c] = $value;
  }
}
"""


def decode_text(spec: KernelSpec, role: Role) -> str:
    """Print read_k or read_v of a part whose elements share scales.

    Raises:
        ValueError: The part stores plain words.
    """
    part = grouped_part(spec, role)
    if part is None:
        raise ValueError(f"{role} of {spec.symbol} stores plain words")
    unpack = "".join(
        f"  unpack_{role}_{plane.bits}(part + {plane.begin}, slot, codes);\n"
        for plane in part.planes()
    )
    literals = {
        "ctype": CTYPE[spec.dtype],
        "head_dim": part.shape.head_dim,
        "channels": part.channels,
        "code_bytes": part.code_bytes,
        "unpack": unpack,
        "value": narrow(spec.dtype, _value(part)),
    }
    texts = [unpack_text(part, plane) for plane in part.planes()]
    layout = record_layout(spec)
    if role == "k" and layout.rotary is not None:
        texts.append(add_text(layout))
        mean = {
            "decoded": _value(part),
            "narrowed": narrow(spec.dtype, "dense[c]"),
            "mean_offset": layout.mean_offset,
        }
        texts.append(render(READ_K_AND_MEAN, **mean, **literals))
    elif role == "k":
        texts.append(render(READ_K, **literals))
    else:
        page_size = part.shape.page_size
        levels = [
            f"{word} = widen_bf16(words[{i * page_size}])" for i, word in enumerate(part.words)
        ]
        texts.append(
            render(
                READ_V,
                groups=len(part.shape.channel_groups()),
                group_size=part.shape.group_size,
                group_words=len(part.words) * page_size,
                levels=", ".join(levels),
                **literals,
            )
        )
    return join_sections(*texts)


def _value(part: GroupedPart) -> str:
    code = "float(codes[c] ^ 128)" if part.flipped else "float(codes[c])"
    if part.float8 is not None:
        code = f"widen_{part.float8.type_name}(codes[c])"
    if part.shape.role == "v":
        return " + ".join([f"{code} * scale", *part.words[1:]])
    terms = [f"{code} * widen_bf16(words[c])"]
    if "minimum" in part.words:
        terms.append(f"widen_bf16(words[{part.channels} + c])")
    return " + ".join(terms)
