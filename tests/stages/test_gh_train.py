"""[G] [H] train.py: sample, score, normalise, update; and again.

It promises that `train_step` moves the weights as `plain_step` does; that each metric is what its
name says; that an update which is not finite, or of a sampler that is off, moves no weight; and
that the loop asks its own problems, evaluates and saves when it should, and leaves its files.
"""
import copy
import functools
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from checks import is_same, same, seeded
from files import FEW, MINE, SHORT, TINY, checkpoint_of, edit_json, lines_of, metrics_of
from models import answer_rows, logprobs_on_full_logits
from runs import evaluates, refused, told, trained, trains
from steps import (PROBLEMS, REWARDS, all_gradients, loop, parts, parts_of, run_in,
                   settings, step_on, whole_step)
import evaluate
import reward
import sample
import train
from advantage import group_advantages
from logprob import IGNORE, token_logprobs
from loss import grpo_loss
from reward import with_error
from sample import sample_groups


def test_by_hand():
    """The first update of a rollout: every ratio is 1, the loss is 0, and its gradient is not."""
    p = parts("--kl-coef=0", "--updates-per-rollout=1", "--lr=0.01", noise=0)
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])    # of two groups of four answers
    metrics, rollout, (gradient_of_it,) = whole_step(p, lambda *_: rewards)
    assert rollout.advantages.tolist() == pytest.approx(
        [1.73205, -0.57735, -0.57735, -0.57735, 1, 1, -1, -1], abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6) and metrics["clip_fraction"] == 0
    assert metrics["policy_loss"] == pytest.approx(0, abs=1e-6)       # -(mean of A) is 0
    assert gradient_of_it.norm() > 0.1                    # -(mean of A grad log pi) is not
    # [H] Fresh log-probs: what was right is now more likely, what was wrong less
    logp, _ = logprobs_on_full_logits(p.policy_model, rollout, 1.0)
    moved = ((logp - rollout.sampler_logprobs) * rollout.mask).sum(dim=1)
    assert (moved * rollout.advantages).sum() > 0


# --------------------------------------------------------------------------------------------------
# A reader may stop here. What follows: the step, its metrics, the loop, the files of a run.

