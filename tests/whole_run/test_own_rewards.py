"""Rewards of one's own: --reward, --reward-weights, --step-reward, and from Python."""
import math
import random
import re
import shlex
import shutil
import sys
import textwrap
import time
import types
from fractions import Fraction
from types import SimpleNamespace
import pytest
import torch
from checks import same, value_error
from files import (MINE, ROOT, SHORT, checkpoint_of, curve, json_lines, lines_of,
                   metrics_of)
from models import make_tokenizer
from runs import told, trained
from steps import PROBLEMS, REWARDS, own_rewards, parts, run_in, whole_step
import loss
import page
import reward
import sample
import train
from advantage import gdpo_advantages, is_flat
from reward import load_rewards


def box(answer):
    return rf"So it is \boxed{{{answer}}}."


# --- A user's own reward: --reward, --reward-weights, --step-reward, --reward-model ---------------
ASKED = [{"question": "a", "answer": "7", "level": 3},
            {"question": "b", "answer": "8", "level": None}]
FOUR = [box(7), box(8), "x", box(8)]


def write(path, text):
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def spoken(*responses, problems=ASKED, prompts=("<a>", "<b>")):
    """Answers to these problems: two prompt tokens, then the answer's: 5 6 in the first row, 5 6 7
    in the second, and so on."""
    count = len(responses)
    labels = torch.arange(3, 6 + count).repeat(count, 1).tril(3)
    ids = [row[row > 4].tolist() for row in labels]
    G = count // len(problems)
    return types.SimpleNamespace(
        responses=list(responses), answer_ids=ids, problems=reward.repeat_each(problems, G),
        prompts=reward.repeat_each(prompts, G), turns=None)


@pytest.fixture
def scored(monkeypatch, tmp_path):
    """--reward f.py:f with this function in the file: two answers to each of two problems."""
    (tmp_path / "f.py").write_text("from held import f")
    monkeypatch.chdir(tmp_path)

    def score(function, rollout=None):
        monkeypatch.setitem(sys.modules, "held", types.SimpleNamespace(f=function))
        reward_of = load_rewards(["f.py:f"])
        return reward_of(rollout or spoken(*FOUR))
    return score


def test_a_reward_is_called_as_trl_calls_it(scored):
    seen = {}

    def f(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, ids=completion_ids)
        return [1, 2.5, None, True]
    rollout = spoken(*FOUR)
    rewards = scored(f, rollout)
    assert rewards.nan_to_num(-7).tolist() == [1.0, 2.5, -7, 1.0]
    assert list(rollout.reward_parts) == ["reward/f"]
    assert rollout.reward_parts["reward/f"].isnan().tolist() == [False, False, True, False]
    assert seen == {
        "prompts": ["<a>", "<a>", "<b>", "<b>"], "completions": FOUR, "question": [*"aabb"],
        "ids": [[5, 6], [5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9]],
        "answer": [*"7788"], "level": [3, 3, None, None]}


