"""train.py beyond plain GRPO: every variant arrives, every warning comes, every choice is shown."""
import copy
import dataclasses
import functools
import itertools
import math
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
import pytest
import torch
from conftest import (FEW, MINE, PROBLEMS, REWARDS, TINY, assert_same_run, begin, json_lines,
                      lines_of, logprobs_on_full_logits, loop, metrics_of, own_rewards, parts,
                      parts_of, run_in, seeded, settings, trained, trains, well_ended, whole_step)
import sample
import train
from advantage import (
    gdpo_advantages, group_advantages, grpo_s_advantages, gtpo_advantages, leave_one_out_advantages)
from logprob import IGNORE
from loss import grpo_loss, kl_estimate, next_kl_coef
from reward import length_rescaled, overlong_penalty
from sample import Rollout, sample_groups

SHORT = ("--steps=4", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=4", "--eval-every=2", "--save-every=1", "--updates-per-rollout=1")
SMALL = (*FEW, *SHORT)

# --- [C] [E] [F]: the updates of a step against the stage functions on full logits ----------------
def rollout_of(p, temperature, max_new_tokens=12):
    """Two groups with right, wrong and cut answers, and a sampler that is off by some tenths."""
    rollout = sample_groups(p.policy, p.tokenizer, p.prompts, 4, max_new_tokens, temperature,
                            seeded(3))
    rollout.finished = torch.arange(8) % 3 > 0
    rollout.logprobs += rollout.mask * torch.randn(rollout.mask.shape, generator=seeded())
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
    model = copy.deepcopy(p.policy)
    with torch.no_grad():
        old, entropies = logprobs_on_full_logits(model, rollout, s.temperature)
        ref, _ = logprobs_on_full_logits(p.reference, rollout, s.temperature)
    advantages = advantages_by_hand(flags, rollout, entropies.float())
    mask = rollout.mask
    if "--mask-truncated" in flags:
        mask = mask & rollout.finished[:, None]
    records = []
    for rows in s.updates_per_rollout * torch.arange(8).chunk(s.minibatches):
        logp, _ = logprobs_on_full_logits(model, rollout, s.temperature)
        rows = rows[mask[rows].any(dim=1)]                # a masked row is as if it were not there
        if s.sampler_correction:
            how["sampler_logprobs"] = rollout.logprobs.double()[rows]
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_sampler", lambda *_: None)   # this sampler is off on purpose
        p.optimizer = torch.optim.SGD(p.policy.parameters(), RATE)
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
    *(f"{flags} --plain" for flags in (
        "--clip-eps=0.01", "--aggregate=token", "--aggregate=constant"))])
def test_a_flag_that_changes_the_mathematics_arrives(flags):
    flags = flags.split()
    p = parts(*PLAIN, *flags, "--micro-batch-tokens=25")
    rollout = rollout_of(p, 0.7)
    assert len(list(train.micro_batches(p.policy, rollout, p.settings))) > 2
    expected = by_hand(p, rollout, flags)
    plain = by_hand(p, rollout, flags[1:])
    if "--kl-coef=0" in flags:
        p.reference = None
    metrics = assert_same_step(p, rollout, expected)
    apart = [(one.gradient - other.gradient).norm() / one.gradient.norm()
             for one, other in zip(expected, plain)]
    assert len(expected) != len(plain) or max(apart) > 2e-3
    assert metrics["accuracy"] == pytest.approx(3 / 8)    # by the rule, whatever was added to it


def test_gdpo_reads_each_reward():
    p = parts("--advantage=gdpo", "--reward", "rule", f"{MINE}:some",
              "--reward-weights", "0.5", "2", "--micro-batch-tokens=64", "--minibatches=2")
    metrics, rollout, _ = whole_step(p, own_rewards(p.settings))
    both = torch.stack(list(rollout.reward_parts.values()))
    assert both.isnan().any() and rollout.advantages.isfinite().all()
    assert torch.equal(rollout.advantages, gdpo_advantages(both, (0.5, 2), 4))
    assert rollout.advantages.std() > 0 and metrics["skipped_updates"] == 0


@pytest.mark.parametrize("flags", [
    ["--advantage=gdpo", "--reward", "rule", f"{MINE}:some"], ["--advantage=batch-std"]])
