"""Models with sliding windows, chunks, sinks, or layers that share keys and values."""

from __future__ import annotations

from tests.worker.architectures.entry import Entry, plain
from tests.worker.architectures.experts import MOE
from tests.worker.architectures.plain import TIMES_ROOT

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

WINDOWS: dict[str, Entry] = {
    "afm7": Entry(
        plain(
            hidden_dim=64,
            num_layers=5,
            num_kv_reuse_layers=2,
            num_heads=4,
            num_kv_heads=2,
            hidden_dim_scale_factor=1.5,
        )
    ),
    "afmoe": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            layer_types=[SLIDING, FULL] * 2,
            head_dim=32,
            num_dense_layers=1,
            route_scale=1.0,
            sliding_window=40,
        )
    ),
    "cohere2": Entry(
        plain(
            num_hidden_layers=4,
            head_dim=16,
            logit_scale=0.25,
            sliding_window=150,
            sliding_window_pattern=2,
        )
    ),
    "exaone4": Entry(
        plain(num_hidden_layers=4, head_dim=32, sliding_window=40, sliding_window_pattern="LG")
    ),
    "exaone_moe": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            head_dim=64,
            sliding_window=150,
            layer_types=[SLIDING, FULL] * 2,
            is_moe_layer=[False, True, True, True],
        )
    ),
    "gemma3": Entry(
        {
            "vocab_size": 101,
            "text_config": plain(
                model_type="gemma3_text",
                num_hidden_layers=4,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=150,
                sliding_window_pattern=2,
            ),
        },
    ),
    "gemma3_text": Entry(
        plain(
            num_hidden_layers=4,
            head_dim=128,
            query_pre_attn_scalar=128,
            sliding_window=40,
            sliding_window_pattern=3,
        ),
    ),
    "gemma3n": Entry(
        {
            "text_config": plain(
                model_type="gemma3n_text",
                num_hidden_layers=5,
                intermediate_size=[96] * 5,
                head_dim=32,
                num_kv_shared_layers=2,
                vocab_size_per_layer_input=101,
                sliding_window=40,
                rope_local_base_freq=1000.0,
                final_logit_softcapping=30.0,
                layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL],
                activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0],
                hidden_size_per_layer_input=16,
                altup_num_inputs=2,
                altup_coef_clip=120.0,
                altup_correct_scale=True,
                altup_active_idx=0,
                laurel_rank=8,
            )
        },
    ),
    "gemma4": Entry(
        {
            "vocab_size": 101,
            "text_config": plain(
                model_type="gemma4_text",
                num_hidden_layers=4,
                head_dim=32,
                global_head_dim=64,
                num_kv_shared_layers=0,
                vocab_size_per_layer_input=101,
                hidden_size_per_layer_input=16,
                sliding_window=40,
                sliding_window_pattern=2,
                tie_word_embeddings=True,
            ),
        },
        gains={"embed_tokens.weight": 0.15},
        why=TIMES_ROOT,
    ),
    "gemma4_text": Entry(
        plain(
            num_hidden_layers=5,
            head_dim=32,
            global_head_dim=64,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=101,
            hidden_size_per_layer_input=16,
            sliding_window=150,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL],
            tie_word_embeddings=True,
        ),
        gains={"embed_tokens.weight": 0.15},
        why=TIMES_ROOT,
    ),
    "gpt_oss": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            head_dim=64,
            sliding_window=40,
        )
    ),
    "iquestloopcoder": Entry(plain(head_dim=32, loop_num=2, loop_window_size=40)),
    "laguna": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=40,
            layer_types=[SLIDING, FULL] * 2,
            num_attention_heads_per_layer=[4, 2, 4, 2],
            rope_parameters={SLIDING: ROPE, FULL: ROPE},
        )
    ),
    "llama4": Entry(
        {
            "text_config": plain(
                model_type="llama4_text",
                num_hidden_layers=4,
                head_dim=32,
                attention_chunk_size=200,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=96,
                num_experts_per_tok=1,
                num_local_experts=4,
                use_qk_norm=True,
            )
        },
    ),
    "llama4_text": Entry(
        plain(
            head_dim=32,
            num_hidden_layers=4,
            intermediate_size_mlp=96,
            no_rope_layers=[1, 1, 1, 0],
            use_qk_norm=True,
        )
    ),
    "mellum": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=150,
            layer_types=[SLIDING, FULL] * 2,
            rope_parameters={SLIDING: ROPE, FULL: ROPE},
        )
    ),
    "mimo_v2_flash": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            hybrid_layer_pattern=[0, 1, 0, 1],
            moe_layer_freq=[0, 1, 1, 1],
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=40,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            layernorm_epsilon=1e-5,
            swa_rope_theta=10000.0,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=1,
            head_dim=48,
            v_head_dim=32,
            swa_head_dim=32,
            swa_v_head_dim=64,
            partial_rotary_factor=0.5,
            attention_value_scale=0.9,
        )
    ),
    "ministral3": Entry(
        plain(
            num_hidden_layers=4,
            head_dim=64,
            layer_types=[SLIDING, FULL] * 2,
            sliding_window=150,
            rope_parameters={
                **ROPE,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "muse_glimmer": Entry(
        plain(num_hidden_layers=4, head_dim=32, sliding_window=40, layer_types=[SLIDING, FULL] * 2)
    ),
    "olmo3": Entry(plain(num_hidden_layers=4, head_dim=32, sliding_window=40)),
    "plamo3": Entry(
        plain(num_hidden_layers=4, head_dim=32, sliding_window=40, sliding_window_pattern=2),
        chunked=0.2,
        why="mlx-lm's mask is one token wider than its rotating cache: the first query of a chunk,"
        " and every decoding query, sees 40 tokens, and other queries see 41",
    ),
    "spark2_5": Entry(
        plain(
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=40,
            layer_types=[SLIDING, FULL] * 2,
            rope_parameters={SLIDING: ROPE, FULL: ROPE},
        )
    ),
    "step3p5": Entry(
        plain(
            num_hidden_layers=4,
            num_attention_groups=2,
            head_dim=32,
            sliding_window=40,
            layer_types=[SLIDING, FULL] * 2,
            attention_other_setting={
                "attention_type": SLIDING,
                "num_attention_heads": 8,
                "num_attention_groups": 2,
                "head_dim": 32,
            },
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=32,
            share_expert_dim=32,
            moe_layers_enum="1,2,3",
            moe_router_scaling_factor=1.0,
        )
    ),
}