FLAGS = (*FEW, "--steps=3", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=8", "--eval-every=2", "--warmup-steps=2")


# --- [G] A step against the formula, and what it asks of the stages; flags: test_variants.py ------
def test_a_step_is_the_definition(monkeypatch):
    """plain_step draws the answers of train_step; losses, gradients and weights are its own, too,
    to rounding: in two updates, of which the second clips."""
    p = parts("--group-size=8", "--max-new-tokens=256", "--kl-coef=0.04", "--updates-per-rollout=2",
              "--max-grad-norm=1e9", "--clip-eps=0.01")
    model = copy.deepcopy(p.policy_model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    drawn, losses, gradients = [], [], []

    def noted(function, results):
        def call(*arguments, **options):
            results.append(function(*arguments, **options))
            return results[-1]
        return call

    monkeypatch.setattr(train, "sample_groups", noted(train.sample_groups, drawn))
    monkeypatch.setattr(train, "plain_loss", noted(train.plain_loss, losses))
    optimizer.register_step_pre_hook(lambda *_: gradients.append(all_gradients(model)))
    rewards = train.plain_step(model, p.ref_model, optimizer, p.tokenizer, p.prompts,
                               train.truths_of(p.problems), generators=seeded(), updates=2,
                               clip_eps=0.01)
    p.optimizer = torch.optim.SGD(p.policy_model.parameters(), 1.0)
    metrics, rollout, expected = whole_step(p, None)
    assert torch.equal(drawn[0].labels, rollout.labels)
    assert torch.equal(rewards, rollout.rewards) and metrics["clip_fraction"] > 0.01
    assert metrics["loss"] == pytest.approx(sum(loss.item() for loss in losses) / 2, rel=1e-4)
    for one, other in zip(gradients, expected, strict=True):
        assert 0 < other.norm() and (one - other).norm() <= 1e-4 * other.norm()
    for one, other in zip(model.parameters(), p.policy_model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-6)


def test_the_definition_reads_answers_as_the_loop_does(monkeypatch):
    """Where the prompt ends in <think>, a box in reasoning that never ends earns nothing."""
    p = parts()
    drawn = sample_groups(p.policy_model, p.tokenizer, p.prompts, 4, 40, 1.0, seeded())
    assert any("boxed" in answer for answer in drawn.responses)
    p.prompts = [f"{prompt} <think>" for prompt in p.prompts]
    monkeypatch.setattr(train, "sample_groups", lambda *_, **how: copy.deepcopy(drawn))
    _, rollout, _ = whole_step(p, None, sampler=train.sample_groups)
    rewards = train.plain_step(p.policy_model, p.ref_model, p.optimizer, p.tokenizer, p.prompts,
                               train.truths_of(p.problems), 4, 40)
    assert not rewards.any() and not rollout.rewards.any()


def test_plain_is_the_same_run(capsys, tmp_path):
    """`--plain` draws what the other run draws, and earns the same, step by step."""
    flags = (*FEW, "--steps=4", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=16",
             "--eval-limit=2", "--lr=0.002")
    trains(*flags, "--plain")
    shown = re.findall(r"step +(\d+) +reward (\S+) +accuracy (\S+)", capsys.readouterr().out)
    trains(*flags, "--max-grad-norm=1e9", f"--output={tmp_path}")
    assert shown == [(f"{m['step']}", f"{m['reward_mean']:.4f}", f"{m['accuracy']:.4f}")
                     for m in metrics_of(tmp_path)[1:]]
    assert len({reward for _, reward, _ in shown}) > 2    # it has moved
    trains(*flags, "--plain", "--kl-coef=0", "--steps=1")  # without a reference


def test_the_reward_is_asked_and_replaces_the_rules():
    asked = []
    p = parts("--updates-per-rollout=1", noise=0)
    metrics, rollout, _ = whole_step(p, reward_of=lambda *given: asked.append(given) or REWARDS)
    assert asked == [(rollout,)]
    assert rollout.problems[::4] == p.problems and rollout.prompts[::4] == p.prompts
    same(rollout.rewards, REWARDS.double())
    assert torch.allclose(rollout.advantages, group_advantages(REWARDS, 4))
    assert abs(metrics["approx_kl"]) < 1e-9                # of an untouched reference
    assert metrics["sampler_difference"] < 1e-5            # decoding against one pass
    _, rollout, _ = whole_step(p, reward_of=None)
    expected = train.score_responses(rollout.responses, [q["answer"] for q in p.problems], 4)
    same([rollout.rewards, rollout.rule_rewards], [expected.double(), expected])
    assert expected.unique().numel() > 1


@pytest.mark.parametrize("flags, dtype", [((), torch.float32), ((), torch.bfloat16),
                                          (("--lora-rank=4",), torch.bfloat16)])
@pytest.mark.parametrize("what", ["nothing", "gradient", "loss"])
def test_what_is_not_finite_skips_the_update_and_is_counted(monkeypatch, what, flags, dtype):
    """After a step no gradient is held, and the reference stands where it stood."""
    @functools.wraps(grpo_loss)
    def of_infinite_value(*given, **options):
        loss, metrics = grpo_loss(*given, **options)
        return loss, {**metrics, "loss": metrics["loss"] + math.inf}
    p = parts(*flags, dtype=dtype)
    masters = p.optimizer.param_groups[0]["params"]
    before = copy.deepcopy([p.policy_model.state_dict(), p.ref_model.state_dict(), masters])
    if what == "gradient":
        learns = masters[0] if flags else p.policy_model.model.layers[1].mlp.up_proj.weight
        learns.register_hook(lambda grad: grad * math.nan)
    if what == "loss":
        monkeypatch.setattr(train, "grpo_loss", of_infinite_value)
    p.reward_of = lambda *_: REWARDS
    metrics, _ = step_on(p, p.settings, p.problems, p.prompts)
    skipped = metrics["skipped_updates"]
    assert skipped == (0 if what == "nothing" else p.settings.updates_per_rollout) in (0, 2)
    assert is_same(before[0], p.policy_model.state_dict()) == (what != "nothing")
    assert is_same(before[2], masters) == (what != "nothing")
    same(before[1], p.ref_model.state_dict())
    assert all(weight.grad is None for weight in [*p.policy_model.parameters(), *masters])


@pytest.mark.parametrize("dtype, rounding, fault", [
    (torch.float32, 5e-5, 2e-4), (torch.bfloat16, 0.05, 0.2)])
@pytest.mark.parametrize("slow, correction", [(False, 0), (True, 0), (False, 2.0), (True, 2.0)])
def test_a_sampler_that_is_off_moves_no_weight(dtype, slow, rounding, fault, correction):
    """The run ends, and names --no-fast and a sampler of one's own; rounding and
    --sampler-correction pass. No later update of the rollout runs."""
    def off_by(nats):
        p = parts(f"--sampler-correction={correction}", "--updates-per-rollout=2",
                  *["--no-fast"] * slow, dtype=dtype)
        before = copy.deepcopy(p.policy_model.state_dict())

        def sampler(*how):
            rollout = sample_groups(*how)
            with torch.no_grad():
                exact, _ = token_logprobs(p.policy_model, rollout.input_ids, rollout.labels)
            rollout.sampler_logprobs = exact + nats * rollout.mask
            return rollout

        try:
            skipped = whole_step(p, sampler=sampler)[0]["skipped_updates"]
        except train.BadInput as error:
            skipped = re.findall("--no-fast|sampler of one's own", str(error))
        return skipped, is_same(before, p.policy_model.state_dict())
    assert off_by(rounding) == (0, False)
    ends = ["--no-fast", "sampler of one's own"], True
    assert off_by(fault) == ((0, False) if correction else ends)
    if not correction:
        assert off_by(math.nan) == ends


# --- Every metric of the README against its definition, on six answers written by hand ------------
SIZES = [(4, 2), (4, 3), (3, 1), (3, 4), (5, 5), (5, 9)]  # of the rows: prompt, answer
RESPONSES = ["\\boxed{7}", "\\boxed{8}", "none", "\\boxed{6}", "\\boxed{5}", "so \\boxed{5}"]
TRUTHS = ["7", "7", "5"]


@pytest.fixture
def measured(monkeypatch):
    """A step on these answers, drawn at temperature 0.8 and trained at 0.7."""
    def measure(reward_of=None):
        p = parts("--group-size=2", "--temperature=0.7", "--micro-batch-tokens=40",
                  "--max-new-tokens=9")
        input_ids, labels, _ = answer_rows(SIZES, width=14, words=57)
        rollout = sample.Rollout(input_ids, labels, torch.zeros(6, 13), RESPONSES,
                                 torch.arange(6) < 5)
        mask = rollout.labels[:, 1:] != IGNORE
        with torch.no_grad():
            drawn, _ = logprobs_on_full_logits(p.policy_model, rollout, 0.8)
            rollout.sampler_logprobs = drawn.float() * mask
            old, entropy = logprobs_on_full_logits(p.policy_model, rollout, 0.7)
        moments = iter([100.0, 101.5, 102.0, 102.0, 105.0])
        monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
        monkeypatch.setattr(train, "check_sampler", lambda *_: None)      # another temperature
        problems = [{"answer": truth} for truth in TRUTHS]
        p.sampler, p.reward_of = lambda *_: rollout, reward_of
        metrics, _ = step_on(p, p.settings, problems, list("abc"))
        drift = (old - rollout.sampler_logprobs)[mask].abs().mean()
        return metrics, float(entropy[mask].mean()), float(drift)
    return measure


def test_every_metric_is_its_definition(measured):
    metrics, entropy, drift = measured()
    # rewards 1.5 0.5 | 0 0.5 | 1.5 1.5: the third group's are equal
    expected = {
        "reward_mean": 5.5 / 6, "reward_std": math.sqrt(7.25 / 6 - (5.5 / 6)**2),
        "reward_std_in_groups": (0.5 + 0.25 + 0) / 3,
        "accuracy": 3 / 6, "format_rate": 5 / 6, "flat_groups": 1 / 3,
        # A is 1 -1 | -1 1 | 0 0 for answers of 2 3 | 1 4 | 5 9 tokens
        "positive_advantages": (2 + 4) / 24,
        "response_length_mean": 24 / 6,
        "response_length_p95": 5 + 0.75 * (9 - 5),    # at 0.95 * 5 = 4.75 of the sorted
        "truncated_fraction": 1 / 6, "tokens": 24, "entropy": entropy, "sampler_difference": drift,
        "skipped_updates": 0, "seconds_sampling": 1.5, "seconds_scoring": 0.5,
        "seconds_training": 3, "tokens_per_second": 24 / 5}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name
    assert drift > 0.05                                   # a sampler at another temperature shows
    # test_variants.py has the values of these.
    by_gradient = {"loss", "policy_loss", "approx_kl", "clip_fraction", "ratio_mean", "grad_norm"}
    assert metrics.keys() - expected.keys() >= by_gradient


def test_accuracy_is_the_rules_and_zero_variance_the_rewards(monkeypatch, measured):
    metrics, *_ = measured(lambda *_: torch.tensor([3.0, 3, 1, 1, 0, 2]))
    names = ("reward_mean", "accuracy", "format_rate", "flat_groups")
    assert [metrics[name] for name in names] == pytest.approx([10 / 6, 3 / 6, 5 / 6, 2 / 3])
    for truths, expected in ((["7", None, "5"], [3 / 4, 1.0]), (3 * [None], 2 * [math.nan])):
        monkeypatch.setattr(sys.modules[__name__], "TRUTHS", truths)
        metrics, *_ = measured(lambda *_: torch.arange(6.0))
        assert [metrics[x] for x in names[1:3]] == pytest.approx(expected, nan_ok=True)


def test_evaluation_is_its_definition():
    p = parts("--max-new-tokens=11", "--system-prompt=Think.", "--prompts-per-step=3",
              "--group-size=2")
    problems = [{"question": f"q {j}", "answer": str(j)} for j in range(7)]
    asked, how, seeds = [], [], []

    def answers(model, tokenizer, prompts, group_size, max_new_tokens, temperature, generators):
        asked.append(prompts)
        how.append((group_size, max_new_tokens, temperature))
        seeds.extend(g.initial_seed() for g in generators)
        # right where the number of the problem is even, and in the second of two answers
        numbers = [prompt.split()[-2] for prompt in prompts for _ in range(group_size)]
        n = len(numbers)
        labels = mask = torch.ones(n, 9)
        return SimpleNamespace(finished=torch.arange(n) != 4, labels=labels, mask=mask,
                               reward_parts={}, responses=[
            f"\\boxed{{{x}}}" if int(x) % 2 == 0 or i % group_size == 1 else "?"
            for i, x in enumerate(numbers)])

    def reward_of(rollout):
        rows = zip(rollout.problems, rollout.prompts, strict=True)
        assert all(problem["question"] in prompt for problem, prompt in rows)
        return torch.tensor([float(problem["answer"]) for problem in rollout.problems])
    p = parts_of(p, problems, sampler=answers, reward_of=reward_of)
    figures, found = train.evaluate(p, p.settings)
    assert figures == {"eval_accuracy": pytest.approx(4 / 7), "eval_reward": pytest.approx(3)}
    assert [row["reward"] for row in found] == [0, 1, 2, 3, 4, 5, 6]
    assert found[1] == {"problem": "q 1", "answer": "?", "reward": 1.0, "tokens": 9, "cut": False,
                        "truth": "1", "boxed": False, "right": False}
    assert found[2] == {**found[1], "problem": "q 2", "answer": "\\boxed{2}", "reward": 2.0,
                        "truth": "2", "boxed": True, "right": True,
                        "right of boxed and uncut": True}
    assert found[4]["right"] and found[4]["cut"] and "right of boxed and uncut" not in found[4]
    prompts = [train.chat_prompt(p.tokenizer, problem, "Think.") for problem in problems]
    assert asked == [prompts[:6], prompts[6:]]
    p.reward_of = None
    figures, found = train.evaluate(p, p.settings, 2, 0.7)
    assert figures == {"eval_accuracy": pytest.approx(11 / 14)} and len(found) == 14
    assert how == [(1, 11, 0.0)] * 2 + [(2, 11, 0.7)] * 3 and len(set(seeds)) == 7


# --- [H] The loop ---------------------------------------------------------------------------------
def test_the_loop_warms_up_evaluates_and_saves_when_it_should(tmp_path):
    run = loop(tmp_path, "--warmup-steps=4", "--eval-every=2", "--save-every=3",
               "--updates-per-rollout=1")
    assert run.rates == [m["lr"] for m in run.history]
    assert run.rates == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004])
    assert [m["step"] for m in run.history] == list(range(1, 6))
    assert [m["step"] for m in run.evaluations] == [0, 2, 4, 5]
    assert run.checkpoints == [3, 5]
    assert [len(rows) for rows in train.first_and_last(run)] == [3, 3]