def test_the_std_of_the_batch_is_that_of_all_ranks(tmp_path, flags):
    flags = (*SMALL, "--steps=2", *flags, "--lr=0.003")
    end = begin("train.py", *flags, f"--output={tmp_path / 'two'}", ranks=2)
    trained(tmp_path / "one", *flags)
    well_ended(end())
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("given, expected", [
    ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
    (torch.arange(8), range(8)), (torch.arange(8.0).numpy(), range(8)), (torch.ones(8, 1), [1] * 8),
    (torch.ones(8, requires_grad=True), [1] * 8), ([True] * 8, [1] * 8)])
def test_a_reward_from_python_may_give_any_list_of_numbers(given, expected):
    def reward_of(problems, prompts, rollout):
        return given
    metrics, rollout, _ = whole_step(parts(), reward_of)
    assert rollout.rewards.tolist() == list(expected)
    assert rollout.rewards.dtype == torch.float32 and not rollout.rewards.requires_grad
    assert metrics["skipped_updates"] == 0


def test_template_arguments_stay_with_the_run(capsys, run_here, tmp_path):
    """Begun from Python, with numbers and paths; they reach prompts, config.json and sample.py."""
    model = shutil.copytree(TINY, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if hint %} Ben {% endif %}")
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 1, "--eval-limit", 2, "--model", model, "--output", folder,
             f"--config={TINY / 'grpo.json'}", '--template-args={"hint": true}']
    with ThreadPoolExecutor() as threads:
        assert threads.submit(train.main, flags).result() == 0
    prompts = [record["prompt"] for record in lines_of(folder / "samples.jsonl")]
    assert all(prompt.endswith("<|assistant|> Ben ") for prompt in prompts) and prompts
    assert train.parse([f"--config={folder / 'config.json'}"]).template_args == {"hint": True}
    capsys.readouterr()
    for more in ([], ["--template-args", '{"hint": 0}']):
        first = run_here("sample.py", "--model", folder, "Bob ?", *more).splitlines()[0]
        assert first.endswith("<|assistant|> Ben ") == (not more)
    assert train.main([f"--resume={folder}", "--template-args={}"]) == 2
    trains(f"--resume={folder}", "--steps=2", '--template-args={"hint": true}')
    assert lines_of(folder / "samples.jsonl")[-1]["prompt"].endswith(" Ben ")


@pytest.mark.parametrize("flag, words", [
    ("--length-rescale=0.1", "--length-rescale:"),
    ("--advantage=max-rl", r"--advantage max-rl \(--overlong-buffer ")])
def test_rewards_below_zero_end_a_run_to_which_they_mean_nothing(flag, words):
    with pytest.raises(train.BadInput, match=f"^{words}"):
        whole_step(parts(flag), lambda *_: -REWARDS)


def test_mini_batches_take_every_group_once_in_each_pass():
    """The old log-probs of all of them are those before the first; the ratio corrects."""
    p = parts(*PLAIN, "--minibatches=2", "--updates-per-rollout=2")
    rollout = rollout_of(p, 0.7)
    metrics = assert_same_step(p, rollout, by_hand(p, rollout, ("--minibatches=2",)))
    assert abs(metrics["ratio_mean"] - 1) > 1e-4          # the second is off 1 at once
    p.policy.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    assert assert_same_step(p, rollout, [])["skipped_updates"] == 4   # counted one by one
    rollout = sample.take(rollout, [*range(8), 0, 1])      # five groups of two in two batches
    rollout.old_logprobs = rollout.logprobs                # known: no policy is needed
    s = settings("--group-size=2", "--minibatches=2")
    first, second = train.mini_batches(None, rollout, s)
    assert torch.equal(first.logprobs, rollout.logprobs[:6])
    assert torch.equal(second.logprobs, rollout.logprobs[6:])


class Bigrams(torch.nn.Module):
    """A policy of one table: the next token follows from the one before."""
    config = SimpleNamespace(model_type="bigrams", _attn_implementation=None)
    dtype = torch.float32

    def __init__(self, seed):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, 64, generator=seeded(seed)))

    def get_output_embeddings(self):
        return None

    def token_logprobs(self, input_ids, labels, temperature, measure):
        log_p = (self.table[input_ids[:, :-1]] / temperature).log_softmax(-1)
        mask = labels[:, 1:] != IGNORE
        found = log_p.gather(2, input_ids[:, 1:, None])[..., 0].where(mask, 0)
        entropies = -(log_p.exp() * log_p).sum(-1).detach().where(mask, 0)
        return found, {"entropy": entropies} if measure else {}


