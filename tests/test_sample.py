"""[A] sample.py: the draw, greedy decoding against `generate`, log-probs against [D], the rows, the work done."""
import copy
import math
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import SMALL, small_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DynamicCache, PreTrainedTokenizerFast

import sample
from logprob import token_logprobs
from sample import IGNORE, can_decode_static, decode_graphs, draw, draw_fast, prefill, sample_groups, uniform_numbers

ROOT = Path(sample.__file__).resolve().parent
V, PAD, END, START = SMALL["vocab_size"], 0, 1, 2
PROMPTS = ["w5 w9 w12", "w7", " ".join(f"w{i}" for i in range(20, 33)), "w60 w3 w3 w41 w8 w17"]


def make_tokenizer(**special):
    """A word a token, w3 .. w63; without being told not to, it puts <start> in front."""
    words = ["<pad>", "<end>", "<start>", *(f"w{i}" for i in range(3, V))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<start> $A", special_tokens=[("<start>", START)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<start>", clean_up_tokenization_spaces=False,
                                   **special)


TOKENIZER = make_tokenizer(pad_token="<pad>", eos_token="<end>")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


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
    found = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: found.append(tuple(args[0].shape)))
    yield found
    hook.remove()


def responses_of(rollout):
    """The ids of each response, by the labels."""
    return [row[labels != IGNORE].tolist() for row, labels in zip(rollout.input_ids, rollout.labels)]


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
               for x, y in ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))


