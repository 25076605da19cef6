"""Quantizing one page of one KV head, in C++: [P][C] of fp32 become one part of a record.

The torch twins are the `encode` methods of `codegen/formats`: the same fp32 operations in the same
order give the same bytes. All loops run over channels or neighbouring bytes, which the compiler
turns into vectors of any instruction set.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcompile.codegen.cpu.fields import pack_text
from kvcompile.codegen.cpu.grouped import (
    GroupedPart,
    float8_formats,
    grouped_part,
    part_channels,
)
from kvcompile.codegen.cpu.pages import part_format
from kvcompile.codegen.cpu.rounding import NEAREST, NUMBERS, narrow_text
from kvcompile.codegen.cpu.scalars import CTYPE, narrow
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.formats import Role
from kvcompile.codegen.spec import KernelSpec

QUANTIZE_EVEN = """
// the code c of x: the nearest of the levels scale * c + minimum
static inline uint8_t quantize_$role(float x, float minimum, float scale) {
  const float code = nearest((x - minimum) / scale);
  return uint8_t(int32_t(code < $largest.0f ? code : $largest.0f));
}
"""

QUANTIZE_BIT = """
// the code c of x: the nearer of the levels scale * c + minimum
static inline uint8_t quantize_$role(float x, float minimum, float scale) {
  return x > minimum + scale * 0.5f;
}
"""

QUANTIZE_FP8 = """
// the word of x in units of scale
static inline uint8_t quantize_$role(float x, float scale) {
  return narrow_$type(x / scale);
}
"""

LEVELS_K_EVEN = """
// each channel: the levels reach from below its smallest to above its largest element
static inline void levels_k(const float* x /* [P][$channels] */, float* minimum, float* scale) {
  alignas(64) int32_t lowest[$channels], highest[$channels];
  for (int c = 0; c < $channels; ++c) lowest[c] = highest[c] = ordered(x[c]);
  for (int t = 1; t < $page_size; ++t)
    for (int c = 0; c < $channels; ++c) {
      lowest[c] = std::min(lowest[c], ordered(x[t * $channels + c]));
      highest[c] = std::max(highest[c], ordered(x[t * $channels + c]));
    }
  for (int c = 0; c < $channels; ++c) {
    minimum[c] = bf16_down(from_ordered(lowest[c]) + 0.0f);  // -0 becomes 0
    scale[c] = bf16_up((from_ordered(highest[c]) + 0.0f - minimum[c]) / $largest.0f);
  }
}
"""

LEVELS_K_BIT = """
// sums over tokens, in halves: [P][$channels] -> [$channels], the first row
static inline void tree_sum_k(float* x) {
  for (int half = $page_size / 2; half > 0; half /= 2)
    for (int i = 0; i < half * $channels; ++i) x[i] += x[i + half * $channels];
}
// each channel: the two levels are its mean -+ its mean absolute deviation, rounded outwards
static inline void levels_k(const float* x /* [P][$channels] */, float* minimum, float* scale) {
  alignas(64) float sum[$page_size * $channels], mean[$channels];
  memcpy(sum, x, sizeof sum);
  tree_sum_k(sum);
  for (int c = 0; c < $channels; ++c) mean[c] = sum[c] / $page_size.0f;
  for (int t = 0; t < $page_size; ++t)
    for (int c = 0; c < $channels; ++c)
      sum[t * $channels + c] = std::fabs(x[t * $channels + c] - mean[c]);
  tree_sum_k(sum);
  for (int c = 0; c < $channels; ++c) {
    const float deviation = sum[c] / $page_size.0f;
    minimum[c] = bf16_down(mean[c] - deviation);
    scale[c] = bf16_up((mean[c] + deviation) - minimum[c]);
  }
}
"""

LEVELS_K_FP8 = """
// each channel: its largest magnitude becomes at most $largest
static inline void levels_k(const float* x /* [P][$channels] */, float* scale) {
  alignas(64) int32_t highest[$channels] = {};
  for (int t = 0; t < $page_size; ++t)
    for (int c = 0; c < $channels; ++c)
      highest[c] = std::max(highest[c], ordered(std::fabs(x[t * $channels + c])));
  for (int c = 0; c < $channels; ++c) scale[c] = bf16_up(from_ordered(highest[c]) / $largest.0f);
}
"""

DIVISORS_K = """
  for (int c = 0; c < $channels; ++c) scale[c] = scale[c] == 0 ? 1.0f : scale[c];
