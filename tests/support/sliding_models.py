"""Tiny models with sliding-window layers, alone or beside full ones, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, WEIGHT_STD

Make = Callable[[int, int], PreTrainedModel]
"""Makes a model of a window and a number of layers."""


def _common(window: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": WEIGHT_STD,
        "sliding_window": window,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    torch.nn.Module.eval(model)
    return model


def _hybrid(layers: int) -> list[str]:
    """Return sliding layers with a full one at the end, as hybrids have."""
    return ["sliding_attention"] * (layers - 1) + ["full_attention"]


def mistral(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a model all of whose layers slide."""
    torch.manual_seed(0)
    return _ready(MistralForCausalLM(MistralConfig(**_common(window, layers))))


def qwen2(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid with biases in its projections."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **_common(window, layers), use_sliding_window=True, layer_types=_hybrid(layers)
    )
    return _ready(Qwen2ForCausalLM(config))


def qwen3(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid with norms of q and k."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **_common(window, layers),
        head_dim=16,
        use_sliding_window=True,
        layer_types=_hybrid(layers),
    )
    return _ready(Qwen3ForCausalLM(config))


def gemma3(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid with two rotary bases."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(**_common(window, layers), head_dim=16, layer_types=_hybrid(layers))
    return _ready(Gemma3ForCausalLM(config))


def gemma2(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid whose scores are capped, in eager attention."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **_common(window, layers),
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        layer_types=_hybrid(layers),
    )
    config._attn_implementation = "eager"
    return _ready(Gemma2ForCausalLM(config))


def gpt_oss(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid whose heads have sink logits, in eager attention."""
    torch.manual_seed(0)
    config = GptOssConfig(
        **_common(window, layers),
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=_hybrid(layers),
    )
    config._attn_implementation = "eager"
    return _ready(GptOssForCausalLM(config))


def cohere2(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid whose full layers have no positions."""
    torch.manual_seed(0)
    config = Cohere2Config(**_common(window, layers), layer_types=_hybrid(layers), logit_scale=1.0)
    return _ready(Cohere2ForCausalLM(config))


def olmo3(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a hybrid with norms behind its blocks."""
    torch.manual_seed(0)
    config = Olmo3Config(**_common(window, layers), layer_types=_hybrid(layers))
    return _ready(Olmo3ForCausalLM(config))


def phi3(window: int, layers: int = 2) -> PreTrainedModel:
    """Return a model of one projection for q, k and v, whose layers slide."""
    torch.manual_seed(0)
    return _ready(Phi3ForCausalLM(Phi3Config(**_common(window, layers))))


FAMILIES: list[Make] = [mistral, qwen2, qwen3, gemma2, gemma3, gpt_oss, cohere2, olmo3, phi3]
