"""Process supervision (--step-reward), iterative training with a reward model (--reward-model)."""
import copy
import json
import math
import shutil
import pytest
import torch
from checks import seeded, value_error
from files import (FEW, MINE, TINY, apart, assert_bitwise, assert_same_checkpoint, assert_same_run,
                   checkpoint_of, curve, edit_tensors, json_lines, lines_of, same_tensors)
from models import logprobs_on_full_logits
from runs import begin, refused, trained, trains, well_ended
from steps import PROBLEMS, gradient, own_rewards, parts, whole_step
from safetensors.torch import load_file
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer)
from transformers.utils import logging
import reward
import train
from advantage import process_advantages
from logprob import IGNORE

MODEL = TINY / "reward_model"
SMALL = (*FEW, "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=40", "--device=cpu",
         "--eval-limit=2", "--eval-every=1", "--save-every=1", "--lr=2e-3")
COMMAS = ("--step-reward", f"{MINE}:commas")
ITERATIVE = (*SMALL, "--renew-reference=2", f"--reward-model={MODEL}", "--reward-model-lr=1e-3")


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "run"
    return folder, begin("train.py", *ITERATIVE, "--steps=4", f"--output={folder}", ranks=2)


@pytest.fixture(scope="module")
def whole(two_ranks, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), *ITERATIVE, "--steps=4")


@pytest.fixture
def learner():
    return reward.open_reward_model(MODEL, 1e-3)[0]