def test_the_rewards_that_apply_are_summed():
    # A chat template may write the first tag
    tokenizer = make_tokenizer(chat_template="{{ messages[-1].content }} <think>\n")
    prompts = [train.chat_prompt(tokenizer, problem, "") for problem in ASKED]
    said = box(7), box(8), "<answer>8</answer>", box(8)
    rollout = spoken(*(f"8</think>{text}" for text in said), prompts=prompts)
    specs = [f"{MINE}:one", "rule", "think", f"{MINE}:two"]
    rewards = load_rewards(specs, [10.0, 1.0, 100.0, 1000.0])(rollout)
    assert rewards.tolist() == [11.5, 10.5, 2160.0, 2011.5]
    parts = {name: part.nan_to_num(-1.0).tolist() for name, part in rollout.reward_parts.items()}
    assert parts == {"reward/one": [1.0] * 4, "reward/rule": [1.5, 0.5, 0.0, 1.5],
                     "reward/think": [0.0, 0.0, 1.5, 0.0], "reward/two": [-1.0, -1.0, 2.0, 2.0]}
    assert not hasattr(rollout, "step_rewards")
    assert load_rewards(None) is load_rewards([]) is load_rewards(None, [1.0]) is None
    problems = [{"answer": answer} for answer in ("7", "", [])]
    rollout = spoken(*[box(7)] * 3, problems=problems, prompts="abc")
    rewards = load_rewards(["rule"])(rollout)  # None where no truth is known
    assert rewards.isnan().tolist() == [False, True, True] and rewards[0] == 1.5
    rollout = spoken(box(7), "x", problems=ASKED[:1])  # the sums of steps train, not the rule
    rewards = load_rewards(None, None, f"{MINE}:steps")(rollout)
    assert rewards.tolist() == [3.0, 4.0]
    assert list(rollout.reward_parts) == ["reward/rule"]
    assert rollout.step_rewards == [[(0, 2.0), (1, 1.0)], [(0, 2.0), (2, 2.0)]]
    specs = f"{MINE}:one", "rule", f"{MINE}:rule"
    load_rewards(specs)(rollout)      # each has a name of its own
    assert list(rollout.reward_parts) == ["reward/one", "reward/rule", f"reward/{MINE}:rule"]


# --- Sums: what is equal in decimal earns the same ------------------------------------------------
def summed(weights, rows):
    """Rows of rewards of one's own -> a rollout as [C] gets it."""
    columns = dict(zip("abcdef", zip(*rows)))
    functions = {name: lambda part=part: part for name, part in columns.items()}
    rollout = spoken(*"x" * len(rows))
    rollout.rewards = reward.own_rewards(functions, weights, None, rollout)
    return rollout


@pytest.mark.parametrize("weights", [
    (1, 1), (1, 1, 1), (0.6, 0.4), (0.8, 0.2), (0.5, 0.3, 0.2), (0.1, 0.2, -0.3), (0.7, -0.7),
    (0.1,) * 6, (100, 0.1, 10), (1e-3, 0.3)])
def test_equal_totals_are_equal_for_any_weights(weights):
    """Of multiples of a tenth, also beside large ones, and where they cancel."""
    chance = random.Random(0)
    totals = {}
    rows = [[Fraction(chance.randrange(-10, 11), 10) for _ in weights] for _ in range(300)]
    rows += [[reward + 1000 * (n == 0) for n, reward in enumerate(row)] for row in rows]
    found = summed(weights, [[float(reward) for reward in row] for row in rows]).rewards
    for row, total in zip(rows, found.tolist()):
        exact = sum(Fraction(str(weight)) * reward for weight, reward in zip(weights, row))
        assert total == pytest.approx(float(exact), rel=1e-14, abs=1e-14)
        totals.setdefault(exact, set()).add(total)
    assert len(totals) > 20 and all(len(floats) == 1 for floats in totals.values())


def test_sums_that_lie_between_two_float32_numbers():
    """Where rounding a float64 sum would go up for one order of the terms and down for another."""
    rows = [[8388608.5, 0, 0], [8388608.3, 0.1, 0.1], [8388608.1, 0.2, 0.2], [0.4, 8388608, 0.1]]
    assert len({sum(row) for row in rows}) > 1
    assert is_flat(summed((1, 1, 1), rows).rewards, 4)


def test_equal_totals_with_length_terms():
    """An answer of n tokens costs n tenths, or divides by 1 + n / 10, and earns as much more."""
    lengths = torch.arange(11)
    sums = torch.tensor([0.3 + n / 10 for n in range(11)], dtype=torch.float64)
    products = torch.tensor([0.3 * (10 + n) for n in range(11)], dtype=torch.float64)
    assert is_flat(sums + reward.overlong_penalty(lengths, 10, 10), 11)
    assert is_flat(reward.length_rescaled(products, lengths, 11, 0.5), 11)


@pytest.mark.parametrize("weights, parts", [
    ((1, 1), [(0.0, 0.5), (0.2, 0.3)]), ((0.1, 0.2, 0.3), [(0, 0, 0.1), (0.1, 1, 0)]),
    ((0.5, 0.5), [(0.1 + 0.2, 0.7), (0.3, 0.7)]),
    ((0.3, 0.1, 0.1, 0.1), [(1, 0, 0, 0), (0, 3, 3, 3)]),
    ((1, 1), [(1.5, 0), (0.5, 0.1)])])
