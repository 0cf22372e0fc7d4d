"""train.py beyond plain GRPO: every variant arrives, every warning comes, every choice is shown."""
import copy
import math
from types import SimpleNamespace
import pytest
import torch
from checks import same, seeded
from files import MINE
from models import logprobs_on_full_logits, opened
from steps import REWARDS, loop, own_rewards, parts, parts_of, settings, whole_step
import reward
import sample
import train
from advantage import (gdpo_advantages, group_advantages, grpo_s_advantages, gtpo_advantages,
                       is_flat, leave_one_out_advantages)
from logprob import IGNORE
from loss import grpo_loss, next_kl_coef
from reward import length_rescaled, overlong_penalty
from sample import Rollout, sample_groups

# --- [C] [E] [F]: the updates of a step against the stage functions on full logits ----------------
def mixed_rollout(p):
    """Right, wrong and cut answers; a sampler that is off where that is corrected."""
    rollout = sample_groups(p.policy_model, p.tokenizer, p.prompts, 4, 12, p.settings.temperature,
                            seeded(3))
    rollout.finished = torch.arange(8) % 3 > 0
    if p.settings.sampler_correction:
        noise = torch.randn(rollout.mask.shape, generator=seeded())
        rollout.sampler_logprobs += rollout.mask * noise
    first, second = (f"\\boxed{{{problem['answer']}}}" for problem in p.problems)
    rollout.responses = [first, "\\boxed{-1}", "none", first, "\\boxed{-1}", second, "none", "no"]
    return rollout


RULE = torch.tensor([1.5, 0.5, 0.0, 1.5, 0.5, 1.5, 0.0, 0.0])
LEVELS = {"--advantage=gtpo": gtpo_advantages, "--advantage=grpo-s": grpo_s_advantages}

# The settings that grpo_loss reads
READ = ("clip_eps", "clip_eps_high", "kl_coef", "kl_estimator", "ratio", "objective", "aggregate",
        "max_new_tokens")
RATE = 0.05  # of the SGD that takes the place of AdamW: a second update has ratios off 1
PLAIN = ("--max-new-tokens=12", "--kl-coef=0.5", "--max-grad-norm=1e9", "--temperature=0.7")


def advantages_by_hand(flags, rollout, entropies):
    lengths = rollout.mask.sum(dim=1)
    rewards = RULE
    if "--length-rescale=0.5" in flags:
        rewards = length_rescaled(rewards, lengths, 4, 0.5)
    if "--overlong-buffer=8" in flags:
        rewards = rewards + overlong_penalty(lengths, 12, 8)
    if flags and flags[0] in LEVELS:
        advantages = LEVELS[flags[0]](rewards, entropies, rollout.mask, 4, RULE == 1.5)
    elif "--advantage=leave-one-out" in flags:
        advantages = leave_one_out_advantages(rewards, 4)
    else:
        advantages = group_advantages(rewards, 4, scale_by_std="--no-scale-by-std" not in flags)
    return advantages.clamp(-0.6, 0.6) if "--clip-advantages=0.6" in flags else advantages


def by_hand(p, rollout, flags):
    """[D] on full logits, [E] [F] and a clipped SGD step -> one record per update."""
    s = settings(*PLAIN, *flags)
    how = {name: getattr(s, name) for name in READ}
    if s.sampler_correction:
        how["sampler_cap"] = s.sampler_correction
    model = copy.deepcopy(p.policy_model)
    with torch.no_grad():
        old, entropies = logprobs_on_full_logits(model, rollout, s.temperature)
        ref, _ = logprobs_on_full_logits(p.ref_model, rollout, s.temperature)
    advantages = advantages_by_hand(flags, rollout, entropies.float())
    mask = rollout.mask
    if "--mask-truncated" in flags:
        mask = mask & rollout.finished[:, None]
    records = []
    for rows in s.updates_per_rollout * torch.arange(8).chunk(s.minibatches):
        logp, _ = logprobs_on_full_logits(model, rollout, s.temperature)
        rows = rows[mask[rows].any(dim=1)]                # a masked row is as if it were not there
        if s.sampler_correction:
            how["sampler_logprobs"] = rollout.sampler_logprobs.double()[rows]
        loss, metrics = grpo_loss(logp[rows], old[rows], ref[rows] if s.kl_coef else None,
                                  advantages[rows], mask[rows], **how)
        grads = torch.autograd.grad(loss, [*model.parameters()])
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        grads = [g * min(1.0, s.max_grad_norm / (norm + 1e-6)) for g in grads]
        with torch.no_grad():
            for weight, grad in zip(model.parameters(), grads):
                weight -= RATE * grad
        metrics = {name: float(value) for name, value in metrics.items()} | {"grad_norm": norm}
        records.append(SimpleNamespace(gradient=torch.cat([g.flatten() for g in grads]),
                                       metrics=metrics))
    return records