def surprise(counts, expected):
    """Pearson's chi-square as a number of standard deviations: chance alone stays within (-5, 5)."""
    rare = expected < 5
    pooled = torch.stack((counts[rare].sum(), expected[rare].sum())).double()
    counts, expected = counts[~rare].double(), expected[~rare].double()
    if pooled[1] >= 5:
        counts, expected = torch.cat((counts, pooled[:1])), torch.cat((expected, pooled[1:]))
    k = len(counts) - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return ((chi_square / k) ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5  # Wilson and Hilferty


# ----- greedy decoding --------------------------------------------------------------------------------------


def generated(model, prompt, limit):
    """What `generate` answers to this prompt alone."""
    ids = torch.tensor([ids_of(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
    return out[0, ids.shape[1]:].tolist()


def in_float64(model):
    """A copy in which no tie is decided by rounding. (Gemma 2 masks with float32's lowest number: it stays.)"""
    model = copy.deepcopy(model)
    return model if model.config.model_type == "gemma2" else model.double()


def test_greedy_is_generate(random_model):
    """Token for token, though prompts of several lengths stand in one batch."""
    model = in_float64(random_model)
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 2, 30, temperature=0)
    expected = [generated(model, prompt, 30) for prompt in PROMPTS for _ in range(2)]
    assert responses_of(rollout) == expected
    assert len({token for answer in expected for token in answer}) > 8  # not one token over and over


def test_greedy_ends_where_generate_ends(random_model):
    """With many end tokens some rows end early; the others go on as if alone."""
    model = in_float64(random_model)
    model.generation_config.eos_token_id = list(range(1, V, 9))
    prompts = [" ".join(f"w{i + j}" for j in range(1 + i % 4 * 4)) for i in range(10, 30)]
    rollout = sample_groups(model, TOKENIZER, prompts, 1, 25, temperature=0)
    expected = [generated(model, prompt, 25) for prompt in prompts]
    assert responses_of(rollout) == expected
    assert rollout.finished.tolist() == [answer[-1] % 9 == 1 for answer in expected]
    assert len(set(map(len, expected))) > 3


def test_the_cache_with_room_holds_what_transformers_own_holds():
    """150 tokens, past several growths, while rows end now and then: the same keys and values, row by row."""
    torch.manual_seed(0)
    plain, roomy = DynamicCache(), DynamicCache()
    for cache in (plain, roomy):
        cache.update(*torch.arange(2 * 20 * 2 * 5 * 4.0).view(2, 20, 2, 5, 4), 0)
    sample.make_room(roomy)
    assert type(roomy.layers[0]) is sample.RoomyLayer
    for t in range(150):
        if t % 20 == 7:
            n = plain.layers[0].keys.shape[0]
            ends = torch.randperm(n)[:1 + t // 70]
            rows = sample.close_up(~torch.isin(torch.arange(n), ends))
            assert sorted(rows.tolist()) == sorted(set(range(n)) - set(ends.tolist()))
            for cache in (plain, roomy):
                cache.batch_select_indices(rows)
        new = torch.randn(2, plain.layers[0].keys.shape[0], 2, 1, 4)
        for ours, theirs in zip(roomy.update(*new, 0), plain.update(*new, 0)):
            assert torch.equal(ours, theirs)
    assert roomy.get_seq_length() == 155


@pytest.mark.parametrize("ended", [[], [0], [8], [0, 1, 2], [3, 8], [7, 8], [0, 2, 4, 6, 8], list(range(9))])
def test_few_rows_move_when_rows_end(ended):
    rows = sample.close_up(torch.tensor([n not in ended for n in range(9)]))
    assert sorted(rows.tolist()) == [n for n in range(9) if n not in ended]
    assert sum(n != row for n, row in enumerate(rows.tolist())) <= len(ended)


def test_greedy_logprobs_are_those_of_temperature_one(model):
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 2, 12, temperature=0)
    expected = token_logprobs(model, rollout.input_ids, rollout.labels).detach()
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-4)


# ----- log-probs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_recorded_logprobs_are_those_of_logprob_py(random_model, temperature):
    rollout = sample_groups(random_model, TOKENIZER, PROMPTS, 4, 30, temperature, seeded())
    expected = token_logprobs(random_model, rollout.input_ids, rollout.labels, temperature).detach()
    assert len(set(rollout.labels[rollout.labels != IGNORE].tolist())) > 8
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-4)
    assert rollout.logprobs.dtype == torch.float32 and not rollout.logprobs.requires_grad


# ----- the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 12])
@pytest.mark.parametrize("ends", [[END], [END, 7, 40, 41, 42, 43]])
def test_the_layout(model, config, ends, limit):
    config("eos_token_id", ends if len(ends) > 1 else END)
    G, N = 50, 4 * 50
    rollout = sample_groups(model, TOKENIZER, PROMPTS, G, limit, 1.5, seeded())
    S = rollout.input_ids.shape[1]
    assert rollout.input_ids.shape == rollout.labels.shape == (N, S) and rollout.logprobs.shape == (N, S - 1)
    assert rollout.finished.shape == rollout.group_ids.shape == (N,) and len(rollout.responses) == N
    assert {rollout.input_ids.dtype, rollout.labels.dtype, rollout.group_ids.dtype} == {torch.long}
    assert rollout.finished.dtype == torch.bool
    assert rollout.group_ids.tolist() == [n // G for n in range(N)]

    longest, at_the_limit = 0, 0
    for n in range(N):
        row, prompt = rollout.input_ids[n].tolist(), ids_of(PROMPTS[n // G])
        assert row[:len(prompt)] == prompt
        answer = row[len(prompt):len(prompt) + limit]
        length = next((t + 1 for t, token in enumerate(answer) if token in ends), limit)
        answer, rest = answer[:length], row[len(prompt) + length:]
        assert len(answer) == length and rest == [PAD] * len(rest)
        assert rollout.labels[n].tolist() == [IGNORE] * len(prompt) + answer + [IGNORE] * len(rest)
        spoken = [0] * (len(prompt) - 1) + [1] * length + [0] * len(rest)
        assert (rollout.logprobs[n] < 0).int().tolist() == spoken
        assert not rollout.logprobs[n][rollout.labels[n, 1:] == IGNORE].any()
        assert bool(rollout.finished[n]) == (answer[-1] in ends)
        assert rollout.responses[n].split() == [f"w{token}" for token in answer if token > START]
        longest = max(longest, len(prompt) + length)
        at_the_limit += length == limit and answer[-1] in ends
    assert S == longest
    if len(ends) > 1 or limit == 12:  # all of these occurred
        assert rollout.finished.any() and not rollout.finished.all() and (at_the_limit or len(ends) == 1)
    if limit == 12:
        drawn = rollout.labels[rollout.labels != IGNORE]
        assert (drawn == PAD).any() and all((drawn == end).any() for end in ends)


def test_the_ids_are_kept_though_the_text_is_not_theirs(model, config):
    """A padding id that was drawn is an action like any other, though `responses` does not show it."""
    config("eos_token_id", END)
    rollout = sample_groups(model, TOKENIZER, PROMPTS[:1], 64, 8, 1.5, seeded())
    inside = (rollout.labels == PAD).any(dim=1)
    assert inside.any()
    for n in inside.nonzero()[:, 0].tolist():
        answer = rollout.labels[n][rollout.labels[n] != IGNORE]
        assert len(TOKENIZER(rollout.responses[n], add_special_tokens=False).input_ids) < len(answer)


def test_no_special_token_in_the_responses(model):
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 50, 12, 1.5, seeded())
    assert {PAD, END, START} <= set(rollout.labels.flatten().tolist())
    assert not any(f"<{name}>" in text for text in rollout.responses for name in ("pad", "end", "start"))


def test_no_start_token_is_added(model):
    assert TOKENIZER("w5").input_ids == [START, 5]
    rollout = sample_groups(model, TOKENIZER, ["w5", "<start> w5"], 1, 2, 1.0, seeded())
    assert rollout.input_ids[0, 0] == 5 and rollout.input_ids[1, :2].tolist() == [START, 5]


# ----- end tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation, tokenizer_end, ends", [
    (END, "<end>", {END}), ([END, 9], "<end>", {END, 9}), ([11, 9, 8], "<end>", {8, 9, 11}), (12, None, {12}),
    (None, "<end>", {END}), (None, "w13", {13}),
])
def test_end_tokens(model, config, generation, tokenizer_end, ends):
    config("eos_token_id", generation)
    tokenizer = make_tokenizer(pad_token="<pad>", **({"eos_token": tokenizer_end} if tokenizer_end else {}))
    rollout = sample_groups(model, tokenizer, PROMPTS, 100, 20, 1.5, seeded())
    last = set()
    for answer, finished in zip(responses_of(rollout), rollout.finished.tolist()):
        assert not ends & set(answer[:-1])
        assert finished == (answer[-1] in ends) and (finished or len(answer) == 20)
        last |= {answer[-1]} & ends
    assert last == ends


def test_without_an_end_token_anywhere(model, config):
    config("eos_token_id", None)
    with pytest.raises(ValueError, match="end token") as error:
        sample_groups(model, make_tokenizer(pad_token="<pad>"), PROMPTS, 2, 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ends, pad", [(END, END), ([11, 9], END)])
def test_without_a_padding_token_the_end_token_pads(model, config, ends, pad):
    config("eos_token_id", ends)
    rollout = sample_groups(model, make_tokenizer(eos_token="<end>"), PROMPTS, 10, 20, 1.5, seeded())
    response = (rollout.labels != IGNORE).int()
    behind = (rollout.labels == IGNORE) & (response.cumsum(dim=1) > 0)
    assert behind.any() and (rollout.input_ids[behind] == pad).all()


@pytest.mark.parametrize("prompts, which", [([""], 0), (["w5", ""], 1), (["w5", "  ", ""], 1)])
def test_an_empty_prompt(model, prompts, which):
    with pytest.raises(ValueError, match=f"prompt {which}") as error:
        sample_groups(model, TOKENIZER, prompts, 2, 4)
    assert "\n" not in str(error.value)


# ----- chance -----------------------------------------------------------------------------------------------


def next_token(model, ids, temperature):
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(dim=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_have_the_softmax_frequencies(model, temperature):
    G = 8000
    rollout = sample_groups(model, TOKENIZER, PROMPTS[:2], G, 1, temperature, seeded())
    expected = [next_token(model, ids_of(prompt), temperature) for prompt in PROMPTS[:2]]
    counts = [torch.tensor(answers).flatten().bincount(minlength=V)
              for answers in (responses_of(rollout)[g * G:g * G + G] for g in (0, 1))]
    for g in (0, 1):
        assert abs(surprise(counts[g], expected[g] * G)) < 5
        assert surprise(counts[g], expected[1 - g] * G) > 50  # what a mistake would look like
        other = next_token(model, ids_of(PROMPTS[g]), 0.7 if temperature == 1.0 else 1.0)
        assert surprise(counts[g], other * G) > 20


def test_siblings_draw_independently(model):
    """How often two of a group fall into each pair of quarters of their distribution."""
    G = 8000
    rollout = sample_groups(model, TOKENIZER, PROMPTS[:2], G, 1, 1.0, seeded())
    for prompt, first in zip(PROMPTS, torch.tensor(responses_of(rollout)).view(2, G)):
        p = next_token(model, ids_of(prompt), 1.0)
        quarter = ((p.cumsum(dim=0) - p / 2) * 4).long()  # of each token
        share = torch.zeros(4, dtype=torch.double).scatter_add(0, quarter, p)
        assert share.min() > 0.05
        for a, b in (first.view(-1, 2).T, first.view(2, -1)):  # neighbours; rows half a group apart
            counts = (quarter[a] * 4 + quarter[b]).bincount(minlength=16)
            assert abs(surprise(counts, torch.outer(share, share).flatten() * (G / 2))) < 5


def test_every_later_token_has_the_softmax_frequencies(model, config):
    """Each draw lands in its distribution at F(token - 1) + u p(token), which is uniform; so are pairs of them."""
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
    assert abs(surprise(counts, torch.full((10,), counts.sum() / 10))) < 5
    for a, b in (((slice(None), slice(1, None)), (slice(None), slice(None, -1))),  # in a row
                 ((slice(1, None), slice(None)), (slice(None, -1), slice(None)))):  # in neighbouring rows
        both = mask[a] & mask[b]
        counts = (tenth[a] * 10 + tenth[b])[both].bincount(minlength=100)
        assert abs(surprise(counts, torch.full((100,), counts.sum() / 100))) < 5


@pytest.mark.parametrize("settings", [
    dict(do_sample=True, top_k=1), dict(temperature=0.01), dict(repetition_penalty=5.0), dict(do_sample=False),
    dict(top_p=0.01, min_p=0.5, typical_p=0.1), dict(max_new_tokens=2, max_length=3), dict(min_new_tokens=12),
    dict(no_repeat_ngram_size=1, bad_words_ids=[[i] for i in range(3, 50)], suppress_tokens=[1]),
])
def test_a_checkpoints_own_settings_change_nothing(model, config, settings):
    plain = sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.5, seeded())
    for name, value in settings.items():
        config(name, value)
    assert same(sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.5, seeded()), plain)


def test_the_generator_decides(model):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.0, seeded(5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert same(sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.0, seeded(5)), first)
    assert not same(sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.0, seeded(6)), first)
    generator = seeded(5)
    assert same(sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.0, generator), first)
    assert not same(sample_groups(model, TOKENIZER, PROMPTS, 3, 10, 1.0, generator), first)  # it has moved on