def test_scores_of_gdpo_that_cancel_are_no_advantage(weights, parts):
    rollout = summed(weights, [[float(value) for value in row] for row in parts * 2])
    for dtype in (torch.float64, torch.float32):
        both = {name: values.to(dtype) for name, values in rollout.reward_parts.items()}
        assert gdpo_advantages(both, weights, 2).tolist() == [0.0] * 4


def test_a_group_of_equal_totals_teaches_nothing(tmp_path):
    spec = write(tmp_path / "a.py", """
        def a(completions, **columns):
            return [0.7 if len(text) % 2 else 0.1 for text in completions]

        def b(completions, **columns):
            return [0.0 if len(text) % 2 else 0.3 for text in completions]

        c = b
    """)
    flags = [f"--reward={spec}:{name}" for name in "abc"]
    p = parts("--kl-coef=0", "--updates-per-rollout=1", *flags)
    metrics, rollout, [gradient] = whole_step(p, own_rewards(p.settings))
    assert len({len(text) % 2 for text in rollout.responses}) == 2
    assert metrics["flat_groups"] == 1
    assert not rollout.advantages.any() and not gradient.any()


def gives(*values):
    return lambda **columns: list(values)


@pytest.mark.parametrize("function, reason", [
    (gives(1, 2, 3), "[1, 2, 3], not 4 rewards"), (gives(1, 2, 3, math.nan), "nan"),
    (gives(1, -1e39, 3, 4), "-1e+39"), (gives(10**400, 2, 3, 4), "too large"),
    (gives(1, "two", 3, 4), "'two'"), (gives(1, 2, [3], 4), "list"),
    (gives(1, 2, 3, 1j), "complex"),
    (gives(1, torch.ones(2), 3, 4), "element"), (lambda completions: [], "[], not 4 rewards"),
    (lambda **columns: 1.0, "1.0]"), (lambda **columns: torch.tensor(1.0), "not 4 rewards"),
    (lambda **columns: None, "None], not 4 rewards"), (lambda **columns: "1010", "1010"),
    (lambda **columns: {1: 1, 2: 2, 3: 3, 4: 4}, "not 4 rewards"),
    (lambda **columns: {1, 2, 3, 4}, "not 4 rewards"),
    (lambda **columns: "ten", "['ten'], not 4")])
def test_a_reward_that_goes_wrong_is_named(scored, function, reason):
    """In one line, which says what it is called with."""
    with value_error(f"^--reward f.*{re.escape(reason)}.*"):
        scored(function)


@pytest.mark.parametrize("function, error", [
    (lambda completions, **columns: [c[0]["content"] for c in completions], TypeError),
    (lambda completions, mood, **columns: [], TypeError),
    (lambda completions, **columns: 1 / 0, ZeroDivisionError),
    (lambda completions, **columns: (c + 1 for c in completions), TypeError),
    (lambda **columns: int("one"), ValueError), (lambda **columns: open("not there"), OSError),
    (lambda **columns: sys.exit(5), SystemExit)])
def test_an_error_in_a_reward_stays_as_it_is(scored, function, error):
    """It is the cause of the one that tells whose it is."""
    with pytest.raises(reward.ForeignError, match="^--reward f ") as raised:
        scored(function)
    cause = raised.value.__cause__
    assert isinstance(cause, error)
    assert "test_own_rewards.py" in str(raised.getrepr(chain=True)) or "mood" in str(cause)


def test_a_step_reward_of_another_shape_is_told_the_right_one(tmp_path):
    file = tmp_path / "f.py"
    write(file, "def steps(completions, **columns):\n    return [[1.0] for _ in completions]")
    with value_error("^--step-reward .* float"):
        load_rewards(None, None, f"{file}:steps")(spoken(*FOUR))


