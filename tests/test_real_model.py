"""The tasks of real models: their problems and their rewards."""
import calendar
import json
import re
import runpy
import sys
import pytest
import dates
import real_model
import real_qwen
import real_reward
from files import TINY, lines_of
import reward
from train import parse

# --- The problems ---------------------------------------------------------------------------------
def total_of(question):
    """A reader of its own: the first number, then every other with the word that it follows."""
    numbers = list(map(int, re.findall(r"\d+", question)))
    verbs = "buys|finds|gets|borrows|makes|away|loses|sells"
    words = re.findall(rf"({verbs}) \d|\d (more|fewer) than", question)
    signs = [-1 if {"away", "loses", "sells", "fewer"} & set(pair) else 1 for pair in words]
    assert len(signs) == len(numbers) - 1, question
    return numbers[0] + sum(sign * number for sign, number in zip(signs, numbers[1:]))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The folder that the script writes, for a model that is not there."""
    folder = tmp_path_factory.mktemp("real") / "task"
    real_model.write_task(folder, folder / "model")
    return folder


@pytest.mark.parametrize("name, many", [("train", real_model.TRAIN), ("test", real_model.TEST)])
def test_the_answers_are_right(task, name, many):
    problems = reward.load_problems(str(task / f"{name}.jsonl"))
    assert len(problems) == many
    for problem in problems:
        assert 0 <= int(problem["answer"]) == total_of(problem["question"]) < 100, problem
        assert real_reward.all_equations_true(problem["solution"]), problem
        assert problem["solution"].endswith(f" = {problem['answer']}")


def test_nothing_held_out_is_trained_on_and_every_kind_is_asked(task):
    train, test = (lines_of(task / name) for name in ("train.jsonl", "test.jsonl"))
    assert not {p["answer"] for p in train} & {p["answer"] for p in test}     # it holds the sum
    assert len({p["question"] for p in train + test}) == len(train + test)
    two_steps = sum(len(re.findall(r"\d+", p["question"])) == 3 for p in test)
    comparisons = sum(" than " in p["question"] for p in test)
    assert two_steps >= 20 and comparisons >= 20 and len(test) - two_steps - comparisons >= 40


# --- The rewards, and GSM8K for Qwen2.5 ----------------------------------------------------------
@pytest.mark.parametrize("answer, right, completions", [
    ("13", 1.0, ("4 + 9 = 13", "Anna has 13 stamps.", "$13.00")), ("1300", 1.0, ("1,300",)),
    ("0", 1.0, ("0",)), ("13", 0.0, ("13, not 12", "113", "13.5", "-13", "thirteen", ""))])
def test_the_last_number_counts(answer, right, completions):
    n = len(completions)
    assert real_reward.right(completions=completions, answer=[answer] * n) == [right] * n


def test_gsm8k_as_a_conversation_whose_examples_nobody_is_asked(tmp_path):
    def problem(n):
        return {"question": f"What is {n} + 1?", "answer": f"It is {n}+1=<<{n}+1={n + 1}>>{n + 1}"
                                                          f".\n#### {n + 1}"}

    for name, start, stop in (("train", 0, 6000), ("test", 6000, 6010)):
        lines = [json.dumps(problem(n)) + "\n" for n in range(start, stop)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    task = tmp_path / "task"
    config, found, shown = real_qwen.write_task(task, tmp_path, "1.5B", tmp_path)
    examples = real_qwen.EXAMPLES
    assert len(found["test"]) == 10 and shown == [problem(n) for n in examples]
    settings = parse(["--config", str(config)])
    assert settings.lora_rank == 16 and settings.data == str(task / "train.jsonl")
    train, test = lines_of(task / "train.jsonl"), lines_of(task / "test.jsonl")
    assert len(train) == 6000 - len(examples) and len(test) == 10
    *shown, last = test[-1]["messages"]
    assert last == {"role": "user", "content": "What is 6009 + 1?"}
    assert test[-1] == test[-1] | problem(6009)
    asked = {p["question"] for p in train + test}
    assert len(shown) == 2 * len(examples)
    for n, question, answer in zip(examples, shown[::2], shown[1::2]):
        assert question == {"role": "user", "content": problem(n)["question"]}
        assert question["content"] not in asked
        assert answer["content"] == f"It is {n}+1={n + 1}.\nThe answer is \\boxed{{{n + 1}}}."


def test_a_table_of_greedy_answers_by_train_py(capsys, tmp_path):
    """As --measure and --prompts ask, here the tiny policy: the figures are those of its rows."""
    problems = lines_of(TINY / "test.jsonl")[:6]
    rows = real_qwen.greedy(TINY, problems, "", 20, tmp_path)
    assert [row["problem"] for row in rows] == [problem["question"] for problem in problems]
    assert all(row["tokens"] <= 20 for row in rows)
    rows[0]["truth"] = "15,620"                           # as GSM8K writes it
    before = [{**row, "right": False} for row in rows]
    capsys.readouterr()
    real_qwen.print_row("tiny", [{**row, "right": True, "cut": n < 3}
                                 for n, row in enumerate(rows)], before)
    line = capsys.readouterr().out
    assert line.startswith("| tiny | 1.000 [0.61, 1] | ") and "| 0.500 | " in line
    assert "6 gained, 0 lost, p = 0.031" in line


def test_the_mean_of_several_runs_is_compared_problem_by_problem(capsys):
    untrained, *runs = ([{"right": bool(x)} for x in right]
                        for right in ([0, 0, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0]))
    real_qwen.print_mean("asked", untrained, *runs)
    line = capsys.readouterr().out
    # Of each problem 1, 1/2, 1 and 1/2 are right: 1, 1/2, 0 and -1/2 more than before.
    assert "0.750 ± 0.144" in line and "0.250 ± 0.323" in line


# --- Dates ----------------------------------------------------------------------------------------
def test_dates_are_told_in_four_ways_and_the_true_one_is_paid(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dates.py", str(tmp_path / "dates.jsonl")])
    runpy.run_path(dates.__file__, run_name="__main__")
    problems = lines_of(tmp_path / "dates.jsonl")
    assert len({p["answer"] for p in problems}) == 600
    for p in problems:
        year, month, day = p["answer"].split("-")
        told = re.match("Write the date (.*) as YYYY-MM-DD", p["question"])[1]
        assert year in told and re.search(rf"\b{int(day)}(st|nd|rd|th)?\b", told)
        assert calendar.month_abbr[int(month)] in told
    assert list(map(dates.nth, (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31))) == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 30th 31st".split())


@pytest.mark.parametrize("text, right", [
    ("2025-07-19", 1), ("It is 2025-07-19.", 1), ("2025-07-19, yes, 2025-07-19", 1),
    ("2025-07-19 or 2025-07-18", 0), ("2025-7-19", 0), ("19 July 2025", 0), ("", 0)])
def test_a_date_is_paid(text, right):
    assert dates.right(completions=[text], answer=["2025-07-19"]) == [right]