ONE_FLAG = """--clip-eps 0.9|--clip-eps-high 2|--kl-coef 0|--kl-estimator k2|--aggregate token
--ratio sequence|--objective cispo|--sampler-correction 1.1|--mask-truncated|--renew-reference 1
--kl-band 1e-6 2e-6|--advantage leave-one-out|--advantage gtpo|--advantage grpo-s|--advantage shape
--advantage max-rl|--advantage batch-std
--no-scale-by-std|--clip-advantages 0.7|--length-rescale 0.3|--overlong-buffer 9
--reward M:words rule|--reward M:words|--advantage gdpo|--reward-weights 0.5 2|--reward-weights 3
--minibatches 2|--step-reward M:steps|--reward-model-lr 0.1|--updates-per-rollout 1
--lora-alpha 3|--max-turns 2"""
TEXTS = ["7 + 2 = 9 , \\boxed{ 9 }", "\\boxed{ 5 } , 9 \\boxed{ 9 }", "9", "\\boxed{ 7 } 2 2 2",
         "\\boxed{ 9 }", "2 - 2 \\boxed{ 2 }", "\\boxed{ 2 } \\boxed{ 9 }", "4 = 4 = 4 , 5"]


def test_no_pair_of_flags_hides_one_that_changes_nothing(capsys, monkeypatch, tiny):
    """Two steps with each pair: a flag that leaves the weights as without it is told or refused."""
    tokenizer = tiny[1]
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    labels = torch.tensor([[IGNORE] * 3 + row + [IGNORE] * (20 - len(row)) for row in rows])
    rollout = Rollout(labels.clamp(min=3), labels, torch.zeros(8, 22), TEXTS,
                      torch.arange(8) % 4 > 0)
    noise = 1e-3 * rollout.mask * torch.randn(8, 22, generator=seeded())  # as rounding may give

    def drawn(model, *_):
        found = model.token_logprobs(rollout.input_ids, labels, 1.0, False)[0].detach()
        return dataclasses.replace(copy.deepcopy(rollout), logprobs=found + noise)
    batch = [{"question": "?", "answer": "9"}, {"question": "?", "answer": "2"}]
    monkeypatch.setattr(train, "batch_of_step", lambda *_: train.Batch(batch, ["", ""]))
    monkeypatch.setattr(train, "evaluate", lambda *_: ({"eval_accuracy": 0.5}, [("", 0.0)] * 2))
    plain = vars(settings("--steps=2", "--prompts-per-step=2", "--group-size=4", "--lr=20",
                          "--max-new-tokens=12", "--kl-coef=0.3", "--updates-per-rollout=2"))
    given = {words: train.given_flags(words.replace("M:", f"{MINE}:").split())
             for words in re.split(r"\||\n", ONE_FLAG)}

    @functools.cache
    def trained(flags, seed):
        """-> what two steps move in the table, and what is told; None for a refusal."""
        s = train.Settings(**{**plain, **{k: v for f in flags for k, v in given[f].items()}})
        capsys.readouterr()
        try:
            train.check_combinations(s)
            train.tell_idle(s)
            reward_of = own_rewards(s)
        except train.BadInput:
            return None
        told = capsys.readouterr().out
        start, policy, reference = (Bigrams(seed).requires_grad_(k == 1) for k in range(3))
        reference.table += 0.3 * torch.randn(64, 64, generator=seeded(2))
        try:
            p = SimpleNamespace(policy=policy, reference=reference if s.kl_coef else None,
                                optimizer=torch.optim.SGD(policy.named_parameters()),
                                tokenizer=tokenizer)
            train.train_grpo(parts_of(p, batch, drawn, reward_of), s)
        except train.BadInput:  # MaxRL, and a reward below 0
            return None
        return (policy.table - start.table).detach(), told

    def moves_alike(one, other, seed):
        ours, theirs = trained(one, seed)[0], trained(other, seed)[0]
        return bool((ours - theirs).norm() <= 1e-5 * theirs.norm())
    tried = 0
    given[""] = {}
    for one, other in itertools.permutations(given, 2):
        beside, both = frozenset([other]), frozenset([one, other])
        if not one or not (trained(beside, 5) and trained(both, 5)):
            continue
        if given[one].keys() & given[other].keys():
            continue
        tried += 1
        alike = (moves_alike(both, beside, seed) for seed in range(5, 15))
        if f"{one.split()[0]} has no effect" in trained(both, 5)[1]:
            assert next(alike), (other, one)
        else:
            assert not all(alike), (other, one)           # not every start needs to show it
    assert tried > 600
    settings("--kl-coef=0", "--kl-estimator=k2")
    assert capsys.readouterr().out.count("--kl-estimator has no effect: --kl-coef is 0\n") == 1
    three = frozenset(["--ratio sequence", "--advantage gtpo", "--updates-per-rollout 1"])
    assert "--ratio" not in trained(three, 5)[1]              # the advantages of tokens are mixed