@pytest.mark.parametrize("flag", ["--reward", "--step-reward"])
@pytest.mark.parametrize("spec, reason", [
    ("ours.py", "no such file (path/to/file.py:function)"), ("other.py:one", "no such file"),
    ("notes.txt:f", "no such file"), ("ours.py:three", "has no function 'three'"),
    ("ours.py:calls", "has no function 'calls'")])
def test_a_file_that_cannot_be_used_is_named_at_load(tmp_path, monkeypatch, flag, spec, reason):
    monkeypatch.chdir(tmp_path)
    shutil.copy(MINE, tmp_path / "ours.py")
    write(tmp_path / "notes.txt", "f = print")
    write(tmp_path / "broken.py", "\n1 / 0")
    given = ([spec],) if flag == "--reward" else (None, None, spec)
    with value_error(f"^{flag} {spec}: .*{re.escape(reason)}"):
        load_rewards(*given)
    with pytest.raises(reward.ForeignError) as raised:
        load_rewards(["broken.py:f"])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_file_is_one_module(tmp_path):
    """Its functions share what it holds, and find its neighbours; what is ours stays as it is."""
    write(tmp_path / "points.py", "points = 5")
    write(tmp_path / "later.py", "points = 1")
    for hidden in ("loss", "json"):
        write(tmp_path / f"{hidden}.py", "1 / 0")
    spec = write(tmp_path / "judged.py", """
        from __future__ import annotations
        import json
        from concurrent.futures import ProcessPoolExecutor
        from dataclasses import dataclass
        from multiprocessing import get_context
        import torch
        from advantage import plain_advantages
        from loss import plain_loss
        from points import points
        calls = []

        @dataclass
        class Part:
            value: float

        def length(text):
            return Part(len(text) + points).value

        def first(completions, **columns):
            calls.append(1)
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
                return list(pool.map(length, completions))

        def second(completions, **columns):
            from later import points
            yield from [len(calls) * points] * len(completions)
    """)
    for _ in range(2):  # a run after a run begins anew
        rollout = spoken("a", "ab", "abc", "")
        load_rewards([f"{spec}:first", f"{spec}:second"])(rollout)
        found = [part.tolist() for part in rollout.reward_parts.values()]
        assert found == [[6, 7, 8, 5], [1, 1, 1, 1]]
    for module in (reward, time, train, loss):
        assert sys.modules[module.__name__] is module


def test_a_reward_may_change_what_it_gets(tmp_path):
    spec = write(tmp_path / "greedy.py", """
        def greedy(completions, completion_ids, **columns):
            completions[:] = [""] * 4
            completion_ids[0].clear()
            columns["level"].append(5)
            return [0.0] * 4

        def score(completions, completion_ids, level, **columns):
            return [len(text) + len(ids) + len(level)
                    for text, ids in zip(completions, completion_ids)]
    """)
    rollout = spoken(*FOUR)
    rewards = load_rewards([f"{spec}:greedy", f"{spec}:score"])(rollout)
    assert rewards.tolist() == [len(text) + n + 4 for text, n in zip(FOUR, (2, 3, 4, 5))]
    assert rollout.responses == FOUR


def test_random_numbers_and_the_directory_are_the_rewards_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    spec = write(tmp_path / "r.py", """
        import os, random
        import torch

        def quiet(completions, **columns):
            return [len(text) % 7 if len(text) % 3 else None for text in completions]

        def loud(completions, **columns):
            torch.manual_seed(5)
            random.seed(5)
            os.chdir("/")
            return quiet(completions)

        def loud_reply(prompt, turns):
            loud([])
            return "How many ?"

        def quiet_reply(prompt, turns):
            return "How many ?"
    """)
    for flag, names in ((f"--reward={spec}:", ("loud", "quiet")),
                        (f"--reply={spec}:", ("loud_reply", "quiet_reply"))):
        folders = [trained(tmp_path / name, *SHORT, "--steps=2", "--max-turns=2", flag + name)
                   for name in names]
        found, expected = ([{name.rpartition("/")[0]: value for name, value in row.items()}
                            for row in curve(folder)] for folder in folders)
        assert found == expected
        same(*({**checkpoint_of(folder), "counters": None} for folder in folders), "checkpoint")