"""

ENCODE_K = """
// K part: codes, then bf16 [$channels] each: $words
static void encode_k(const float* x /* [P][$channels] */, uint8_t* part) {
  alignas(64) float $declared;
  levels_k(x, $arguments);
  uint16_t* words = (uint16_t*)(part + $code_bytes);
  for (int c = 0; c < $channels; ++c) {
$stores  }
$divisors  alignas(64) uint8_t codes[$page_size * $channels];
  for (int t = 0; t < $page_size; ++t)
    for (int c = 0; c < $channels; ++c)
      codes[t * $channels + c] = quantize_k(x[t * $channels + c], $values);
$pack$tail}
"""

LEVELS_V_EVEN = """
  int32_t lowest = ordered(x[0]), highest = lowest;
  for (int c = 0; c < $size; ++c) {
    lowest = std::min(lowest, ordered(x[c]));
    highest = std::max(highest, ordered(x[c]));
  }
  const float minimum = bf16_down(from_ordered(lowest) + 0.0f);  // -0 becomes 0
  const float scale = bf16_up((from_ordered(highest) + 0.0f - minimum) / $largest.0f);
"""

LEVELS_V_BIT = """
  alignas(64) float sum[$power] = {};
  memcpy(sum, x, $size * sizeof(float));
  const float mean = tree_sum_$power(sum) / $size.0f;
  for (int c = 0; c < $power; ++c) sum[c] = c < $size ? std::fabs(x[c] - mean) : 0.0f;
  const float deviation = tree_sum_$power(sum) / $size.0f;
  const float minimum = bf16_down(mean - deviation);
  const float scale = bf16_up((mean + deviation) - minimum);
"""

LEVELS_V_FP8 = """
  int32_t highest = 0;
  for (int c = 0; c < $size; ++c) highest = std::max(highest, ordered(std::fabs(x[c])));
  const float scale = bf16_up(from_ordered(highest) / $largest.0f);
"""

TREE_SUM_V = """
// the sum in halves
static inline float tree_sum_$power(float* x) {
$halves  return x[0];
}
"""

DIVISOR_V = """  const float divisor = scale == 0 ? 1.0f : scale;
"""

GROUP_V = """
// $size channels of a token: their codes, and their $words, bf16, P words apart;
// not inlined, lest the loop over tokens is turned into vectors instead of those over channels
static __attribute__((noinline)) void encode_group_$size(
    const float* x, uint8_t* codes, uint16_t* words) {
$levels
$stores$divisors  for (int c = 0; c < $size; ++c) codes[c] = quantize_v(x[c], $values);
}
"""

FLIP = """
  for (int i = 0; i < $page_size * $channels; ++i) codes[i] ^= 128;