def test_every_step_asks_its_own_problems(tmp_path):
    drawn = []

    def spy(model, tokenizer, prompts, *how):
        if how[2]:                                        # an evaluation is greedy
            drawn.append((prompts, how[3]))
        return sample_groups(model, tokenizer, prompts, *how)

    run = loop(tmp_path, "--system-prompt=", problems=PROBLEMS[:4], sampler=spy,
               reward_of=lambda rollout: torch.arange(float(len(rollout.responses))))
    for (prompts, generators), (rollout, *_) in zip(drawn, run.samples, strict=True):
        assert prompts == rollout.prompts[::2] and len(generators) == len(prompts)
        assert rollout.rewards.tolist() == [0, 1, 2, 3]
        assert rollout.advantages.tolist() == pytest.approx([-1, 1, -1, 1])
    assert run.evaluations[-1]["eval_reward"] == pytest.approx(1.0)


def test_all_that_is_random_follows_from_seed_step_and_round(tiny, monkeypatch):
    """The problems of an epoch are asked once each; every prompt has a generator of its own."""
    def batch(n, step, places=None, *flags):
        problems = [{"question": f"q {j}.", "answer": "1"} for j in range(n)]
        given = SimpleNamespace(tokenizer=tiny[1], problems=problems)
        s = settings("--prompts-per-step=4", "--max-resample=3", *flags)
        found = train.batch_of_step(given, step, s)
        if places:
            found = found.others(places[0], len(places))
        pairs = zip(found.problems, found.prompts, strict=True)
        assert all(problem["question"] in prompt for problem, prompt in pairs)
        return tuple(found.prompts), [g.initial_seed() for g in found.generators]

    epochs = [[batch(18, step)[0] for step in range(1 + 4 * e, 5 + 4 * e)] for e in range(2)]
    assert [len({*sum(epoch, ())}) for epoch in epochs] == [16, 16] and epochs[0] != epochs[1]
    ways = [(3,), (4,), (3, None, "--seed=1"), *((step, range(n, n + 4))
                                                 for step, n in ((3, 0), (3, 4), (4, 0)))]
    drawn = [batch(12, *way) for way in ways]
    assert drawn == [batch(12, *way) for way in ways]
    assert len({prompts for prompts, _ in drawn}) == 6
    assert len({seed for _, seeds in drawn for seed in seeds}) == 24
    others = {*drawn[3][0], *drawn[4][0]}                 # 8 others are there, and come first
    assert len(others) == 8 and not others & {*drawn[0][0]}
    assert {*batch(12, 3, range(8, 12))[0]} == {*drawn[0][0]}
    assert len({*batch(4, 1, range(12))[1]}) == 12        # answers differ where problems repeat
    monkeypatch.setattr(train, "WORLD_SIZE", 3)
    monkeypatch.setattr(train, "RANK", 2)
    assert len(batch(12, 1, range(6))[0]) == 2            # each rank has its share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_adamw(dtype):
    """Its first step moves weights by lr against the gradient's sign; decay, 0 by default, too.

    Vectors, which are norms and biases, do not decay.
    """
    for flags, grad, move in (((), 1.0, lambda was: was - 0.01), (
            ("--weight-decay=0.5",), 0.0,
            lambda was: was.clone() if was.ndim == 1 else was * (1 - 0.01 * 0.5))):
        p = parts("--lr=0.01", *flags, dtype=dtype)
        masters = train.trained_by(p.optimizer)
        assert {master.ndim for master in masters} == {1, 2}
        own = all(weight is master for weight, master in zip(p.policy_model.parameters(), masters))
        assert own == (dtype == torch.float32)            # these are their own masters
        expected = [move(master.detach().float()) for master in masters]
        for weight in p.policy_model.parameters():
            weight.grad = torch.full(weight.shape, grad)
        p.optimizer.step()
        assert all(map(functools.partial(torch.allclose, atol=1e-6), masters, expected))


