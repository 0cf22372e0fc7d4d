"""Families of models, small and random: [A] and [D] against each one's own forward pass."""
import copy
import itertools
from functools import lru_cache
import pytest
import torch
from conftest import SMALL, answer_rows, make_tokenizer, small_model, value_error
import logprob
import sample
from logprob import IGNORE, plain_logprobs, token_logprobs

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
DEEPSEEK = dict(EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
                topk_group=1)
LATENT = dict(DEEPSEEK, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, head_dim=8,
              qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
PER_LAYER = dict(head_dim=8, sliding_window=8, num_hidden_layers=4, num_kv_shared_layers=2,
                 layer_types=2 * ["sliding_attention", "full_attention"],
                 hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)
# name -> what its config changes beside conftest's ARCHITECTURES; the name is transformers' model
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
    "gemma4": dict(text_config=dict(SMALL, **PER_LAYER, global_head_dim=16), vision_config=None,
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
PROMPTS = ["w3 w9 w4 w33 w17", "w5 w60 w21 w8 w8 w40 w13 w3 w7"]
SIZES = [(5, 6), (5, 1), (5, 3), (9, 7), (9, 4)]         # of the rows: prompt, answer


@lru_cache(maxsize=4)
def family(name, **how):
    changes = dict({**FAMILIES, **STATEFUL}[name])
    return small_model(changes.pop("type", name), std=0.1, **how, **changes)


def gradient(model, loss):
    """All of it in one vector; the weights that the loss does not reach have zeros."""
    found = torch.autograd.grad(loss, model.parameters(), materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def definition(model, input_ids, labels):
    """[D] word for word: every logit of every row alone, without its padding."""
    logprobs = []
    for n, (P, L) in enumerate(SIZES):
        row = plain_logprobs(model, input_ids[n:n + 1, :P + L], labels[n:n + 1, :P + L])
        logprobs.append(torch.nn.functional.pad(row, (0, 20 - P - L)))
    return torch.cat(logprobs)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_and_gradients(name):
    """Against those of the definition: one long row or padded ones, layers kept or run again."""
    model = family(name)
    input_ids, labels, weights = answer_rows(SIZES, seed=1)
    expected = definition(model, input_ids, labels)
    expected_gradient = gradient(model, (expected * weights).sum())
    # In training mode dropout would come back
    for fast, dropout in itertools.product((True, False), (None, 0.5)):
        measured = family(name, fast=fast, dropout=dropout)
        with logprob.layers_checkpointed(measured, dropout):
            actual, _ = token_logprobs(measured, input_ids, labels)
            error = gradient(measured, (actual * weights).sum()) - expected_gradient
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        assert error.norm() <= 1e-5 * expected_gradient.norm()


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """Long rows go to `varlen_attn`, and that is the formula -> a list: was enable_gqa on?"""
    calls = []

    def varlen_attn(q, k, v, ends_q, ends_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert window_size == (-1, 0) and q.dtype == k.dtype == v.dtype
        assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k)
        assert (max_q, max_k) == (ends_q.diff().max(), ends_k.diff().max())
        assert q.shape[1] == k.shape[1] or enable_gqa
        calls.append(enable_gqa)
        out = []
        for n in range(len(ends_q) - 1):
            (a, b), (c, d) = ends_q[n:n + 2].tolist(), ends_k[n:n + 2].tolist()
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            heads = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            out.append(torch.nn.functional.scaled_dot_product_attention(
                *heads, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
        return torch.cat(out)
    monkeypatch.setattr(logprob, "varlen_attn", varlen_attn)
    monkeypatch.setattr(logprob, "has_flash", lambda *given: True)
    return calls


@pytest.mark.parametrize("name", sorted(logprob.FAST))
def test_fast_families_on_a_gpu(name, flash_on_cpu):
    """Each family of the list, with fused norms, and long rows as flash attention takes them."""
    model, plain = copy.deepcopy(family(name)), family(name, fast=False)
    assert logprob.is_fast(model)
    run = []                                             # tokens that pass through the model
    model.get_input_embeddings().register_forward_pre_hook(lambda _, x: run.append(x[0].numel()))
    input_ids, labels, weights = answer_rows(SIZES, seed=1)
    expected = definition(plain, input_ids, labels)
    actual, _ = token_logprobs(model, input_ids, labels)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    expected = gradient(plain, (expected * weights).sum())
    assert (gradient(model, (actual * weights).sum()) - expected).norm() <= 1e-5 * expected.norm()
    assert run == [5 + 5 + 0 + 2 + 9 + 6 + 3]            # prompts, answers without their last
    assert len(flash_on_cpu) == model.config.num_hidden_layers
    assert name not in ("llama", "qwen2") or all(flash_on_cpu)    # these share key heads


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers(name):
    """The most likely token after each; [D] finds the log-probs that the sampler noted."""
    model = family(name)
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<end>")
    rollout = sample.sample_groups(model, tokenizer, PROMPTS, 1, 6, temperature=0)
    assert not sample.PLAIN                              # every family takes the fast step
    for prompt, row in zip(PROMPTS, rollout.labels):
        ids = [int(word[1:]) for word in prompt.split()]
        written = []
        while len(written) < 6 and written[-1:] != [SMALL["eos_token_id"]]:
            with torch.no_grad():
                logits = model(torch.tensor([ids + written]), use_cache=False).logits
            written.append(int(logits[0, -1].argmax()))
        assert row[row != IGNORE].tolist() == written
    expected, _ = token_logprobs(model, rollout.input_ids, rollout.labels)
    torch.testing.assert_close(rollout.logprobs, expected.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_that_begin_alike(name):
    """What all of them begin with runs once, unless a window or an attention forbids that."""
    model = family(name)
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<end>")
    common = [f"w{2 + 7 * t % 59}" for t in range(100)]
    prompts = [" ".join([*common, *(f"w{5 + 3 * n}" for t in range(1 + n % 4))]) for n in range(12)]
    rollout = sample.sample_groups(model, tokenizer, prompts, 1, 5, temperature=0)
    with torch.no_grad():
        logits = model(rollout.input_ids, use_cache=False).logits[:, :-1]
    assert torch.equal(logits.argmax(dim=2)[rollout.mask], rollout.input_ids[:, 1:][rollout.mask])
    logp = logits.log_softmax(dim=2).gather(2, rollout.input_ids[:, 1:, None])[:, :, 0]
    torch.testing.assert_close(rollout.logprobs, logp.where(rollout.mask, 0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_model_with_a_state_is_refused_in_one_line(name, tmp_path):
    tokenizer = make_tokenizer(eos_token="<end>", chat_template="{{ messages[0].content }}")
    tokenizer.save_pretrained(tmp_path)
    family(name).save_pretrained(tmp_path)
    with value_error(f"{name} models keep a state"):
        sample.open_policy(str(tmp_path))
