"""Models whose layers all have full attention over plain keys and values, without experts."""

from __future__ import annotations

from tests.worker.architectures.entry import Entry, plain

# The reason for smaller embeddings.
TIMES_ROOT = (
    "multiplies the embeddings by the square root of the hidden size, so attention would hardly"
    " affect the logits"
)

PLAIN: dict[str, Entry] = {
    "apertus": Entry(plain(head_dim=16, post_norm=False, qk_norm=True)),
    "baichuan_m1": Entry(
        plain(
            num_hidden_layers=4,
            sliding_window=40,
            sliding_window_layers=[1, 3],
            num_swa_attention_heads=4,
            num_swa_key_value_heads=2,
            conv_window=2,
        ),
        gains={"conv_k": 0.4, "conv_v": 1.5, "o_proj": 1.5},
        why="the state of its convolutions is one token's key and value, which affect the logits"
        " enough only if attention is nearly uniform",
    ),
    "cohere": Entry(
        plain(logit_scale=0.25, use_qk_norm=True),
        gains={"embed": 0.4},
        why="with tied embeddings and one norm for attention and MLP, the newest token would"
        " dominate the logits",
    ),
    "ernie4_5": Entry(plain(head_dim=32, use_bias=False)),
    "exaone": Entry(plain(num_layers=3, hidden_size=160, num_attention_heads=2)),
    "gemma": Entry(plain(head_dim=96), gains={"embed": 0.15}, why=TIMES_ROOT),
    "gemma2": Entry(
        plain(head_dim=32, query_pre_attn_scalar=32.0), gains={"embed": 0.15}, why=TIMES_ROOT
    ),
    "glm": Entry(plain(head_dim=64)),
    "glm4": Entry(plain(head_dim=32, partial_rotary_factor=0.5)),
    "gpt2": Entry(plain(n_ctx=512, n_positions=512, n_embd=64, n_head=2, n_layer=3)),
    "gpt_bigcode": Entry(plain(n_embd=64, n_layer=3, n_inner=96, n_head=4, n_positions=512)),
    "gpt_neox": Entry(plain(rotary_emb_base=10000, rotary_pct=0.25)),
    "gptj": Entry(plain(n_embd=64, n_positions=512, n_head=2, rotary_dim=16, n_layer=3)),
    "granite": Entry(
        plain(
            logits_scaling=4.0,
            attention_multiplier=0.25,
            embedding_multiplier=1.5,
            residual_multiplier=0.8,
        )
    ),
    "helium": Entry(plain(head_dim=16)),
    "hunyuan_v1_dense": Entry(plain(head_dim=128)),
    "internlm2": Entry(plain(hidden_size=128, bias=False)),
    "internlm3": Entry(plain()),
    "lille-130m": Entry(plain(block_size=512, n_embd=64, n_head=4, n_kv_heads=2, n_layer=3)),
    "llama": Entry(
        plain(
            head_dim=64,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=40,
        )
    ),
    "mimo": Entry(plain(hidden_size=128)),
    "minicpm": Entry(plain(dim_model_base=32, scale_depth=1.4, scale_emb=1.0)),
    "mistral3": Entry({"text_config": plain(model_type="llama", head_dim=32)}),
    "nanbeige": Entry(plain(head_dim=32, num_hidden_layers=2, num_loops=2)),
    "nanochat": Entry(plain(num_key_value_heads=2)),
    "nemotron": Entry(plain(hidden_act="relu2", hidden_size=128)),
    "nemotron-nas": Entry(
        plain(
            num_hidden_layers=4,
            block_configs=[
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
                {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
            ],
        )
    ),
    "olmo2": Entry(plain(head_dim=64)),
    "openelm": Entry(
        plain(
            head_dim=16,
            num_transformer_layers=3,
            model_dim=64,
            ffn_dim_divisor=16,
            num_query_heads=[4, 4, 8],
            num_kv_heads=[2, 2, 4],
            ffn_multipliers=[1.0, 1.5, 2.0],
        )
    ),
    "phi": Entry(plain(hidden_size=128, partial_rotary_factor=0.5)),
    "phi3": Entry(plain(hidden_size=128)),
    "pixtral": Entry({"text_config": plain(model_type="llama", head_dim=128)}),
    "plamo": Entry(plain(n_shared_head=2)),
    "qwen": Entry(plain(num_key_value_heads=4, kv_channels=16)),
    "qwen2": Entry(plain(hidden_size=128, num_attention_heads=8, num_key_value_heads=1)),
    "qwen2_vl": Entry({"text_config": plain(model_type="qwen2_vl")}),
    "qwen3": Entry(plain(head_dim=128)),
    "qwen3_vl": Entry({"text_config": plain(model_type="qwen3_vl", head_dim=32)}),
    "seed_oss": Entry(plain(head_dim=80)),
    "smollm3": Entry(plain(head_dim=32, num_hidden_layers=4, no_rope_layer_interval=2)),
    "stablelm": Entry(plain(partial_rotary_factor=0.5, use_qkv_bias=True, qk_layernorm=True)),
    "starcoder2": Entry(plain(hidden_size=128)),
    "talkie": Entry(plain(head_dim=32)),
    "telechat3": Entry(plain(head_dim=32)),
}
