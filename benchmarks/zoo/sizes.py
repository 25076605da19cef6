"""What the rule sets wherever a configuration has a field of that name."""

from __future__ import annotations

from typing import Any

VOCABULARY = 128
WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
LAYERS = 2
WINDOW = 24
POSITIONS = 256
WEIGHT_STD = 0.25

_SIZES: tuple[tuple[Any, str], ...] = (
    (
        VOCABULARY,
        "vocab_size text_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size "
        "decoder_vocab_size n_words unpadded_vocab_size",
    ),
    (
        WIDTH,
        "hidden_size n_embd d_model embed_dim dim embedding_size emb_dim "
        "decoder_hidden_size encoder_hidden_size word_embed_proj_dim input_dim output_hidden_size "
        "projection_dim hidden_size_global",
    ),
    (
        2 * WIDTH,
        "intermediate_size ffn_dim d_ff d_inner n_inner dim_ff ffn_hidden_size encoder_ffn_dim "
        "decoder_ffn_dim shared_intermediate_size mlp_hidden_size ",
    ),
    (
        WIDTH // 2,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_size "
        "expert_ffn_hidden_size expert_dim moe_shared_expert_intermediate_size ",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_decoder_layers num_encoder_layers depth ",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads ",
    ),
    (KV_HEADS, "num_key_value_heads n_kv_heads num_kv_heads"),
    (HEAD_DIM, "head_dim d_kv v_head_dim qk_nope_head_dim attention_head_dim kv_channels"),
    (HEAD_DIM // 2, "qk_rope_head_dim"),
    (2 * HEAD_DIM, "kv_lora_rank q_lora_rank"),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer",
    ),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (1, "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace"),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size attention_chunk_size "
        "local_attention window_size",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions max_seq_len max_sequence_length "
        "max_source_positions max_target_positions n_ctx block_size",
    ),
    (WEIGHT_STD, "initializer_range init_std init_method_std"),
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (None, "eos_token_id forced_eos_token_id forced_bos_token_id"),
    (True, "is_decoder use_cache"),
    (16, "patch_size mamba_d_state ssm_state_size"),
    (32, "image_size"),
)

SIZES: dict[str, Any] = {name: value for value, names in _SIZES for name in names.split()}
