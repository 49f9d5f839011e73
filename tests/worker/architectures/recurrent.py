"""Models with recurrent states: state spaces, gated delta rules, linear attention, convolutions."""

from __future__ import annotations

from typing import Any

from tests.worker.architectures.entry import Entry, plain
from tests.worker.architectures.experts import MOE

GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
}
ROTARY = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
BAILING: dict[str, Any] = {
    **MOE,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "partial_rotary_factor": 0.5,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}

RECURRENT: dict[str, Entry] = {
    "bailing_hybrid": Entry(plain(**BAILING | LATENT, head_dim=16)),
    "bailing_moe_linear": Entry(plain(**BAILING, head_dim=32)),
    "bailing_moe_v3": Entry(
        plain(
            **BAILING | LATENT,
            head_dim=16,
            moe_shared_expert_intermediate_size=32,
            short_conv_kernel_size=4,
        )
    ),
    "falcon_h1": Entry(
        plain(
            head_dim=32,
            mamba_d_head=16,
            mamba_d_ssm=64,
            mamba_d_state=16,
            mamba_n_heads=4,
            mamba_n_groups=2,
            embedding_multiplier=1.0,
            attention_out_multiplier=1.0,
            key_multiplier=1.0,
            ssm_in_multiplier=1.0,
            ssm_out_multiplier=1.0,
            ssm_multipliers=[1.0] * 5,
            mlp_multipliers=[1.0, 1.0],
            lm_head_multiplier=1.0,
        )
    ),
    "gear": Entry(
        plain(
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=40,
            layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        )
    ),
    "granitemoehybrid": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            embedding_multiplier=1.5,
            attention_multiplier=0.25,
            logits_scaling=2.0,
            residual_multiplier=0.8,
            layer_types=["mamba", "attention"] * 2,
            shared_intermediate_size=32,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_n_groups=2,
            mamba_proj_bias=False,
            mamba_conv_bias=True,
        )
    ),
    "jamba": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
            mamba_d_conv=4,
            mamba_d_state=8,
            mamba_expand=2,
        )
    ),
    "kimi_k3": Entry(
        {
            "text_config": plain(
                **MOE | LATENT,
                model_type="kimi_linear",
                num_hidden_layers=4,
                linear_attn_config=KDA,
                num_experts_per_token=2,
                activation_situ_beta=1.0,
                activation_situ_linear_beta=1.0,
                attn_res_block_size=2,
            )
        }
    ),
    "kimi_linear": Entry(
        plain(
            **MOE | LATENT,
            num_hidden_layers=4,
            head_dim=16,
            linear_attn_config=KDA,
            model_max_length=4096,
            num_experts_per_token=2,
        )
    ),
    "lfm2": Entry(
        plain(
            num_hidden_layers=4,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=[1, 3],
        )
    ),
    "lfm2-vl": Entry(
        {
            "text_config": plain(
                model_type="lfm2",
                num_hidden_layers=4,
                conv_bias=False,
                conv_L_cache=3,
                block_dim=64,
                block_multiple_of=16,
                block_ffn_dim_multiplier=1.0,
                block_auto_adjust_ff_dim=False,
                layer_types=["conv", "full_attention"] * 2,
            )
        }
    ),
    "lfm2_moe": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            num_dense_layers=1,
            use_expert_bias=True,
            conv_bias=False,
            conv_L_cache=3,
            full_attn_idxs=[1, 3],
        )
    ),
    "mamba": Entry(
        plain(
            intermediate_size=128,
            state_size=8,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank="auto",
        )
    ),
    "mamba2": Entry(
        plain(
            num_heads=8,
            head_dim=16,
            intermediate_size=128,
            state_size=16,
            conv_kernel=4,
            n_groups=2,
            use_bias=False,
            use_conv_bias=True,
            time_step_limit=[0.0, 100.0],
            time_step_rank="auto",
        )
    ),
    "nemotron_h": Entry(
        plain(
            **MOE,
            hybrid_override_pattern=["M", "-", "*", "M", "E"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            mamba_proj_bias=False,
            ssm_state_size=16,
            conv_kernel=4,
            n_groups=2,
            use_bias=False,
            use_conv_bias=True,
            head_dim=32,
            moe_shared_expert_intermediate_size=32,
        )
    ),
    "olmo_hybrid": Entry(
        plain(
            **GATED_DELTA,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_allow_neg_eigval=True,
        )
    ),
    "plamo2": Entry(
        plain(
            num_hidden_layers=4,
            hidden_size_per_head=32,
            mamba_d_state=16,
            mamba_num_heads=4,
            mamba_step=2,
        )
    ),
    "prism_hadamard_qwen35": Entry(
        {
            "schema_version": 1,
            "tensor_namespace": "mlx-lm-text",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [
                {
                    "path": "model.layers.1.mlp.gate_proj",
                    "embedding": False,
                    "dtype": "float16",
                    "block": 0,
                }
            ],
            "text_config": plain(
                **GATED_DELTA, model_type="qwen3_5", hidden_size=128, rope_parameters=ROTARY
            ),
        }
    ),
    "qwen3_5": Entry(
        {"text_config": plain(**GATED_DELTA, model_type="qwen3_5", rope_parameters=ROTARY)}
    ),
    "qwen3_5_moe": Entry(
        {
            "text_config": plain(
                **GATED_DELTA, **MOE, model_type="qwen3_5_moe", rope_parameters=ROTARY
            )
        }
    ),
    "qwen3_next": Entry(plain(**GATED_DELTA, **MOE)),
    "recurrent_gemma": Entry(
        plain(
            num_hidden_layers=4,
            conv1d_width=4,
            logits_soft_cap=30.0,
            num_key_value_heads=1,
            attention_window_size=96,
            block_types=["recurrent", "attention"],
        )
    ),
    "rwkv7": Entry(
        plain(
            head_dim=16,
            a_low_rank_dim=8,
            v_low_rank_dim=8,
            gate_low_rank_dim=16,
            decay_low_rank_dim=8,
        )
    ),
}
