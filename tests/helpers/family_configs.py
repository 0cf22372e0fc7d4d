"""Families of transformers by small configs: what each changes beside SHAPE and ARCHITECTURES."""
from models import SHAPE

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
DEEPSEEK = dict(EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
                topk_group=1)
LATENT = dict(DEEPSEEK, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, head_dim=8,
              qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
PER_LAYER = dict(head_dim=8, sliding_window=8, num_hidden_layers=4, num_kv_shared_layers=2,
                 layer_types=2 * ["sliding_attention", "full_attention"],
                 hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)

# name -> what its config changes beside ARCHITECTURES of models.py; the name is transformers' model
# type where no `type` says it. The sliding windows are smaller than the rows.
FAMILIES = {
    # one stack of layers, dense
    "mistral": dict(sliding_window=None), "mistral with a window": dict(type="mistral"),
    "gemma2": dict(attn_logit_softcapping=2.0), "olmo3": dict(sliding_window=8),
    "gemma3_text": dict(head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "phi3": dict(sliding_window=None), "starcoder2": dict(sliding_window=None),
    "cohere2": dict(logit_scale=0.25, sliding_window=8),
    **dict.fromkeys(("gemma", "glm", "glm4", "seed_oss", "helium", "hunyuan_v1_dense"),
                    dict(head_dim=8)),
    **dict.fromkeys(("qwen2", "qwen3", "llama", "granite", "cohere", "phi", "olmo", "olmo2",
                     "smollm3", "stablelm", "nemotron", "persimmon", "ernie4_5", "apertus",
                     "arcee"), {}),
    # positions learned, or as a slope on the scores
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neox", "bloom", "falcon", "biogpt"), {}),
    **dict.fromkeys(("gptj", "codegen"), dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4)),
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "falcon with slopes": dict(type="falcon", alibi=True),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2),
    "xglm": dict(d_model=32, attention_heads=4, num_layers=2, ffn_dim=48),
    # mixtures of experts
    "qwen2_moe": dict(EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    "qwen3_moe": dict(EXPERTS, num_experts=4, head_dim=8),
    "mixtral": dict(num_local_experts=4, sliding_window=None),
    "olmoe": dict(EXPERTS, num_experts=4),
    "granitemoe": dict(EXPERTS, num_local_experts=4, logits_scaling=2.0),
    "phimoe": dict(num_local_experts=4, sliding_window=None),
    "gpt_oss": dict(EXPERTS, num_local_experts=4, head_dim=8, sliding_window=8),
    "deepseek_v2": dict(LATENT, topk_method="greedy"), "deepseek_v3": LATENT,
    "glm4_moe": dict(DEEPSEEK, head_dim=8),
    "llama4_text": dict(head_dim=8, intermediate_size_mlp=48, num_local_experts=2,
                        attention_chunk_size=8),
    # layers with keys and inputs of their own or shared ones; text inside a model of more senses
    "gemma3n_text": dict(PER_LAYER, intermediate_size=[48] * 4, laurel_rank=8,
                         activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0]),
    "gemma4": dict(text_config=dict(SHAPE, **PER_LAYER, global_head_dim=16), vision_config=None,
                   audio_config=None)}
MIXERS = dict(EXPERTS, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=8)

# These keep a state in place of keys and values, in all layers or in some: they are not opened.
STATEFUL = {
    "mamba": dict(state_size=4), "lfm2": dict(layer_types=["conv", "full_attention"]),
    "minimax": dict(num_local_experts=2, layer_types=["linear_attention", "full_attention"]),
    "jamba": dict(EXPERTS, num_experts=2, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1,
                  use_mamba_kernels=False),
    "qwen3_next": dict(MIXERS, num_experts=4, head_dim=8, shared_expert_intermediate_size=32)}
ENCODERS = ("bert", "roberta", "electra")                # transformers opens them as causal models
