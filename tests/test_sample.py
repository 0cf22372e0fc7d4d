"""[A] sample.py: greedy decoding against `generate`, log-probs against [D], the rows, fast forms
against the plain loop, the check that chooses among them, the draw, the variants, the script."""
# ruff: noqa: I001 - several names to a line

import copy
import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in
import torch
from conftest import (
    NO_MEMORY, SMALL, TINY, edit_json, ended, make_tokenizer, precisions, raises, reasons,
    seeded, small_model, start, value_error)
from tokenizers import AddedToken

import sample
from logprob import token_logprobs
from sample import (
    IGNORE, OwnStep, PlainStep, Rollout, draw, forms_of, joined, own_step, sample_around,
    sample_conversations, sample_groups, uniform_numbers)

V, PAD, END, START = SMALL["vocab_size"], 0, 1, 2
ENDS = [END, 7, 40, 41, 42, 43]
PROMPTS = ["w5 w9 w12", "w7", " ".join(f"w{i}" for i in range(20, 33)), "w60 w3 w3 w41 w8 w17"]
TOKENIZER = make_tokenizer(pad_token="<pad>", eos_token="<end>")


def ids_of(prompt):
    return [int(word[1:]) for word in prompt.split()]


@pytest.fixture(scope="module")
def model():
    return small_model("qwen2", tie_word_embeddings=False)


@pytest.fixture
def config(model, monkeypatch):
    """Set a value of the model's generation config for one test."""
    return lambda name, value: monkeypatch.setattr(model.generation_config, name, value)


@pytest.fixture
def runs(model):
    """The (rows, tokens) of every run through the model."""
    def whole(head, args):
        assert args[0].is_contiguous()  # else a CPU copies the head's bfloat16 weights per row

    found = []
    with (model.get_output_embeddings().register_forward_pre_hook(whole),
          model.get_input_embeddings().register_forward_pre_hook(
              lambda module, args: found.append(tuple(args[0].shape)))):
        yield found


def responses_of(rollout):
    """The ids of each response, by the labels."""
    return [row[labels != IGNORE].tolist()
            for row, labels in zip(rollout.input_ids, rollout.labels)]


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
               for x, y in ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))


def assert_logprobs(model, rollout, temperature=1.0, atol=1e-4):
    expected = token_logprobs(model, rollout.input_ids, rollout.labels, temperature).detach()
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=atol)


def surprise(counts, expected):
    """Pearson's chi-square in standard deviations: chance alone stays within (-5, 5)."""
    k = len(counts) - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    variance = 2 / (9 * k)  # of the cube root, by Wilson and Hilferty
    return ((chi_square / k) ** (1 / 3) - (1 - variance)) / variance**0.5


# --------------------------------------------------------------------------------------------------
# Greedy decoding, and log-probs

