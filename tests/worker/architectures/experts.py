"""Mixtures of experts with full attention over plain keys and values."""

from __future__ import annotations

from tests.worker.architectures.entry import Entry, plain

# Few experts, so that two router scores are seldom so close that rounding swaps them.
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "shared_expert_intermediate_size": 32,
}

EXPERTS: dict[str, Entry] = {
    "Klear": Entry(plain(**MOE)),
    "bailing_moe": Entry(plain(**MOE, hidden_size=128, use_qk_norm=True)),
    "dbrx": Entry(
        plain(
            d_model=64,
            n_layers=3,
            n_heads=4,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        ),
    ),
    "deepseek": Entry(plain(**MOE)),
    "dots1": Entry(plain(**MOE, head_dim=32)),
    "ernie4_5_moe": Entry(
        plain(
            head_dim=32,
            use_bias=False,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=32,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
        )
    ),
    "glm4_moe": Entry(plain(**MOE, head_dim=64, use_qk_norm=True, partial_rotary_factor=0.5)),
    "granitemoe": Entry(
        plain(
            **MOE,
            logits_scaling=4.0,
            attention_multiplier=0.25,
            embedding_multiplier=1.5,
            residual_multiplier=0.8,
        )
    ),
    "hunyuan": Entry(
        plain(
            num_hidden_layers=4,
            moe_topk=2,
            num_experts=4,
            num_shared_expert=1,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            use_cla=True,
            cla_share_factor=2,
            moe_intermediate_size=32,
            rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 100.0},
        )
    ),
    "minimax": Entry(plain(**MOE, head_dim=32, shared_intermediate_size=32, rotary_dim=16)),
    "mixtral": Entry(plain(**MOE)),
    "olmoe": Entry(plain(**MOE, head_dim=64)),
    "phimoe": Entry(
        plain(
            **MOE,
            original_max_position_embeddings=4096,
            rope_scaling={
                "type": "longrope",
                "long_factor": [1.0] * 8,
                "short_factor": [1.0] * 8,
                "long_mscale": 1.2,
                "short_mscale": 1.1,
                "original_max_position_embeddings": 4096,
            },
        ),
        seed=26,
        why="its router drops experts below a threshold: seed 0 has one at rounding's distance",
    ),
    "phixtral": Entry(
        plain(**MOE, num_vocab=101, model_dim=64, num_heads=2, num_layers=3, rotary_dim=16)
    ),
    "qwen2_moe": Entry(plain(**MOE, num_attention_heads=2, num_key_value_heads=1)),
    "qwen3_moe": Entry(plain(**MOE, head_dim=64)),
    "qwen3_vl_moe": Entry({"text_config": plain(**MOE, model_type="qwen3_vl_moe", head_dim=32)}),
    "solar_open": Entry(plain(**MOE, head_dim=96, partial_rotary_factor=0.5)),
}