def assert_same_step(p, rollout, expected):
    """The program's step on this rollout has these gradients and their mean metrics -> all."""
    p.optimizer = torch.optim.SGD(p.policy_model.parameters(), RATE)
    metrics, _, found = whole_step(p, None, sampler=lambda *_: copy.deepcopy(rollout))
    assert len(found) == len(expected)
    for one, record in zip(found, expected):
        assert (one - record.gradient).norm() <= 3e-4 * record.gradient.norm()
    for name in expected[0].metrics if expected else ():
        mean = sum(record.metrics[name] for record in expected) / len(expected)
        # A loss near 0 is a difference of terms of size 1
        assert metrics[name] == pytest.approx(mean, rel=1e-3, abs=1e-4, nan_ok=True), name
    return metrics


@pytest.mark.parametrize("flags", [
    "--temperature=0.5", "--no-scale-by-std", "--clip-eps=0.01", "--ratio=sequence",
    "--clip-eps-high=0.9 --clip-eps=0.01", "--kl-coef=0.1", "--kl-coef=0", "--kl-estimator=k1",
    "--kl-estimator=k2", "--kl-estimator=k3_corrected", "--aggregate=token", "--aggregate=constant",
    "--max-new-tokens=9 --aggregate=constant", "--updates-per-rollout=1", "--updates-per-rollout=3",
    "--max-grad-norm=0.01", "--advantage=leave-one-out", "--advantage=gtpo", "--advantage=grpo-s",
    "--clip-advantages=0.6", "--advantage=gtpo --clip-advantages=0.6", "--sampler-correction=1.2",
    "--objective=cispo --clip-eps-high=0.01", "--mask-truncated", "--overlong-buffer=8",
    "--mask-truncated --aggregate=token", "--length-rescale=0.5 --overlong-buffer=8",
    *(f"{flags} --no-fast" for flags in (
        "--clip-eps=0.01", "--aggregate=token", "--aggregate=constant"))])
def test_a_flag_that_changes_the_mathematics_arrives(flags):
    flags = flags.split()
    p = parts(*PLAIN, *flags, "--micro-batch-tokens=25")
    rollout = mixed_rollout(p)
    assert len(list(train.micro_batches(p.policy_model, rollout, p.settings))) > 2
    expected = by_hand(p, rollout, flags)
    plain = by_hand(p, rollout, flags[1:])
    if "--kl-coef=0" in flags:
        p.ref_model = None
    metrics = assert_same_step(p, rollout, expected)
    apart = [(one.gradient - other.gradient).norm() / one.gradient.norm()
             for one, other in zip(expected, plain)]
    assert len(expected) != len(plain) or max(apart) > 2e-3
    assert metrics["accuracy"] == pytest.approx(3 / 8)    # by the rule, whatever was added to it


GDPO = ("--advantage=gdpo", "--reward", "rule", f"{MINE}:some", "--reward-weights", "0.5", "2")


@pytest.mark.parametrize("flags", [GDPO, ["--advantage=batch-std"]])
def test_the_std_of_the_batch_is_that_of_all_ranks(monkeypatch, flags):
    """Beside a rank whose answers are all alike. GDPO reads each reward, where it applies."""
    def advantages():
        p = parts(*flags, "--micro-batch-tokens=64", "--minibatches=2")
        metrics, rollout, _ = whole_step(p, own_rewards(p.settings))
        assert metrics["skipped_updates"] == 0 and rollout.advantages.any()
        return rollout.advantages, rollout.reward_parts

    alone, rewards = advantages()
    if flags is GDPO:
        assert torch.stack([*rewards.values()]).isnan().any()
        same(alone, gdpo_advantages(rewards, (0.5, 2), 4).float())
    def two_ranks(function, *given):
        rollout, seconds = function(*given)
        other = sample.take(rollout, range(len(rollout.rewards)))
        other.rewards = 0 * other.rewards
        if other.reward_parts:
            other.reward_parts = {name: 0 * part for name, part in other.reward_parts.items()}
        return (rollout, seconds), (other, seconds)

    monkeypatch.setattr(train, "together", two_ranks)
    torch.testing.assert_close(advantages()[0][:len(alone)], 2**0.5 * alone)


