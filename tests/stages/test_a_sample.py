"""[A] sample.py: G answers to every prompt, drawn token by token from the policy itself.

It promises that a draw is softmax(logits / temperature) at a random number; that the fast loops
draw what `plain_answer` draws; that the ids and log-probs of a Rollout are those that were drawn,
and nothing else is labelled; and that an answer depends on its own random numbers alone.
"""
import copy
import json
import math
import shutil
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from chat_families import family
from checks import is_same, same, seeded, value_error
from files import TINY
from models import make_tokenizer, small_model
from steps import raises
import sample
from logprob import token_logprobs
from sample import (IGNORE, Rollout, draw, joined, plain_answer, sample_around,
                    sample_conversations, sample_groups, uniform_numbers)


class ThreeWords(torch.nn.Module):
    """Of three words it says 0, 1, 2 with chances 0.2, 0.5, 0.3, whatever was said before."""
    device = "cpu"

    def forward(self, ids):
        logits = torch.tensor([0.2, 0.5, 0.3]).log()
        return SimpleNamespace(logits=logits.expand(*ids.shape, 3))


def test_by_hand():
    """The running sums are 0.2, 0.7, 1.0: the first that exceeds the random number is drawn."""
    u = torch.tensor([0.1, 0.2, 0.69, 0.71, 0.99], dtype=torch.float64)
    ids, logprobs = plain_answer(ThreeWords(), [0, 1], u, 1.0, ends=[])
    assert ids == [0, 1, 1, 2, 2]
    assert logprobs == pytest.approx([-1.60944, -0.69315, -0.69315, -1.20397, -1.20397], abs=1e-5)
    ids, _ = plain_answer(ThreeWords(), [0, 1], u, 1.0, ends=[1])     # it ends with its end token
    assert ids == [0, 1]
    # At temperature 0.5 the chances are 0.04, 0.25, 0.09 over 0.38; the sums 0.105, 0.763, 1
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(5, 3)
    tokens, logprobs = draw(logits, 0.5, u)
    assert tokens.tolist() == [0, 1, 1, 1, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.10526, *3 * [0.65789], 0.23684], abs=1e-5)


# --------------------------------------------------------------------------------------------------
# A reader may stop here. What follows: the loops, the rows, end tokens, variants, prompts, folders.

PAD, END = 0, 1
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
    return lambda name, value: monkeypatch.setattr(model.generation_config, name, value)


@pytest.fixture
def runs(model):
    """The (rows, tokens) of every run through the model."""
    found = []
    with model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args: found.append(tuple(args[0].shape))):
        yield found


FAMILY = {
    "qwen2": {}, "qwen3": {}, "mistral": dict(sliding_window=None),
    "llama": dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        rope_theta=10000.0, original_max_position_embeddings=16)),
    "smollm3": dict(no_rope_layers=[1, 0])}


def assert_logprobs(model, rollout, temperature=1.0, atol=1e-4):
    expected = token_logprobs(model, rollout.input_ids, rollout.labels, temperature)[0].detach()
    torch.testing.assert_close(rollout.sampler_logprobs, expected, rtol=0, atol=atol)


# --- The definition, and log-probs; test_families.py decodes greedily -----------------------------
@pytest.mark.parametrize("name, fast, temperature, T", [
    ("qwen2", False, 1.0, 1), ("qwen2", False, 0.7, 16), ("qwen2", True, 1.0, 1),
    *((name, True, temperature, 16) for name, temperature in zip(FAMILY, 3 * [0.7, 1.8]))])
