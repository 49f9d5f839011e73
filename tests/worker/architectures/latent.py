"""Multi-head latent attention, and sparse attention that picks its keys with an index."""

from __future__ import annotations

from tests.worker.architectures.entry import Entry, plain
from tests.worker.architectures.experts import MOE
from tests.worker.architectures.recurrent import LATENT

GROUPED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Up to 96 keys, all are seen; with more, the index selects 96 of them.
INDEX = {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 96}

ZEROS = "the values in its index cache are zeros, which nothing reads"
YARN = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}

LATENTS: dict[str, Entry] = {
    "deepseek_v2": Entry(plain(**MOE | LATENT, topk_method="greedy", rope_scaling=YARN)),
    "deepseek_v3": Entry(plain(**MOE | LATENT, **GROUPED)),
    "deepseek_v32": Entry(plain(**MOE | LATENT, **GROUPED, **INDEX), unread=(3, 7, 11), why=ZEROS),
    "deepseek_v41": Entry(
        plain(
            **MOE,
            num_hidden_layers=4,
            head_dim=40,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=40,
            compress_ratios=[0, 4, 4, 1],
            kv_source_layer_ids=[1, 3],
            index_source_layer_ids=[1, 3],
            index_n_heads=2,
            index_head_dim=24,
            index_topk=32,
            hc_mult=2,
            hc_sinkhorn_iters=4,
        ),
        why="with head sizes that blocks of 16 divide, the model would round keys to 4 bits, and a"
        " tiny difference could become a large one",
    ),
    "glm4_moe_lite": Entry(plain(**MOE | LATENT, **GROUPED)),
    "glm_moe_dsa": Entry(
        plain(
            **MOE | LATENT,
            **GROUPED,
            **INDEX,
            rope_parameters={"rope_theta": 10000.0},
            moe_layer_freq=1,
        ),
        unread=(3, 7, 11),
        why=ZEROS,
    ),
    "kimi_k25": Entry({"text_config": plain(**MOE | LATENT, **GROUPED, model_type="kimi_k25")}),
    "kimi_vl": Entry({"text_config": plain(**MOE | LATENT, **GROUPED, model_type="kimi_vl")}),
    "longcat_flash": Entry(
        plain(
            **MOE | LATENT,
            attention_method="MLA",
            zero_expert_type="identity",
            ffn_hidden_size=96,
            moe_topk=2,
            expert_ffn_hidden_size=32,
            zero_expert_num=1,
            num_layers=2,
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
        )
    ),
    "longcat_flash_ngram": Entry(
        plain(
            **MOE | LATENT,
            attention_method="MLA",
            ffn_hidden_size=96,
            moe_topk=2,
            expert_ffn_hidden_size=32,
            zero_expert_num=1,
            num_layers=2,
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
            ngram_vocab_size_ratio=3,
            emb_neighbor_num=3,
            emb_split_num=2,
        )
    ),
    "minicpm3": Entry(
        plain(
            **LATENT,
            dim_model_base=32,
            scale_depth=1.4,
            scale_emb=1.0,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
                "original_max_position_embeddings": 4096,
            },
        )
    ),
    "minimax_m3_vl": Entry(
        {
            "text_config": plain(
                **MOE,
                num_hidden_layers=3,
                head_dim=32,
                dense_intermediate_size=96,
                shared_intermediate_size=32,
                moe_layer_freq=[0, 1, 1],
                sparse_attention_freq=[0, 1, 1],
                index_n_heads=2,
                index_head_dim=32,
                index_block_size=16,
                index_topk_blocks=6,
            )
        }
    ),
    "mistral4": Entry(
        plain(
            **MOE | LATENT,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "youtu_llm": Entry(plain(**LATENT)),
}