@pytest.mark.parametrize("flag, words", [
    ("--length-rescale=0.1", "--length-rescale:"),
    ("--advantage=max-rl", "--advantage max-rl: ")])
def test_rewards_below_zero_end_a_run_to_which_they_mean_nothing(flag, words):
    with pytest.raises(train.BadInput, match=f"^{words}"):
        whole_step(parts(flag), lambda *_: -REWARDS)


def test_mini_batches_take_every_group_once_in_each_pass():
    """The old log-probs of all of them are those before the first; the ratio corrects."""
    p = parts(*PLAIN, "--minibatches=2", "--updates-per-rollout=2")
    rollout = mixed_rollout(p)
    metrics = assert_same_step(p, rollout, by_hand(p, rollout, ("--minibatches=2",)))
    assert abs(metrics["ratio_mean"] - 1) > 1e-4          # the second is off 1 at once
    p.policy_model.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    assert assert_same_step(p, mixed_rollout(p), [])["skipped_updates"] == 4  # one by one
    rollout = sample.take(rollout, [*range(8), 0, 1])      # five groups of two in two batches
    first, second = train.split_groups(rollout, 2, settings("--group-size=2"))
    drawn = rollout.sampler_logprobs
    same([first.sampler_logprobs, second.sampler_logprobs], [drawn[:6], drawn[6:]])


def entropy_of(p, rollout):
    """Of the policy that drew the answers."""
    model, _ = opened(p.settings.model)
    return train.rollout_logprobs(model, rollout, p.settings, measure=True)[1]


def test_by_own_rewards_an_answer_is_right_if_it_earns_something():
    p = parts("--advantage=gtpo", "--max-new-tokens=12")
    _, rollout, _ = whole_step(p)
    H = entropy_of(p, rollout)
    same(rollout.advantages, gtpo_advantages(REWARDS, H, rollout.mask, 4, REWARDS > 0))
    p = parts("--advantage=gtpo", "--max-new-tokens=12", "--reward=rule")
    _, rollout, _ = whole_step(p, reward.load_rewards(["rule"]))
    r, H = rollout.rewards, entropy_of(p, rollout)
    assert 0.5 in r                                       # a box that holds something else
    same(rollout.advantages, gtpo_advantages(r, H, rollout.mask, 4, r == 1.5))


# --- --max-resample: flat groups make room for those of other problems ----------------------------
def draws(texts, length, start):
    """A rollout of one group for each list of texts; the ids tell where rows are from."""
    n = torch.arange(sum(map(len, texts)))
    ids = start + n[:, None].repeat(1, length)
    labels = ids.where(torch.arange(length) >= 4, IGNORE)
    return Rollout(ids, labels, -0.1 * ids[:, 1:], sum(texts, []), n < 0)


def length_reward(rollout):
    values = torch.tensor([float(len(text)) for text in rollout.responses])
    rollout.reward_parts = {"reward/one": values, "reward/two": values + 1}
    return values


def resampled(rounds, *flags, reward_of=length_reward):
    """A step of four groups, of which 0, 2 and 3 are flat; what each round draws is given."""
    # These log-probs are invented, and the correction passes them.
    p = parts("--prompts-per-step=4", "--updates-per-rollout=1", "--sampler-correction=2", *flags)
    flat = ["a"] * 4
    first = draws([flat, ["a", "bb", "c", "d"], flat, flat], 9, 5)
    later = [draws(texts, 7 + 4 * i, 20 + 20 * i) for i, texts in enumerate(rounds)]
    rollouts = iter([first, *later])
    asked = []

    def batch_of(kind, n):
        names = [f"{kind}{k}" for k in range(n)]
        return train.Batch([{"question": name, "answer": "7"} for name in names], names,
                           others=others)

    def others(first, n):
        asked.append([*range(first, first + n)])
        return batch_of(f"new {len(asked)}.", n)
    given = parts_of(p, [], sampler=lambda *_: next(rollouts), reward_of=reward_of)
    metrics, rollout = train.train_step(given, batch_of("old ", 4), p.settings)
    assert [problem["question"] for problem in rollout.problems] == rollout.prompts
    return SimpleNamespace(prompts=rollout.prompts[::4], metrics=metrics, asked=asked,
                           rollout=rollout)


