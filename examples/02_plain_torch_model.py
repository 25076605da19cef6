"""Compile a decoder written in plain PyTorch, whose cache is a tuple of `(k, v)`.

Nothing in the model knows of kvcompile, and no library is needed: the compiler finds the cache in
the graph, by the `cat` that grows it and the attention that reads it.
"""

import torch
import torch.nn.functional as F
from torch import nn

import kvcompile

VOCAB_SIZE, WIDTH, HEADS, LAYERS = 256, 64, 4, 2
Cache = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Layer(nn.Module):
    """Causal self-attention and an MLP, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the output [batch, new tokens, width] and the grown `(k, v)`."""
        batch, new_len, _ = x.shape
        heads = (batch, new_len, HEADS, WIDTH // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, new_len, WIDTH))
        return x + self.mlp(x), (k, v)


class Decoder(nn.Module):
    """Takes tokens and a cache, returns logits and the grown cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, ids: torch.Tensor, past: Cache | None) -> tuple[torch.Tensor, Cache]:
        """Return logits [batch, new tokens, vocabulary] and the grown cache."""
        x, presents = self.embedding(ids), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, past[i] if past is not None else None)
            presents.append(present)
        return self.head(x), tuple(presents)


def decode(model: nn.Module, ids: torch.Tensor, new_tokens: int) -> tuple[list[int], Cache]:
    """Decode greedily; return the new tokens and the final cache."""
    logits, past = model(ids, None)
    tokens = []
    for _ in range(new_tokens):
        token = logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        logits, past = model(token, past)
    return tokens, past


@torch.no_grad()
def main() -> None:
    """Decode with and without the backend and compare."""
    torch.manual_seed(0)
    model = Decoder().eval()
    ids = torch.randint(0, VOCAB_SIZE, (1, 16))

    expected, _ = decode(model, ids, 24)
    tokens, cache = decode(torch.compile(model, backend="kvcompile"), ids, 24)

    print("tokens:", tokens)
    print(f"the same tokens as the unmodified model: {tokens == expected}")
    print(kvcompile.memory_report(cache))


if __name__ == "__main__":
    main()
