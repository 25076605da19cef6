"""Tiny encoder-decoders with random weights: seeded, in evaluation mode, nothing is downloaded.

Four heads of 16 channels. As in `tiny_models`, large weights let every cached token
change the next one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.support.tiny_models import VOCAB_SIZE

HEADS, HEAD_DIM = 4, 16
BYTES_PER_TOKEN = 2 * HEADS * HEAD_DIM * 4
"""K and V of one token in one layer of one of the two caches, in float32."""
MEL_BINS, FRAMES = 8, 20

WEIGHT_STD = 0.4
_SPECIAL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
}


def _layers(count: int) -> dict[str, Any]:
    """Return the sizes of BART and of Whisper."""
    return {
        "d_model": HEADS * HEAD_DIM,
        "encoder_layers": count,
        "decoder_layers": count,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
    }


def _ready(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=WEIGHT_STD)
    nn.Module.eval(model)
    return model


def tiny_t5(*, layers: int = 1, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return a T5: a learned bias per head and distance on the scores, which are not scaled."""
    config = T5Config(
        d_model=HEADS * HEAD_DIM,
        d_kv=HEAD_DIM,
        d_ff=96,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=HEADS,
        dropout_rate=0.0,
        **_SPECIAL,
    )
    config._attn_implementation = attention
    return _ready(T5ForConditionalGeneration(config), seed)


def tiny_bart(*, layers: int = 1, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return a BART: learned positions, biases on all projections."""
    config = BartConfig(
        max_position_embeddings=256, forced_eos_token_id=None, **_layers(layers), **_SPECIAL
    )
    config._attn_implementation = attention
    return _ready(BartForConditionalGeneration(config), seed)


def tiny_whisper(*, layers: int = 1, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return a Whisper that hears `2 * FRAMES` frames of `MEL_BINS`; its encoder halves them."""
    config = WhisperConfig(
        num_mel_bins=MEL_BINS,
        max_source_positions=FRAMES,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_layers(layers),
        **_SPECIAL,
    )
    config._attn_implementation = attention
    return _ready(WhisperForConditionalGeneration(config), seed)


def frames(batch: int = 1, *, seed: int = 0) -> torch.Tensor:
    """Return random features for a Whisper, float32 [batch, MEL_BINS, 2 * FRAMES]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, MEL_BINS, 2 * FRAMES), generator=generator)