# --- --max-resample: flat groups make room for those of other problems ----------------------------
def draws(texts, length, start):
    """A rollout of one group for each list of texts; the ids tell where rows are from."""
    n = torch.arange(sum(map(len, texts)))
    ids = start + n[:, None].repeat(1, length)
    labels = ids.where(torch.arange(length) >= 4, IGNORE)
    return Rollout(ids, labels, -0.1 * ids[:, 1:], sum(texts, []), n < 0)


def length_reward(problems, prompts, rollout):
    values = torch.tensor([float(len(text)) for text in rollout.responses])
    rollout.reward_parts = {"one": values, "two": values + 1}
    return values


def resampled(rounds, *flags, reward_of=length_reward):
    """A step of four groups, of which 0, 2 and 3 are flat; what each round draws is given."""
    p = parts("--prompts-per-step=4", "--updates-per-rollout=1", *flags)
    flat = ["a"] * 4
    first = draws([flat, ["a", "bb", "c", "d"], flat, flat], 9, 5)
    others = [draws(texts, 7 + 4 * i, 20 + 20 * i) for i, texts in enumerate(rounds)]
    rollouts = iter([first, *others])
    asked = []

    def batch_of(kind, n):
        names = [f"{kind}{k}" for k in range(n)]
        return train.Batch([{"question": name, "answer": "7"} for name in names], names)

    def more(attempt, n):
        asked.append((attempt, n))
        return batch_of(f"new {attempt}.", n)
    batch = batch_of("old ", 4)
    batch.more = more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_sampler", lambda *_: None)      # these log-probs are invented
        metrics, rollout = train.train_step(p.policy, p.reference, p.optimizer, p.tokenizer, batch,
                                            p.settings, lambda *_: next(rollouts), reward_of)
    # A problem goes where its prompt goes.
    assert [problem["question"] for problem in batch.problems] == batch.prompts
    return SimpleNamespace(prompts=batch.prompts, metrics=metrics, asked=asked, rollout=rollout)


MIXED, FLAT = ["\\boxed{7}", "yyy", "xx", "zzzz"], ["q"] * 4


def test_flat_groups_are_replaced_whole():
    """One of three is replaced in the first round, one in the second; then the rounds are over."""
    r = resampled([[FLAT, MIXED, FLAT], [FLAT, MIXED]], "--max-resample=2")
    assert r.asked == [(1, 3), (2, 2)]
    # the first flat group stays, because nothing is left to replace it, and comes last
    assert r.prompts == ["old 1", "new 1.1", "new 2.1", "old 0"]
    assert r.rollout.responses == ["a", "bb", "c", "d", *MIXED, *MIXED, *4 * ["a"]]
    lengths = [float(len(text)) for text in r.rollout.responses]
    assert r.rollout.rewards.tolist() == lengths
    assert torch.allclose(r.rollout.advantages, group_advantages(r.rollout.rewards, 4))
    mean = sum(lengths) / 16
    expected = {"reward_mean": mean, "reward/one": mean, "reward/two": mean + 1, "accuracy": 2 / 16,
                "resampled_groups": 5, "zero_variance_groups": 0.25}  # 5 were drawn to no use
    assert {name: r.metrics[name] for name in expected} == pytest.approx(expected)
    # Whole rows, test_sample.py has how they are joined
    assert r.rollout.input_ids[:, 0].tolist() == [
        *range(9, 13), *range(24, 28), *range(44, 48), *range(5, 9)]


