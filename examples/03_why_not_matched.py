"""Ask why an attention stayed as the model wrote it.

The second model weighs its values with a sigmoid instead of a softmax, which is not the attention
that any pattern means. It still runs, and correctly, only with its cache left dense.
"""

import torch
from torch import nn

import kvcompile


class Attention(nn.Module):
    """Cached attention of one head; `weigh` turns scores into weights."""

    def __init__(self, weigh: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.weigh = weigh

    def forward(
        self, x: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output [batch, 1, tokens, width] and the grown keys and values."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return self.weigh(scores) @ v, k, v


@torch.no_grad()
def main() -> None:
    """Explain a model that is matched and one that is not, then insist."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 1, 32)
    past = torch.randn(1, 1, 40, 32)

    print(kvcompile.explain(Attention(nn.Softmax(dim=-1)).eval(), (x, past, past)))
    odd = Attention(nn.Sigmoid()).eval()
    print(kvcompile.explain(odd, (x, past, past)))

    difference = torch.compile(odd, backend="kvcompile")(x, past, past)[0] - odd(x, past, past)[0]
    print(f"\nunmatched, dense, and right: largest difference {difference.abs().max():.1e}")

    # With strict=True, what cannot be compressed is an error instead.
    try:
        kvcompile.compile(odd, strict=True)(x, past, past)
    except Exception as error:
        print(f"strict=True: {type(error).__name__}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