"""

ENCODE_V = """
// V part: codes, then bf16 [P] per group of channels: $words
static void encode_v(const float* x /* [P][$channels] */, uint8_t* part) {
  alignas(64) uint8_t codes[$page_size * $channels]$zeros;
  uint16_t* words = (uint16_t*)(part + $code_bytes);
  for (int t = 0; t < $page_size; ++t) {
$calls  }
$flip$pack$tail}
"""

ENCODE_EXACT = """
// $name part: words of $format
static void encode_$role(const float* x /* [P][$channels] */, uint8_t* part) {
  $word* words = ($word*)part;
  for (int t = 0; t < $page_size; ++t)
    for (int c = 0; c < $channels; ++c)
      words[${role}_index(t, c)] = $converted;
}
"""


def encode_text(spec: KernelSpec) -> str:
    """Print encode_k and encode_v, which turn [P][channels] of fp32 into parts of a record."""
    roles: tuple[Role, ...] = ("k", "v")
    parts = {role: grouped_part(spec, role) for role in roles}
    grouped = [part for part in parts.values() if part is not None]
    return join_sections(
        NUMBERS,
        NEAREST if any(part.is_even for part in grouped) else "",
        *(narrow_text(format_) for format_ in float8_formats(*grouped)),
        *(
            _exact_text(spec, role) if part is None else _grouped_text(part)
            for role, part in parts.items()
        ),
    )


def _exact_text(spec: KernelSpec, role: Role) -> str:
    name = part_format(spec, role)
    channels = part_channels(spec, role)
    return render(
        ENCODE_EXACT,
        name=role.upper(),
        format=name,
        role=role,
        word=CTYPE[name],
        page_size=spec.page_size,
        channels=channels,
        converted=narrow(name, f"x[t * {channels} + c]"),
    )


def _grouped_text(part: GroupedPart) -> str:
    role = part.shape.role
    literals = {
        "role": role,
        "page_size": part.shape.page_size,
        "channels": part.channels,
        "code_bytes": part.code_bytes,
        "largest": part.largest,
        "type": "" if part.float8 is None else part.float8.type_name,
        "words": " and ".join(part.words),
        "pack": "".join(
            f"  pack_{role}_{plane.bits}(codes, part{_plus(plane.begin)});\n"
            for plane in part.planes()
        ),
        "tail": "",
    }
    tail = part.part_bytes - part.used_bytes
    if tail:
        literals["tail"] = f"  memset(part + {part.used_bytes}, 0, {tail});\n"
    return join_sections(
        render(_choose(part, QUANTIZE_EVEN, QUANTIZE_BIT, QUANTIZE_FP8), **literals),
        *(pack_text(part, plane) for plane in part.planes()),
        *(_k_texts if role == "k" else _v_texts)(part, literals),
    )


def _choose(part: GroupedPart, even: str, bit: str, fp8: str) -> str:
    if part.is_float:
        return fp8
    return bit if part.format.bits == 1 else even


def _k_texts(part: GroupedPart, literals: Mapping[str, object]) -> list[str]:
    stores = "".join(
        f"    words[{f'{i * part.channels} + ' if i else ''}c] = bf16_word({word}[c]);\n"
        for i, word in enumerate(part.words)
    )
    backwards = part.words[::-1]
    return [
        render(_choose(part, LEVELS_K_EVEN, LEVELS_K_BIT, LEVELS_K_FP8), **literals),
        render(
            ENCODE_K,
            divisors="" if part.format.bits == 1 else render(DIVISORS_K, **literals) + "\n",
            declared=", ".join(f"{word}[{part.channels}]" for word in backwards),
            arguments=", ".join(backwards),
            values=", ".join(f"{word}[c]" for word in backwards),
            stores=stores,
            **literals,
        ),
    ]


def _v_texts(part: GroupedPart, literals: Mapping[str, object]) -> list[str]:
    channels = part.channels
    sizes = [len(group) for group in part.shape.channel_groups()]
    distinct = sorted(set(sizes), reverse=True)
    calls = ""
    for size in distinct:
        first, count = sizes.index(size), sizes.count(size)
        step = len(part.words) * part.shape.page_size
        offset, word = _plus(first * sizes[0]), _plus(first * step)
        if count > 1:
            calls += f"    for (int g = 0; g < {count}; ++g)\n  "
            offset, word = f" + g * {size}", f" + g * {step}"
        calls += (
            f"    encode_group_{size}(x + t * {channels}{offset}, "
            f"codes + t * {channels}{offset}, words + t{word});\n"
        )
    sums = []
    if part.format.bits == 1:
        powers = sorted({_power_of_two(size) for size in distinct}, reverse=True)
        sums = [_tree_sum_text(power) for power in powers]
    return [
        *sums,
        *(_group_text(part, size, literals) for size in distinct),
        render(
            ENCODE_V,
            calls=calls,
            zeros=" = {}" if channels > part.shape.head_dim else "",
            flip=render(FLIP, **literals) + "\n" if part.flipped else "",
            **literals,
        ),
    ]


def _group_text(part: GroupedPart, size: int, literals: Mapping[str, object]) -> str:
    levels = _choose(part, LEVELS_V_EVEN, LEVELS_V_BIT, LEVELS_V_FP8)
    stores = "".join(
        f"  words[{i * part.shape.page_size}] = bf16_word({word});\n"
        for i, word in enumerate(part.words)
    )
    values = ", ".join(part.words[::-1])
    return render(
        GROUP_V,
        size=size,
        levels=render(levels, size=size, power=_power_of_two(size), **literals),
        values=values if part.format.bits == 1 else values.replace("scale", "divisor"),
        divisors="" if part.format.bits == 1 else DIVISOR_V,
        stores=stores,
        **literals,
    )


def _tree_sum_text(power: int) -> str:
    halves = [power >> level for level in range(1, power.bit_length())]
    lines = [f"  for (int i = 0; i < {half}; ++i) x[i] += x[i + {half}];\n" for half in halves]
    return render(TREE_SUM_V, power=power, halves="".join(lines))


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def _plus(offset: int) -> str:
    return f" + {offset}" if offset else ""
