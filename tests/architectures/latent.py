"""Multi-head latent attention, and sparse attention that picks its keys with an index."""

from __future__ import annotations

from tests.architectures.entry import Entry, plain
from tests.architectures.experts import MOE
from tests.architectures.recurrent import LATENT

GROUPED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Above 70 tokens the index decides; below it all keys are seen.
INDEX = {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 96}

LATENTS: dict[str, Entry] = {
    "deepseek_v2": Entry(plain(**MOE | LATENT, topk_method="greedy")),
    "deepseek_v3": Entry(plain(**MOE | LATENT, **GROUPED)),
    "deepseek_v32": Entry(plain(**MOE | LATENT, **GROUPED, **INDEX)),
    "glm4_moe_lite": Entry(plain(**MOE | LATENT, **GROUPED)),
    "glm_moe_dsa": Entry(
        plain(
            **MOE | LATENT,
            **GROUPED,
            **INDEX,
            rope_parameters={"rope_theta": 10000.0},
            moe_layer_freq=1,
        )
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
    "minicpm3": Entry(plain(**LATENT, dim_model_base=32, scale_depth=1.4, scale_emb=1.0)),
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