MIXED, FLAT = ["\\boxed{7}", "yyy", "xx", "zzzz"], ["q"] * 4


def test_flat_groups_are_replaced_whole():
    """One of three is replaced in the first round, one in the second; then the rounds are over."""
    r = resampled([[FLAT, MIXED, FLAT], [FLAT, MIXED]], "--max-resample=2")
    assert r.asked == [[0, 1, 2], [3, 4]]                 # no problem twice
    # the first flat group stays, because nothing is left to replace it, and comes last
    assert r.prompts == ["old 1", "new 1.1", "new 2.1", "old 0"]
    assert r.rollout.responses == ["a", "bb", "c", "d", *MIXED, *MIXED, *4 * ["a"]]
    lengths = [float(len(text)) for text in r.rollout.responses]
    assert r.rollout.rewards.tolist() == lengths
    assert torch.allclose(r.rollout.advantages, group_advantages(r.rollout.rewards, 4))
    # The metrics are those of the first draw, of which three groups were flat
    mean = (12 * 1 + 1 + 2 + 1 + 1) / 16
    expected = {"reward_mean": mean, "reward/one": mean, "reward/two": mean + 1, "accuracy": 0,
                "resampled_groups": 5, "flat_groups": 0.75}
    assert {name: r.metrics[name] for name in expected} == pytest.approx(expected)
    assert r.rollout.input_ids[::4, 0].tolist() == [9, 24, 44, 5]      # whole rows


def test_rounds_of_resampling():
    """No more than are needed, none without the flag; the rule's rewards are of the new answers."""
    r = resampled([[MIXED, MIXED, MIXED]], "--max-resample=5")
    assert r.asked == [[0, 1, 2]] and r.metrics["resampled_groups"] == 3
    assert not is_flat(r.rollout.rewards, 4).any()
    r = resampled([])
    assert r.asked == [] and "resampled_groups" not in r.metrics
    right = ["\\boxed{7}", "\\boxed{8}", "no", "no"]
    r = resampled([[right, right, FLAT, right]], "--max-resample=1", reward_of=None)
    assert r.asked == [[0, 1, 2, 3]]                      # by the rule the second was flat too
    assert r.rollout.rewards.tolist() == 3 * [1.5, 0.5, 0, 0] + 4 * [0]
    assert r.metrics["accuracy"] == 0                     # of the first draw


# --- The loop: reference, best, beta, learning rate -----------------------------------------------
def test_the_kl_is_0_right_after_the_reference_was_renewed(tmp_path):
    run = loop(tmp_path, "--renew-reference=2", "--updates-per-rollout=1", "--save-every=2")
    kl = [abs(metrics["approx_kl"]) for metrics in run.history]
    assert [value < 1e-9 for value in kl] == [False, False, True, False, True]


def test_beta_follows_the_band(tmp_path):
    run = loop(tmp_path, "--kl-band", "0.0001", "0.0002", "--kl-coef=0.02",
               "--updates-per-rollout=1")
    beta = 0.02
    for metrics in run.history:
        assert metrics["kl_coef"] == pytest.approx(beta)
        penalty = metrics["loss"] - metrics["policy_loss"]    # and it is the beta that the loss has
        assert penalty == pytest.approx(beta * metrics["approx_kl"], rel=1e-3)
        beta = next_kl_coef(beta, metrics["approx_kl"], 0.0001, 0.0002)
    assert beta != 0.02
    assert next_kl_coef(0.3, None) == 0.3                     # a step was skipped


@pytest.mark.parametrize("schedule, warmup, rates", [
    ("linear", 2, [0.5, 1, 1, 0.75, 0.5, 0.25]), ("constant", 0, [1] * 6),
    ("cosine", 2, [0.5, 1, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])])
def test_learning_rate_schedule(schedule, warmup, rates):
    s = settings("--steps=6", f"--warmup-steps={warmup}", "--lr=0.01", f"--lr-schedule={schedule}")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    found = []
    for step in range(1, 7):
        train.set_learning_rate(optimizer, step, s)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.01 * rate for rate in rates], abs=1e-12)
