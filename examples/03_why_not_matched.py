"""Ask why an attention stayed as the model wrote it.

The second model multiplies its probabilities with a gate before it weighs the values, which is not
the attention that any pattern means. It still runs, and correctly, only with its cache left dense.
"""

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import kvcompile


class Attention(nn.Module):
    """Cached attention of one head; with `gated`, tokens with short keys count for less."""

    def __init__(self, *, gated: bool, width: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.gated = gated

    def forward(
        self, x: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output [batch, 1, tokens, width] and the grown keys and values."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        if self.gated:
            weights = weights * k.norm(dim=-1).sigmoid()[:, :, None]
        return weights @ v, k, v


@torch.no_grad()
def main() -> None:
    """Explain a model that is matched and one that is not, then insist."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 1, 32)
    past = torch.randn(1, 1, 40, 32), torch.randn(1, 1, 40, 32)

    print(kvcompile.explain(Attention(gated=False).eval(), (x, *past)))
    gated = Attention(gated=True).eval()
    print(kvcompile.explain(gated, (x, *past)))

    difference = torch.compile(gated, backend="kvcompile")(x, *past)[0] - gated(x, *past)[0]
    print(f"\nunmatched, dense, and right: largest difference {difference.abs().max():.1e}")

    # With strict=True, what cannot be compressed is an error instead.
    try:
        kvcompile.compile(gated, strict=True)(x, *past)
    except BackendCompilerFailed as error:
        print(f"strict=True: {error.inner_exception}")


if __name__ == "__main__":
    main()
