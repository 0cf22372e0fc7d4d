"""Families of models, small and random: [A] and [D] against each one's own forward pass."""
import copy
import itertools
from functools import lru_cache
import pytest
import torch
from checks import same, value_error
from family_configs import ENCODERS, FAMILIES, STATEFUL
from models import SHAPE, answer_rows, make_tokenizer, small_model
import logprob
import sample
from logprob import plain_logprobs, token_logprobs

PROMPTS = ["w3 w9 w4 w33 w17", "w5 w60 w21 w8 w8 w40 w13 w3 w7"]
SIZES = [(5, 6), (5, 1), (5, 3), (9, 7), (9, 4)]         # of the rows: prompt, answer


@lru_cache(maxsize=4)
def family(name, **how):
    changes = dict({**FAMILIES, **STATEFUL}.get(name, {}))
    return small_model(changes.pop("type", name), std=0.1, **how, **changes)


def gradient_of(model, loss):
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
    expected_gradient = gradient_of(model, (expected * weights).sum())
    # In training mode dropout would come back
    for fast, dropout in itertools.product((True, False), (None, 0.5)):
        measured = copy.deepcopy(family(name, fast=fast, dropout=dropout))
        if dropout:
            logprob.checkpoint_layers(measured)
        actual, _ = token_logprobs(measured, input_ids, labels)
        error = gradient_of(measured, (actual * weights).sum()) - expected_gradient
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
    monkeypatch.setattr(logprob, "block_attention", logprob.flash_attention)
    return calls


@pytest.mark.parametrize("name", sorted(sample.FAST))
def test_fast_families_on_a_gpu(name, flash_on_cpu):
    """Each family of the list, with fused norms, and long rows as flash attention takes them."""
    model, plain = copy.deepcopy(family(name)), family(name, fast=False)
    assert model.fast.has_long_rows
    run = []                                             # tokens that pass through the model
    model.get_input_embeddings().register_forward_pre_hook(lambda _, x: run.append(x[0].numel()))
    input_ids, labels, weights = answer_rows(SIZES, seed=1)
    expected = definition(plain, input_ids, labels)
    actual, _ = token_logprobs(model, input_ids, labels)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    expected = gradient_of(plain, (expected * weights).sum())
    error = gradient_of(model, (actual * weights).sum()) - expected
    assert error.norm() <= 1e-5 * expected.norm()
    assert run == [5 + 5 + 0 + 2 + 9 + 6 + 3]            # prompts, answers without their last
    assert len(flash_on_cpu) == model.config.num_hidden_layers
    assert name not in ("llama", "qwen2") or all(flash_on_cpu)    # these share key heads


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers(name):
    """The most likely token after each, by its own forward pass; and log-probs of these tokens."""
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<end>")
    for fast in (True, False):
        model = family(name, fast=fast)
        rollout = sample.sample_groups(model, tokenizer, PROMPTS, 1, 5, temperature=0)
        with torch.no_grad():
            logits = model(rollout.input_ids, use_cache=False).logits[:, :-1]
        same(logits.argmax(dim=2)[rollout.mask], rollout.input_ids[:, 1:][rollout.mask])
        logp = logits.log_softmax(dim=2).gather(2, rollout.input_ids[:, 1:, None])[:, :, 0]
        torch.testing.assert_close(rollout.sampler_logprobs, logp.where(rollout.mask, 0), rtol=0,
                                   atol=1e-4)
        for row, finished in zip(rollout.answer_ids, rollout.finished):
            assert finished == (SHAPE["eos_token_id"] in row) and (finished or len(row) == 5)


@pytest.mark.parametrize("name, reason", [*((name, "keep a state") for name in STATEFUL),
                                          *((name, "are encoders") for name in ENCODERS)])
def test_what_cannot_be_sampled_from_is_refused_in_one_line(name, reason, tmp_path):
    tokenizer = make_tokenizer(eos_token="<end>", chat_template="{{ messages[0].content }}")
    tokenizer.save_pretrained(tmp_path)
    family(name).save_pretrained(tmp_path)
    with value_error(f"{name} models {reason}"):
        sample.open_policy(str(tmp_path))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_looks_ahead(name):
    """In half precision rounding must not look like it."""
    assert not sample.looks_ahead(copy.deepcopy(family(name)).bfloat16())