def test_rounds_of_resampling():
    """No more than are needed, none without the flag; the rule's rewards are of the new answers."""
    r = resampled([[MIXED, MIXED, MIXED]], "--max-resample=5")
    assert r.asked == [(1, 3)] and r.metrics["resampled_groups"] == 3
    assert r.metrics["zero_variance_groups"] == 0
    r = resampled([])
    assert r.asked == [] and "resampled_groups" not in r.metrics
    right = ["\\boxed{7}", "\\boxed{8}", "no", "no"]
    r = resampled([[right, right, FLAT, right]], "--max-resample=1", reward_of=None)
    assert r.asked == [(1, 4)]                            # by the rule the second was flat too
    assert r.rollout.rewards.tolist() == 3 * [1.5, 0.5, 0, 0] + 4 * [0]
    assert r.metrics["accuracy"] == pytest.approx(3 / 16)


# --- The loop: reference, best, beta, learning rate -----------------------------------------------
def test_the_kl_is_0_right_after_the_reference_was_renewed():
    run = loop("--renew-reference=2", "--updates-per-rollout=1", "--save-every=2")
    kl = [abs(metrics["approx_kl"]) for metrics in run.metrics[1:]]
    assert [value < 1e-9 for value in kl] == [False, False, True, False, True]


def test_beta_follows_the_band():
    run = loop("--kl-band", "0.0001", "0.0002", "--kl-coef=0.02", "--updates-per-rollout=1")
    beta = 0.02
    for metrics in run.metrics[1:]:
        assert metrics["kl_coef"] == pytest.approx(beta)
        penalty = metrics["loss"] - metrics["policy_loss"]    # and it is the beta that the loss has
        assert penalty == pytest.approx(beta * metrics["approx_kl"], rel=1e-3)
        beta = next_kl_coef(beta, metrics["approx_kl"], 0.0001, 0.0002)
    assert beta != 0.02
    s = settings("--kl-band", "0.1", "0.2", "--kl-coef=0.5")
    for last, kept in (({"step": 0}, 0.5), ({"approx_kl": None, "kl_coef": 0.3}, 0.3)):  # skipped
        train.adapt_kl_coef(last, s)
        assert s.kl_coef == kept


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


# --- Warnings: each known failure is provoked, and nothing is said of a healthy run ---------------
def history(n, **series):
    """n steps of a healthy run; of a name in `series` the last values are these."""
    rows = [dict(approx_kl=0.01, zero_variance_groups=0.3, entropy=0.5, reward_std=0.5,
                 grad_norm=1.0, reward_mean=step / 100, accuracy=0.4) for step in range(n)]
    for name, values in series.items():
        for row, value in zip(rows[-len(values):], values):
            row[name] = value
    return rows


def in_trouble(rows):
    """The same with a reward that has fallen after the first step."""
    return [{**row, "reward_mean": float(step == 0)} for step, row in enumerate(rows)]


@pytest.mark.parametrize("rewards, accuracy, told", [
    ([0.5] * 29, 0.4, []), ([0.5] * 30, 0.4, ["stuck reward"]), ([0.5] * 30, 0.95, []),
    ([0.5] * 30, None, ["stuck reward"]), ([*[0.5] * 29, 0.55], 0.4, []), ([0.5], 0.4, []),
    ([0.9, 0.3], 0.4, ["fallen reward"]), ([0.9, 0.5], 0.4, []), ([1.0, *[0.8] * 20], 0.4, []),
    ([*[0.1] * 20, *[0.8] * 20, *[0.4] * 10], 0.95, ["fallen reward"]),
    ([*[0.1] * 20, *[0.8] * 20, *[0.4] * 5], 0.4, []), ([-9.0, *[-9.2] * 20], 0.4, [])])
def test_only_a_reward_that_has_fallen_or_stands_is_trouble(rewards, accuracy, told):
    """A fallen one names --lr first; half a standard deviation of the answers is a quarter here."""
    rows = [{**row, "reward_mean": reward, "accuracy": accuracy}
            for row, reward in zip(history(len(rewards)), rewards)]
    found = train.symptoms(rows)
    assert list(found) == told and all("--lr" in line for line in found.values())
    assert train.symptoms([{**row, "reward_std": 0.0} for row in rows[:1]]) == {}


@pytest.mark.parametrize("n, series, told", [
    (3, {}, True), (2, {}, False), (9, {}, True), (3, {"reward_mean": [0.4]}, False),
    (3, {"reward_std": [0.1, 0.0, 0.0]}, False), (3, {"policy_loss": [0.01]}, False)])
