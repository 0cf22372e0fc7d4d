"""A small Llama as a GGUF file. Used by tests/test_real_model.py; needs the package gguf."""
import gguf
import torch

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
         "model.norm": "output_norm", "model.layers.": "blk.", "lm_head": "output"}
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>"
            "{% endfor %}")


def write_gguf(path, model, words):
    """A Llama as GGUF in Q4_1, as llama.cpp writes it; the model takes the rounded weights."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in dict(
            block_count=config.num_hidden_layers, context_length=config.max_position_embeddings,
            embedding_length=config.hidden_size, feed_forward_length=config.intermediate_size,
            head_count=config.num_attention_heads, head_count_kv=config.num_key_value_heads,
            layer_norm_rms_eps=1e-5, vocab_size=config.vocab_size, tokenizer_model="gpt2",
            tokenizer_pre="smollm", token_list=words, token_merges=["1 2"], unk_token_id=0,
            token_types=[3] * 3 + [1] * (len(words) - 3),                # control, normal
            bos_token_id=1, eos_token_id=2, pad_token_id=2, chat_template=TEMPLATE).items():
        getattr(writer, f"add_{name}")(value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        values = weight.numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(values, kind)                      # every row on its own
        weight.copy_(torch.tensor(gguf.quants.dequantize(packed, kind)))
        n = next((n for part, n in heads.items() if part in name), None)
        if n:  # rows that rotary embeddings turn together stand side by side in GGUF
            packed = packed.reshape(n, 2, -1, packed.shape[1]).swapaxes(1, 2).reshape(packed.shape)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
