"""attend_latent: split-KV attention over latents, which are keys and values at once.

Multi-head latent attention (https://arxiv.org/abs/2405.04434) with the projections of K and V
absorbed into query and output: a token is its latent of R channels, which all heads share, and the
part of its key that rotates. Rows are heads; each latent is read once for scores and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvcompile.codegen.gpu import fragments, words
from kvcompile.codegen.gpu.glossary import latent_glossary
from kvcompile.codegen.gpu.shape import GpuShape, Part, supports_records
from kvcompile.codegen.gpu.text import Writer, jit
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec

LATENT_TILE = 32
"""Tokens of a tile: latents are wide, and two tiles of 64 fill a chip."""


@dataclass(frozen=True)
class LatentShape(GpuShape):
    """The numbers of a kernel whose values are its latents."""

    @cached_property
    def v(self) -> Part:
        """The latents."""
        return self.k

    @property
    def out_channels(self) -> int:
        """R: the output is a sum of latents."""
        return self.spec.head_dim_qk

    @property
    def block_tokens(self) -> int:
        """Tokens of an iteration."""
        return min(self.spec.page_size, LATENT_TILE)


def shape_of(spec: KernelSpec) -> GpuShape:
    """Return the numbers of a kernel that attends."""
    return LatentShape(spec) if spec.op == "attend_latent" else GpuShape(spec)


class LatentGenerator:
    """Prints attend_latent kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        if spec.is_grouped:
            return Unsupported(
                f"{spec.k_format} latents", "Only latents of floating-point numbers are printed."
            )
        return supports_records(spec)

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        shape = LatentShape(spec)
        w = Writer()
        w(*latent_glossary(shape), "", "import triton", "import triton.language as tl", "", "")
        w(jit(fragments.varying(shape)), f"def {spec.symbol}(")
        w(*fragments.parameters(shape))
        with w.block("):"):
            fragments.rows(w, shape)
            fragments.load_query(w, shape)
            _load_rotating_query(w, shape)
            fragments.begin(w, shape)
            words.exact_pages(w, shape, lambda slots: _attend_tile(w, shape, slots))
            fragments.store_partial(w, shape)
        return KernelSource(spec, w.text)


def _load_rotating_query(w: Writer, shape: LatentShape) -> None:
    rotating = shape.part("v")
    for piece in rotating.pieces:
        inside = fragments.within(piece, rotating.shape.head_dim)
        seen = f"live_rows & {inside}" if inside else "live_rows"
        w(
            f"r{piece.name} = tl.load(q_row + {shape.spec.head_dim_qk} + "
            f"{fragments.channels(piece)}, mask={seen}, other=0.0)"
        )
    w("")


def _attend_tile(w: Writer, shape: LatentShape, slots: str) -> None:
    """Attend to a tile of tokens."""
    # A latent of a token that is not stored may be NaN, and weighs 0: it is not loaded.
    words.load_words(w, shape, "k", slots, "live")
    fragments.scores(w, shape, "q", "x", exact=True)
    rotating = shape.part("v")
    words.load_words(w, shape, "v", slots, "live", pieces=rotating.pieces)
    ieee = ', input_precision="ieee"' if shape.product_type("v") == "fp32" else ""
    for piece in rotating.pieces:
        w(f"x = tl.dot(r{piece.name}, v{piece.name}.T, x{ieee})")
    units = fragments.finish_scores(w, shape, "x", fragments.EXACT_UNITS)
    fragments.mask(w, shape, "x", "tokens", "live")
    fragments.online_softmax(w, shape, ["x"], ["p"], units)
    fragments.accumulate(w, shape, shape.block_tokens, value="k")