def test_a_generator_a_prompt(model, config):
    """Then an answer does not depend on the other prompts, on their number, lengths or answers."""
    config("eos_token_id", [END, 7, 40, 41, 42, 43])
    exact = in_float64(model)
    generators = [seeded(5), seeded(6), seeded(7), seeded(8)]
    together = sample_groups(exact, TOKENIZER, PROMPTS, 3, 10, 1.0, generators)
    assert len(set(map(len, responses_of(together)))) > 3
    for which in ([0], [2], [3, 1]):
        apart = sample_groups(exact, TOKENIZER, [PROMPTS[i] for i in which], 3, 10, 1.0,
                              [seeded(5 + i) for i in which])
        rows = [3 * i + k for i in which for k in range(3)]
        assert responses_of(apart) == [responses_of(together)[row] for row in rows]
    same_prompt = sample_groups(exact, TOKENIZER, PROMPTS[:1] * 2, 3, 10, 1.0, [seeded(5), seeded(6)])
    assert responses_of(same_prompt)[:3] != responses_of(same_prompt)[3:]


def test_without_a_generator_the_global_seed_decides(model):
    rollouts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        rollouts.append(sample_groups(model, TOKENIZER, PROMPTS, 3, 10))
    assert same(rollouts[0], rollouts[1]) and not same(rollouts[0], rollouts[2])


