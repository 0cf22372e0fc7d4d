"""[G][H] train.py: the step, the loop, the flags, the files of a run."""
import copy
import functools
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace
import pytest
import torch
from conftest import (FEW, LIMIT, NO_MEMORY, PROBLEMS, REWARDS, TINY, answer_rows, begin,
                      checkpoint_of, gradient, lines_of, logprobs_on_full_logits, loop, metrics_of,
                      parts, parts_of, raises, refused, rollout_of, run_in, same_tensors, settings,
                      trains, updated, well_ended, whole_step)
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          AutoTokenizer, Qwen2Config)
import reward
import sample
import train
from advantage import group_advantages
from logprob import IGNORE, token_logprobs
from loss import grpo_loss
from sample import sample_groups

SMALL = (*FEW, "--steps=3", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=8", "--eval-every=2", "--warmup-steps=2")
QWEN = {"model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "tie_word_embeddings": True}


# --- [G] A step against the formula, and what it asks of the stages; flags: test_variants.py ------
def test_a_step_is_the_definition():
    """train_step moves the weights as plain_step does, and its gradient is of the same size."""
    p = parts("--group-size=8", "--max-new-tokens=256", "--kl-coef=0.04", "--updates-per-rollout=1",
              "--max-grad-norm=1e9")
    model = copy.deepcopy(p.policy)
    start = {name: weight.clone() for name, weight in model.named_parameters()}
    torch.manual_seed(0)
    train.plain_step(model, p.reference, torch.optim.SGD(model.parameters(), 1.0), p.tokenizer,
                     p.prompts, train.truths_of(p.problems))
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(p.policy.parameters(), 1.0)
    train.train_step(p.policy, p.reference, optimizer, p.tokenizer,
                     train.Batch(p.problems, p.prompts), p.settings)
    for (name, one), other in zip(model.named_parameters(), p.policy.parameters()):
        moved = one - start[name]
        assert 0 < moved.norm() and (one - other).norm() <= 1e-4 * moved.norm(), name


def test_the_reward_is_asked_about_the_rollout_and_replaces_the_rules():
    asked = []
    p = parts("--updates-per-rollout=1", noise=0)
    metrics, rollout, _ = whole_step(p, reward_of=lambda *given: asked.append(given) or REWARDS)
    assert asked == [(p.problems, p.prompts, rollout)] and torch.equal(rollout.rewards, REWARDS)
    assert torch.allclose(rollout.advantages, group_advantages(REWARDS, 4))
    # A first step is honest: of an untouched reference the KL is 0, and every ratio is 1
    assert abs(metrics["approx_kl"]) < 1e-9 and metrics["clip_fraction"] == 0
    assert metrics["sampler_difference"] < 1e-5            # decoding against one pass
    _, rollout, _ = whole_step(p, reward_of=None)
    expected = train.score_responses(rollout.responses, [q["answer"] for q in p.problems], 4)
    assert torch.equal(rollout.rewards, expected) and expected.unique().numel() > 1
    assert torch.equal(rollout.rule_rewards, expected)


@pytest.mark.parametrize("flags, dtype", [((), torch.float32), ((), torch.bfloat16),
                                          (("--lora-rank=4",), torch.bfloat16)])
@pytest.mark.parametrize("what", ["nothing", "gradient", "loss"])
def test_what_is_not_finite_skips_the_update_and_is_counted(monkeypatch, what, flags, dtype):
    """After a step no gradient is held, and the reference stands where it stood."""
    def of_infinite_value(*given, **options):
        loss, metrics = grpo_loss(*given, **options)
        return loss, {**metrics, "loss": metrics["loss"] + math.inf}
    p = parts(*flags, dtype=dtype)
    masters = p.optimizer.param_groups[0]["params"]
    before = copy.deepcopy([p.policy.state_dict(), p.reference.state_dict(), masters])
    if what == "gradient":
        learns = masters[0] if flags else p.policy.model.layers[1].mlp.up_proj.weight
        learns.register_hook(lambda grad: grad * math.nan)
    if what == "loss":
        monkeypatch.setattr(train, "grpo_loss", of_infinite_value)
    metrics, _ = train.train_step(p.policy, p.reference, p.optimizer, p.tokenizer,
                                  train.Batch(p.problems, p.prompts), p.settings,
                                  reward_of=lambda *_: REWARDS)
    skipped = metrics["skipped_updates"]
    assert skipped == (0 if what == "nothing" else p.settings.updates_per_rollout) in (0, 2)
    assert same_tensors(before[0], p.policy.state_dict()) == (what != "nothing")
    assert all(map(torch.equal, before[2], masters)) == (what != "nothing")
    assert same_tensors(before[1], p.reference.state_dict())
    assert all(weight.grad is None for weight in [*p.policy.parameters(), *masters])


@pytest.mark.parametrize("dtype, rounding, fault", [
    (torch.float32, 5e-4, 2e-3), (torch.bfloat16, 0.05, 0.2)])
@pytest.mark.parametrize("plain, correction", [(False, 0), (True, 0), (False, 2.0), (True, 2.0)])
def test_a_sampler_that_is_off_moves_no_weight(dtype, plain, rounding, fault, correction):
    """The run ends, with --plain as the way on if it is not plain; rounding and
    --sampler-correction pass. No later update of the rollout runs."""
    def off_by(nats):
        p = parts(f"--sampler-correction={correction}", "--updates-per-rollout=2",
                  *["--plain"] * plain, dtype=dtype)
        before = copy.deepcopy(p.policy.state_dict())

        def sampler(*how):
            rollout = sample_groups(*how)
            with torch.no_grad():
                exact, _ = token_logprobs(p.policy, rollout.input_ids, rollout.labels)
            rollout.logprobs = exact + nats * rollout.mask
            return rollout

        try:
            skipped = whole_step(p, sampler=sampler)[0]["skipped_updates"]
        except train.BadInput as error:
            skipped = type(error)
        return skipped, same_tensors(before, p.policy.state_dict())
    assert off_by(rounding) == (0, False)
    ends = (train.BadInput if plain else train.FastPathFault), True
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
            rollout.logprobs = logprobs_on_full_logits(p.policy, rollout, 0.8)[0].float() * mask
            old, entropy = logprobs_on_full_logits(p.policy, rollout, 0.7)
        moments = iter([100.0, 100.0, 101.5, 102.0, 105.0])
        monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
        monkeypatch.setattr(train, "check_sampler", lambda *_: None)      # another temperature
        batch = train.Batch([{"answer": truth} for truth in TRUTHS], list("abc"))
        metrics, _ = train.train_step(p.policy, p.reference, p.optimizer, p.tokenizer, batch,
                                      p.settings, lambda *_: rollout, reward_of)
        drift = (old - rollout.logprobs)[mask].abs().mean()
        return metrics, float(entropy[mask].mean()), float(drift)
    return measure


def test_every_metric_is_its_definition(measured):
    metrics, entropy, drift = measured()
    # rewards 1.5 0.5 | 0 0.5 | 1.5 1.5: the third group's are equal
    expected = {
        "reward_mean": 5.5 / 6, "reward_std": math.sqrt(7.25 / 6 - (5.5 / 6)**2),
        "accuracy": 3 / 6, "format_rate": 5 / 6, "zero_variance_groups": 1 / 3,
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


@pytest.mark.parametrize("flags", [[], ["--minibatches=2", "--micro-batch-tokens=25"]])
def test_what_d_measures_is_logged_under_its_name(monkeypatch, flags):
    """A quantity that is measured beside the entropy needs no other line."""
    monkeypatch.setattr(train.logprob, "measured_of", lambda logp: {
        "entropy": torch.ones(len(logp)), "first_token": logp.exp()[:, 0]})
    p = parts(*flags)
    metrics, rollout, _ = whole_step(p)
    p = parts(*flags)                                     # as it was before the updates
    chances = p.policy(rollout.input_ids).logits[:, :-1].softmax(dim=2).detach()
    expected = float(chances[:, :, 0][rollout.mask].mean())
    assert metrics["first_token"] == pytest.approx(expected, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(1)


def test_accuracy_is_the_rules_and_zero_variance_the_rewards(monkeypatch, measured):
    metrics, *_ = measured(lambda *_: torch.tensor([3.0, 3, 1, 1, 0, 2]))
    names = ("reward_mean", "accuracy", "format_rate", "zero_variance_groups")
    assert [metrics[name] for name in names] == pytest.approx([10 / 6, 3 / 6, 5 / 6, 2 / 3])
    for truths, expected in ((["7", None, "5"], [3 / 4, 1.0]), (3 * [None], 2 * [math.nan])):
        monkeypatch.setattr(sys.modules[__name__], "TRUTHS", truths)
        metrics, *_ = measured(lambda *_: torch.arange(6.0))
        assert [metrics[x] for x in names[1:3]] == pytest.approx(expected, nan_ok=True)


def test_evaluation_is_its_definition(monkeypatch):
    p = parts("--max-new-tokens=11", "--system-prompt=Think.", "--prompts-per-step=3",
              "--group-size=2")
    problems = [{"question": f"q {j}", "answer": str(j)} for j in range(7)]
    asked, how, seeds = [], [], []

    def answers(model, tokenizer, prompts, group_size, max_new_tokens, temperature, generators):
        asked.append(prompts)
        how.append((group_size, max_new_tokens, temperature))
        seeds.append([g.initial_seed() for g in generators])
        # right where the number of the problem is even, and in the second of two answers
        numbers = [prompt.split()[2] for prompt in prompts for _ in range(group_size)]
        return SimpleNamespace(responses=[
            f"\\boxed{{{x}}}" if int(x) % 2 == 0 or i % group_size == 1 else "?"
            for i, x in enumerate(numbers)])

    def reward_of(problems, prompts, rollout):
        assert [problem["question"] in prompt for problem, prompt in zip(problems, prompts)]
        return torch.tensor([float(problem["answer"]) for problem in problems])
    p = parts_of(p, problems, answers, reward_of)
    figures, found = train.evaluate(p, p.settings)
    assert figures == {"eval_accuracy": pytest.approx(4 / 7), "eval_reward": pytest.approx(3)}
    assert [reward for _, reward in found] == [0, 1, 2, 3, 4, 5, 6]
    assert [text for text, _ in found[:3]] == ["\\boxed{0}", "?", "\\boxed{2}"]
    prompts = [train.chat_prompt(p.tokenizer, problem, "Think.") for problem in problems]
    assert asked == [prompts[:6], prompts[6:]]
    p.reward_of = None
    figures, found = train.evaluate(p, p.settings, 2, 0.7)
    assert figures == {"eval_accuracy": pytest.approx(11 / 14)} and len(found) == 14
    assert how == [(1, 11, 0.0)] * 2 + [(2, 11, 0.7)] * 3 and len(set(sum(seeds, []))) == 7
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train, "world", lambda: 2)        # this rank has a step's rows at a time
    meetings = []
    monkeypatch.setattr(train, "gathered_objects", lambda value: meetings.append(value) or [value])
    train.evaluate(p, p.settings)
    assert asked[-2:] == [prompts[:2], prompts[2:3]]
    assert len(meetings) == 1                             # another rank may have one batch only


# --- [H] The loop ---------------------------------------------------------------------------------
def test_the_loop_warms_up_evaluates_and_saves_when_it_should():
    run = loop("--warmup-steps=4", "--eval-every=2", "--save-every=3", "--updates-per-rollout=1")
    assert run.rates == [m["lr"] for m in run.metrics[1:]]
    assert run.rates == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004])
    assert [m["step"] for m in run.metrics] == list(range(6))
    assert [m["step"] for m in run.metrics if "eval_accuracy" in m] == [0, 2, 4, 5]
    assert run.checkpoints == [3, 5]
    assert len(run.before) == len(run.after) == 3 and run.before is not run.after


def test_every_step_asks_its_own_problems_with_its_own_random_numbers():
    drawn = []

    def spy(model, tokenizer, prompts, *how):
        if how[2]:                                        # an evaluation is greedy
            drawn.append((prompts, how[3]))
        return sample_groups(model, tokenizer, prompts, *how)

    run = loop("--system-prompt=", problems=PROBLEMS[:4], sampler=spy,
               reward_of=lambda *given: torch.arange(float(len(given[2].responses))))
    for (prompts, generators), (batch, rollout) in zip(drawn, run.samples, strict=True):
        assert prompts == batch.prompts and generators == batch.generators
        assert rollout.rewards.tolist() == [0, 1, 2, 3]
        assert rollout.advantages.tolist() == pytest.approx([-1, 1, -1, 1])
    assert run.metrics[-1]["eval_reward"] == pytest.approx(1.0)


def test_problems_and_random_numbers_follow_from_seed_step_and_round(tiny):
    """The problems of an epoch are asked once each; every prompt has a generator of its own."""
    def batch(n, step, attempt=0, *flags):
        problems = [{"question": f"q {j}.", "answer": "1"} for j in range(n)]
        found = train.batch_of_step(tiny[1], problems, step,
                                    settings("--prompts-per-step=4", *flags), attempt)
        pairs = zip(found.problems, found.prompts, strict=True)
        assert all(problem["question"] in prompt for problem, prompt in pairs)
        return tuple(found.prompts), [g.initial_seed() for g in found.generators]

    epochs = [[batch(18, step)[0] for step in range(1 + 4 * e, 5 + 4 * e)] for e in range(2)]
    assert [len({*sum(epoch, ())}) for epoch in epochs] == [16, 16] and epochs[0] != epochs[1]
    ways = [(3,), (4,), (3, 0, "--seed=1"), (3, 1), (3, 2), (4, 1)]
    drawn = [batch(12, *way) for way in ways]
    assert drawn == [batch(12, *way) for way in ways]
    assert len({prompts for prompts, _ in drawn}) == 6
    assert len({seed for _, seeds in drawn for seed in seeds}) == 24
    assert not {*drawn[0][0]} & {*drawn[3][0]}            # 8 others are there, and come first
    assert {*batch(4, 1, 1)[0]} == {*batch(4, 1)[0]}      # where there are no others


def test_the_bar_shows_trouble_first():
    written = []
    bar = SimpleNamespace(set_postfix_str=written.append, update=lambda: None)
    metrics = {"step": 4, "reward_mean": 1.25, "accuracy": 0.5, "response_length_mean": 12.4,
               "approx_kl": 0.0123}
    run = train.Run()
    run.history = [{"step": step, "eval_accuracy": x} for step, x in ((0, 0.125), (2, 0.75))]
    for run.skipped, first in ((0, []), (3.0, ["3"])):
        train.update_bar(bar, metrics, run)
        numbers = re.findall(r"[\d.]+", written.pop())
        assert numbers == [*first, "1.25", "0.50", "12", "0.012", "0.75"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_adamw(dtype):
    """Its first step moves weights by lr against the gradient's sign; decay, 0 by default, too."""
    for flags, grad, move in (((), 1.0, lambda was: was - 0.01),
                              (("--weight-decay=0.5",), 0.0, lambda was: was * (1 - 0.01 * 0.5))):
        p = parts("--lr=0.01", *flags, dtype=dtype)
        masters = p.optimizer.param_groups[0]["params"]
        own = all(weight is master for weight, master in zip(p.policy.parameters(), masters))
        assert own == (dtype == torch.float32)            # these are their own masters
        expected = [move(master.detach().float()) for master in masters]
        for weight in p.policy.parameters():
            weight.grad = torch.full(weight.shape, grad)
        p.optimizer.step()
        assert all(map(functools.partial(torch.allclose, atol=1e-6), masters, expected))


def test_masters_gather_the_gradient_of_all_micro_batches():
    """bfloat16 gradients are added up in float32, and are those of the bfloat16 model."""
    p = parts("--max-grad-norm=1e9", "--kl-coef=0", "--lr=1e-12", dtype=torch.bfloat16)
    rollout = rollout_of(p)
    found = []
    p.optimizer.register_step_pre_hook(lambda *_: found.append(gradient(p.policy)))
    for budget in (10**6, 1):
        updated(p, p.policy, p.optimizer, rollout, micro_batch_tokens=budget)
    assert found[0].dtype == torch.float32
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


# --- A run, its files and what it prints ----------------------------------------------------------
@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    done = begin("train.py", *SMALL, f"--output={folder}")()
    return SimpleNamespace(folder=folder, out=well_ended(done), err=done.stderr)


def test_a_run_leaves_the_files_of_the_contract(finished_run):
    folder = finished_run.folder
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == [
        "checkpoint.safetensors", "config.json", "final", "metrics.jsonl", "page.html",
        "samples.jsonl"]
    metrics = metrics_of(folder)
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert all(m.keys() >= {"reward_mean", "lr", "loss", "tokens_per_second"} for m in metrics[1:])
    assert [m["step"] for m in metrics if "eval_accuracy" in m] == [0, 2, 3]
    config = json.loads((folder / "config.json").read_text())
    assert config["lr"] == 3e-4 and config["steps"] == 3  # of grpo.json, of the command line
    assert not config.keys() & {"output", "resume", "config", "dry_run", "eval_only", "trace"}
    samples = lines_of(folder / "samples.jsonl")
    assert [record["step"] for record in samples] == [1, 1, 2, 2, 3, 3]
    for record in samples:
        assert "<|user|>" in record["prompt"]
        assert len(record["responses"]) == len(record["finished"]) == 4
        advantages = group_advantages(torch.tensor(record["rewards"]), 4)
        assert record["advantages"] == pytest.approx(advantages.tolist(), abs=1e-6)
    for word in ("question  ", "grpo.json", "0.08M parameters", "32 problems", "8 held out",
                 "from step 0 to 3", str(folder)):
        assert word in finished_run.out
    final = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert AutoTokenizer.from_pretrained(folder / "final").chat_template
    assert not same_tensors(final.state_dict(), parts().policy.state_dict())
    last = checkpoint_of(folder)
    assert all(torch.equal(last[f"weight/{name}"], p) for name, p in final.named_parameters())


def test_the_story_tells_of_a_problem_that_was_learned(capsys, tmp_path):
    """By the run's own reward: a right answer that became wrong is no success."""
    run, nan = run_in(tmp_path), math.nan
    run.eval_problems = [{"question": f"question {x}", "answer": x} for x in "1234"]
    run.before = [("\\boxed{1}", 0.9), ["\\boxed{9}", 0.1], ("\\boxed{9}", nan), ("", 0.0)]
    run.after = [("\\boxed{7}", 0.8), ["\\boxed{8}", 0.7], ("\\boxed{3}", nan), ("", 0.1)]
    train.print_story(run)
    out = capsys.readouterr().out
    assert "question  question 2\nbefore    \\boxed{9}\nafter     \\boxed{8}\ntruth     2" in out


def test_a_reward_from_python_is_not_replaced_in_silence(capsys, finished_run, tmp_path):
    """README's way to give one; neither --resume nor --config trains by another."""
    folder = tmp_path / "run"

    def length(problems, prompts, rollout):
        return torch.tensor([-float(len(text)) for text in rollout.responses])

    def trained(*flags, reward_of=length):
        s = settings(*flags)
        s.reward = None
        p = train.load(s)
        p.reward_of = reward_of
        return train.train(p, train.Run(), s)

    assert trained(*SMALL, "--reward=rule", "--steps=1", f"--output={folder}") == 0
    capsys.readouterr()
    for flags in (["--resume", str(folder)],
                  ["--config", f"{folder}/config.json", f"--output={tmp_path / 'other'}"]):
        line = refused(capsys, *flags, "--steps=2")
        assert line.startswith("train.py: --reward ") and "parts.reward_of" in line
    assert not (tmp_path / "other").exists()
    assert trained(f"--resume={folder}", "--steps=2") == 0
    assert all(m["reward_mean"] < 0 for m in metrics_of(folder)[1:])
    # A run by flags goes on by them
    assert json.loads((finished_run.folder / "config.json").read_text())["reward"] is None


def test_the_command_that_goes_on_is_the_one_that_began(monkeypatch):
    assert train.command("train.py", "--resume", "x").startswith(f"{sys.executable} ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.command("train.py", "--resume", "x").startswith("torchrun --nproc-per-node=2 /")
    assert train.command("sample.py").startswith(f"{sys.executable} ")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")           # of two nodes
    assert train.command("train.py").startswith("torchrun --nproc-per-node=1 /")


def test_a_run_from_python_has_its_threads_too_and_blocks_that_may_grow(monkeypatch):
    assert "expandable_segments" in os.environ["PYTORCH_ALLOC_CONF"]
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    train.load(settings("--threads=3", "--eval-limit=2"))
    assert asked == [3]


def test_a_run_goes_on_from_its_model_with_all_of_its_settings(finished_run):
    command = finished_run.out.splitlines()[-1].partition("train.py ")[2].split()
    assert command[::2] == ["--config", "--model"]
    first = train.parse(SMALL)
    for model in (command[3], str(finished_run.folder)):
        s = train.parse([*command[:2], "--model", model])
        assert s.model == str(finished_run.folder / "final")
        for name in train.FIELDS:
            if train.FIELDS[name].metadata["kept"] and name not in ("model", "offload", "dtype"):
                assert getattr(s, name) == getattr(first, name), name


def test_eval_only_prints_the_figures(capsys, monkeypatch):
    monkeypatch.chdir("/")
    trains("--eval-only", "--eval-limit=8", "--group-size=4", "--max-new-tokens=16")
    out = capsys.readouterr().out
    line, = [line for line in out.splitlines() if line.startswith("eval_accuracy: ")]
    assert "8 problems, 4 samples of each at temperature 1.0" in out
    p = parts("--max-new-tokens=16")
    problems = reward.load_problems(p.settings.eval_data)[:8]
    p = parts_of(p, problems)
    greedy, _ = train.evaluate(p, p.settings)
    sampled, answers = train.evaluate(p, p.settings, 4, 1.0)
    responses = [text for text, _ in answers]
    figures = f"greedy {greedy['eval_accuracy']:.4f}, sampled {sampled['eval_accuracy']:.4f}"
    assert line == f"eval_accuracy: {figures}"
    figures = reward.figures_of(responses, [problem["answer"] for problem in problems], 4)
    assert all(f"\n{name:18} {value:.4f}\n" in out for name, value in figures.items())


def test_the_help():
    done = begin("train.py", "--help")()
    assert done.returncode == 0 and done.stderr == ""
    for name in train.FIELDS:
        assert len(re.findall(rf"\n  {train.flag_of(name)}[ ,\n]", done.stdout)) == 1, name
    assert "_" not in "".join(re.findall(r"\n  --(\S+)", done.stdout))
    heads = [field.metadata["head"] for field in train.FIELDS.values() if field.metadata["head"]]
    places = [done.stdout.index(head + ":") for head in heads]
    assert len(heads) == 8 and places == sorted(places)


# --- Settings: the defaults, over them a config file, over it the command line --------------------
def test_the_command_line_wins_over_the_config_and_the_config_over_the_defaults(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "c.json").write_text(json.dumps(
        {"model": "Qwen/Qwen2.5-0.5B", "lr": 0.5, "scale_by_std": False, "data": "d.jsonl",
        "kl_coef": 0, "kl_band": [0.1, 0.2], "clip_eps_high": None, "reward": ["d.jsonl", "rule"]}))
    s = train.parse([f"--config={tmp_path / 'c.json'}", "--kl-coef=0.3"])
    assert (s.lr, s.scale_by_std, s.kl_coef, s.kl_band) == (0.5, False, 0.3, [0.1, 0.2])
    assert s.clip_eps_high is None and s.steps == 500 and s.system_prompt == train.BOXED
    assert s.data == str(tmp_path / "d.jsonl")            # from the folder of the file
    assert s.reward == [str(tmp_path / "d.jsonl"), "rule"] and s.model == "Qwen/Qwen2.5-0.5B"


def test_the_tiny_policy_brings_its_config_and_no_other_model_does(tmp_path):
    own = json.loads((TINY / "grpo.json").read_text())
    s = train.parse([])
    assert (s.steps, s.lr, s.system_prompt) == (own["steps"], own["lr"], "")
    assert s.eval_data == str(TINY / "test.jsonl") and s.config == str(TINY / "grpo.json")
    assert train.parse([f"--model={TINY}"]).steps == 500
    (tmp_path / "c.json").write_text('{"lr": 0.5}')       # without a model: over the tiny policy's
    s = train.parse([f"--config={tmp_path / 'c.json'}"])
    assert (s.lr, s.steps) == (0.5, own["steps"]) and s.config == str(tmp_path / "c.json")


def test_what_flags_become(monkeypatch, tmp_path):
    """Paths are absolute, so that a resumed run finds them."""
    monkeypatch.chdir(tmp_path)
    for name in ("d.jsonl", "e.jsonl", "r.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "m").mkdir()
    s = train.parse(["--model=m", "--data=d.jsonl", "--eval-data=e.jsonl", "--reward=r.py:f"])
    assert (s.model, s.data, s.eval_data) == tuple(
        str(tmp_path / name) for name in ("m", "d.jsonl", "e.jsonl"))
    assert s.reward == [f"{tmp_path / 'r.py'}:f"]
    assert train.parse(["--model=Qwen/Qwen2.5-0.5B", "--data=gsm8k"]).data == "gsm8k"
    # A switch is on, off, or left to the program; a list has several values
    assert [train.parse(flags).offload for flags in ([], ["--offload"], ["--no-offload"])] == [
        None, True, False]
    # Rewards and their weights that are given twice are added; of all others the last counts
    s = train.parse("--reward rule --reward think rule --reward-weights=1 --reward-weights 2 -0.5 "
                    "--steps=3 --lr=0.1 --steps 4".split())
    assert (s.reward, s.reward_weights, s.steps) == (["rule", "think", "rule"], [1, 2, -0.5], 4)
    # A learning rate for all weights is none for LoRA's factors
    assert train.parse(["--model=x", "--lora-rank=4"]).learning_rate == 1e-4
    assert train.parse(["--lora-rank=4", "--lr=1e-5"]).learning_rate == 1e-5
    # Held-out problems of a config do not judge another data set
    (tmp_path / "c.json").write_text('{"data": "d.jsonl"}')
    assert train.parse(["--data=d.jsonl"]).eval_data == ""
    assert train.parse(["--data=gsm8k"]).eval_data == ""
    assert train.parse(["--config=c.json"]).eval_data == ""
    assert train.parse(["--data=x", "--eval-data=y"]).eval_data == "y"


# --- Memory ---------------------------------------------------------------------------------------
def test_checkpointed_layers_run_again():
    p, calls = parts("--micro-batch-tokens=10000", "--kl-coef=0", "--sampler-correction=2"), []
    rollout = rollout_of(p)
    p.policy.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(on))
    for on in (False, True):
        updated(p, p.policy, p.optimizer, rollout, gradient_checkpointing=on)
    assert calls == [False, True, True]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The shape of Qwen2.5-1.5B, without weights or a tokenizer -> the flag that names it."""
    folder = tmp_path_factory.mktemp("big")
    Qwen2Config(num_hidden_layers=28, hidden_size=1536, num_attention_heads=12,
                num_key_value_heads=2, intermediate_size=8960, vocab_size=151936,
                tie_word_embeddings=True, max_position_embeddings=32768).save_pretrained(folder)
    return f"--model={folder}"


def counted(tmp_path, *flags, dtype=torch.bfloat16, device="cuda"):
    """The count of a small Qwen3: 4 x 3 answers of 44 tokens, micro-batches of 500."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    s = train.parse([f"--model={tmp_path}", "--prompts-per-step=4", "--group-size=3",
                     "--max-new-tokens=44", "--micro-batch-tokens=500", *flags])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    count = train.memory(s, model, torch.device(device))
    return count, sum(p.numel() for p in model.parameters()), model


def test_count_of_the_memory(monkeypatch, tmp_path):
    with monkeypatch.context() as ranks:                  # shards, and a whole copy that samples
        ranks.setenv("WORLD_SIZE", "2")
        count, n, _ = counted(tmp_path)
    assert count["policy"] == 2 * n and count["policy's shard"] == count["reference"] == n
    count, n, model = counted(tmp_path)
    assert count["policy's shard"] == 0
    largest = 4 * 1000 * 64                               # a tensor of a checkpoint, in float32
    assert count["policy"] == count["reference"] == 2 * n
    assert count["float32 masters"] == count["gradients, float32"] == 4 * n
    assert count["AdamW's two moments"] == 8 * n and count["reward model"] == 0
    assert count[train.HOST] == 2 * n + largest           # weights on their way to the device
    # keys and values of 12 rows, 300 positions, 3 layers, 2 heads of 16, in bfloat16
    assert count["key/value cache"] == 2 * 12 * 300 * 3 * 2 * 16 * 2
    assert count["logits of the draw"] == 12 * 12 * 1000  # of 12 rows, 3 numbers for each word
    count, n, model = counted(tmp_path, "--offload", "--kl-coef=0")
    assert count["float32 masters"] == count["AdamW's two moments"] == count["reference"] == 0
    pinned = sum(2**math.ceil(math.log2(4 * W.numel())) for W in model.parameters())
    assert count["gradients, float32"] == 4 * n
    assert count[train.HOST] == 8 * n + 2 * pinned + largest     # masters and gradients are pinned
    count, n, _ = counted(tmp_path, dtype=torch.float32)  # the weights are their own masters
    assert count["float32 masters"] == 0 and count["policy"] == 4 * n
    head = 4 * 1000 * 64
    # On a CPU the head in half precision has a float32 copy, else a second gradient; and a single
    # backward pass frees what it kept while the gradients grow: in bfloat16 half of them fit. With
    # several passes a seventh more is held.
    for dtype in (torch.float32, torch.bfloat16):
        for flags, passes in (([], 2), (["--micro-batch-tokens=1000000"], 1)):
            count, n, _ = counted(tmp_path, *flags, dtype=dtype, device="cpu")
            on_a_gpu, _, _ = counted(tmp_path, *flags, dtype=dtype)
            kept = on_a_gpu["kept for the backward pass"]
            kept = kept - dtype.itemsize * n if passes == 1 else 1.15 * kept
            assert count["kept for the backward pass"] == kept
            assert count["the program"] == 5e8 + head
    # LoRA's factors; the first weights are a copy where no reference keeps them
    linears = [W for name, W in model.named_parameters() if "proj" in name]
    factors = sum(4 * sum(W.shape) for W in linears)
    widest = 4 * max(W.numel() for W in linears)          # of one of them: a master
    copied = 2 * sum(W.numel() for W in linears)
    for flags, first in ((), 0), (["--kl-coef=0"], copied), (["--renew-reference=1"], copied):
        count, n, _ = counted(tmp_path, "--lora-rank=4", *flags)
        assert count["float32 masters"] == 4 * factors and count["LoRA's first weights"] == first
        assert count["gradients, float32"] == 4 * factors + widest
    # A reward model has float32 weights; if it is trained, also a gradient and moments
    scorer = Qwen2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
                         intermediate_size=48, vocab_size=64)
    scorer.save_pretrained(tmp_path / "scorer")
    weights = AutoModelForSequenceClassification.from_config(scorer).num_parameters()
    for flags, each in (((), 4), (("--renew-reference=1",), 16)):
        count, _, _ = counted(tmp_path, f"--reward-model={tmp_path / 'scorer'}", *flags)
        assert count["reward model"] == each * weights