def test_a_run_in_which_nothing_can_be_learned_says_so_after_three_steps(n, series, told):
    """Not one whose first step alone is flat, and not one that step rewards teach."""
    same = {name: [value] * n for name, value in dict(
        reward_mean=0.0, reward_std=0.0, policy_loss=0.0, format_rate=0.0,
        truncated_fraction=0.9).items()}
    rows = history(n, **same)
    for name, values in series.items():
        for row, value in zip(rows, values):
            row[name] = value
    found = train.symptoms(rows)
    assert ("nothing to learn" in found) == told
    if told:
        line = found["nothing to learn"]
        assert all(word in line for word in ("earned 0,", "0% have a \\boxed{}", "90%"))


@pytest.mark.parametrize("what, n, name, failing, healthy, words", [
    ("gradient", 45, "grad_norm", [10.5], [9.5], ("10 times", "--lr")),
    ("KL", 12, "approx_kl", [0.06] * 10, [0.04] * 10, ("0.06 ", "--kl-band 0.02 0.05")),
    ("flat groups", 10, "zero_variance_groups", [0.51] * 10, [0.5] * 10,
     ("51%", "--max-resample 3")),
    ("cut answers", 10, "truncated_fraction", [0.96] * 10, [0.95] * 9, ("96%", "--max-new-tokens")),
    ("entropy", 20, "entropy", [0.049] * 10, [0.051] * 10, ("1/10", "--clip-eps-high 0.28"))])
def test_a_failure_is_named_with_its_number_and_its_remedy(what, n, name, failing, healthy, words):
    rows = in_trouble(history(n, **{name: failing}))
    before = copy.deepcopy(rows)
    (first, _), (found, line) = train.symptoms(rows).items()
    assert first == "fallen reward" and found == what
    assert all(word in line for word in words) and "\n" not in line, line
    for well in (history(n, **{name: failing}), history(n)):
        assert train.symptoms(well) == {}
    assert list(train.symptoms(in_trouble(history(n, **{name: healthy})))) == ["fallen reward"]
    assert rows == before                                 # a pure function


@pytest.mark.parametrize("row", [
    dict(approx_kl=None, entropy=None, grad_norm=None), dict(grad_norm=0.0)])
def test_nothing_is_said_of_steps_without_a_number_or_a_gradient(row):
    """Skipped updates; groups that are all flat."""
    for rows in (45 * [row], [*40 * [{"grad_norm": 0.0}], {}]):
        rows = in_trouble([{**metrics, **row} for metrics, row in zip(history(len(rows)), rows)])
        assert list(train.symptoms(rows)) == ["fallen reward"]


def logged(lines, run):
    for step, metrics in enumerate(lines, start=len(run.history)):
        run.log({"step": step, **metrics})
    return run


def warnings_of(folder):
    return {m["step"]: m["warning"] for m in metrics_of(folder) if "warning" in m}


@pytest.mark.parametrize("at", range(1, 30, 4))
def test_a_resumed_run_warns_as_one_that_was_never_stopped(tmp_path, at):
    """Also where numbers were not finite: they stand as null in the file."""
    lines = history(30, approx_kl=[math.inf, *[0.06] * 15], grad_norm=[math.nan, *[1.0] * 20])
    lines = [{}, *({"loss": 0.0, **line} for line in in_trouble(lines))]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    logged(lines, run_in(whole))
    first, resumed = logged(lines[:at + 1], run_in(parts)), run_in(parts)
    resumed.step, resumed.told = at, first.told           # these are in the checkpoint
    resumed.before = [("", 0.5)]
    resumed.history = train.forget_later_steps(resumed)
    logged(lines[at + 1:], resumed)
    warnings = warnings_of(whole)
    assert warnings_of(parts) == warnings
    assert list(warnings) == [2, 25], "each is told once"


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    flags = ("--group-size=4", "--lr=0.0005", "--temperature=0.9", "--length-rescale=0.5")
    folder = tmp_path_factory.mktemp("trace")
    out = well_ended(begin("train.py", "--trace", *flags, folder=folder)())
    assert list(folder.iterdir()) == []
    p = parts(*flags, noise=0)
    # The same step once more: another problem, until its answers disagree
    s = dataclasses.replace(p.settings, prompts_per_step=1, max_resample=20, updates_per_rollout=1)
    batch = train.batch_of_step(p.tokenizer, PROBLEMS, 1, s)
    metrics, rollout = train.train_step(p.policy, p.reference, p.optimizer, p.tokenizer, batch, s)
    with torch.no_grad():
        old, new = (logprobs_on_full_logits(policy, rollout, 0.9)[0]
                    for policy in (p.reference, p.policy))
    return SimpleNamespace(out=out, tokenizer=p.tokenizer, rollout=rollout, metrics=metrics,
                           old=old, new=new, prompt=batch.prompts[0],
                           truth=batch.problems[0]["answer"])