def test_a_reward_sees_the_turns_of_a_conversation(tmp_path):
    spec = write(tmp_path / "r.py", """
        def reply(prompt, turns):
            return "How many ?" if len(turns[0]) % 2 else None

        def score(completions, turns, **columns):
            assert all(text == "\\n".join(said[::2]) for text, said in zip(completions, turns))
            assert {len(said) for said in turns} <= {1, 3}
            return [float(len(said)) for said in turns]
    """)
    folder = trained(tmp_path / "run", *SHORT, "--steps=2", "--max-turns=2",
                     f"--reply={spec}:reply", f"--reward={spec}:score")
    assert 1 < metrics_of(folder)[1]["reward_mean"] < 3


@pytest.mark.parametrize("large", [1e16, -1e20, 3e38, math.inf])
def test_rewards_whose_squares_overflow_are_named(large, tmp_path):
    """They would make every std infinite, and so every advantage 0."""
    rewards = torch.tensor([large, *REWARDS.tolist()[1:]], dtype=torch.float64)
    for advantage in train.ADVANTAGES.keys() - {"gdpo", "shape"}:
        with pytest.raises(ValueError, match="not numbers below 1e15"):
            whole_step(parts(f"--advantage={advantage}"), lambda *_: rewards)
    spec = write(tmp_path / "r.py", f"def f(prompts): return [float('{large}')] * len(prompts)")
    p = parts("--reward", f"{spec}:f", "rule")
    with pytest.raises(train.BadInput, match="--reward f .* does not lie between"):
        whole_step(p, own_rewards(p.settings))


@pytest.mark.parametrize("given", [
    [1, 2, 3, 4, 5, 6, 7, 8], torch.arange(8.0).numpy(), torch.ones(8, 1, requires_grad=True)])
def test_a_reward_from_python_may_give_any_list_of_numbers(given):
    _, rollout, _ = whole_step(parts("--updates-per-rollout=1"), lambda *_: given)
    assert rollout.rewards.tolist() == torch.as_tensor(given).flatten().tolist()
    assert rollout.rewards.dtype == torch.float64 and not rollout.rewards.requires_grad


# --- Rewards of one's own, and problems whose answers nobody knows --------------------------------
@pytest.mark.filterwarnings("error::UserWarning")
def test_each_reward_has_its_mean(tmp_path):
    last = {**PROBLEMS[19], "level": "hard"}       # None in the others
    (tmp_path / "d.jsonl").write_text(json_lines(*PROBLEMS[:19], last))
    names = ("length", "second", "never", "of_level")
    folder = trained(tmp_path / "run", *SHORT, "--steps=1", f"--data={tmp_path / 'd.jsonl'}",
                     "--reward", *(f"{MINE}:{name}" for name in names), "rule",
                     "--reward-weights", "0.5", "2", "1", "0", "10")
    samples = lines_of(folder / "samples.jsonl")
    lengths = torch.tensor([float(len(text)) for r in samples for text in r["responses"]])
    m = metrics_of(folder)[1]
    assert m["reward/length"] == pytest.approx(lengths.mean().item())
    assert m["reward/second"] == 1                        # None does not count
    assert m["reward/rule"] == pytest.approx(m["accuracy"] + 0.5 * m["format_rate"])
    assert m["reward/never"] is None
    assert m["reward/of_level"] == m["reward/length"]     # weight 0: measured, not trained on
    run = run_in(folder)
    run.read_metrics(train.records_in(folder, "metrics.jsonl"))
    shown = {name for name, *_ in train.curves_of(run)}
    assert "reward/of_level" in shown and "reward/never" not in shown
    total = 0.5 * m["reward/length"] + 2 * 0.5 + 10 * m["reward/rule"]
    assert m["reward_mean"] == pytest.approx(total)
    assert sum(sum(r["rewards"]) for r in samples) / 8 == pytest.approx(total)