def generated(model, prompt, limit):
    ids = torch.tensor([ids_of(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                         max_new_tokens=limit)
    return out[0, ids.shape[1] :].tolist()


def in_float64(model):
    """A copy in which no tie is decided by rounding; Gemma 2 masks with float32's lowest number."""
    model = copy.deepcopy(model)
    return model if model.config.model_type == "gemma2" else model.double()


@pytest.mark.parametrize("ends", [[END], list(range(1, V, 9))], ids=["one end", "many ends"])
def test_greedy_is_generate(some_model, ends):
    """Though prompts of several lengths stand in one batch, of which some rows end early."""
    model = in_float64(some_model)
    model.generation_config.eos_token_id = ends
    many = [" ".join(f"w{i + j}" for j in range(1 + i % 4 * 4)) for i in range(10, 22)]
    prompts, G = (PROMPTS, 2) if len(ends) == 1 else (many, 1)
    rollout = sample_groups(model, TOKENIZER, prompts, G, 20, temperature=0)
    expected = [answer for prompt in prompts for answer in [generated(model, prompt, 20)] * G]
    assert responses_of(rollout) == expected
    assert rollout.finished.tolist() == [answer[-1] in ends for answer in expected]
    various = len({token for answer in expected for token in answer}) > 8
    assert various if G > 1 else len(set(map(len, expected))) > 3
    assert_logprobs(model, rollout)  # those of temperature 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_recorded_logprobs_are_those_of_logprob_py(random_model, temperature):
    rollout = sample_groups(random_model, TOKENIZER, PROMPTS, 4, 30, temperature, seeded())
    assert len(set(rollout.labels[rollout.labels != IGNORE].tolist())) > 8
    assert_logprobs(random_model, rollout, temperature)
    assert rollout.logprobs.dtype == torch.float32 and not rollout.logprobs.requires_grad


# --------------------------------------------------------------------------------------------------
# The rows

@pytest.mark.parametrize("limit", [1, 2, 12])
@pytest.mark.parametrize("ends", [[END], ENDS])
def test_the_layout(model, config, ends, limit):
    config("eos_token_id", ends if len(ends) > 1 else END)
    G, N = 50, 4 * 50
    rollout = sample_groups(model, TOKENIZER, PROMPTS, G, limit, 1.5, seeded())
    S = rollout.input_ids.shape[1]
    assert len(rollout.finished) == len(rollout.responses) == len(rollout.input_ids) == N
    assert {rollout.input_ids.dtype, rollout.labels.dtype, rollout.group_ids.dtype} == {torch.long}
    assert rollout.finished.dtype == torch.bool
    assert rollout.group_ids.tolist() == [n // G for n in range(N)]

    longest = at_the_limit = 0
    for n in range(N):
        row, prompt = rollout.input_ids[n].tolist(), ids_of(PROMPTS[n // G])
        assert row[: len(prompt)] == prompt  # no <start>, which the tokenizer would add
        answer = row[len(prompt) : len(prompt) + limit]
        length = next((t + 1 for t, token in enumerate(answer) if token in ends), limit)
        answer, rest = answer[:length], row[len(prompt) + length :]
        assert len(answer) == length and rest == [PAD] * len(rest)
        assert rollout.labels[n].tolist() == [IGNORE] * len(prompt) + answer + [IGNORE] * len(rest)
        spoken = [0] * (len(prompt) - 1) + [-1] * length + [0] * len(rest)
        assert rollout.logprobs[n].sign().tolist() == spoken
        assert bool(rollout.finished[n]) == (answer[-1] in ends)
        text = answer[:-1] if answer[-1] in ends else answer  # the end token alone is left out
        assert rollout.responses[n].split() == TOKENIZER.convert_ids_to_tokens(text)
        longest = max(longest, len(prompt) + length)
        at_the_limit += length == limit and answer[-1] in ends
    assert S == longest
    if len(ends) > 1 or limit == 12:  # all of these occurred
        assert rollout.finished.any() and not rollout.finished.all()
        assert at_the_limit or len(ends) == 1
    if limit == 12:
        drawn = rollout.labels[rollout.labels != IGNORE]
        assert (drawn == PAD).any() and all((drawn == end).any() for end in ends)
        # What was written is scored: a control token inside a number does not vanish
        said = " ".join(rollout.responses)
        assert "<pad>" in said and "<start>" in said and "<end>" not in said
    assert all(getattr(rollout, f.name) is None for f in fields(rollout)[6:])  # for later stages
    assert torch.equal(rollout.mask, rollout.labels[:, 1:] != IGNORE)


def filled(N, S, seed, flat=True):
    """A Rollout with a value of its own in every place of every field."""
    def numbers(*shape):
        return torch.rand(shape, generator=seeded(seed)) + seed

    ids = (numbers(N, S) * 100).long()
    per_token = numbers(N, S - 1)
    return Rollout(
        ids, ids + 50, per_token, [f"{seed}, {n}" for n in range(N)], numbers(N) > seed + 0.5,
        torch.arange(N) // 2, turns=[["yes", str(n)] for n in range(N)], rewards=numbers(N) + 1,
        rule_rewards=numbers(N) + 2, reward_parts={"a": numbers(N) + 3, "b": numbers(N) + 4},
        step_rewards=[[(n, 0.5)] for n in range(N)], judged=[{"row": n} for n in range(N)],
        advantages=(numbers(N) if flat else per_token) + 5, old_logprobs=per_token + 6,
        ref_logprobs=per_token + 7, entropies=per_token + 8)


def rows_of(value, rows):
    if isinstance(value, dict):
        return {name: rows_of(part, rows) for name, part in value.items()}
    return [value[n].tolist() if isinstance(value, torch.Tensor) else value[n] for n in rows]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("rows", [[2, 0], [3], [0, 1, 2, 3], [1, 1]])
def test_take(rows, flat):
    rollout = filled(4, 7, 1, flat)
    for width in (None, 5):
        part = rollout.take(rows, width)
        for f in fields(rollout):
            value, found = getattr(rollout, f.name), getattr(part, f.name)
            if isinstance(value, torch.Tensor) and value.ndim == 2 and width:
                value = value[:, :5 if value.shape[1] == 7 else 4]
            assert rows_of(found, range(len(rows))) == rows_of(value, rows), f.name
        assert part.mask.shape == part.logprobs.shape


@pytest.mark.parametrize("widths", [(7, 4), (4, 7), (5, 5)])
@pytest.mark.parametrize("flat", [True, False])
def test_join(widths, flat):
    """Each row ends in padding where the other rollout is longer: -100 in labels, else 0."""
    a, b = filled(2, widths[0], 1, flat), filled(3, widths[1], 2, flat)
    both = joined(a, b)
    for f in fields(both):
        first, second, found = (getattr(part, f.name) for part in (a, b, both))
        if isinstance(found, dict):
            expected = {name: rows_of(first[name], range(2)) + rows_of(second[name], range(3))
                      for name in first}
        else:
            expected = rows_of(first, range(2)) + rows_of(second, range(3))
        if isinstance(found, torch.Tensor) and found.ndim == 2:
            assert found.dtype == first.dtype
            blank = IGNORE if f.name == "labels" else 0
            width = max(widths) - (f.name not in ("input_ids", "labels"))
            expected = [row + [blank] * (width - len(row)) for row in expected]
        assert rows_of(found, range(5)) == expected, f.name
    for name in ("rewards", "reward_parts", "judged", "advantages"):
        lacking = replace(b, **{name: None})
        assert getattr(joined(a, lacking), name) is getattr(joined(lacking, a), name) is None
        assert getattr(lacking.take([0]), name) is None


def test_a_broken_logprob_is_not_hidden():
    rows = [[([5, 6], None), ([7, END], [math.nan, -1.0])], [([5], None), ([END], [0.0])]]
    rollout = sample.to_rollout(TOKENIZER, rows, [END], 2, torch.device("cpu"))
    assert rollout.labels.tolist() == [[IGNORE, IGNORE, 7, END], [IGNORE, END, IGNORE, IGNORE]]
    assert rollout.logprobs[0, 1].isnan() and rollout.logprobs[0, 2] == -1
    assert rollout.finished.all() and rollout.responses == ["w7", ""]


PADDED = {"pad_token": "<pad>"}


@pytest.mark.parametrize("generation, special, ends, pad", [
    (END, {"eos_token": "<end>"}, {END}, END),  # without a padding token the end token pads
    ([11, 9], {"eos_token": "<end>"}, {9, 11}, END),
    ([END, 9], {"eos_token": "<end>", **PADDED}, {END, 9}, PAD),
    (12, PADDED, {12}, PAD), (None, {"eos_token": "<end>", **PADDED}, {END}, PAD),
    (None, {"eos_token": "w13", **PADDED}, {13}, PAD),
])
def test_end_tokens_and_padding(model, config, generation, special, ends, pad):
    config("eos_token_id", generation)
    rollout = sample_groups(model, make_tokenizer(**special), PROMPTS, 100, 20, 1.5, seeded())
    answers = responses_of(rollout)
    assert not any(ends & set(answer[:-1]) for answer in answers)
    assert rollout.finished.tolist() == [answer[-1] in ends for answer in answers]
    assert all(answer[-1] in ends or len(answer) == 20 for answer in answers)
    assert {answer[-1] for answer in answers} >= ends
    response = (rollout.labels != IGNORE).int()
    behind = (response == 0) & (response.cumsum(dim=1) > 0)
    assert behind.any() and (rollout.input_ids[behind] == pad).all()


@pytest.mark.parametrize("prompts, says", [
    ([""], "prompt 0"), (["w5", "  ", ""], "prompt 1"), (PROMPTS, "end token")])  # none anywhere
def test_what_cannot_be_sampled_from(model, config, prompts, says):
    config("eos_token_id", None)
    with value_error(says):
        sample_groups(model, make_tokenizer(pad_token="<pad>"), prompts, 2, 4)


# --------------------------------------------------------------------------------------------------
# Chance

def test_every_later_token_has_the_softmax_frequencies(model, config):
    """Each draw lands at F(token - 1) + u p(token), which is uniform; so are pairs of them."""
    config("eos_token_id", [END, 7, 40])
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 60, 24, 0.7, seeded())
    with torch.no_grad():
        p = (model(rollout.input_ids).logits[:, :-1].double() / 0.7).softmax(dim=-1)
    chosen = rollout.input_ids[:, 1:, None]
    u = torch.rand(chosen.shape[:2], dtype=torch.double, generator=seeded(1))
    landed = p.cumsum(dim=-1).gather(2, chosen)[..., 0] - u * p.gather(2, chosen)[..., 0]
    mask = rollout.labels[:, 1:] != IGNORE
    tenth = (landed * 10).long().clamp(0, 9)
    counts = tenth[mask].bincount(minlength=10)
    assert abs(surprise(counts, counts.sum() / 10)) < 5
    for dim in (0, 1):  # neighbouring rows; neighbours in a row
        a, b = (tenth.narrow(dim, start, tenth.shape[dim] - 1) for start in (1, 0))
        both = torch.logical_and(*(mask.narrow(dim, i, mask.shape[dim] - 1) for i in (1, 0)))
        counts = (a * 10 + b)[both].bincount(minlength=100)
        assert abs(surprise(counts, counts.sum() / 100)) < 5


@pytest.mark.parametrize("settings", [
    dict(do_sample=True, top_k=1), dict(temperature=0.01), dict(repetition_penalty=5.0),
    dict(do_sample=False), dict(top_p=0.01, min_p=0.5, typical_p=0.1),
    dict(max_new_tokens=2, max_length=3), dict(min_new_tokens=12),
    dict(no_repeat_ngram_size=1, bad_words_ids=[[i] for i in range(3, 50)], suppress_tokens=[1]),
])
def test_a_checkpoints_own_settings_change_nothing(model, config, settings):
    plain = sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.5, seeded())
    for name, value in settings.items():
        config(name, value)
    assert same(sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.5, seeded()), plain)


def test_the_generator_decides(model, config):
    draw_three = partial(sample_groups, model, TOKENIZER, PROMPTS, 3, 10, 1.0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw_three(seeded(5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    generator = seeded(5)
    assert same(draw_three(generator), first) and not same(draw_three(seeded(6)), first)
    assert not same(draw_three(generator), first)  # it has moved on
    # without one the global seed does
    a, b, c = (torch.manual_seed(seed) and draw_three() for seed in (5, 5, 6))
    assert same(a, b) and not same(a, c)
    config("eos_token_id", list(range(1, V, 5)))
    eight = sample_groups(model, TOKENIZER, PROMPTS, 8, 256, 1.0, seeded())  # the defaults
    assert same(sample_groups(model, TOKENIZER, PROMPTS, generator=seeded()), eight)


def test_a_generator_a_prompt(model, config):
    """Then an answer does not depend on the other prompts, on their number, lengths or answers."""
    config("eos_token_id", ENDS)
    exact = in_float64(model)
    generators = [seeded(seed) for seed in (5, 6, 7, 8)]
    together = sample_groups(exact, TOKENIZER, PROMPTS, 3, 10, 1.0, generators)
    assert len(set(map(len, responses_of(together)))) > 3
    for which in ([0], [2], [3, 1]):
        apart = sample_groups(exact, TOKENIZER, [PROMPTS[i] for i in which], 3, 10, 1.0,
                              [seeded(5 + i) for i in which])
        rows = [3 * i + k for i in which for k in range(3)]
        assert responses_of(apart) == [responses_of(together)[row] for row in rows]
    twice = sample_groups(exact, TOKENIZER, PROMPTS[:1] * 2, 3, 10, 1.0, generators[:2])
    assert responses_of(twice)[:3] != responses_of(twice)[3:]


# --------------------------------------------------------------------------------------------------
# The fast forms against the plain loop

FAMILY = {
    "qwen2": {}, "qwen3": {}, "llama": {},
    "llama with biases": dict(attention_bias=True, mlp_bias=True),
    "llama stretched": dict(rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        rope_theta=10000.0, original_max_position_embeddings=16)),
    "mistral": dict(sliding_window=None),
    "smollm3": dict(no_rope_layers=[1, 0]),
}


def member(name, ends=ENDS):
    """In float64, where no tie is decided by rounding."""
    model = small_model(name.split()[0], **FAMILY[name]).double()
    model.generation_config.eos_token_id = ends
    return model


def plainly(monkeypatch, *args):
    with monkeypatch.context() as patch:
        patch.setattr(sample, "fastest_form", lambda model: PlainStep)
        return sample_groups(*args)


def assert_same_rollout(a, b, atol):
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=atol)
    assert same(replace(a, logprobs=b.logprobs), b)


def held_against_plain(monkeypatch, *args, seed=0, atol=1e-5):
    """The rollout; its ids are those of the plain loop, its log-probs nearly."""
    rollout = sample_groups(*args, seeded(seed))
    assert_same_rollout(rollout, plainly(monkeypatch, *args, seeded(seed)), atol)
    return rollout


def lengths_of(rollout):
    return set(map(len, responses_of(rollout)))


@pytest.mark.parametrize("temperature", [1.2, 0])
@pytest.mark.parametrize("name", FAMILY)
def test_the_own_step_draws_what_the_plain_loop_draws(name, temperature, monkeypatch):
    model = member(name)
    assert forms_of(model) == {"own decode step": True}
    rollout = held_against_plain(monkeypatch, model, TOKENIZER, PROMPTS, 6, 30, temperature)
    assert len(lengths_of(rollout)) > (3 if temperature else 1)
    assert model not in sample.KEPT  # without graphs


def test_the_own_step_without_padding_and_in_float32(monkeypatch):
    """Prompts of one length need no mask. Rounding decides next to nothing: of 200 rows no id."""
    args = member("qwen2"), TOKENIZER, ["w5 w9 w12", "w7 w7 w30"], 6, 20, 1.2
    assert len(lengths_of(held_against_plain(monkeypatch, *args))) > 3
    args = small_model("qwen3"), TOKENIZER, PROMPTS, 50, 20, 1.0
    held_against_plain(monkeypatch, *args, atol=1e-4)


def test_the_decoder_is_kept_and_released(monkeypatch):
    """Nothing of an earlier rollout, not even a NaN, shows in a later one of other shape."""
    with stand_in.machine() as gpu:
        model = member("qwen2", [END, 7, 40]).to("cuda")
        sample_groups(model, TOKENIZER, PROMPTS, 6, 30, 1.0, seeded())
        kept = sample.KEPT[model]
        for layer in kept.layers:
            layer.past.fill_(torch.nan)
        for prompts, G, T in ((PROMPTS, 6, 30), (PROMPTS[1:2], 5, 12), (PROMPTS[2:], 7, 30)):
            held_against_plain(monkeypatch, model, TOKENIZER, prompts, G, T, 1.0, seed=1)
            assert sample.KEPT[model] is kept
        assert len(gpu.graphs) <= 5  # for 24, 12, 6, 3 rows and one
        down = model.model.layers[0].mlp.down_proj  # a graph would read the old weights
        down.weight = torch.nn.Parameter(down.weight.detach().clone())
        sample_groups(model, TOKENIZER, PROMPTS, 6, 30, 1.0, seeded())
        assert sample.KEPT[model] is not kept
    sample.release(model)
    sample.release(model)
    assert model not in sample.KEPT


def test_few_keys_and_many(monkeypatch):
    """On a CPU another kernel takes over where a row has more than 64 keys."""
    lengths, real = [], OwnStep.attend
    monkeypatch.setattr(OwnStep, "attend", lambda self, *given: (
        lengths.append(given[3].shape[3]) or real(self, *given)))
    held_against_plain(monkeypatch, member("qwen2", [END]), TOKENIZER, PROMPTS, 3, 80, 1.0)
    assert min(lengths) < 64 < max(lengths)


@pytest.mark.parametrize("ended", [
    [], [0], [8], [0, 1, 2], [3, 8], [7, 8], [0, 2, 4, 6, 8], list(range(8)),
])
def test_few_rows_move_when_rows_end(ended):
    decoder = OwnStep(small_model("llama"), 9, 4, graphs=False)
    decoder.length = 3
    rows = torch.arange(9)
    for layer in decoder.layers:
        layer.past.copy_(torch.stack((rows, rows + 10))[:, :, None, None, None])
    decoder.padding[:9] = rows
    decoder.bias.copy_(rows[:, None, None, None])
    n = 9 - len(ended)
    places = decoder.keep(~torch.isin(rows, torch.tensor(ended, dtype=torch.long)))
    assert set(places.tolist()) == set(range(9)) - set(ended) and len(places) == n
    assert int((places != rows[:n]).sum()) <= len(ended)  # the others stay where they are
    for layer in decoder.layers:
        keys, values = layer.past[:, :n, 0, :3, 0]
        assert (keys == places[:, None]).all() and (values == places[:, None] + 10).all()
    assert torch.equal(decoder.padding[:n].long(), places)
    assert (decoder.bias[:n, 0, 0] == places[:, None]).all()


def test_nothing_is_run_twice_or_for_nothing(model, config, runs):
    """A prompt runs once, then each row token by token; its last is drawn but not run."""
    config("eos_token_id", [END, 7, 40, 41, 42])
    forms_of(model)
    runs.clear()
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 5, 40, 1.5, seeded())
    lengths = [len(answer) for answer in responses_of(rollout)]
    assert len(set(lengths)) > 5
    assert runs[0] == (len(PROMPTS), max(len(ids_of(prompt)) for prompt in PROMPTS))
    assert runs[1:] == [(sum(length > t for length in lengths),) for t in range(1, max(lengths))]
    runs.clear()
    sample_groups(model, TOKENIZER, PROMPTS, 5, 1, 1.0, seeded())
    assert len(runs) == 1  # one token needs no second


# --------------------------------------------------------------------------------------------------
# The check

def adapted():
    model = small_model("llama")
    model.model.layers[1].self_attn.q_proj.__class__ = type("Adapted", (torch.nn.Linear,), {})
    return model


LLAMA = partial(small_model, "llama")
LONG = dict(rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)


@pytest.mark.parametrize("make, why", [
    *((partial(small_model, name), why) for name, why in {
        "qwen2": None, "qwen3": None, "llama": None, "mistral": "a sliding window",
        "gemma2": "a sliding window", "granite": "off by", "gpt2": "no attribute",
        "cohere": "no attribute"}.items()),
    (adapted, "Adapted"),  # its layers are not stepped over
    # What a few tokens would not show
    (partial(LLAMA, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)),
     "far positions"),
    (partial(LLAMA, rope_parameters=dict(LONG, rope_type="longrope", short_factor=[1.0] * 4,
                                         long_factor=[2.0] * 4)), "far positions"),
    (partial(LLAMA, rope_parameters=dict(LONG, rope_type="yarn")), None),
    (partial(small_model, "ministral3", head_dim=8), None),  # it is beyond its 128 positions
    (partial(small_model, "ministral3", head_dim=8, rope_parameters=dict(
        LONG, rope_type="yarn", llama_4_scaling_beta=0.1)), "far positions"),
    (partial(LLAMA, attn_logit_softcapping=1000.0), "softcapping"),
    (partial(LLAMA, attention_chunk_size=64), "chunk"),
])
def test_the_form_that_a_family_takes(make, why):
    found = reasons(sample, make())["own decode step"]
    assert found is None if why is None else why in found and "\n" not in found


def test_a_wrong_form_is_refused_and_not_taken(monkeypatch):
    model = small_model("llama")
    plain = plainly(monkeypatch, model, TOKENIZER, PROMPTS, 3, 8, 1.0, seeded())
    monkeypatch.setattr(sample.F, "rms_norm", lambda x, *_: x)
    assert reasons(sample, model)["own decode step"].startswith("off by")
    assert same(sample_groups(model, TOKENIZER, PROMPTS, 3, 8, 1.0, seeded()), plain)
    monkeypatch.setattr(OwnStep, "step", raises(RuntimeError("no kernel\nfor this\ncard")))
    [why] = reasons(sample, small_model("llama")).values()
    assert why == "no kernel"  # one line
    for error in NO_MEMORY:  # is no reason
        monkeypatch.setattr(OwnStep, "step", raises(error))
        with pytest.raises(type(error)):
            forms_of(small_model("llama"))


def test_the_check_runs_once_and_leaves_no_trace():
    small = small_model("qwen2")
    calls = []
    small.register_forward_pre_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    forms_of(small)
    assert torch.equal(torch.get_rng_state(), state) and small not in sample.KEPT
    assert all(p.grad is None for p in small.parameters())
    after = len(calls)
    sample_groups(small, TOKENIZER, PROMPTS, 2, 1, 1.0, seeded())
    assert after > 4 and len(calls) == after + 1
    forms_of(small.double())  # other numbers: checked again
    assert len(calls) > after + 5


def test_a_cache_that_is_a_little_wrong_is_only_told(monkeypatch, capsys):
    """Between the tolerance and 1 nat; the fast forms are held against the forward pass as ever.
    test_families.py has the families that have no cache."""
    run = PlainStep.run

    def shifted(self, *given):
        token, logprob = run(self, *given)
        return token, logprob - nats

    monkeypatch.setattr(PlainStep, "run", shifted)
    for nats, told in ((0.5, True), (0.0, False)):  # noqa: B007
        assert all(forms_of(small_model("llama")).values())
        assert ("llama: log-probs with its cache are off by 0." in capsys.readouterr().err) == told
    nats = 1.5
    with value_error(r"^llama cannot be sampled .* off by 1.\d+ nats$"):
        sample_groups(small_model("llama"), TOKENIZER, PROMPTS, 2, 4)


# --------------------------------------------------------------------------------------------------
# Variants

@pytest.mark.parametrize("best, cut", [(1, 0.5), (3, 0.3), (3, 0.9)])
def test_sampling_around_the_best(model, config, best, cut):
    config("eos_token_id", [END, 7, 40])
    asked = []

    def rewards_of(prompts, responses):
        asked.append((prompts, responses))
        return torch.tensor([float(len(text)) for text in responses])  # the longest is the best

    around = sample_around(model, TOKENIZER, PROMPTS, 6, 20, 1.0, seeded(), rewards_of=rewards_of,
                           best=best, cut=cut)
    [(prompts, texts)] = asked
    assert prompts == PROMPTS and len(texts) == 4 * 3
    rows, answers = around.responses, responses_of(around)
    assert len(rows) == 24 and around.group_ids.tolist() == [n // 6 for n in range(24)]
    for g in range(4):
        first, fine = range(6 * g, 6 * g + 3), range(6 * g + 3, 6 * g + 6)
        assert [rows[n] for n in first] == texts[3 * g : 3 * g + 3]
        ranked = sorted(first, key=lambda n: -len(rows[n]))[:best]
        for n in fine:
            stem = answers[ranked[(n - fine[0]) // (3 // best)]]
            kept = int(len(stem) * cut)
            assert answers[n][:kept] == stem[:kept] and len(answers[n]) <= 20
    assert len({tuple(answer) for answer in answers}) > 16
    assert_logprobs(model, around)  # of every policy token
    for n, answer in enumerate(answers):
        ended = [token in (END, 7, 40) for token in answer]
        assert not any(ended[:-1]) and bool(around.finished[n]) == ended[-1]
    for G, best, cut in ((5, 2, 0.5), (6, 4, 0.5), (6, 2, 0.5), (6, 1, 1.0), (1, 1, 0.5)):
        with pytest.raises(ValueError):
            sample_around(model, TOKENIZER, PROMPTS, G, rewards_of=None, best=best, cut=cut)


# Conversations of word tokenizers: <start> begins a user's message and w3 an answer.
TALK = ("{% for m in messages %}{{ '<start> ' if m.role == 'user' else 'w3 ' }}{{ m.content }} "
        "{% if m.role == 'assistant' %}<end> {% endif %}{% endfor %}w3")


def talk_tokenizer():
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TALK
    return tokenizer


def echo(prompt, turns):
    """Some of the answer's words, more or fewer; some conversations end early."""
    words = turns[-1].split() or ["w4"]
    if len(turns) > 1 and {"w5", "w9", "w11", "w60"} & set(words):
        return None
    return " ".join(words[: 1 + len(turns[-1]) % 7])


def talked(model):
    prompts = [f"<start> {prompt} w3" for prompt in PROMPTS]
    return sample_conversations(model, talk_tokenizer(), prompts, 5, 9, 1.2, seeded(), reply=echo,
                                max_turns=4)


def turns_of(rollout):
    """How many answers each row has: runs of labels."""
    said = (rollout.labels != IGNORE).int()
    return (said.diff(dim=1, prepend=torch.zeros_like(said[:, :1])) == 1).sum(dim=1).tolist()


ASKED = ["How many ?", "Anna has 9 . How many ?"]


def test_conversations(tiny):
    """Turn by turn: the ids are those that were said, and only the policy's are labelled."""
    model, tokenizer = tiny
    prompts = [sample.chat_prompt(tokenizer, {"question": text}, "") for text in ASKED]
    heard = []

    def reply(prompt, turns):
        heard.append((prompt, list(turns)))
        return None if len(turns) == 3 and "1" in turns[0] else "loses <|end|> 4 ."

    rollout = sample_conversations(model, tokenizer, prompts, 4, 12, 1.0, seeded(), reply=reply,
                                   max_turns=3)
    assert rollout.group_ids.tolist() == [0] * 4 + [1] * 4
    turns = turns_of(rollout)
    for n in range(8):
        said = (rollout.labels[n] != IGNORE).int()
        ids = tokenizer(prompts[n // 4], add_special_tokens=False).input_ids
        assert rollout.input_ids[n, : said.argmax()].tolist() == ids
        text = tokenizer.decode(rollout.input_ids[n])
        assert text.count("<|user|>") == text.count("<|assistant|>") == turns[n]
        assert text.count("loses") == turns[n] - 1
        assert rollout.finished[n] == (rollout.labels[n][said > 0][-1] == tokenizer.eos_token_id)
        assert len(rollout.responses[n].split("\n")) == turns[n]
        assert "<|user|>" not in rollout.responses[n]
        # An end token after every turn, drawn or put there; the one in the reply is text
        ends = int((rollout.input_ids[n, : said.nonzero()[-1] + 1] == 1).sum())
        assert ends in (turns[n] - 1, turns[n])
    firsts = [response.split("\n")[0] for response in rollout.responses]
    assert turns == [2 if "1" in first else 3 for first in firsts] and set(turns) == {2, 3}
    assert [prompt for prompt, _ in heard[:8]] == [prompts[n // 4] for n in range(8)]
    assert [said for _, said in heard[:8]] == [[first] for first in firsts]
    assert all(said[1] == "loses <|end|> 4 ." for _, said in heard[8:])
    assert_logprobs(model, rollout)


@pytest.mark.parametrize("where, form", [
    ("cpu", PlainStep), ("cpu", own_step), ("cuda", partial(own_step, graphs=True))])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "smollm3"])
def test_conversations_in_every_form(name, where, form, monkeypatch):
    with stand_in.machine() if where == "cuda" else nullcontext():
        model = member(name).to(where)
        monkeypatch.setattr(sample, "fastest_form", lambda model: form)
        rollout = talked(model)
        assert set(turns_of(rollout)) == {2, 3, 4}  # rows leave, the others have many lengths
        assert_logprobs(model, rollout, 1.2, atol=1e-5)


def test_turns_run_a_prompt_once_for_its_group_and_then_the_rows_that_go_on(model, runs):
    forms_of(model)
    runs.clear()
    rollout = talked(model)
    turns = [rows for rows, *width in runs if width]  # the others are single tokens
    going_on = [sum(count > turn for count in turns_of(rollout)) for turn in range(1, len(turns))]
    assert turns == [len(PROMPTS), *going_on] and len(going_on) > 1


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt2"])
def test_conversations_with_windows_and_learned_positions(architecture):
    model = small_model(architecture)
    assert_logprobs(model, talked(model), 1.2)


def test_a_conversation_of_one_turn_is_a_group(tiny):
    model, tokenizer = tiny
    prompts = [sample.chat_prompt(tokenizer, {"question": text}, "") for text in ASKED]
    group = sample_groups(model, tokenizer, prompts, 3, 12, 1.0, [seeded(1), seeded(2)])
    group.turns = [[text] for text in group.responses]
    for turns, reply in ((1, lambda *_: "more"), (5, lambda *_: None)):
        talk = sample_conversations(model, tokenizer, prompts, 3, 12, 1.0, [seeded(1), seeded(2)],
                                    reply=reply, max_turns=turns)
        assert same(talk, group)


@pytest.mark.parametrize("changes, says", [
    (dict(reply=raises(KeyError("no\ntool"))), "row 0 fails"),
    (dict(reply=lambda prompt, turns: 3), "row 0 fails .TypeError: of type int"),
    (dict(reply=lambda prompt, turns: None if "w41 w8" not in prompt else ["x"]),
     "row 15 fails .TypeError: of type list"),
    (dict(group_size=0), "group_size 0"), (dict(prompts=[]), "0 prompts"),
    (dict(prompts=["w5", ""]), "prompt 1"),
    (dict(template="{{ messages[0].content }} w3", reply=lambda *_: "w5"), "nothing between"),
])
def test_what_is_no_conversation(model, changes, says):
    tokenizer = talk_tokenizer()
    tokenizer.chat_template = changes.get("template", TALK)
    how = dict(prompts=PROMPTS, group_size=5, max_new_tokens=4, reply=echo) | changes
    how.pop("template", None)
    with value_error(says):
        sample_conversations(model, tokenizer, **how)


# --------------------------------------------------------------------------------------------------
# One draw

# below 1024 words the running sum has one level, unless `draw` is told otherwise
LEVELS = pytest.mark.parametrize("few", [0, 1024], ids=["two levels", "one level"])


@LEVELS
@pytest.mark.parametrize("words", [7, 128, 1000, 151_936])
@pytest.mark.parametrize("temperature", [3.0, 0.7])
def test_u_is_a_place_in_the_running_sum(words, temperature, few):
    """So that a uniform u draws by the softmax; also among words of 3e-8 and less, which a float32
    sum cannot tell apart."""
    logits = torch.randn(words, generator=seeded())
    logits[words // 2] = 17.0
    p = (logits.double() / temperature).softmax(dim=0)
    above = p.cumsum(dim=0)
    head = float(above[words // 2])
    n = 200 if words < 10**5 else 40
    u = torch.linspace(0, 1, n + 1, dtype=torch.double)[:-1] + 1e-3
    u = torch.cat((u, head + (1 - head) * u, torch.tensor([0.0, 1 - 2**-53])))
    tokens, logprobs = draw(logits.expand(len(u), words), temperature, u, few=few)
    assert tokens.shape == logprobs.shape == u.shape and tokens.dtype == torch.long
    near = 1e-5 * (1 - head)
    assert (above[tokens] - p[tokens] - near <= u).all() and (u <= above[tokens] + near).all()
    assert (tokens[n:2 * n] > words // 2).all() and len(tokens.unique()) > min(words // 3, n // 2)
    torch.testing.assert_close(logprobs.double(), p[tokens].log(), rtol=1e-5, atol=1e-5)


@LEVELS
@pytest.mark.parametrize("words, first, last", [(50, 5, 30), (500, 5, 490), (500, 140, 370)])
def test_the_ends_of_the_running_sum(words, first, last, few):
    """The smallest and the largest u meet words that have a probability."""
    logits = torch.full((2, words), -torch.inf)
    logits[:, first : last + 1] = torch.randn(last + 1 - first, generator=seeded())
    tokens, _ = draw(logits, 1.0, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), few=few)
    assert tokens.tolist() == [first, last]


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_on_a_cpu(monkeypatch, dtype, amx):
    """Not rounded, also where the CPU takes the product in bfloat16."""
    taken = precisions(monkeypatch, amx)
    model, h = small_model("llama").to(dtype), torch.randn(40, 32, generator=seeded()).to(dtype)
    logits = OwnStep(model, 40, 8, False).logits(h)
    exact = h.double() @ model.lm_head.weight.double().T
    assert logits.dtype == torch.float32 and (logits - exact).norm() <= 1e-6 * exact.norm()
    told = "bf16" if amx and dtype == torch.bfloat16 else None
    assert taken == (set() if dtype == torch.float32 else {told})


@LEVELS
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logprob_of_a_draw(few, temperature, dtype):
    """At temperature 0, where the largest logit is taken, that of temperature 1."""
    logits = (100 + 4 * torch.randn(500, 300, generator=seeded())).to(dtype)
    before = logits.clone()
    u = torch.rand(500, dtype=torch.float64, generator=seeded())
    tokens, logprobs = draw(logits, temperature, u, few=few)
    expected = (logits.double() / (temperature or 1)).log_softmax(dim=1)
    assert logprobs.dtype == torch.float32 and torch.equal(logits, before)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0],
                               rtol=1e-5, atol=1e-4)
    if temperature == 0:
        assert tokens.tolist() == [max(range(300), key=row.__getitem__) for row in logits.tolist()]


@LEVELS
@pytest.mark.parametrize("words", [50, 300])
def test_what_has_no_probability_is_never_drawn(few, words):
    logits = torch.zeros(10_000, words)
    logits[:, ::2] = logits[:, :5] = logits[:, -20:] = -torch.inf  # in front, behind, between
    u = torch.rand(10_000, dtype=torch.float64, generator=seeded())
    tokens, logprobs = draw(logits, 1.0, u, few=few)
    assert set(tokens.tolist()) == set(range(5, words - 20, 2))
    assert logprobs.tolist() == pytest.approx([-math.log((words - 24) // 2)] * 10_000, abs=1e-5)


def test_the_numbers_behind_the_draws():
    """So fine that no two of 200,000 are the same; a prompt's come from its own generator."""
    numbers = uniform_numbers(seeded(), 4, 50, 1000, torch.device("cpu"))
    assert numbers.shape == (200, 1000) and len(numbers.unique()) == 200_000
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = (numbers.flatten() * 1000).long().bincount()
    assert abs(surprise(counts, 200.0)) < 5
    own = uniform_numbers([seeded(3), seeded(4)], 2, 50, 10, torch.device("cpu"))
    assert torch.equal(own[50:], uniform_numbers(seeded(4), 1, 50, 10, torch.device("cpu")))


# --------------------------------------------------------------------------------------------------
# The chat template

class Template:
    """A tokenizer with one special token and nothing but a chat template, a Python function."""
    added_tokens_decoder = {0: AddedToken("<|end|>", special=True)}
    chat_template = None

    def __init__(self, render):
        self.render = render

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return self.render([(m["role"], m["content"]) for m in messages])


def without_system(messages):
    if messages[0][0] == "system":
        raise RuntimeError("System role not supported")
    return "".join(f"[{content}]" for _, content in messages)


def test_a_prompt_is_the_template_around_the_problem(tiny):
    question = [{"role": "user", "content": "How many ?"}]
    expected = tiny[1].apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert sample.chat_prompt(tiny[1], {"question": "How many ?"}, "") == expected
    assert sample.chat_prompt(tiny[1], {"messages": question}, "") == expected
    with_system = str([("system", "Think."), ("user", "x")])
    assert sample.chat_prompt(Template(str), {"question": "x"}, "Think.") == with_system
    # A template that refuses a system message gets it in the first turn
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    prompt = sample.chat_prompt(Template(without_system), {"messages": messages}, "Think.")
    assert prompt == "[Think.\n\none][two]"


def test_a_blank_makes_text_of_a_special_token():
    tokenizer = Template(None)
    assert sample.as_text(tokenizer, "a <|end|><|end|> b") == "a < |end|>< |end|> b"
    assert sample.as_text(tokenizer, "a < b | c > d") == "a < b | c > d"
    tokenizer.added_tokens_decoder = {0: AddedToken("x", special=True)}  # cannot be parted
    assert sample.as_text(tokenizer, "x") == "x"
    # the template writes <user>; what was only added marks no turn
    tokenizer = Template(lambda messages: "".join(f"<user>{text}" for _, text in messages))
    tokenizer.added_tokens_decoder = dict(enumerate([
        AddedToken("@@", special=True), AddedToken("<tool>"), AddedToken("stamps")]))
    assert sample.as_text(tokenizer, "@@ <tool> stamps <user>") == "@ @ <tool> stamps < user>"


@pytest.mark.parametrize("system_prompt", ["", "Think."])
@pytest.mark.parametrize("render, says", [
    (raises(RuntimeError("no\nsuch role")), r"fails \(no\)"),
    (lambda messages: " \n", "empty prompt"),
])
def test_a_template_that_makes_no_prompt(system_prompt, render, says):
    with value_error(f"chat template .*{says}$"):
        sample.chat_prompt(Template(render), {"question": "x"}, system_prompt)


# --------------------------------------------------------------------------------------------------
# The script

@pytest.fixture
def run(tmp_path):
    """A run's folder -> a function that writes its config.json."""
    shutil.copytree(TINY, tmp_path / "final")

    def write(config):
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
        return f"--model={tmp_path}"
    return write


def test_script_takes_a_runs_settings(run_here, run):
    """Its config.json gives the defaults, the command line wins; a model's folder brings none."""
    model = run({"max_new_tokens": 3, "temperature": 0, "lr": 1, "system_prompt": "", "data": "x"})
    for flags, differ, limit in ((("--group-size=4",), False, 3), (
            ("--group-size=20", "--max-new-tokens=2", "--temperature=3"), True, 2)):
        answers = run_here("sample.py", model, *flags).strip().split("\n\n")[1:]
        assert (len({answer.split(maxsplit=1)[1] for answer in answers}) > 1) == differ
        assert all(int(answer.split()[1]) <= limit for answer in answers)
    final = Path(model.partition("=")[2], "final")
    (final / "recipe.json").write_text('{"max_new_tokens": 1}')
    assert "cut at the limit" not in run_here("sample.py", f"--model={final}", "--temperature=0")


def test_script_says_the_system_prompt(run_here, run):
    arguments = run({"system_prompt": "Anna"}), "--group-size=1", "--max-new-tokens=1", "Bob ?"
    template = Path(arguments[0].partition("=")[2], "final", "chat_template.jinja")
    template.write_text("{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}")
    assert "system : Anna user : Bob ?" in run_here("sample.py", *arguments)
    assert "system : Eve user : Bob ?" in run_here("sample.py", *arguments, "--system-prompt=Eve")
    assert "system" not in run_here("sample.py", *arguments, "--system-prompt=")


@pytest.mark.parametrize("config, says", [
    ({"max_new_tokens": "many"}, "argument --max-new-tokens: invalid int value: 'many'"),
    ({"max_new_tokens": True}, "argument --max-new-tokens: invalid int value: 'True'"),
    ({"temperature": [1]}, "argument --temperature: invalid float value: '[1]'"),
    ({"temperature": -1}, "temperature -1"), (["temperature"], "config.json: "),
    (3, "config.json: "), ("{", "config.json: Expecting"), (None, "config.json"),  # no such file
    *((flag, "") for flag in ("--device=abacus", "--model=nowhere/at/all", "--group-size=0",
                              "--max-new-tokens=0", "--temperature=nan")),
    *((flag, "--max-new-tokens 125: the model's 128 positions leave 1")
      for flag in ("--max-new-tokens=125", {"max_new_tokens": 125})),
])
def test_script_refuses_a_config_and_a_flag_in_one_line(run_here, run, tmp_path, config, says):
    flag = config if str(config).startswith("--") else run(config or {})
    if config is None:
        (tmp_path / "config.json").unlink()
    *usage, line = run_here("sample.py", flag, status=2).splitlines()
    assert line.startswith("sample.py: ") and says in line
    assert not usage or "error: argument" in line         # argparse's own way of saying it


def test_a_tokenizer_without_words_and_layers_left_over(tiny):
    nothing = SimpleNamespace(get_vocab=lambda: {"<|end|>": 0}, pad_token_id=None,
                              get_added_vocab=lambda: {"<|end|>": 0}, name_or_path="x")
    report = dict(missing_keys=[], mismatched_keys=[], unexpected_keys=["vision.tower"])
    sample.check_loaded(*tiny, report)
    with pytest.raises(ValueError, match="lack the words"):
        sample.check_loaded(tiny[0], nothing, report)
    report["unexpected_keys"] = ["model.layers.9.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match="layers that its config.json does not know"):
        sample.check_loaded(*tiny, report)


def test_open_policy(tmp_path, tiny):
    """In the dtype that is asked for, without dropout, ready for sampling."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    edit_json(folder / "config.json", attention_dropout=0.5)
    model, tokenizer = sample.open_policy(str(folder), "cpu", torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training and tokenizer.chat_template
    assert model.config.attention_dropout == 0
    assert all(getattr(part, "attention_dropout", 0) == 0 for part in model.modules())
    model, _ = sample.open_policy(str(folder))
    assert all(map(torch.equal, model.parameters(), tiny[0].parameters()))


def test_a_reader_that_leaves_costs_no_traceback(tmp_path):
    """`| head -1`: a pipe without a reader, as out="" is."""
    process = start("sample.py", "--group-size=2", "How many ?", out="", err=tmp_path / "err")
    assert ended([process]) == [0] and (tmp_path / "err").read_text() == ""


def test_script_draws_a_group(run_here, tiny):
    model, tokenizer = tiny
    flags = "--group-size=3", "--max-new-tokens=9", "--seed=4", "--temperature=3"
    head, *answers = run_here("sample.py", *flags, "How many ?").split("\n\n")
    prompt = sample.chat_prompt(tokenizer, {"question": "How many ?"}, "")
    rollout = sample_groups(model, tokenizer, [prompt], 3, 9, 3.0, seeded(4))
    assert head == prompt.rstrip("\n") and len(answers) == 3
    for n, answer in enumerate(answers):
        facts, _, text = answer.rstrip("\n").partition("\n")
        length, total = len(responses_of(rollout)[n]), float(rollout.logprobs[n].sum())
        assert facts.startswith(f"[{n}] {length} tokens, log-prob {total:.2f}")
        assert ("cut" in facts) == (not rollout.finished[n])
        assert text == rollout.responses[n]