def test_the_loop_draws_what_the_definition_draws(name, fast, temperature, T):
    """The same random numbers give the same ids; in float64, where rounding decides no tie."""
    model = small_model(name, fast=fast, **FAMILY[name]).double()
    u = torch.rand(4 * 3, T, dtype=torch.float64, generator=seeded(2))
    prompts = [ids_of(prompt) for prompt in PROMPTS]
    found = sample.write_answers(model, prompts, u, temperature, ENDS)
    for n, (ids, logprobs) in enumerate(found):
        expected, theirs = plain_answer(model, prompts[n // 3], u[n], temperature, ENDS)
        assert ids == expected and logprobs == pytest.approx(theirs, abs=1e-5)
    assert len(found) == 12
    assert not (fast and model.fast.decoder)                 # no graphs to keep on a CPU


@pytest.mark.parametrize("T", [1, 6])
def test_every_token_is_drawn_from_float32_logits(T):
    """Also the first. In bfloat16 a log-prob would be off by 0.06 and more."""
    model = small_model("llama").bfloat16()
    model.generation_config.eos_token_id = END
    model.lm_head.weight.data.mul_(8)                    # logits of 16 and more
    precisions = set()                                   # of the rotation: angles need all digits
    model.model.rotary_emb.register_forward_pre_hook(
        lambda *_: precisions.add(torch.get_float32_matmul_precision()))
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 8, T, 4.0, seeded())
    assert precisions == {"highest"}
    assert "forward" not in vars(model.lm_head)          # its own again
    first = (rollout.labels != IGNORE).int().argmax(dim=1)
    rows = torch.arange(len(first))
    prompts = [ids_of(prompt) for prompt in PROMPTS]
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda _, args: hidden.extend(args))
    with torch.no_grad():
        sample.run_prompts(model, prompts)
    logits = hidden[0][:, -1].double() @ model.lm_head.weight.double().T
    expected = (logits / 4.0).log_softmax(dim=-1).repeat_interleave(8, dim=0)
    expected = expected.gather(1, rollout.input_ids[rows, first][:, None])[:, 0]
    error = (rollout.sampler_logprobs[rows, first - 1] - expected).abs().max()
    assert error < 1e-5 and logits.abs().max() > 16


