"""train.py beyond plain GRPO: every variant arrives, every warning comes, every choice is shown."""
import copy
import dataclasses
import json
import math
import re
import shlex
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import (
    TINY,
    curve,
    ends_badly,
    lines_of,
    metrics_of,
    refused,
    small_model,
    trains,
    weights_of,
)
from safetensors.torch import load_file
from test_train import (
    RATE,
    Diary,
    gradient,
    logprobs_on_full_logits,
    loop,
    parts,
    seeded,
    settings,
    still,
    with_settings,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import train
from advantage import entropy_advantages, group_advantages, leave_one_out_advantages
from logprob import IGNORE
from loss import grpo_loss, kl_estimate, next_kl_coef
from reward import length_rescaled, load_problems, overlong_penalty, score_responses
from sample import Rollout, sample_groups

SMALL = ("--steps=4", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=4", "--eval-every=2", "--save-every=1", "--updates-per-rollout=1")

# --------------------------------------------------------------------------------------------------
# [C] [E] [F]: the updates of one step against the stage functions, called by hand on full logits


def rollout_of(p, temperature, max_new_tokens=12):
    """Two groups with right, wrong and cut answers, and a sampler that is off by some tenths."""
    rollout = sample_groups(p.policy, p.tokenizer, p.prompts, 4, max_new_tokens, temperature,
                            seeded(3))
    assert 0 < int(rollout.finished.sum()) < 8
    mask = rollout.labels[:, 1:] != IGNORE
    noise = torch.randn(mask.shape, generator=seeded())
    rollout.logprobs = rollout.logprobs + mask * noise
    first, second = (f"\\boxed{{{truth}}}" for truth in p.truths)
    rollout.responses = [first, "\\boxed{-1}", "none", first, "\\boxed{-1}", second, "none", "no"]
    return rollout


RULE = torch.tensor([1.5, 0.5, 0.0, 1.5, 0.5, 1.5, 0.0, 0.0])
RIGHT = RULE == 1.5


def advantages_by_hand(flags, rollout, entropies):
    mask = rollout.labels[:, 1:] != IGNORE
    lengths = mask.sum(dim=1)
    rewards = RULE
    if "--length-rescale=0.5" in flags:
        rewards = length_rescaled(rewards, lengths, 4, 0.5)
    if "--overlong-buffer=8" in flags:
        rewards = rewards + overlong_penalty(lengths, 12, 8)
    if "--advantage=leave-one-out" in flags:
        advantages = leave_one_out_advantages(rewards, 4)
    elif "--advantage=gtpo" in flags:
        advantages = entropy_advantages(rewards, entropies, mask, 4, "token", right=RIGHT)
    elif "--advantage=grpo-s" in flags:
        advantages = entropy_advantages(rewards, entropies, mask, 4, "sequence", right=RIGHT)
    else:
        advantages = group_advantages(rewards, 4)
    return advantages.clamp(-0.6, 0.6) if "--clip-advantages=0.6" in flags else advantages


def options_by_hand(flags, rollout):
    """What grpo_loss is told: (mask, options)."""
    mask = rollout.labels[:, 1:] != IGNORE
    options = {"clip_eps": 0.2, "kl_coef": 0.5, "max_new_tokens": 12}
    if "--clip-eps-high=0.01" in flags:
        options["clip_eps_high"] = 0.01
    if "--objective=cispo" in flags:
        options["objective"] = "cispo"
    if "--kl-estimator=k3_corrected" in flags:
        options["kl_estimator"] = "k3_corrected"
    if "--aggregate=token" in flags:
        options["aggregate"] = "token"
    if "--sampler-correction=1.2" in flags:
        options |= {"sampler_logprobs": rollout.logprobs.double(), "sampler_cap": 1.2}
    if "--mask-truncated" in flags:
        mask = mask & rollout.finished[:, None]
    return mask, options


def gradients_by_hand(p, rollout, flags, temperature, order):
    """One gradient for each of the parts of `order` (slices of rows), each followed by SGD."""
    model = copy.deepcopy(p.policy)
    weights = list(model.parameters())
    with torch.no_grad():
        old, entropies = logprobs_on_full_logits(model, rollout, temperature)
        ref, _ = logprobs_on_full_logits(p.reference, rollout, temperature)
    advantages = advantages_by_hand(flags, rollout, entropies.float())
    mask, options = options_by_hand(flags, rollout)
    found = []
    for rows in order:
        logp, _ = logprobs_on_full_logits(model, rollout, temperature)
        here = dict(options)
        if "sampler_logprobs" in here:
            here["sampler_logprobs"] = here["sampler_logprobs"][rows]
        loss, _ = grpo_loss(logp[rows], old[rows], ref[rows], advantages[rows], mask[rows], **here)
        grads = torch.autograd.grad(loss, weights)
        found.append(torch.cat([g.flatten() for g in grads]))
        with torch.no_grad():
            for weight, grad in zip(weights, grads):
                weight -= RATE * grad
    return found


def gradients_of_the_program(p, rollout, monkeypatch):
    """-> (the gradient of every gradient step, what on_rollout saw, metrics)."""
    monkeypatch.setattr(train, "sample_groups", lambda *_: copy.deepcopy(rollout))
    optimizer = torch.optim.SGD(p.policy.parameters(), RATE)
    found = []
    seen = []
    optimizer.register_step_pre_hook(lambda *_: found.append(gradient(p.policy)))
    metrics = train.train_step(
        p.policy, p.reference, optimizer, p.tokenizer, p.prompts, p.truths, p.settings,
        on_rollout=lambda *given: seen.append(given))
    return found, seen[0], metrics


ALL = slice(0, 8)
VARIANTS = [
    ("--advantage=leave-one-out",), ("--advantage=gtpo",), ("--advantage=grpo-s",),
    ("--clip-advantages=0.6",), ("--advantage=gtpo", "--clip-advantages=0.6"),
    ("--objective=cispo", "--clip-eps-high=0.01"), ("--sampler-correction=1.2",),
    ("--kl-estimator=k3_corrected",), ("--mask-truncated",),
    ("--mask-truncated", "--aggregate=token"), ("--length-rescale=0.5",), ("--overlong-buffer=8",),
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
def test_a_variant_arrives(monkeypatch, flags, temperature):
    p = parts(*flags, f"--temperature={temperature}", "--micro-batch-tokens=150",
              "--max-new-tokens=12", "--kl-coef=0.5", "--max-grad-norm=1e9")
    rollout = rollout_of(p, temperature)
    expected = gradients_by_hand(p, rollout, flags, temperature, [ALL, ALL])
    plain = gradients_by_hand(p, rollout, flags[1:], temperature, [ALL, ALL])
    found, (_, rewards, advantages), metrics = gradients_of_the_program(p, rollout, monkeypatch)
    assert len(found) == 2
    for one, other in zip(found, expected):
        assert (one - other).norm() <= 3e-4 * other.norm()
    # and it would be missed
    assert (expected[1] - plain[1]).norm() > 2e-3 * expected[1].norm()
    assert metrics["truncated_fraction"] == pytest.approx(float((~rollout.finished).float().mean()))
    assert metrics["accuracy"] == pytest.approx(3 / 8)    # by the rule, whatever was added to it


def test_mini_batches_take_every_group_once_in_each_pass(monkeypatch):
    """The old log-probs of all of them are those before the first; the ratio corrects."""
    p = parts("--minibatches=2", "--updates-per-rollout=2", "--max-new-tokens=12", "--kl-coef=0.5",
              "--max-grad-norm=1e9")
    rollout = rollout_of(p, 1.0)
    order = [slice(0, 4), slice(4, 8)] * 2
    expected = gradients_by_hand(p, rollout, (), 1.0, order)
    found, _, metrics = gradients_of_the_program(p, rollout, monkeypatch)
    assert len(found) == 4
    for one, other in zip(found, expected):
        assert (one - other).norm() <= 3e-4 * other.norm()
    assert metrics["ratio_max_error"] > 0.01              # the second is off 1 at once
    norms = [float(g.norm()) for g in expected]
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-3)


def test_mini_batches_keep_every_field_of_their_rows():
    n = torch.arange(10)
    rollout = Rollout(n.view(10, 1), n.view(10, 1) + 20, n.view(10, 1) + 40.0,
                      [str(i) for i in range(10)], n % 2 == 0, n // 2,
                      old_logprobs=n.view(10, 1) + 60.0)
    s = settings("--group-size=2", "--prompts-per-step=5", "--minibatches=2")
    batches = train.mini_batches(rollout, n + 80, s)
    assert [part.group_ids.tolist() for part, _ in batches] == [
        [0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]
    for part, advantages in batches:
        rows = part.input_ids[:, 0]
        assert torch.equal(part.labels[:, 0], rows + 20)
        assert torch.equal(part.logprobs[:, 0], rows + 40.0)
        assert part.responses == [str(int(i)) for i in rows]
        assert torch.equal(part.finished, rows % 2 == 0)
        assert torch.equal(part.old_logprobs[:, 0], rows + 60.0)
        assert part.ref_logprobs is None and torch.equal(advantages, rows + 80)


def test_updates_that_are_skipped_are_counted_one_by_one(monkeypatch):
    p = parts("--minibatches=2", "--updates-per-rollout=2", "--max-new-tokens=12")
    rollout = rollout_of(p, 1.0)
    p.policy.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    found, _, metrics = gradients_of_the_program(p, rollout, monkeypatch)
    assert metrics["skipped_updates"] == 4 and found == []


# --------------------------------------------------------------------------------------------------
# --max-resample: flat groups make room for those of other problems


def draws(p, texts, length, start):
    """A rollout of one group for each list of texts; ids and lengths tell where rows are from."""
    N = sum(map(len, texts))
    labels = torch.full((N, length), IGNORE)
    ids = torch.full((N, length), start) + torch.arange(N)[:, None]
    labels[:, 4:] = ids[:, 4:]
    logprobs = torch.full((N, length - 1), -0.1 * start) * (labels[:, 1:] != IGNORE)
    return Rollout(ids, labels, logprobs, sum(texts, []), torch.full((N,), start == 5),
                   torch.arange(N) // 4)


def length_reward(prompts, rollout):
    """Has parts, as several rewards of one's own have."""
    values = torch.tensor([float(len(text)) for text in rollout.responses])
    rollout.reward_parts = {"one": values, "two": values + 1}
    return values


@pytest.fixture
def resampled(monkeypatch):
    """A step of four groups, of which 0, 2 and 3 are flat; what each round draws is given."""
    def run(rounds, *flags, reward_fn=length_reward):
        p = parts("--prompts-per-step=4", "--updates-per-rollout=1", *flags)
        flat = ["a"] * 4
        first = draws(p, [flat, ["a", "bb", "c", "d"], flat, flat], 9, 5)
        rollouts = iter([first, *(draws(p, texts, 7 + 4 * i, 20 + 20 * i)
                                  for i, texts in enumerate(rounds))])
        monkeypatch.setattr(train, "sample_groups", lambda *_: next(rollouts))
        asked = []

        def more(attempt, n):
            asked.append((attempt, n))
            names = [f"new {attempt}.{k}" for k in range(n)]
            return names, ["7"] * n, None, reward_fn

        prompts = [f"old {j}" for j in range(4)]
        seen = []
        metrics = train.train_step(
            p.policy, p.reference, p.optimizer, p.tokenizer, prompts, ["7"] * 4, p.settings,
            reward_fn=reward_fn, on_rollout=lambda *given: seen.append(given), more=more)
        return SimpleNamespace(prompts=prompts, metrics=metrics, asked=asked, rollout=seen[0][0],
                               rewards=seen[0][1], advantages=seen[0][2])
    return run


MIXED = ["xx", "yyy", "xx", "zzzz"]
FLAT = ["q"] * 4


def test_flat_groups_are_replaced_whole(resampled):
    """One of three is replaced in the first round, one in the second; then the rounds are over."""
    r = resampled([[FLAT, MIXED, FLAT], [FLAT, MIXED]], "--max-resample=2")
    assert r.asked == [(1, 3), (2, 2)]
    # what was drawn second takes the first place that is still free
    assert r.prompts == ["new 1.1", "old 1", "new 2.1", "old 3"]
    assert r.rollout.responses == [*MIXED, "a", "bb", "c", "d", *MIXED, *4 * ["a"]]
    lengths = [float(len(text)) for text in r.rollout.responses]
    assert r.rewards.tolist() == lengths
    assert torch.allclose(r.advantages, group_advantages(r.rewards, 4))
    assert r.metrics["reward_mean"] == pytest.approx(sum(lengths) / 16)
    assert r.metrics["reward/one"] == pytest.approx(sum(lengths) / 16)
    assert r.metrics["reward/two"] == pytest.approx(sum(lengths) / 16 + 1)
    assert r.metrics["resampled_groups"] == 5             # that were drawn to no use
    assert r.metrics["zero_variance_groups"] == 0.25
    # ids, labels and log-probs of each group are those of its own draw, padded to the longest
    starts = [24, 9, 44, 17]
    ends = [7, 9, 11, 9]
    for j, (start, end) in enumerate(zip(starts, ends)):
        ids = r.rollout.input_ids[4 * j:4 * j + 4]
        assert ids[:, 0].tolist() == list(range(start, start + 4))
        labels = r.rollout.labels[4 * j:4 * j + 4]
        assert (labels != IGNORE).sum(dim=1).tolist() == [end - 4] * 4
        assert torch.equal(labels[:, 4:end], ids[:, 4:end])
        drawn = -0.1 * {24: 20, 9: 5, 44: 40, 17: 5}[start]
        logprobs = r.rollout.logprobs[4 * j:4 * j + 4]
        assert torch.allclose(logprobs[:, 3:end - 1], torch.tensor(drawn))
        assert not logprobs[:, end - 1:].any()
    assert r.rollout.finished.tolist() == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert r.rollout.group_ids.tolist() == [n // 4 for n in range(16)]


def test_no_more_rounds_than_are_needed(resampled):
    r = resampled([[MIXED, MIXED, MIXED]], "--max-resample=5")
    assert r.asked == [(1, 3)] and r.metrics["resampled_groups"] == 3
    assert r.metrics["zero_variance_groups"] == 0


def test_without_the_flag_nothing_is_drawn_anew(resampled):
    r = resampled([])
    assert r.asked == [] and "resampled_groups" not in r.metrics


def test_the_rules_rewards_are_those_of_the_new_answers(resampled):
    right = ["\\boxed{7}", "\\boxed{8}", "no", "no"]
    r = resampled([[right, right, FLAT, right]], "--max-resample=1", reward_fn=None)
    # by the rule the second group was flat too
    assert r.asked == [(1, 4)]
    assert r.rewards.tolist() == 3 * [1.5, 0.5, 0, 0] + 4 * [0]
    assert r.metrics["accuracy"] == pytest.approx(3 / 16)


def test_other_problems_follow_from_seed_step_and_round():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    problems = load_problems(str(TINY / "train.jsonl"))[:12]
    s = settings("--prompts-per-step=4")

    def more(step, attempt, n=3):
        asked = []

        def reward_fn(batch, prompts, rollout):
            asked.extend(problem["question"] for problem in batch)

        prompts, truths, generators, fn = train.more_problems(
            tokenizer, problems, step, s, reward_fn, attempt, n)
        fn(prompts, None)
        by_question = {problem["question"]: problem["answer"] for problem in problems}
        assert truths == [by_question[question] for question in asked]
        assert all(question in prompt for question, prompt in zip(asked, prompts))
        return prompts, [g.initial_seed() for g in generators]

    assert more(3, 1) == more(3, 1) and len(more(3, 1)[0]) == 3
    drawn = [more(step, attempt) for step, attempt in ((3, 1), (3, 2), (4, 1))]
    assert len({tuple(prompts) for prompts, _ in drawn}) == 3
    assert len({seed for _, seeds in drawn for seed in seeds}) == 9
    assert len(set(more(3, 1)[0])) == 3


# --------------------------------------------------------------------------------------------------
# The loop: reference, best, beta, learning rate


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_kl_is_0_right_after_the_reference_was_renewed():
    run = loop("--renew-reference=2", "--updates-per-rollout=1", "--save-every=2")
    kl = [metrics["approx_kl"] for metrics in run.metrics[1:]]
    assert [value == pytest.approx(0, abs=1e-9) for value in kl] == [
        False, False, True, False, True]


def test_the_reference_becomes_a_copy():
    p = parts()
    train.renew(p.reference, p.policy)
    assert torch.equal(weights(p.reference), weights(p.policy))
    train.assert_own_frozen_tensors(p.reference, p.policy)


def test_beta_follows_the_band():
    run = loop("--kl-band", "0.0001", "0.0002", "--kl-coef=0.02", "--updates-per-rollout=1")
    lines = run.metrics[1:]
    beta = 0.02
    for metrics in lines:
        assert metrics["kl_coef"] == pytest.approx(beta)
        beta = next_kl_coef(beta, metrics["approx_kl"], 0.0001, 0.0002)
    assert run.kl_coef == pytest.approx(beta) and beta != 0.02
    # and it is the beta that the loss has
    for metrics in lines:
        penalty = metrics["loss"] - metrics["policy_loss"]
        assert penalty == pytest.approx(metrics["kl_coef"] * metrics["approx_kl"], rel=1e-3)
    assert {metrics["kl_coef"] for metrics in loop("--kl-coef=0.02").metrics[1:]} == {0.02}
    s = settings("--kl-band", "0.1", "0.2", "--kl-coef=0.5")
    assert train.next_beta(math.nan, s) == 0.5            # a step that was skipped


@pytest.mark.parametrize("schedule, rates", [
    ("linear", [0.5, 1, 0.75, 0.5, 0.25, 0]),
    ("cosine", [0.5, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0]),
    ("constant", [0.5, 1, 1, 1, 1, 1]),
])
def test_learning_rate_schedule(schedule, rates):
    s = settings("--steps=6", "--warmup-steps=2", "--lr=0.01", f"--lr-schedule={schedule}")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    found = []
    for step in range(1, 7):
        train.set_learning_rate(optimizer, step, s)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.01 * rate for rate in rates], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay(dtype):
    p = parts("--lr=0.01", "--weight-decay=0.5", dtype=dtype)
    masters = p.optimizer.param_groups[0]["params"]
    before = [master.detach().clone() for master in masters]
    for weight in p.policy.parameters():
        weight.grad = torch.zeros(weight.shape)
    p.optimizer.step()
    for master, was in zip(masters, before):
        assert torch.allclose(master, was * (1 - 0.01 * 0.5), atol=1e-7)


def stopped_after(monkeypatch, step):
    """Ctrl-C in that step."""
    def stopped(run):
        run.signal = 2 if run.step == step else 0
        return run.signal
    monkeypatch.setattr(train.Run, "stopped", stopped)


EVERYTHING = (*SMALL, "--renew-reference=3", "--kl-band", "0.0001", "0.0002", "--keep-best",
              "--max-resample=1", "--lr-schedule=cosine", "--weight-decay=0.1", "--minibatches=2",
              "--advantage=gtpo", "--steps=6", "--lr=0.002")


def checkpoint_of(folder):
    return load_file(folder / "checkpoint" / "run.safetensors")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A run with much at once, whose policy was watched at every evaluation."""
    folder = tmp_path_factory.mktemp("everything") / "run"
    watched = []
    reference = []
    with pytest.MonkeyPatch.context() as patch:
        def keep_best(model, tokenizer, settings, run, figures, plain=train.keep_best):
            watched.append((figures["eval_accuracy"], copy.deepcopy(model.state_dict())))
            plain(model, tokenizer, settings, run, figures)

        def renew(ref, policy, plain=train.renew):
            plain(ref, policy)
            reference.append(copy.deepcopy(dict(ref.named_parameters())))

        patch.setattr(train, "keep_best", keep_best)
        patch.setattr(train, "renew", renew)
        trains(*EVERYTHING, f"--output={folder}")
    return SimpleNamespace(folder=folder, watched=watched, reference=reference)


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_is_bitwise_the_same(monkeypatch, tmp_path, everything, step):
    """Beta, reference, best accuracy, resampled groups and schedule all come back."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stopped_after(patch, step)
        assert train.main([*EVERYTHING, f"--output={folder}"]) == 130
    trains(f"--output={folder}", "--resume")
    assert curve(folder) == curve(everything.folder)
    assert weights_of(folder) == weights_of(everything.folder)
    ended = checkpoint_of(folder)
    expected = checkpoint_of(everything.folder)
    assert ended.keys() == expected.keys()
    assert all(torch.equal(ended[name], value) for name, value in expected.items())
    best, expected = (load_file(place / "best" / "model.safetensors")
                      for place in (folder, everything.folder))
    assert all(torch.equal(best[name], value) for name, value in expected.items())


def test_the_checkpoint_holds_the_renewed_reference(everything):
    assert len(everything.reference) == 2                 # after steps 3 and 6
    tensors = checkpoint_of(everything.folder)
    for name, value in everything.reference[-1].items():
        assert torch.equal(tensors[f"reference/{name}"], value)


def test_without_renewal_no_reference_is_saved(tmp_path):
    trains(*SMALL, "--steps=1", f"--output={tmp_path / 'run'}")
    assert not any(name.startswith("reference/") for name in checkpoint_of(tmp_path / "run"))
    assert not (tmp_path / "run" / "best").exists()


def test_best_is_the_policy_of_the_best_evaluation(everything):
    accuracies = [accuracy for accuracy, _ in everything.watched]
    first_best = everything.watched[accuracies.index(max(accuracies))][1]
    best = AutoModelForCausalLM.from_pretrained(everything.folder / "best").state_dict()
    assert all(torch.equal(best[name], value) for name, value in first_best.items())


def test_best_is_kept_until_a_better_one_comes(monkeypatch):
    saved = []
    monkeypatch.setattr(train, "save_final", lambda *given: saved.append(given))
    s = settings("--keep-best")
    run = train.Run()
    for accuracy in (0.0, 0.5, 0.25, 0.5, math.nan, 0.75):
        train.keep_best("model", "tokenizer", s, run, {"eval_accuracy": accuracy})
    assert [given[3].best for given in saved] == [0.75] * 3 and run.best == 0.75
    assert all(given[4] == "best" for given in saved)
    train.keep_best("model", "tokenizer", settings(), train.Run(), {"eval_accuracy": 1.0})
    assert len(saved) == 3


def test_final_of_such_a_run_can_be_gone_on_from(everything):
    """Its recipe.json has the band, a list, and is read again."""
    s, recipe = train.parse([f"--model={everything.folder / 'final'}"])
    assert s.kl_band == [0.0001, 0.0002] and s.keep_best and s.advantage == "gtpo"
    assert (s.renew_reference, s.max_resample, s.minibatches) == (3, 1, 2)
    assert (s.lr_schedule, s.weight_decay) == ("cosine", 0.1)