def test_the_trace_tells_the_stages_in_order(capsys, traced):
    assert re.findall(r"\[([A-H])\]", traced.out) == list("ABCDEFGH")
    assert traced.prompt in traced.out and f"truth is {traced.truth}" in traced.out
    rollout = traced.rollout
    for n, response in enumerate(rollout.responses):
        line = next(line for line in traced.out.splitlines() if f"  y_{n + 1} " in line)
        words = (f"{rollout.mask[n].sum()} tokens", f"r {rollout.rewards[n]:g}",
                 f"A {rollout.advantages[n]:+.4f}", train.one_line(response)[:60])
        assert all(word in line for word in words), line
    trains("--trace", "--group-size=2", "--max-new-tokens=8", "--kl-coef=0", "--advantage=gtpo")
    assert "--advantage gtpo" in capsys.readouterr().out


def test_the_trace_agrees_with_a_step_computed_again(traced):
    rollout, mask, old, new = traced.rollout, traced.rollout.mask, traced.old, traced.new
    ratio = (new - old).exp()
    A = rollout.advantages[:, None].expand_as(ratio)
    J = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    k3 = kl_estimate(new, old)
    rows = re.findall(r"^  y_(\d) +('.*?'|\".*?\") +([-\d].*)$", traced.out, re.MULTILINE)
    expected = [(n, t) for n in range(4) for t in mask[n].nonzero()[:4, 0].tolist()]
    for (row, word, numbers), (n, t) in zip(rows, expected, strict=True):
        token = traced.tokenizer.decode(rollout.input_ids[n, t + 1:t + 2])
        assert (int(row), word) == (n + 1, repr(token[:10]))
        values = [float(x[n, t]) for x in (old, old, new, ratio, J, k3)]
        found = [float(x) for x in numbers.removesuffix(" clipped").split()]
        assert found == pytest.approx(values, rel=1e-3, abs=2e-3)
        assert numbers.endswith("clipped") == bool(J[n, t] < ratio[n, t] * A[n, t])
    loss, norm = (traced.metrics[name] for name in ("loss", "grad_norm"))
    assert "clipped\n" in traced.out and f"norm of its gradient {norm:.4f}"[:-1] in traced.out
    assert f"grpo_loss before the update {loss:+.6f}"[:-1] in traced.out
    agreed = ((new - old) * A)[mask]
    moved, of = map(int, re.search(r"(\d+) of (\d+) tokens have moved", traced.out).groups())
    # A token that has hardly moved may count or not
    assert 4 < (agreed > 1e-5).sum() <= moved <= (agreed > -1e-5).sum() and of == len(agreed)


def test_a_warning_is_told_once(tmp_path, capsys):
    """The learning rate is a hundred times too high, and the first warning says so."""
    trains(*SMALL, "--steps=6", "--lr=0.03", "--prompts-per-step=8", "--group-size=8",
           f"--output={tmp_path}")
    (step, warning), *_ = warnings_of(tmp_path).items()
    assert step <= 15 and re.findall(r"--[a-z-]+", warning)[0] == "--lr"
    assert f"step {step}: {warning}" in capsys.readouterr().err
    assert f"<li>step {step}: {train.escape(warning)}<" in (tmp_path / "page.html").read_text()
    # The checkpoint knows what was told.
    trains("--resume", tmp_path, "--steps=8")
    assert not any("warning" in m for m in metrics_of(tmp_path)[5:])


