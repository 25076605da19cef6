"""Tiny transformers models that do more to scores than scale and mask them; see `tiny_models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, WEIGHT_STD, ready


def tiny_gemma2(*, dtype: torch.dtype = torch.float32, softcap: float = 2.0) -> Gemma2ForCausalLM:
    """Return a Gemma 2 of full layers alone, with a cap that its scores reach."""
    config = Gemma2Config(
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=softcap,
        layer_types=["full_attention"],
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return ready(Gemma2ForCausalLM(config), dtype)


def tiny_gpt_oss(*, dtype: torch.dtype = torch.float32, sinks: float = 2.0) -> GptOssForCausalLM:
    """Return a gpt-oss of full layers alone, with sink logits that take their share."""
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=WEIGHT_STD,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"],
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter, mean=sinks)
    return ready(model, dtype)


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": WEIGHT_STD,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }


def tiny_bloom() -> BloomForCausalLM:
    """Return a BLOOM: ALiBi by `baddbmm`, batch and heads in one dimension."""
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=64, n_layer=2, n_head=4, **_common())
    return ready(BloomForCausalLM(config), torch.float32)


def tiny_mpt() -> MptForCausalLM:
    """Return an MPT: ALiBi that is added, and a mask that fills."""
    torch.manual_seed(0)
    config = MptConfig(
        d_model=64, n_heads=4, n_layers=1, max_seq_len=256, use_cache=True, **_common()
    )
    return ready(MptForCausalLM(config), torch.float32)


def tiny_falcon() -> FalconForCausalLM:
    """Return a Falcon with ALiBi, which is scaled with the scores; one KV head for all."""
    torch.manual_seed(0)
    config = FalconConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, alibi=True, **_common()
    )
    config.num_key_value_heads = 1  # as it is called elsewhere
    config._attn_implementation = "eager"
    return ready(FalconForCausalLM(config), torch.float32)