def test_a_width_for_each_layer_is_counted(monkeypatch, tmp_path):
    wide = dict(model_type="gemma3n_text", num_kv_shared_layers=0, intermediate_size=[96, 96, 192])
    monkeypatch.setattr(sys.modules[__name__], "QWEN", QWEN | wide)
    assert counted(tmp_path)[0]["kept for the backward pass"] > 500 * 3 * 4 * 192 * 2


@pytest.mark.parametrize("changes", [
    {}, {"model_type": "qwen2", "num_attention_heads": 4},
    {"model_type": "llama", "hidden_size": 128, "intermediate_size": 384}])
def test_count_of_what_is_kept_is_what_autograd_saves(monkeypatch, tmp_path, changes):
    """Of a micro-batch of rows without padding, in bfloat16; heads wider than the hidden states."""
    monkeypatch.setattr(sys.modules[__name__], "QWEN", QWEN | changes)
    count, _, model = counted(tmp_path)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.untyped_storage()) or tensor, lambda tensor: tensor):
        model.model(torch.zeros(1, 500, dtype=torch.long), use_cache=False)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in kept}
    saved = sum(size for at, size in sizes.items() if at not in weights)
    assert count["kept for the backward pass"] == pytest.approx(saved, rel=0.15)


# Cards that people own: GB free there and in host memory, capability -> --offload and
# --gradient-checkpointing for 1.5B
OLD = (0, 0)
OWNED = [("cuda", 84, 64, (9, 0), (False, False)), ("cuda", 69, 64, (9, 0), (False, True)),
         ("cuda", 41.3, 64, (8, 0), (False, True)), ("cuda", 41.1, 64, (8, 0), (True, True)),
         ("cuda", 25, 32.1, (8, 9), (True, True)), ("cuda", 25, 31.9, (8, 9), None),
         ("cuda", 20, 64, (8, 9), None), ("cuda", 15.6, 64, (7, 5), None),
         ("cpu", 60, 60, OLD, (False, False)), ("cpu", 42, 42, OLD, (False, True)),
         ("cpu", 30, 30, OLD, None), ("mps", 30, 64, OLD, None)]


