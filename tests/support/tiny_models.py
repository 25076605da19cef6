"""Tiny decoders with random weights: seeded, in evaluation mode, nothing is downloaded.

The weights are scaled up from the usual initialisation: with it, a random model's logits are
nearly flat and a wrong cache would go unnoticed. Here every cached token changes the next one.

B batch, S new tokens, T all tokens, H heads, D head dimension, C = H * D model width.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB_SIZE = 128
MAX_POSITIONS = 1024
WEIGHT_STD = 0.25

TupleCache = tuple[tuple[torch.Tensor, torch.Tensor], ...]
CacheLayout = Literal["BHTD", "BTHD"]
Model = TypeVar("Model", bound=PreTrainedModel)


def ready(model: Model, dtype: torch.dtype) -> Model:
    """Return a model in evaluation mode, its weights converted."""
    nn.Module.eval(model)
    nn.Module.to(model, dtype)
    return model


def tiny_llama(
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a Llama with rotary positions and grouped queries; no bias anywhere."""
    config = LlamaConfig(
        hidden_size=16 * q_heads,
        intermediate_size=96,
        head_dim=head_dim,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return ready(LlamaForCausalLM(config), dtype)


def tiny_qwen2(
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    k_bias: float = 1.0,
    head_dim: int = 16,
) -> Qwen2ForCausalLM:
    """Return a Qwen2: like Llama, with biases on the projections of q, k and v.

    Args:
        dtype: Dtype of the weights.
        seed: Of the random weights.
        k_bias: Standard deviation of the biases of k.
        head_dim: Channels of a head.
    """
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    config.head_dim = head_dim  # which the class reads, and does not declare
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            nn.init.normal_(parameter, std=k_bias if "k_proj" in name else 1.0)
    return ready(model, dtype)


def tiny_gpt2(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> GPT2LMHeadModel:
    """Return a GPT-2: learned positions, as many KV heads as query heads, one q, k, v matrix."""
    config = GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return ready(GPT2LMHeadModel(config), dtype)


def tiny_gptj(
    *, dtype: torch.dtype = torch.float32, layers: int = 2, seed: int = 0
) -> GPTJForCausalLM:
    """Return a GPT-J: neighbouring channels turn together, half of them."""
    config = GPTJConfig(
        n_embd=64,
        n_layer=layers,
        n_head=4,
        rotary_dim=8,
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return ready(GPTJForCausalLM(config), dtype)


def tiny_neox(
    *, dtype: torch.dtype = torch.float32, layers: int = 2, seed: int = 0
) -> GPTNeoXForCausalLM:
    """Return a GPT-NeoX: halves turn together, of the first quarter of the channels."""
    config = GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25},
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return ready(GPTNeoXForCausalLM(config), dtype)


class NanoAttention(nn.Module):
    """Causal attention that grows its cache by `torch.cat`, as a hand-written decoder does."""

    def __init__(self, width: int, heads: int, cache_layout: CacheLayout) -> None:
        super().__init__()
        self.heads = heads
        self.time_axis = 2 if cache_layout == "BHTD" else 1
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x_BSC: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Attend to the cached and the new tokens; return the output and the grown cache."""
        batch, new_len, width = x_BSC.shape
        q, k, v = (
            part.view(batch, new_len, self.heads, width // self.heads)
            for part in self.qkv(x_BSC).chunk(3, dim=-1)
        )
        q = q.transpose(1, 2)
        if self.time_axis == 2:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k = torch.cat([past[0], k], dim=self.time_axis)
            v = torch.cat([past[1], v], dim=self.time_axis)
        keys, values = (k, v) if self.time_axis == 2 else (k.transpose(1, 2), v.transpose(1, 2))
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=past is None)
        return self.out(y.transpose(1, 2).reshape(batch, new_len, width)), (k, v)


class NanoBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, cache_layout: CacheLayout) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = NanoAttention(width, heads, cache_layout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the block's output [B, S, C] and the layer's grown cache."""
        y, present = self.attention(self.norm1(x), past)
        x = x + y
        return x + self.mlp(self.norm2(x)), present


class NanoGPT(nn.Module):
    """A decoder without any library: takes and returns a tuple of `(k, v)`, one per layer.

    Args:
        cache_layout: "BHTD" caches [B, H, T, D], "BTHD" caches [B, T, H, D].
    """

    def __init__(
        self,
        *,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        cache_layout: CacheLayout = "BHTD",
    ) -> None:
        super().__init__()
        self.time_axis = 2 if cache_layout == "BHTD" else 1
        self.tokens = nn.Embedding(VOCAB_SIZE, width)
        self.positions = nn.Embedding(MAX_POSITIONS, width)
        self.blocks = nn.ModuleList(NanoBlock(width, heads, cache_layout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(
        self, ids: torch.Tensor, past: TupleCache | None = None
    ) -> tuple[torch.Tensor, TupleCache]:
        """Return logits [B, S, vocabulary] and the grown cache."""
        past_len = past[0][0].shape[self.time_axis] if past is not None else 0
        places = torch.arange(past_len, past_len + ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        presents = []
        for i, block in enumerate(self.blocks):
            x, present = block(x, past[i] if past is not None else None)
            presents.append(present)
        return self.head(self.norm(x)), tuple(presents)


def tiny_nanogpt(
    *,
    cache_layout: CacheLayout = "BHTD",
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> NanoGPT:
    """Return a `NanoGPT` with random weights."""
    torch.manual_seed(seed)
    model = NanoGPT(cache_layout=cache_layout, layers=layers)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=WEIGHT_STD)
    model.eval()
    return model.to(dtype)


def greedy(model: nn.Module, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, TupleCache]:
    """Decode a `NanoGPT`, or a compiled one, greedily.

    Args:
        model: Takes `(ids, past)`, returns `(logits, past)`.
        ids: Prompt, int64 [B, S].
        new_tokens: How many tokens to add.

    Returns:
        Prompt and new tokens, int64 [B, S + new_tokens], and the last cache.
    """
    tokens, past, step = [ids], None, ids
    with torch.no_grad():
        for _ in range(new_tokens):
            logits, past = model(step, past)
            step = logits[:, -1:].argmax(-1)
            tokens.append(step)
    assert past is not None
    return torch.cat(tokens, dim=1), past


def prompt(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Return random token ids [batch, length], none of them the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (batch, length), generator=generator)