def test_weight_decay_changes_nothing_else():
    """Gradients are clipped together, every weight learns, and the moments are those of AdamW."""
    found = []
    for decay in (0, 0.5):
        p = parts("--lr=0.01", "--updates-per-rollout=1", f"--weight-decay={decay}")
        before = copy.deepcopy(p.policy_model)
        given = parts_of(p, p.problems, reward_of=lambda *_: REWARDS)
        metrics, _ = step_on(given, p.settings, p.problems, p.prompts, seeded())
        moments = [p.optimizer.state[q]["exp_avg"] for q in train.trained_by(p.optimizer)]
        found.append((metrics["grad_norm"], moments))
        for was, now in zip(before.parameters(), p.policy_model.parameters()):
            assert not torch.equal(was, now)
    assert found[0][0] == found[1][0] > 0
    same(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_weight_stays_and_takes_no_memory_of_the_optimizer(dtype):
    p = parts("--lr=0.01", "--updates-per-rollout=1", dtype=dtype)
    before = copy.deepcopy(p.policy_model)
    p.policy_model.get_decoder().norm.requires_grad_(False)
    p.optimizer = train.make_optimizer(p.policy_model, p.settings)
    trained = [weight for weight in p.policy_model.parameters() if weight.requires_grad]
    assert len(p.optimizer.state) == len(trained) < len(list(before.parameters()))
    given = parts_of(p, p.problems, reward_of=lambda *_: REWARDS)
    step_on(given, p.settings, p.problems, p.prompts)
    moved = [name for name, weight in p.policy_model.named_parameters()
             if not torch.equal(weight, before.get_parameter(name))]
    assert len(moved) == len(trained)


# --- A run, its files and what it prints ----------------------------------------------------------
@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return SimpleNamespace(folder=folder, out=told(*FLAGS, f"--output={folder}")[0])


def test_a_run_leaves_the_files_of_the_contract(finished_run):
    folder = finished_run.folder
    assert {p.name for p in folder.iterdir()} == {
        "checkpoint.safetensors", "config.json", "evaluations.jsonl", "final", "metrics.jsonl",
        "samples.jsonl", ".lock"}
    metrics = metrics_of(folder)
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert all(m.keys() >= {"reward_mean", "lr", "loss", "tokens_per_second"} for m in metrics[1:])
    assert [m["step"] for m in metrics if "eval_accuracy" in m] == [0, 2, 3]
    config = json.loads((folder / "config.json").read_text())
    assert config["lr"] == 3e-4 and config["steps"] == 3  # of grpo.json, of the command line
    assert not config.keys() & {"output", "resume", "config", "dry_run", "trace"}
    samples = lines_of(folder / "samples.jsonl")
    assert [record["step"] for record in samples] == [1, 1, 2, 2, 3, 3]
    for record in samples:
        assert "<|user|>" in record["prompt"]
        assert len(record["responses"]) == len(record["finished"]) == 4
        advantages = group_advantages(torch.tensor(record["rewards"]), 4)
        assert record["advantages"] == pytest.approx(advantages.tolist(), abs=1e-6)
    final = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert AutoTokenizer.from_pretrained(folder / "final").chat_template
    assert not is_same(final.state_dict(), parts().policy_model.state_dict())
    last = checkpoint_of(folder)
    for name, p in final.named_parameters():
        same(last[f"weight/{name}"], p.data, name)


def test_the_story_tells_of_a_problem_that_was_learned(capsys, tmp_path):
    """By the run's own reward: a right answer that became wrong is no success."""
    run, nan = run_in(tmp_path), math.nan
    for step, answers in enumerate((
            [("\\boxed{1}", 0.9), ("\\boxed{9}", 0.1), ("\\boxed{9}", nan), ("", 0.0)],
            [("\\boxed{7}", 0.8), ("\\boxed{8}", 0.7), ("\\boxed{3}", nan), ("", 0.1)])):
        run.log_evaluation({"step": step, "eval_id": 1}, {"eval_reward": 0.3}, [
            {"problem": f"question {x}", "answer": text, "reward": earned, "truth": x}
            for x, (text, earned) in zip("1234", answers)])
    run.step = 1
    train.print_story(run)
    out = capsys.readouterr().out
    assert "question  question 2\nbefore    \\boxed{9}\nafter     \\boxed{8}\ntruth     2" in out


def test_a_reward_from_python_is_not_replaced_in_silence(capsys, finished_run, tmp_path):
    """README's way to give one: the command line does not go on by another, and Python can."""
    folder = tmp_path / "run"

    def trained(*flags):
        s = settings(*flags)
        s.reward = None
        p = train.load(s)
        p.reward_of = lambda rollout: torch.tensor(
            [-float(len(text)) for text in rollout.responses])
        return train.train(p, s, train.Run())

    assert trained(*FLAGS, "--reward=rule", "--steps=1", f"--output={folder}") == 0
    capsys.readouterr()
    line = refused(capsys, f"--resume={folder}", "--steps=2", begun=True)
    assert "--resume" in line and "Python" in line
    assert trained(f"--resume={folder}", "--steps=2") == 0
    assert all(m["reward_mean"] < 0 for m in metrics_of(folder)[1:])
    # A run by flags goes on by them
    assert json.loads((finished_run.folder / "config.json").read_text())["reward"] is None


def test_a_run_goes_on_from_its_model_with_all_of_its_settings(finished_run):
    """The command that is printed goes on; an evaluation of its folders has them, too."""
    folder = finished_run.folder
    printed = finished_run.out.splitlines()[-1].partition("train.py ")[2].split()
    assert printed == ["--resume", str(folder), "--steps", "6"] and train.parse(printed).steps == 6
    command = ["--config", f"{folder}/config.json", "--model", f"{folder}/final"]
    first = vars(train.parse(FLAGS))
    expected = {name: first[name] for name in train.FIELDS.keys() - {
        "model", "offload", "dtype", *train.THIS_CALL}} | {"model": f"{folder}/final"}
    for words in command, [*command[:2], "--model", str(folder)]:
        assert expected.items() <= vars(train.parse(words)).items()
    for model in folder, folder / "final":
        assert expected.items() <= vars(evaluate.parse([str(model)])[0]).items()
    assert evaluate.parse([str(folder), "--seed=5"])[0].seed == 5
    assert evaluate.parse([f"{folder}/best"])[0].data == first["data"]
    assert train.parse(["--model", str(folder)]).data == "gsm8k"  # to train on it brings none
    assert evaluate.parse([])[0].config == str(train.TINY_CONFIG)


def test_an_evaluation_prints_the_figures(capsys):
    evaluates("--eval-limit=8", "--group-size=4", "--max-new-tokens=16")
    out = capsys.readouterr().out
    assert "8 problems" in out and "4 samples of each at temperature 1.0" in out
    p = parts("--max-new-tokens=16")
    problems = reward.distinct(reward.load_problems(p.settings.eval_data), 8)
    p = parts_of(p, problems)
    greedy, _ = train.evaluate(p, p.settings)
    sampled, answers = train.evaluate(p, p.settings, 4, 1.0)
    first, second = (figures["eval_accuracy"] for figures in (greedy, sampled))
    error = r"(?:± 0\.\d+|\[\S+, \S+\])"                 # where all are equal, an interval
    assert re.search(rf"\nright +{first:.3f} {error} +{second:.3f} {error}\n", out)
    cut = f"{sum(row['cut'] for row in answers) / 32:.3f}"
    assert re.search(rf"\ncut .* {cut} {error}\n", out)
    right = train.column(answers, "right").view(8, 4)
    for k in (1, 2, 4):
        value = with_error(evaluate.best_of_k(right, k))
        assert re.search(rf"\npass@{k} +{re.escape(value)}\n", out)
        assert re.search(rf"\nmaj@{k} +0\.\d\d\d {error}\n", out)


def test_problems_that_are_equal_are_asked_once(tmp_path):
    """And the limit takes any of them, wherever they stand in the file."""
    lines = (train.TINY / "few.jsonl").read_text().splitlines()
    asked = []
    for order in (lines * 3, lines[::-1]):
        (tmp_path / "d.jsonl").write_text("\n".join(order))
        s = settings(f"--data={train.TINY / 'few.jsonl'}", f"--eval-data={tmp_path / 'd.jsonl'}",
                     "--eval-limit=5")
        asked.append([problem["question"] for problem in train.load(s).eval_problems])
    assert sorted(asked[0]) == sorted(asked[1]) and asked[0] == asked[1][::-1]
    assert asked[0] != [json.loads(line)["question"] for line in lines[:5]]


def test_an_evaluation_has_every_reward_by_its_name(capsys, tmp_path):
    """And no line of the rule, where nothing has a box."""
    rewards = "--reward", f"{MINE}:length", "think"
    folder = trained(tmp_path / "run", *SHORT, f"--data={train.TINY / 'few.jsonl'}", "--steps=1",
                     *rewards)
    row = lines_of(folder / "evaluations.jsonl")[0]["answers"][0]
    assert {"reward/length", "reward/think"} < row.keys()
    capsys.readouterr()
    for more, boxed in ((), True), (["--max-new-tokens=2"], False):
        evaluates(folder, f"--against={TINY}", *rewards, *more)
        out = capsys.readouterr().out
        assert "\nreward/length " in out and "\nreward/think " in out
        assert ("\nright " in out) == ("\nboxed " in out) == boxed
        assert out.count(", p ") + out.count(", no change") == 3 + boxed


def test_two_policies_are_compared_on_the_same_problems(capsys, finished_run):
    """--against: greedy answers of both, and on which problems one is right and the other wrong."""
    folder = finished_run.folder
    evaluates(folder, f"--against={TINY}", "--eval-limit=8")
    out = capsys.readouterr().out
    before, after = [], []
    for rows, model in (before, TINY), (after, folder):
        s = settings("--config", f"{folder}/config.json", f"--model={model}", "--eval-limit=8")
        rows += train.evaluate(train.load(s), s)[1]
    assert train.compared(before, after, "right") in out
    assert train.compared(before, after, "reward") in out


def test_a_policy_that_has_no_room_for_the_problems_is_named(capsys, finished_run, tmp_path):
    other = shutil.copytree(TINY, tmp_path / "other")
    edit_json(other / "config.json", max_position_embeddings=30)
    line = refused(capsys, finished_run.folder, f"--against={other}", "--eval-limit=2", begun=True,
                   program=evaluate)
    assert f"--against {other}, problem 1: " in line and "30 positions" in line


def test_a_comparison_tells_what_the_other_was_trained_by(capsys, finished_run, tmp_path):
    """Else the order of the two would decide who wins; in both orders it is told."""
    short = tmp_path / "short"
    trains(*FLAGS, "--max-new-tokens=4", "--system-prompt=Ben", "--steps=1", f"--output={short}")
    for model, other, limit in (finished_run.folder, short, 4), (short, finished_run.folder, 16):
        capsys.readouterr()
        evaluates(f"{model}/final", f"--against={other}", "--eval-limit=2")
        lines = [line for line in capsys.readouterr().out.splitlines()
                 if line.startswith(f"--against {other}")]
        assert ["--system-prompt" in line for line in lines] == [True, False]
        assert lines[1].endswith(f"--max-new-tokens {20 - limit}, its run had {limit}")


def test_a_folder_of_somebody_runs_no_code(capsys, monkeypatch, tmp_path):
    """A run's config that names code, unless the command names it, or the file, or resumes."""
    folder = tmp_path / "run"
    code = tmp_path / "r.py"
    code.write_text("def f(completions, **_):\n    return [0.0 for _ in completions]\n")
    trains(*FLAGS, f"--reward={code}:f", "--steps=1", f"--output={folder}")
    (folder / "best").mkdir(exist_ok=True)
    for name in ("", "/final", "/best"):
        capsys.readouterr()
        line = refused(capsys, f"{folder}{name}", program=evaluate)
        assert f"{code}:f" in line and "--reward" in line and "config.json" in line
    other = shutil.copytree(folder, tmp_path / "other")   # Python also imports such files
    edit_json(other / "config.json", reward=["r.pyc:f"])
    line = refused(capsys, other, program=evaluate)
    assert "r.pyc:f" in line and "config.json" in line    # before a file is looked for
    named, _ = evaluate.parse([str(folder), f"--reward={code}:f"])
    assert named.max_new_tokens == 16
    assert capsys.readouterr().out == ""
    train.parse([f"--config={folder}/config.json"])
    assert f"{code}:f" in capsys.readouterr().out
    train.parse([f"--resume={folder}"])
    assert capsys.readouterr().out == ""


def test_a_comparison_counts_what_was_gained_and_lost():
    def rows(rewards):
        return [{"right": reward, "reward": 1.5 * reward} for reward in rewards]

    before = rows([True] * 68 + [False] * 132)            # 0.340 of 200
    after = rows([True] * 60 + [False] * 8 + [True] * 41 + [False] * 91)
    line = train.compared(before, after, "right")
    assert "0.340 ± 0.034 → 0.505 ± 0.035" in line and "41 gained, 8 lost, p < 0.001" in line
    assert "difference 0.165 ± 0.033" in line and "chance" not in line
    assert "0.247 ± 0.050" in train.compared(before, after, "reward")
    few = train.compared(rows([True, False, False]), rows([True, True, True]), "right")
    assert "2 gained, 0 lost, p = 0.500" in few and "chance" in few
    unknown = [{"reward": 1.0}, {"reward": 0.0}]          # no true answer
    assert "nan" in train.compared(unknown, unknown, "right")
    assert train.compared(unknown, unknown, "reward").endswith(", no change")


def test_where_all_are_right_or_all_wrong_an_interval_stands():
    """Wilson's for k of n: (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n), z = 1.96."""
    def half_open(n):                                     # at p = 0: (0, z²/n / (1 + z²/n))
        return 1.96**2 / n / (1 + 1.96**2 / n)

    ones, zeros = torch.ones(256).double(), torch.zeros(64).double()
    assert with_error(ones) == f"1.000 [{1 - half_open(256):.3f}, 1]" == "1.000 [0.985, 1]"
    assert with_error(zeros) == f"0.000 [0, {half_open(64):.4f}]" == "0.000 [0, 0.0566]"
    assert with_error(zeros[:8]) == f"0.000 [0, {half_open(8):.3f}]"     # of 8 problems
    assert with_error(torch.tensor([1.0, -1.0]).double()).startswith("0.000 ± ")
    few = torch.full((64,), torch.nan).double()
    few[:2] = 1                                           # it applies to two problems
    assert with_error(few) == f"1.000 [{1 - half_open(2):.3f}, 1]" == "1.000 [0.342, 1]"
    assert with_error(0.5 * ones) == "0.500, all equal"