def test_a_run_with_several_right_answers(tmp_path):
    """One problem's answers are the other right ones; from them as from one."""
    data = tmp_path / "d.jsonl"
    runs = []
    for wrap in (lambda answer: answer, lambda answer: [f"#### {answer}", 1000.0]):
        rows = [{**problem, "answer": wrap(problem["answer"])} for problem in PROBLEMS[:12]]
        data.write_text(json_lines(*rows))
        flags = (*SHORT, f"--data={data}", f"--eval-data={data}", "--steps=2")
        out, _ = told(*flags, f"--output={tmp_path / str(len(runs))}")
        runs.append(tmp_path / str(len(runs)))
    assert re.search(r"^truth +\d+ or 1000.0$", out, re.M)
    assert curve(runs[0]) == curve(runs[1])
    assert lines_of(runs[1] / "samples.jsonl")[0]["truth"].endswith(" or 1000.0")
    _, err = told(f"--resume={runs[1]}", "--steps=3")
    assert "not what the run began with" not in err


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unknown")
    asked = [{"task": problem["question"]} for problem in PROBLEMS[:20]]
    (folder / "mine.jsonl").write_text(json_lines(*asked))
    out, err = told(*SHORT, f"--reward={MINE}:length", "--question-field=task",
                    f"--data={folder / 'mine.jsonl'}", f"--output={folder / 'run'}")
    return SimpleNamespace(folder=folder / "run", out=out, err=err)


def test_without_known_answers_the_rules_figures_are_null(unknown):
    metrics = metrics_of(unknown.folder)
    assert all(m["eval_accuracy"] is None for m in metrics if "eval_reward" in m)
    assert all(m["accuracy"] is m["format_rate"] is None for m in metrics[1:])
    assert all(m["reward_mean"] > 0 for m in metrics[1:])
    assert "truth     not known" in unknown.out
    assert "10 problems, 4 held out" in unknown.out       # a part of one's own data
    figures = [f"{m['eval_reward']:.3g}" for m in metrics if "eval_accuracy" in m]
    line = next(x for x in unknown.out.splitlines() if x.startswith("held-out reward")).split()
    assert [line[2], line[-1]] == [figures[0], figures[-1]] and "0" not in figures
    assert f"held-out reward={figures[0]}" in unknown.err  # the bar
    questions = {p["question"] for p in PROBLEMS[:20]}   # they stand in another column
    for record in lines_of(unknown.folder / "samples.jsonl"):
        assert record["question"] in questions and record["question"] in record["prompt"]


def test_the_end_draws_curves_and_names_what_comes_next(unknown):
    folder = unknown.folder
    tool, talk, again = (shlex.split(line[21:]) for line in unknown.out.splitlines()[-3:])
    assert tool[1:] == [str(ROOT / "tests" / "tools" / "page.py"), str(folder)]
    shown = page.main(tool[2]).read_text(encoding="utf-8")
    run = run_in(folder)
    run.read_metrics(train.records_in(folder, "metrics.jsonl"))
    titles = [title for _, title, _ in train.curves_of(run)]
    assert titles[0] == "held-out reward" and {"sampled reward", "gradient norm"} < {*titles}
    for _, title, points in train.curves_of(run):         # the same numbers here and on the page
        blocks = train.small_curve(points).strip()
        first, *_, last = blocks.split()
        assert re.search(rf"^{re.escape(title)} +{blocks}$", unknown.out, re.MULTILINE)
        assert re.search(rf"<p>{re.escape(title)}</p>.*\n<b>{first} → {last}</b>", shown)
    assert talk == [sys.executable, sample.__file__, "--model", str(folder), "YOUR QUESTION"]
    assert again[:2] == [sys.executable, train.__file__]
    assert train.parse(again[2:]).reward == [f"{MINE}:length"]
    for values, blocks in (((0.0, 1.0, 0.5), "0 ▁█▄ 0.5"), ((2.0, 2.0), "2 ██ 2"),
                           ((-1.0, -2.0), "-1 ▄▁ -2")):
        assert train.small_curve([*enumerate(values)]).split() == blocks.split()
