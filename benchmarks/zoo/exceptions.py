"""What single classes need besides the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {}
"""Arguments of configurations that cannot be made without any."""

_IMAGE = 127
"""The token that stands for a part of an image."""

_ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_WINDOWED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARED = _WINDOWED | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}
_PROPORTIONAL = {"global_head_dim": 32}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_ROTARY_HEADS = {"rotary_dim": 8}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 16},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "CodeGenConfig": _ROTARY_HEADS,
    "CohereCompassTextConfig": _WINDOWED
    | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _SECTIONS)},
    "DbrxAttentionConfig": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "GPTJConfig": _ROTARY_HEADS,
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": _SHARED,
    "Gemma4TextConfig": _SHARED | _PROPORTIONAL,
    "Gemma4UnifiedTextConfig": _SHARED | _PROPORTIONAL,
    "GraniteMoeHybridConfig": _ONE_OF_EACH | {"mamba_n_heads": 4, "mamba_d_state": 16},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "LlavaConfig": {"image_token_index": _IMAGE},
    "LongcatFlashConfig": {"head_dim": 8},
    "Mamba2Config": {"num_heads": 8, "n_groups": 2},
    "Qwen2VLConfig": {"image_token_id": _IMAGE, "vision_start_token_id": _IMAGE - 1},
    "Qwen2VLVisionConfig": {"embed_dim": 64, "hidden_size": 64},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (16, 16),
        "attention_head_size": 16,
        "attn_layers": ("local", "lsh"),
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 32,
    },
    "Zamba2Config": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 4,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
}
"""By class of configuration or of model: fields to set, in place of what the rule says."""

PREPARE: dict[str, Callable[[Any], None]] = {}
"""What a model of a class needs to be told before it generates."""


def _codebooks(model: Any) -> dict[str, torch.Tensor]:
    """Return a prompt of one row per codebook."""
    rows = model.config.num_codebooks
    ids = torch.randint(2, 100, (rows, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids}


def _image_of_llava(model: Any) -> dict[str, torch.Tensor]:
    """Return a prompt with an image between its tokens, as LLaVA takes it."""
    vision = model.config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    return _around_an_image(patches, []) | {
        "pixel_values": _noise(1, 3, vision.image_size, vision.image_size)
    }


def _image_of_qwen(model: Any) -> dict[str, torch.Tensor]:
    """Return a prompt with an image between its tokens, as Qwen-VL takes it."""
    vision = model.config.vision_config
    side = 2 * vision.spatial_merge_size
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    given = _around_an_image(4, [_IMAGE - 1])
    return given | {
        "pixel_values": _noise(side * side, numbers),
        "image_grid_thw": torch.tensor([[1, side, side]]),
        "mm_token_type_ids": (given["input_ids"] == _IMAGE).long(),
    }


def _around_an_image(patches: int, before: list[int]) -> dict[str, torch.Tensor]:
    ids = [*range(5, 13), *before, *[_IMAGE] * patches, *range(20, 28)]
    tokens = torch.tensor([ids])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


PROMPTS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "LlavaForConditionalGeneration": _image_of_llava,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "Qwen2VLForConditionalGeneration": _image_of_qwen,
}
"""Arguments of `generate` for classes that take more than token ids."""