# --- Rewards of one's own, and problems whose answers nobody knows --------------------------------
@pytest.mark.filterwarnings("error::UserWarning")
def test_each_reward_has_its_mean(tmp_path):
    last = {**PROBLEMS[19], "level": "hard"}       # None in the others
    (tmp_path / "d.jsonl").write_text(json_lines(*PROBLEMS[:19], last))
    names = ("length", "second", "never", "of_level")
    trains(*SHORT, "--steps=2", "--reward", *(f"{MINE}:{name}" for name in names), "rule",
           "--reward-weights", "0.5", "2", "1", "0", "10", f"--data={tmp_path / 'd.jsonl'}",
           f"--output={tmp_path / 'run'}")
    samples = [r for r in lines_of(tmp_path / "run" / "samples.jsonl") if r["step"] == 1]
    assert len(samples) == 2                              # the whole step
    lengths = torch.tensor([float(len(text)) for r in samples for text in r["responses"]])
    m = metrics_of(tmp_path / "run")[1]
    assert m["reward/length"] == pytest.approx(lengths.mean().item())
    assert m["reward/second"] == 1                        # None does not count
    assert m["reward/rule"] == pytest.approx(m["accuracy"] + 0.5 * m["format_rate"])
    assert m["reward/never"] is None
    total = 0.5 * m["reward/length"] + 2 * 0.5 + 10 * m["reward/rule"]
    assert m["reward_mean"] == pytest.approx(total)
    assert sum(sum(r["rewards"]) for r in samples) / 8 == pytest.approx(total)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unknown")
    asked = [{"task": problem["question"]} for problem in PROBLEMS[:20]]
    (folder / "mine.jsonl").write_text(json_lines(*asked))
    done = begin("train.py", *SHORT, f"--reward={MINE}:length", "--question-field=task",
                 f"--data={folder / 'mine.jsonl'}", f"--output={folder / 'run'}")()
    return SimpleNamespace(folder=folder / "run", out=well_ended(done), err=done.stderr)


def test_without_known_answers_the_rules_figures_are_null(unknown):
    metrics = metrics_of(unknown.folder)
    assert all(m["eval_accuracy"] is None for m in metrics if "eval_reward" in m)
    assert all(m["accuracy"] is m["format_rate"] is None for m in metrics[1:])
    assert all(m["reward_mean"] > 0 for m in metrics[1:])
    assert "truth     not known" in unknown.out
    assert "16 problems, 4 held out" in unknown.out       # a part of one's own data
    figures = [m["eval_reward"] for m in metrics if "eval_accuracy" in m]
    assert min(figures) > 0 and f"held-out reward{figures[0]:15.3f} " in unknown.out
    assert f" {figures[-1]:.3f}\n" in unknown.out and f"held out {figures[0]:.2f}" in unknown.err
    questions = {p["question"] for p in PROBLEMS[:20]}   # they stand in another column
    for record in lines_of(unknown.folder / "samples.jsonl"):
        assert record["question"] in questions and record["question"] in record["prompt"]


def test_evaluation_of_a_runs_folder(capsys, unknown):
    """Without the reward nothing is known of these answers, with it their mean is shown."""
    flags = ("--eval-only", "--group-size=2", "--eval-limit=2", "--system-prompt=",
             f"--data={unknown.folder.parent / 'mine.jsonl'}", "--question-field=task",
             f"--reward={MINE}:length", "--max-new-tokens=16")
    trains(*flags, f"--model={unknown.folder}")
    out = capsys.readouterr().out
    assert "eval_accuracy: greedy nan" in out and "pass@" not in out
    assert float(re.search(r"eval_reward: greedy ([\d.]+)", out)[1]) > 0


def test_the_end_draws_curves_and_names_what_comes_next(capsys, unknown):
    history = metrics_of(unknown.folder)[1:]
    for name in ("reward_mean", "approx_kl", "response_length_mean"):
        blocks = train.small_curve([(m["step"], m[name]) for m in history]).strip()
        assert re.search(rf"^{name} +{blocks}$", unknown.out, re.MULTILINE)
    folder = unknown.folder
    assert f"{folder}/page.html\n" in unknown.out
    talk, again = (shlex.split(line[21:]) for line in unknown.out.splitlines()[-2:])
    assert talk == [sys.executable, sample.__file__, "--model", str(folder), "YOUR QUESTION"]
    assert again[:2] == [sys.executable, train.__file__]
    assert train.parse(again[2:]).reward == [f"{MINE}:length"]
    assert train.parse(["--resume", str(folder), "--threads=2"]).threads == 2
    assert train.small_curve([*enumerate([0.0, 1.0, 0.5])]) == "   0.000 ▁█▄ 0.500"
    assert train.small_curve([(1, 2.0), (2, 2.0)]) == "   2.000 ▁▁ 2.000"
    first, blocks, last = train.small_curve([*enumerate(map(float, range(1000)))]).split()
    assert len(blocks) == 50 and "".join(sorted(blocks)) == blocks and blocks[::49] == "▁█"
    assert float(first) == 9.5 and float(last) == 989.5   # means of 20