def test_the_defaults(model, config):
    config("eos_token_id", list(range(1, V, 5)))
    assert same(sample_groups(model, TOKENIZER, PROMPTS, generator=seeded()),
                sample_groups(model, TOKENIZER, PROMPTS, 8, 256, 1.0, seeded()))


# ----- the work done ----------------------------------------------------------------------------------------


def test_nothing_is_run_twice_or_for_nothing(model, config, runs):
    """A prompt runs once, then each row a token at a time until its last, which is drawn but not run."""
    config("eos_token_id", [END, 7, 40, 41, 42])
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 5, 40, 1.5, seeded())
    lengths = [len(answer) for answer in responses_of(rollout)]
    assert len(set(lengths)) > 5
    assert runs[0] == (len(PROMPTS), max(len(ids_of(prompt)) for prompt in PROMPTS))
    assert runs[1:] == [(sum(length > t for length in lengths), 1) for t in range(1, max(lengths))]
    assert sum(rows for rows, _ in runs[1:]) == sum(length - 1 for length in lengths)


def test_one_token_needs_no_second_run(model, runs):
    sample_groups(model, TOKENIZER, PROMPTS, 5, 1, 1.0, seeded())
    assert len(runs) == 1


@pytest.mark.parametrize("check_every, bucket, temperature", [(16, 512, 1.2), (1, 8, 1.2), (3, 4, 0)])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2", "granite", "cohere"])
def test_the_steps_that_a_gpu_replays(architecture, monkeypatch, check_every, bucket, temperature):
    """`decode_graphs` without its graphs: the rows of the plain loop, whenever it looks and however it grows."""
    model, rows = small_model(architecture).double(), []
    model.generation_config.eos_token_id = [END, 7, 40, 41, 42, 43]
    plain = sample_groups(model, TOKENIZER, PROMPTS, 6, 30, temperature, seeded())
    assert len(set(map(len, responses_of(plain)))) > (3 if temperature else 1)

    monkeypatch.setattr(sample, "decode_plain",
                        lambda *args: decode_graphs(*args, check_every=check_every, bucket=bucket))
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    again = sample_groups(model, TOKENIZER, PROMPTS, 6, 30, temperature, seeded())
    torch.testing.assert_close(again.logprobs, plain.logprobs, rtol=0, atol=1e-6)
    again.logprobs = plain.logprobs
    assert same(again, plain)
    assert model.config._attn_implementation == "sdpa"
    assert rows[:2] == [4, 24] and (not temperature or rows[-1] <= 12)  # half of them gone: the rest closes ranks