@pytest.mark.parametrize("device, free, host, capability, way", OWNED)
def test_the_first_way_that_fits_is_taken(capsys, machine, big, device, free, host, capability,
                                          way):
    """Nine tenths of what is free; what is given stands; what does not fit is refused."""
    machine(device, free, host, capability)
    flags = (big, "--data=gsm8k")
    if not way:
        with pytest.raises(train.BadInput, match="--model .* GB .* host memory.*--lora-rank 16"):
            train.plan_memory(train.parse([*flags]))
        return
    s = train.plan_memory(train.parse([*flags]))
    assert (s.offload, s.gradient_checkpointing) == way
    assert s.micro_batch_tokens == (8704 if device == "cuda" else 1024)  # two groups
    told = capsys.readouterr().out
    assert ("--offload" in told, "--gradient-checkpointing" in told) == way
    given = train.plan_memory(train.parse([*flags, "--lora-rank=16", "--gradient-checkpointing",
                                           "--micro-batch-tokens=99"]))
    assert given.gradient_checkpointing and not given.offload and given.micro_batch_tokens == 99


def test_dry_run_counts_from_the_configuration_alone(capsys, machine, big):
    """Qwen2.5-1.5B; a star stands over the first way that fits."""
    machine("cuda", 43)
    trains(big, "--dry-run")
    rows = {line[:30].strip(): line[30:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["--offload"] == "                     yes     yes"
    assert rows["--gradient-checkpointing"] == "             yes             yes"
    star, = [cells for what, cells in rows.items() if "*" in what]
    assert star.index("*") == 15                          # of the second column
    assert rows["device memory"].split() == ["62.64", "37.04", "44.12", "18.52"]
    machine("cpu", 100, 100)                              # the card of another machine
    trains(big, "--dry-run=8", "--lora-rank=16")
    out = capsys.readouterr().out
    assert "bfloat16" in out and " 11.76 " in out and "no way" in out
    # A card of so many GB, which lie in no machine; a run of 1.5B keeps 37 GB while it saves
    for size, star in ((80, 7), (40, 15), (24, 31)):
        trains(big, f"--dry-run={size}")
        rows = {line[:30].strip(): line[30:] for line in capsys.readouterr().out.splitlines()[1:]}
        assert rows["*: a run takes this way"].index("*") == star
    trains(big, "--dry-run", "20")
    out = capsys.readouterr().out
    assert "*" not in out.replace("*: ", "") and "--lora-rank 16" in out.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_products_of_many_shapes_keep_little_memory():
    """400 new shapes in bfloat16 would keep 250 MB; on a CPU that has no bfloat16 nothing."""
    program = """
import re, train, torch
def held(first, last):
    for n in range(first, last):
        torch.ones(n, 128, dtype=torch.bfloat16) @ torch.ones(128, 128, dtype=torch.bfloat16)
    return int(re.search("VmRSS:(.*) kB", open("/proc/self/status").read())[1]) / 1000
before = held(100, 200)
print(held(200, 600) - before)"""
    unset = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=LIMIT, cwd=train.HERE, env=unset)
    assert float(well_ended(done)) < 80


def test_memory_that_runs_out_in_the_optimizer_repeats_no_step(monkeypatch):
    p = parts(dtype=torch.bfloat16)
    rollout = rollout_of(p)
    monkeypatch.setattr(train.MasterAdamW, "round", raises(NO_MEMORY[0]))
    with pytest.raises(torch.OutOfMemoryError):
        updated(p, p.policy, p.optimizer, rollout, kl_coef=0)
    assert {int(state["step"]) for state in p.optimizer.state.values()} == {1}