# --- The rows -------------------------------------------------------------------------------------
@pytest.mark.parametrize("ends, limit", [(ENDS, 1), ([END], 2), (ENDS, 12)])
def test_the_layout(model, config, ends, limit):
    config("eos_token_id", ends)
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 50, limit, 1.5, seeded())
    assert rollout.input_ids.dtype == rollout.labels.dtype == torch.long
    logprobs = rollout.sampler_logprobs
    assert logprobs.dtype == torch.float32 and not logprobs.requires_grad
    longest = 0
    for n, row in enumerate(rollout.input_ids.tolist()):
        prompt = ids_of(PROMPTS[n // 50])
        answer = row[len(prompt):len(prompt) + limit]
        length = next((t + 1 for t, token in enumerate(answer) if token in ends), limit)
        answer, rest = answer[:length], row[len(prompt) + length:]
        assert len(answer) == length
        assert row == prompt + answer + [PAD] * len(rest)    # no <start>, as tokenizers would add
        assert rollout.labels[n].tolist() == [IGNORE] * len(prompt) + answer + [IGNORE] * len(rest)
        assert rollout.answer_ids[n] == answer
        spoken = [0] * (len(prompt) - 1) + [-1] * length + [0] * len(rest)
        assert rollout.sampler_logprobs[n].sign().tolist() == spoken
        assert bool(rollout.finished[n]) == (answer[-1] in ends)
        text = answer[:-1] if answer[-1] in ends else answer     # the end token alone is left out
        assert rollout.responses[n].split() == TOKENIZER.convert_ids_to_tokens(text)
        longest = max(longest, len(prompt) + length)
    assert rollout.input_ids.shape == (200, longest) and len(rollout.responses) == 200
    same(rollout.mask, rollout.labels[:, 1:] != IGNORE)
    assert not any(getattr(rollout, f.name) for f in fields(rollout)[5:])  # for later stages
    if limit == 12:                                          # all of these occurred
        assert rollout.finished.any() and not rollout.finished.all()
        drawn = set(rollout.labels.flatten().tolist())
        assert {PAD, *ends} < drawn
        # What was written is scored: a control token inside a number does not vanish
        said = " ".join(rollout.responses)
        assert "<pad>" in said and "<start>" in said and "<end>" not in said


def filled(N, S, seed):
    """A Rollout with a value of its own in every place of every field."""
    def numbers(*shape):
        return torch.rand(shape, generator=seeded(seed)) + seed
    ids = (numbers(N, S) * 100).long()
    per_token = numbers(N, S - 1)
    return Rollout(
        ids, ids + 50, per_token, [f"{seed}, {n}" for n in range(N)], numbers(N) > seed + 0.5,
        turns=[["yes", str(n)] for n in range(N)], rewards=numbers(N) + 1,
        rule_rewards=numbers(N) + 2, reward_parts={"a": numbers(N) + 3, "b": numbers(N) + 4},
        step_rewards=[[(n, 0.5)] for n in range(N)], judged=[{"row": n} for n in range(N)],
        advantages=per_token + 5, old_logprobs=per_token + 6,
        ref_logprobs=per_token + 7)


@pytest.mark.parametrize("widths", [(7, 4), (4, 7), (5, 5)])
def test_join_and_take(widths):
    """Each row ends in padding where the other rollout is longer: -100 in labels, else 0."""
    a, b = filled(2, widths[0], 1), filled(3, widths[1], 2)
    a.judged = b.judged = None
    both = joined(a, b)
    same(sample.take(both, [0, 1], widths[0]), a)
    same(sample.take(both, [2, 3, 4], widths[1]), b)
    S, short = min(widths), slice(2) if widths[0] < widths[1] else slice(2, 5)
    assert (both.labels[short, S:] == IGNORE).all() and not both.input_ids[short, S:].any()
    for per_token in (both.sampler_logprobs, both.ref_logprobs):
        assert not per_token[short, S - 1:].any()
    for name, value in vars(sample.take(b, [2, 0, 2])).items():      # in any order, more than once
        if not isinstance(value, dict) and value is not None:
            same([*value], [vars(b)[name][n] for n in (2, 0, 2)], name)


@pytest.mark.parametrize("generation, special, ends", [
    (END, {"eos_token": "<end>"}, {END}), ([11, 9], {"eos_token": "<end>"}, {9, 11, END}),
    (12, {"pad_token": "<pad>"}, {12}), (None, {"eos_token": "w13"}, {13})])
def test_end_tokens(model, config, generation, special, ends):
    """Without any a model cannot be sampled from."""
    config("eos_token_id", generation)
    assert set(sample.end_token_ids(model, make_tokenizer(**special))) == ends
    config("eos_token_id", None)
    with value_error("end token"):
        sample_groups(model, make_tokenizer(pad_token="<pad>"), PROMPTS, 2, 4)


@pytest.mark.parametrize("generation, configured, eos", [
    ("<|endoftext|>", None, "<|im_end|>"), (None, "<|endoftext|>", "<|im_end|>"),
    ("<|endoftext|>",) * 3, (None, "<|endoftext|>", "<|endoftext|>")])
def test_a_policy_that_ends_its_turns_is_not_cut(tmp_path, generation, configured, eos):
    """Whatever its folder calls an end: its answer is <|im_end|> alone."""
    tokenizer = family("qwen 3")
    model = small_model("qwen2", vocab_size=len(tokenizer), tie_word_embeddings=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_("norm" in name or "embed" in name)
        model.lm_head.weight[end] = 1.0
    tokenizer.eos_token = eos
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids(configured or "<|im_end|>")
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(generation or eos)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    if not generation:
        (tmp_path / "generation_config.json").unlink()
    model, tokenizer = sample.open_policy(tmp_path)
    prompt = sample.chat_prompt(tokenizer, {"question": "2 + 3?"}, "")
    rollout = sample_groups(model, tokenizer, [prompt], 2, 9, 1.0, seeded())
    assert rollout.finished.all() and rollout.responses == ["", ""]
    assert rollout.mask.sum() == 2


def test_the_end_of_a_turn_that_goes_on_is_no_end(model, config):
    """gpt-oss ends a last answer with <|return|>, earlier ones with <|end|>."""
    config("eos_token_id", None)
    tokenizer = make_tokenizer(chat_template=(
        "{% for m in messages %} <start> {{ m.content }} "
        "{{ '<end>' if not loop.last else '<pad>' }}{% endfor %}"),
        pad_token="<pad>", additional_special_tokens=["<end>"])
    assert sample.end_token_ids(model, tokenizer) == [0]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    tokenizer.eos_token = "<end>"
    assert sample.end_token_ids(model, tokenizer) == [1]


def test_the_generator_decides(model):
    """Without one the global seed does."""
    draw_three = partial(sample_groups, model, TOKENIZER, PROMPTS, 3, 10, 1.0)
    state = torch.get_rng_state()
    first = draw_three(seeded(5))
    same(torch.get_rng_state(), state)
    torch.manual_seed(1)
    generator = seeded(5)
    assert is_same(draw_three(generator), first) and not is_same(draw_three(seeded(6)), first)
    assert not is_same(draw_three(generator), first)  # it has moved on
    a, b, c = (torch.manual_seed(seed) and draw_three() for seed in (5, 5, 6))
    assert is_same(a, b) and not is_same(a, c)


def test_a_generator_a_prompt(model, config):
    """Then an answer does not depend on the other prompts, on their number, lengths or answers."""
    config("eos_token_id", ENDS)
    exact = copy.deepcopy(model).double()
    answers = sample_groups(exact, TOKENIZER, PROMPTS, 3, 10, 1.0,
                            [seeded(seed) for seed in (5, 6, 7, 8)]).answer_ids
    assert len(set(map(len, answers))) > 3
    for which in ([0], [2], [3, 1]):
        apart = sample_groups(exact, TOKENIZER, [PROMPTS[i] for i in which], 3, 10, 1.0,
                              [seeded(5 + i) for i in which])
        assert apart.answer_ids == [answers[3 * i + k] for i in which for k in range(3)]
    twice = sample_groups(exact, TOKENIZER, PROMPTS[:1] * 2, 3, 10, 1.0, [seeded(5), seeded(6)])
    assert twice.answer_ids[:3] != twice.answer_ids[3:]


# --- The fast forms against the plain loop --------------------------------------------------------
def test_nothing_is_run_twice_or_for_nothing(model, config, runs):
    """A prompt runs once, then each row token by token; its last is drawn but not run."""
    config("eos_token_id", [END, 7, 40, 41, 42])
    rollout = sample_groups(model, TOKENIZER, PROMPTS, 5, 40, 1.5, seeded())
    lengths = list(map(len, rollout.answer_ids))
    assert len(set(lengths)) > 5
    assert runs[0] == (len(PROMPTS), max(len(ids_of(prompt)) for prompt in PROMPTS))
    assert runs[1:] == [(sum(length > t for length in lengths), 1) for t in range(1, max(lengths))]


def test_a_step_that_fails_leaves_the_model_as_it_was(monkeypatch):
    """And --no-fast, which has no products of our own, goes on to the same answers."""
    model, slow = (small_model("llama", fast=fast).bfloat16().float() for fast in (True, False))
    expected = sample_groups(model, TOKENIZER, PROMPTS, 3, 8, 1.0, seeded())
    fail = raises(TypeError("no such argument"))
    monkeypatch.setattr(sample, "packed", lambda *given: fail)
    for each in (model.bfloat16(), model.float()):
        with pytest.raises(TypeError):
            sample_groups(each, TOKENIZER, PROMPTS, 3, 8, 1.0, seeded())
    assert "forward" not in vars(model.lm_head)
    monkeypatch.setattr(sample, "added_mask", fail)
    found = sample_groups(slow, TOKENIZER, PROMPTS, 3, 8, 1.0, seeded())
    assert found.answer_ids == expected.answer_ids


# --- Variants -------------------------------------------------------------------------------------
@pytest.mark.parametrize("best, cut", [(1, 0.5), (3, 0.3), (3, 0.9)])
def test_sampling_around_the_best(model, config, best, cut):
    config("eos_token_id", [END, 7, 40])
    asked = []

    def score(responses):
        asked.append(responses)
        return torch.tensor([float(len(text)) for text in responses])  # the longest is the best
    around = sample_around(model, TOKENIZER, PROMPTS, 6, 20, 1.0, seeded(), score=score,
                           best=best, cut=cut)
    [texts] = asked
    rows, answers = around.responses, around.answer_ids
    assert len(rows) == 24 and len(texts) == 4 * 3
    for g in range(4):
        first, fine = range(6 * g, 6 * g + 3), range(6 * g + 3, 6 * g + 6)
        assert [rows[n] for n in first] == texts[3 * g:3 * g + 3]
        ranked = sorted(first, key=lambda n: -len(rows[n]))[:best]
        for n in fine:
            stem = answers[ranked[(n - fine[0]) // (3 // best)]]
            kept = int(len(stem) * cut)
            assert answers[n][:kept] == stem[:kept]
    assert_logprobs(model, around)  # of every policy token
    for n, answer in enumerate(answers):
        ended = [token in (END, 7, 40) for token in answer]
        assert len(answer) <= 20 and not any(ended[:-1]) and bool(around.finished[n]) == ended[-1]


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
    turns = turns_of(rollout)
    for n in range(8):
        said = (rollout.labels[n] != IGNORE).int()
        ids = tokenizer(prompts[n // 4], add_special_tokens=False).input_ids
        assert rollout.input_ids[n, : said.argmax()].tolist() == ids
        text = tokenizer.decode(rollout.input_ids[n][said == 0])  # what the policy did not say
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


def test_a_conversation_of_one_turn_is_a_group(model, tiny):
    prompts = [sample.chat_prompt(tiny[1], {"question": text}, "") for text in ASKED]
    group = sample_groups(*tiny, prompts, 3, 12, 1.0, [seeded(1), seeded(2)])
    group.turns = [[text] for text in group.responses]
    for turns, reply in ((1, lambda *_: "more"), (5, lambda *_: None)):
        talk = sample_conversations(*tiny, prompts, 3, 12, 1.0, [seeded(1), seeded(2)],
                                    reply=reply, max_turns=turns)
        same(talk, group)
    with value_error("nothing between"):                 # two turns, by this template
        sample_conversations(model, with_template("{{ messages[0].content }} w3"), PROMPTS, 5, 4,
                             reply=lambda *_: "w5")


# --- One draw -------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, temperature", [
    (7, 3.0), (128, 0.7), (1000, 3.0), (151_936, 0.7)])
def test_every_word_has_its_part_of_the_running_sum(words, temperature):
    """Also one of 1e-12, which a float32 sum would lose: halving finds where its part begins."""
    logits = torch.randn(words, generator=seeded())
    logits[words // 2] = 17.0
    p = (logits / temperature).softmax(dim=0).double()
    asked = torch.randperm(words, generator=seeded())[:300 if words < 10**5 else 20]
    first = torch.stack((asked, asked + 1)).flatten()    # and where the next one's does
    low = torch.zeros(len(first), dtype=torch.double)
    high = torch.ones_like(low)
    for _ in range(60):
        u = (low + high) / 2
        reached = draw(logits.expand(len(u), words), temperature, u)[0] >= first
        high = torch.where(reached, u, high)
        low = torch.where(reached, low, u)
    start, end = high.chunk(2)
    expected = p[asked] / p.sum()
    torch.testing.assert_close(end - start, expected, rtol=1e-5, atol=1e-15)
    torch.testing.assert_close(end, p.cumsum(dim=0)[asked], rtol=0, atol=1e-6)
    assert temperature > 1 or expected.min() < 1e-10


@pytest.mark.parametrize("temperature, dtype", [
    (1.0, torch.bfloat16), (0.7, torch.float32), (2.0, torch.bfloat16), (0, torch.float32)])
def test_the_logprob_of_a_draw(temperature, dtype):
    """At temperature 0, where the largest logit is taken, that of temperature 1."""
    logits = (100 + 4 * torch.randn(500, 300, generator=seeded())).to(dtype)
    before = logits.clone()
    u = torch.rand(500, dtype=torch.float64, generator=seeded())
    tokens, logprobs = draw(logits, temperature, u)
    expected = (logits.double() / (temperature or 1)).log_softmax(dim=1)
    assert logprobs.dtype == torch.float32 and torch.equal(logits, before)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0],
                               rtol=1e-5, atol=1e-4)
    if temperature == 0:
        assert tokens.tolist() == [max(range(300), key=row.__getitem__) for row in logits.tolist()]


@pytest.mark.parametrize("words", [50, 300])
def test_what_has_no_probability_is_never_drawn(words):
    logits = torch.zeros(10_000, words)
    logits[:, ::2] = logits[:, :5] = logits[:, -20:] = -torch.inf  # in front, behind, between
    u = torch.rand(10_000, dtype=torch.float64, generator=seeded())
    u[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)   # the smallest, the largest
    tokens, logprobs = draw(logits, 1.0, u)
    assert tokens[:2].tolist() == [5, words - 21]
    assert set(tokens.tolist()) == set(range(5, words - 20, 2))
    assert logprobs.tolist() == pytest.approx([-math.log((words - 24) // 2)] * 10_000, abs=1e-5)


def test_the_numbers_behind_the_draws():
    """So fine that no two of 200,000 are the same; a prompt's come from its own generator."""
    numbers = uniform_numbers(seeded(), 4, 50, 1000, torch.device("cpu"))
    assert numbers.shape == (200, 1000) and len(numbers.unique()) == 200_000
    assert 0 <= numbers.min() and numbers.max() < 1
    own = uniform_numbers([seeded(3), seeded(4)], 2, 50, 10, torch.device("cpu"))
    same(own[50:], uniform_numbers(seeded(4), 1, 50, 10, torch.device("cpu")))


# --- The chat template ----------------------------------------------------------------------------
def with_template(template):
    return make_tokenizer(pad_token="<pad>", eos_token="<end>", chat_template=template)


def test_a_prompt_is_the_template_around_the_problem(tiny):
    question = [{"role": "user", "content": "How many ?"}]
    expected = tiny[1].apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert sample.chat_prompt(tiny[1], {"question": "How many ?"}, "") == expected
    assert sample.chat_prompt(tiny[1], {"messages": question}, "") == expected
    each = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    assert sample.chat_prompt(with_template(each), {"question": "w3"}, "w4") == "[s:w4][u:w3]"
    own = [{"role": "system", "content": "w5"}, *question]           # a row's own wins
    assert sample.chat_prompt(with_template(each), {"messages": own}, "w4")[:6] == "[s:w5]"
    # A template that refuses a system message gets it in the first turn
    fussy = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + each
    prompt = sample.chat_prompt(with_template(fussy), {"messages": question * 2}, "w4")
    assert prompt == "[u:w4\n\nHow many ?][u:How many ?]"


# --- The script -----------------------------------------------------------------------------------
def test_script_takes_a_runs_settings(run_here, tmp_path):
    shutil.copytree(TINY, tmp_path / "final")
    (tmp_path / "final" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}")
    config = {"max_new_tokens": 3, "temperature": 0, "lr": 1, "system_prompt": "Anna", "data": "x",
              "template_args": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = "--max-new-tokens=2", "--temperature=3", "--system-prompt=Eve"
    for flags, limit, said in ((), 3, "Anna"), (other, 2, "Eve"):
        out = run_here("sample.py", f"--model={tmp_path}", "--group-size=20", *flags, "Bob ?")
        prompt, *answers = out.strip().split("\n\n")
        assert f"system : {said} user : Bob ?" in prompt
        assert (len({answer.split(maxsplit=1)[1] for answer in answers}) > 1) == (limit == 2)
        assert all(int(answer.split()[1]) <= limit for answer in answers)


def test_texts_are_those_that_were_written(tiny):
    """Whatever the tokenizer would tidy up: Llama 3's flag takes spaces before . , ! and 's out."""
    tokenizer = copy.deepcopy(tiny[1])
    ids = sample.ids_of(tokenizer, "Anna has 9 books , loses 4 . How many ?")
    written = tokenizer.decode(ids)
    tokenizer.clean_up_tokenization_spaces = True
    assert " , " in written and tokenizer.decode(ids) != written
    assert sample.texts_of(tokenizer, [(ids, None)], []) == [written]
    assert "".join(sample.words_of(tokenizer, ids)) == written


def test_open_policy(capsys, tmp_path):
    """Quietly, and as it is in the folder."""
    model, tokenizer = sample.open_policy(str(TINY), "cpu", torch.bfloat16)
    assert not any(capsys.readouterr())
    assert not huggingface_hub.utils.are_progress_bars_disabled()
    assert model.dtype == torch.bfloat16 and tokenizer.chat_template
    assert not any(part.training for part in model.modules())
    folder = shutil.copytree(TINY, tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})  # no prompt holds it
    tokenizer.save_pretrained(folder)
    model, _ = sample.open_policy(folder)
    same(dict(model.named_parameters()), load_file(TINY / "model.safetensors"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a card")
def test_a_device_that_is_not_there_is_one_line(run_here):
    assert run_here("sample.py", "--device=cuda", status=2).startswith("sample.py: ")