@pytest.mark.parametrize("architecture, static", [("qwen2", True), ("llama", True), ("gpt2", True),
                                                  ("mistral", False), ("gemma2", False)])
def test_a_window_is_left_to_the_plain_loop(architecture, static):
    model = small_model(architecture)
    cache, *_ = prefill(model, [[5, 6, 7]], 2)
    assert can_decode_static(model, cache) == static


# ----- one draw ---------------------------------------------------------------------------------------------

def fast(logits, temperature=1.0, generator=None):
    return draw_fast(logits, temperature, torch.rand(len(logits), dtype=torch.float64, generator=generator))


DRAWS = [draw, fast]
TAIL = -2.2 * torch.arange(1, 1001).double().log()[torch.randperm(1000, generator=seeded())]  # Zipf


@pytest.mark.parametrize("draw, draws", [(draw, 100_000), (fast, 1_000_000)])
def test_a_draw_has_the_softmax_frequencies(draw, draws):
    """A thousand words, most of them rare."""
    generator, counts = seeded(), torch.zeros(1000, dtype=torch.long)
    logits = TAIL.float().expand(20_000, 1000)
    for _ in range(draws // 20_000):
        counts += draw(logits, 0.8, generator)[0].bincount(minlength=1000)
    expected = (TAIL / 0.8).softmax(dim=0) * draws
    assert counts.sum() == draws and abs(surprise(counts, expected)) < 5
    rare = expected < 5  # so rare that `surprise` takes them together
    tail = float(expected[rare].sum())
    assert rare.sum() > 800 and abs(int(counts[rare].sum()) - tail) < 5 * tail**0.5
    assert (counts[rare] > 0).sum() > 0.8 * (1 - (-expected[rare]).exp()).sum()  # all over the tail


@pytest.mark.parametrize("words", [7, 128, 1000, 151_936])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_u_is_a_place_in_the_running_sum(words, temperature):
    """Also among words of 3e-8 and less, behind one that has nearly all: float32 cannot tell such sums apart."""
    logits = torch.randn(words, generator=seeded())
    logits[words // 2] = 17.0
    p = (logits.double() / temperature).softmax(dim=0)
    above = p.cumsum(dim=0)
    head = float(above[words // 2])
    u = torch.linspace(0, 1, 201, dtype=torch.double)[:-1] + 1e-3
    u = torch.cat((u, head + (1 - head) * u, torch.tensor([0.0, 1 - 2**-53])))
    tokens, logprobs = draw_fast(logits.expand(len(u), words), temperature, u)
    near = 1e-5 * (1 - head)
    assert (above[tokens] - p[tokens] - near <= u).all() and (u <= above[tokens] + near).all()
    assert (tokens[200:400] > words // 2).all() and len(tokens.unique()) > min(words // 3, 100)
    torch.testing.assert_close(logprobs.double(), p[tokens].log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("words", [9, 128, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_a_draw_by_rows(draw, words, temperature):
    """Every row has a distribution of its own."""
    logits = torch.randn(6, words, generator=seeded()) * 2
    tokens, logprobs = draw(logits.repeat_interleave(3000, dim=0), temperature, seeded(1))
    for row, drawn in zip((logits.double() / temperature).softmax(dim=1), tokens.view(6, 3000)):
        assert abs(surprise(drawn.bincount(minlength=words), row * 3000)) < 5
    assert tokens.shape == logprobs.shape == (18_000,) and tokens.dtype == torch.long


@pytest.mark.parametrize("draw", DRAWS)
def test_a_greedy_draw(draw):
    logits = torch.randn(50, 300, generator=seeded())
    tokens, logprobs = draw(logits, temperature=0, generator=seeded())
    assert tokens.tolist() == [max(range(300), key=row.__getitem__) for row in logits.tolist()]
    torch.testing.assert_close(logprobs.double(), logits.double().log_softmax(dim=1).max(dim=1)[0])


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logprob_of_a_draw(draw, temperature, dtype):
    logits = (100 + 4 * torch.randn(500, 300, generator=seeded())).to(dtype)
    tokens, logprobs = draw(logits, temperature, seeded())
    expected = (logits.double() / temperature).log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("words", [50, 300])
def test_what_has_no_probability_is_never_drawn(draw, words):
    logits = torch.zeros(50_000, words)
    logits[:, ::2] = logits[:, :5] = logits[:, -20:] = -torch.inf  # here and there, in front and behind
    tokens, logprobs = draw(logits, 1.0, seeded())
    assert set(tokens.tolist()) == set(range(5, words - 20, 2))
    assert logprobs.tolist() == pytest.approx([-math.log((words - 24) // 2)] * 50_000, abs=1e-5)


@pytest.mark.parametrize("words, first, last", [(50, 5, 30), (500, 5, 490), (500, 140, 370)])
def test_the_ends_of_the_running_sum(words, first, last):
    """The smallest and the largest u meet words that have a probability."""
    logits = torch.full((2, words), -torch.inf)
    logits[:, first:last + 1] = torch.randn(last + 1 - first, generator=seeded())
    tokens, _ = draw_fast(logits, 1.0, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [first, last]


def test_the_numbers_behind_the_draws():
    """So fine that no two of 200,000 are the same; a prompt's come from its own generator."""
    numbers = uniform_numbers(seeded(), 4, 50, 1000, torch.device("cpu"))
    assert numbers.shape == (200, 1000) and len(numbers.unique()) == 200_000
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs(surprise((numbers.flatten() * 1000).long().bincount(), torch.full((1000,), 200.0))) < 5
    own = uniform_numbers([seeded(3), seeded(4)], 2, 50, 10, torch.device("cpu"))
    assert torch.equal(own[50:], uniform_numbers(seeded(4), 1, 50, 10, torch.device("cpu")))


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_leaves_the_logits(draw):
    for temperature in (1.0, 0.7, 0):
        logits = torch.randn(20, 300, generator=seeded())
        before = logits.clone()
        draw(logits, temperature, seeded())
        assert torch.equal(logits, before)


# ----- the tiny policy and the script -----------------------------------------------------------------------


def test_tiny(tiny):
    model, tokenizer = tiny
    chats = [[{"role": "user", "content": "How many ?"}], [{"role": "user", "content": "How many ? " * 3}]]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    rollout = sample_groups(model, tokenizer, prompts, 4, 16, 1.0, seeded())
    for n, row in enumerate(rollout.input_ids):
        ids = tokenizer(prompts[n // 4], add_special_tokens=False).input_ids
        assert row[:len(ids)].tolist() == ids
    expected = token_logprobs(model, rollout.input_ids, rollout.labels).detach()
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-4)


def run_script(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    assert not stop.value.code
    return capsys.readouterr().out


def test_script_draws_a_group(monkeypatch, capsys, tiny):
    model, tokenizer = tiny
    printed = run_script(monkeypatch, capsys, "--group-size=3", "--max-new-tokens=9", "--seed=4", "--temperature=3",
                         "How many ?")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "How many ?"}], tokenize=False,
                                           add_generation_prompt=True)
    rollout = sample_groups(model, tokenizer, [prompt], 3, 9, 3.0, seeded(4))
    head, *answers = printed.split("\n\n")
    assert head == prompt.rstrip("\n") and len(answers) == 3
    for n, answer in enumerate(answers):
        facts, _, text = answer.rstrip("\n").partition("\n")
        length, total = len(responses_of(rollout)[n]), float(rollout.logprobs[n].sum())
        assert facts.startswith(f"[{n}] {length} tokens, log-prob {total:.2f}")
        assert ("cut" in facts) == (not rollout.finished[n])
        assert text == rollout.responses[n]


def test_script_greedy(monkeypatch, capsys):
    printed = run_script(monkeypatch, capsys, "--group-size=2", "--max-new-tokens=9", "--temperature=0")
    first, second = printed.split("\n\n")[1:]
    assert first.split()[1:] == second.split()[1:]