# --- The iteration --------------------------------------------------------------------------------
def test_two_iterations_are_those_of_the_formulas(whole, learner):
    """Rewards, pairs, replay and the trained weights again, from the answers that were logged."""
    problems = reward.load_problems(str(TINY / "few.jsonl"))
    truths = {problem["question"]: problem["answer"] for problem in problems}
    model, tokenizer = learner.model, learner.tokenizer
    learner.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    metrics = {m["step"]: m for m in curve(whole)}
    records = lines_of(whole / "samples.jsonl")
    for step in range(1, 5):
        groups = [record for record in records if record["step"] == step]
        assert len(groups) == 2
        prompts = [group["prompt"] for group in groups]
        responses = groups[0]["responses"] + groups[1]["responses"]
        asked = [prompts[n // 4] for n in range(8)]
        scores = reward.reward_model_scores(model, tokenizer, asked, responses)
        logged = torch.tensor(groups[0]["rewards"] + groups[1]["rewards"])
        assert torch.allclose(logged, scores, atol=1e-5)
        assert metrics[step]["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
        rule = reward.score_responses(responses, [truths[g["question"]] for g in groups], 4)
        assert metrics[step]["accuracy"] == pytest.approx(float((rule == 1.5).float().mean()))
        rows = list(zip(asked, responses, rule.tolist()))
        reward.collect_pairs(learner, rows, 4, train.seeded(0, "pairs", step))
        if step % 2:
            assert "reward_model_loss" not in metrics[step]
            continue
        assert len(learner.pairs) > 2
        figures = reward.train_reward_model(learner, train.seeded(0, "reward model", step))
        for name, value in figures.items():
            assert metrics[step][name] == pytest.approx(value, rel=1e-5)
    found = weights(whole / "reward_model")
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    assert not same_tensors(found, weights(MODEL))
    assert AutoTokenizer.from_pretrained(whole / "reward_model").chat_template
    AutoModelForCausalLM.from_pretrained(whole / "final")


def test_a_resumed_run_is_bitwise_the_same(whole, tmp_path):
    """Stopped in the middle of an iteration, and at its end."""
    folder = trained(tmp_path / "run", *ITERATIVE, "--steps=1")
    for steps in (2, 3, 4):
        trains("--resume", folder, f"--steps={steps}")
    assert_bitwise(folder, whole)
    assert same_tensors(weights(folder / "reward_model"), weights(whole / "reward_model"))
    saved = checkpoint_of(folder)
    assert_same_checkpoint(folder, whole)
    kinds = {name.split("/")[0] for name in saved if "/reward_model/" in name}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert any(json.loads(saved["counters"].numpy().tobytes())["pairs"])


def test_two_ranks_train_the_same_reward_model(whole, two_ranks):
    folder, end = two_ranks
    well_ended(end())
    assert_same_run(folder, whole)
    ours, theirs = (weights(place / "reward_model") for place in (folder, whole))
    assert apart(ours, theirs, weights(MODEL)) < 0.01


def test_without_true_answers_or_renewal_the_reward_model_stays_as_it_is(capsys, tmp_path):
    asked = [{"question": problem["question"]} for problem in PROBLEMS[:12]]
    (tmp_path / "asked.jsonl").write_text(json_lines(*asked))
    data = f"--data={tmp_path / 'asked.jsonl'}"
    folder = trained(tmp_path / "run", *ITERATIVE, "--steps=2", data)
    last = curve(folder)[-1]
    assert last["reward_model_loss"] is None and last["accuracy"] is None
    assert last["reward_std"] > 0 and last["grad_norm"] > 0
    assert same_tensors(weights(folder / "reward_model"), weights(MODEL))
    assert "--renew-reference: no true answer is known" in capsys.readouterr().out
    folder = trained(tmp_path / "fixed", *SMALL, f"--reward-model={MODEL}", "--steps=1")
    assert "--renew-reference: " not in capsys.readouterr().out
    assert not (folder / "reward_model").exists()
    assert not any("/reward_model/" in name for name in checkpoint_of(folder))
    assert curve(folder)[1]["reward_mean"] != 0 and "eval_reward" in curve(folder)[1]


def test_a_score_that_is_not_finite_ends_the_step(learner):
    with torch.no_grad():
        learner.model.score.weight[:] = 3e38
    with pytest.raises(train.BadInput, match="^--reward-model: scores are not finite"):
        reward.reward_model_scores(learner.model, learner.tokenizer, ["Ben has 9"], ["9"])


# --- The reward model's own learning --------------------------------------------------------------
def fresh_learner(lr=1e-2, **changes):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(MODEL, **changes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    return reward.RewardModel(model, tokenizer, optimizer)


def saved_model(folder, **changes):
    learner = fresh_learner(**changes)
    learner.model.save_pretrained(folder)
    learner.tokenizer.save_pretrained(folder)


def test_a_reward_model_has_no_dropout(tmp_path):
    saved_model(tmp_path, attention_dropout=0.9)
    learner, _ = reward.open_reward_model(tmp_path)
    given = (learner.model, learner.tokenizer, ["Anna has 9 books"], ["\\boxed{ 9 }"])
    assert len({float(reward.reward_model_scores(*given)[0]) for _ in range(4)}) == 1


def worked_and_guessed(first, last):
    """Rows of a group of two per problem: worked out, and a guess that is wrong."""
    rows = []
    for problem in PROBLEMS[first:last]:
        steps = problem["solution"].replace("\n", " , ")
        rows.append((problem["question"], f"{steps} , \\boxed{{ {problem['answer']} }}", 1.5))
        rows.append((problem["question"], "\\boxed{ 3 }", 0.5))
    return rows


def test_a_reward_model_learns_from_round_to_round():
    learner = fresh_learner()
    generator = seeded()
    figures = []
    for k in range(4):
        reward.collect_pairs(learner, worked_and_guessed(24 * k, 24 * k + 24), 2, generator)
        assert len(learner.pairs) == 24 and len(learner.replay) == 24 * k
        figures.append(reward.train_reward_model(learner, generator))
    first, last = figures[0], figures[-1]
    assert first["reward_model_accuracy"] < 0.9 and last["reward_model_accuracy"] == 1.0
    assert last["reward_model_loss"] < 0.2 < first["reward_model_loss"] and learner.pairs == []
    assert all(p.grad is None for p in learner.model.parameters())


def test_pairs_and_replay_are_bounded_and_keep_what_is_old(monkeypatch):
    monkeypatch.setattr(reward, "PAIRS_KEPT", 8)
    learner = fresh_learner()
    generator = seeded()
    for first, last in ((0, 8), (8, 20)):
        reward.collect_pairs(learner, worked_and_guessed(first, last), 2, generator)
        assert len(learner.pairs) == len(set(learner.pairs)) == 8
        reward.train_reward_model(learner, generator)
        assert len(learner.replay) == 8
    seen = {row[0] for row in worked_and_guessed(0, 8)}
    assert 0 < sum(prompt in seen for prompt, *_ in learner.replay) < 8


def test_the_tiny_reward_model_ranks_worked_answers_above_wrong_guesses(learner):
    questions, answers, _ = zip(*worked_and_guessed(0, 50))
    prompts = [f"<|user|> {question} <|assistant|>" for question in questions]
    scores = reward.reward_model_scores(learner.model, learner.tokenizer, prompts, answers)
    assert float((scores[::2] > scores[1::2]).float().mean()) >= 0.95
    assert (MODEL / "model.safetensors").stat().st_size < 60_000


# --- Process supervision --------------------------------------------------------------------------
def by_hand(rollout, problems, comma):
    """What `commas` says, from the ids that were trained on."""
    for n, row in enumerate(rollout.labels):
        ids = row[row != IGNORE].tolist()
        ends = [i for i, token in enumerate(ids) if token == comma] + [len(ids) - 1]
        worked = problems[n // 4]["solution"]
        yield [(end, float((7 * end + len(worked)) % 5)) for end in ends]


def test_step_rewards_reach_the_gradient():
    p = parts(*COMMAS, "--updates-per-rollout=1", "--max-grad-norm=1e9", "--kl-coef=0")
    start = copy.deepcopy(p.policy_model)
    _, rollout, gradients = whole_step(p, reward_of=own_rewards(p.settings))
    mask = rollout.mask                                                                # (N, S-1)
    A = process_advantages([*by_hand(rollout, p.problems, p.tokenizer.vocab[","])], mask, 4)
    assert torch.equal(rollout.advantages, A) and A[mask].std() > 0
    rule = reward.score_responses(rollout.responses, reward.truths_of(p.problems), 4)
    assert torch.equal(rollout.rewards, rule)
    logp, _ = logprobs_on_full_logits(start, rollout, 1.0)
    (-(logp * A * mask).sum(1) / mask.sum(1)).mean().backward()
    assert (gradient(start) - gradients[0]).norm() <= 1e-5 * gradient(start).norm()


def test_a_run_with_step_rewards_and_a_reward_beside_them(tmp_path):
    folder = trained(tmp_path / "run", *SMALL, *COMMAS, "--reward", "rule", "--clip-advantages=1",
                     "--steps=2")
    records = lines_of(folder / "samples.jsonl")
    rows = [set(row) for record in records for row in record["advantages"]]
    assert all(-1 <= a <= 1 for row in rows for a in row)
    assert any(len(row) > 1 for row in rows)              # of the tokens and not of the answer
    assert curve(folder)[-1]["reward/rule"] == curve(folder)[-1]["reward_mean"]


def step_rewards(steps):
    table = {"question": ["q", "q"], "completions": ["good", "bad"],
             "completion_ids": [[4, 5, 6], [7, 8]]}
    return reward.call_function("mine.py:steps", steps, table, reward.as_steps)


@pytest.mark.parametrize("second", [[0.5], 5, [(0, 1.0, 2.0)], [(0.5, 1.0)], None, [(0, None)],
                                    [(0, "much")], [(2, 1.0)], [(-1, 1.0)], [(1, math.nan)]])
def test_what_a_step_function_gives_is_looked_at(second):
    with value_error("^mine.py:steps: "):
        step_rewards(lambda **columns: [[(0, 1.0)], second])


def test_step_functions_may_give_nothing_and_numbers_of_any_kind():
    def steps(completions, completion_ids, question, **columns):
        assert completions == ["good", "bad"] and question == ["q", "q"]
        yield []
        yield [(torch.tensor(1), torch.tensor(0.5)), [0, 1]]

    assert step_rewards(steps) == [[], [(1, 0.5), (0, 1.0)]]


def without_safetensors(folder):
    torch.save(weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change, said", [
    (shutil.rmtree, "cannot be loaded"), (without_safetensors, "cannot be loaded"),
    (lambda folder: shutil.copytree(TINY, folder, dirs_exist_ok=True), "score.weight"),
    (lambda folder: saved_model(folder, num_labels=2), "has 2 labels, a reward model has one"),
    (lambda folder: edit_tensors(folder / "model.safetensors", lambda tensors: tensors | {
        "score.weight": torch.full((1, 32), math.nan)}), "not finite: score.weight")])
def test_folders_that_are_no_reward_model_are_refused(tmp_path, caplog, capsys, change, said):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    change(folder)
    capsys.readouterr(), caplog.clear()
    logging.set_verbosity_warning()                       # as in a fresh process
    logging.enable_progress_bar()
    logging.enable_propagation()
    line = refused(capsys, *SMALL, "--steps=1", f"--output={tmp_path / 'run'}",
                   f"--reward-model={folder}")
    logging.disable_propagation()
    assert said in line and f"--reward-model {folder}" in line and not caplog.records, line
    assert not (tmp_path / "run").exists()
