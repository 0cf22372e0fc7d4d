r"""[B] reward.py: the rule, the last box, fair readings, problem files, users' rewards, figures."""
# ruff: noqa: I001 - several names to a line
import gzip
import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
import textwrap
import time
import types
from fractions import Fraction
from pathlib import Path

import answers
import pytest
import torch
from conftest import GSM8K, raises, seeded, small_model, value_error
from transformers import AutoModelForSequenceClassification

import reward
import train
from reward import (
    boxed_candidates, bradley_terry_loss, canonical, complete_boxes, train_reward_model,
    extract_boxed, figures_of, final_answer, has_format, hold_out, is_right, length_rescaled,
    load_function, load_problems, majority_at_k, model_rewards, overlong_penalty, pass_at_k,
    preference_pairs, own_reward_of, reward_model_rows, reward_model_scores, rule_reward,
    score_responses, score_rows, think_answer_reward, truths_of)
from sample import words_of


def box(answer):
    return rf"So it is \boxed{{{answer}}}."


# --------------------------------------------------------------------------------------------------
# The rule

@pytest.mark.parametrize("empty", ["", " ", "\n\t", "$", "$$", r"\$", ".", "...", r"\text{}",
                                   r"\text{ }", r"\ ", "\u00a0", "\u2003"])
def test_an_empty_box_is_no_answer(empty):
    assert rule_reward(box(empty), "63") == 0.0
    assert rule_reward(box(empty), empty) == 0.0
    assert rule_reward(rf"\boxed{{63}} and \boxed{{{empty}}}", "63") == 0.0
    for zero in ("0", "0.0", "-0", "$0", ".0", r"0\%"):  # which is an answer
        assert rule_reward(box(zero), "0") == 1.5 == rule_reward(box(zero), 0)  # as a number, too
        assert rule_reward(box(zero), "7") == 0.5


def test_score_responses_is_prompt_major():
    responses = [box(7), box(8), "none", box(8), box(7), box(8)]
    rewards = score_responses(responses, ["7", "8"], group_size=3)
    assert rewards.dtype == torch.float32 and rewards.device.type == "cpu"
    assert rewards.tolist() == [1.5, 0.5, 0.0, 1.5, 0.5, 1.5]
    assert score_responses([box(7)] * 16, ["7", "8"]).tolist() == [1.5] * 8 + [0.5] * 8
    assert score_responses([], [], group_size=4).shape == (0,)
    assert is_right(rewards).tolist() == [True, False, False, True, False, True]
    assert has_format(rewards).tolist() == [True, True, False, True, True, True]
    assert is_right(rewards.tolist()).dtype == has_format(rewards.half()).dtype == torch.bool
    # Where no truth is known, an answer is neither right nor wrong
    rewards = score_responses([box(1)] * 4, ["1", None], group_size=2)
    assert rewards[:2].tolist() == [1.5, 1.5] and rewards[2:].isnan().all()
    assert is_right(rewards).tolist() == has_format(rewards).tolist() == [True, True, False, False]
    for rows, truths, group_size in ((5, 2, 3), (7, 2, 3), (6, 3, 3), (6, 0, 3), (2, 2, 0)):
        with pytest.raises(ValueError):
            score_responses([box(7)] * rows, ["7"] * truths, group_size)


# --------------------------------------------------------------------------------------------------
# The box

@pytest.mark.parametrize("text, content", [
    (r"\boxed{5}", "5"), (r"\boxed{ 5 }", " 5 "), (r"\boxed{}", ""), ("5", None), ("", None),
    (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"), (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
    (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{1 \boxed{2} 3}", r"1 \boxed{2} 3"),  # inside a complete box: part of its content
    (r"\boxed{1 \boxed{2}}", r"1 \boxed{2}"), ("\\boxed{ \\boxed{ \n\\boxed{ 5 } }\t}", " 5 "),
    (r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}"), (r"\boxed {5}", "5"),
    (r"\boxed{{\boxed{5}}}", r"{\boxed{5}}"), ("\\boxed\n  {5}", "5"), (r"\boxed 5", "5"),
    (r"\boxed{5}}", "5"), (r"\boxed5", "5"), (r"So \boxed -1/2, I think.", "-1/2"),
    (r"$\boxed .5$", ".5"),
    (r"\boxed 1,000.50.", "1,000.50"), (r"\boxed{4} \boxed 5", "5"), (r"\boxed 4 \boxed{5}", "5"),
    (r"\boxed{\boxed 5 }", "5"), (r"Use \boxed and see.", None), (r"\boxed{1} \boxed{2", "1"),
    (r"\boxed{1 \boxed{2}", "2"), (r"\boxed{1 {2}", None), (r"{\boxed{5} and on", "5"),
    (r"} } \boxed{5} }", "5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\{}", r"\{"),
    (r"\boxed{\}}", r"\}"), (r"\boxed{1\}", None), ("\\boxed{1\n2}", "1\n2"), (r"boxed{5}", None),
    (r"\\boxed{5}", "5"),  # a backslash too many, as in a quoted string
    (r"\fbox{5} \Boxed{5}", None), ("\\boxed{\0\ud800}", "\0\ud800"),
])
def test_extract_boxed(text, content):
    assert extract_boxed(text) == content


def every_complete_box(text):
    """(end, begin, content) of each complete box, in quadratic time."""
    for start in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for i in range(start.end(), len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
            if depth == 0:
                yield i + 1, start.start(), text[start.end() : i]
                break
    for bare in re.finditer(r"\\boxed\s*([0-9]+)", text):
        yield bare.end(), bare.start(), bare[1]


def slow_extract_boxed(text):
    """The definition: the complete box that ends last, opened while it holds a box and no more."""
    content = max(every_complete_box(text), default=(0, 0, None))[2]
    nested = content and any(content[begin:end] == content.strip()
                             for end, begin, _ in every_complete_box(content))
    return slow_extract_boxed(content) if nested else content


PIECES = ["\\boxed{", "\\boxed ", "{", "}", "}", "\\{", "\\}", "\\", "5", " ", "$"]
def latex_like(chance):
    """Up to 30 pieces of what boxes are made of."""
    return "".join(chance.choices(PIECES, k=chance.randrange(31)))


def test_boxes_are_their_definition():
    """Of random pieces: the last complete box; and all those that are in no other."""
    chance = random.Random(0)
    for _ in range(1000):
        text = latex_like(chance)
        assert extract_boxed(text) == slow_extract_boxed(text)
        every = sorted((begin, end) for end, begin, _ in every_complete_box(text))
        outer = [(begin, end) for begin, end in every
                 if not any(b < begin and end < e for b, e in every)]
        assert outer == [(b, b + len(text[b:e].rstrip())) for b, e, _ in complete_boxes(text)], text


# --------------------------------------------------------------------------------------------------
# Answers, read fairly

NUMBERS = {  # how 18, and other numbers, may be written; answers.jsonl has more
    "18": r"""18$  $\$18.00$  $18.$  ((18))  36/2  x_{10} = 18  \text{Answer: }18
        18 \text{ dollars}.  18\,\text{km/h}  18.\text{ eggs}  18~\text{}  \$18\text{ a day}
        18\qquad km  18\:\text{km}  \mathbf{ 18. }  $\textbf{\$18}$  18 \degree  18\%  18%
        18 \%  18 percent  \emph{18}  \bm{18}  \textsc{18}  \boldsymbol{\frac{36}{2}}
        \textbf{\underline{18}}  \underline{\textbf{18}}  {\bf 18}  \color{red}18
        \displaystyle 18  USD18  \text{USD }18  ¥18  18 usd  usd -18 * -1  $18 = 18$  9 \cdot 2
        9*2  9 \times \$2 = \$18  36/2 = 18 km  \frac{9 \cdot 2}{1}
        \frac{36}{2} = 9 \times 2 = 18\text{ km}  Total = 9 * 2 = 18  \text{The answer is } 18
        \text{The answer is: }\$18.  It equals 18  \text{Anna's total} = 18  \text{Größe: }18""",
    "12.5": r"12.5  12.50  12\frac{1}{2}  12 1/2  12½  25/2  12.5\% \text{off}  1.25e1",
    "-3": r"-$3  $-3  -\$3.0  -6/2  \frac{-6}{2}  -\frac{6}{2}  6/-2",
    "1000": r"""1000  10³  1\cdot 10^3  1 × 10^3  1x10^3  1*10^3  1.0e+3  100\times 10^1
        1\times10^3\text{ m}  1e3 m""",
    "0.5": r"0.5  \dfrac{1}{2}  \frac12  \frac{1}2  ½  5\times 10^{-1}  5e-1",
    "3.5": r"3 \frac{1}{2}  7/2",
    "-3.5": r"-3 1/2  -\frac{7}{2}",
    "1/3": r"\frac{2}{6}  1/3  \frac{0.5}{1.5}  \frac{1,000}{3,000}",
    "1000/3": r"1000/3  1,000/3  1 000/3  333 1/3  333\frac{1}{3}",
    "0": r"0.0  $0  .0  0\%  0/5  0e9",
    "1234567.5": r"1 234 567.5",
}


HUGE = ["10^999999999", "10^{999999999}", "1e999999999", "1e-999999999", r"1\times10^{999999999}",
        "9**9**9**9", "9^{9^{9^9}}"]


@pytest.mark.parametrize("number, written", [
    (number, written) for number, forms in NUMBERS.items()
    for written in re.split(r"\s\s+", forms)])
def test_numbers_that_are_equal(number, written):
    assert canonical(written) == Fraction(number) and isinstance(canonical(written), Fraction)
    assert rule_reward(box(written), number) == rule_reward(box(number), written) == 1.5
    assert rule_reward(box(written), str(Fraction(number) + Fraction(1, 10**12))) == 0.5


@pytest.mark.parametrize("answer, truth", [
    ("5", "5.01"), ("63", "62.995"), ("1", "1.0000000000000000000000001"),
    ("1/3", "0.333333333333333333"), ("-5", "5"), (r"\pm 5", "5"), ("1,0000", "10000"),
    (",100", "100"), ("1 00", "100"), ("1_000", "1000"), ("0x10", "16"), ("18 thousand", "18000"),
    (r"\$18k", "18"), (r"18\text{ K}", "18"), (r"5\text{ or }6", "6"), (r"5\text{ or 6}", "5"),
    ("5$6", "56"), ("5$6", "5"), (r"\text{about }5", "5"), ("5 am", "5"), ("50%", "0.5"),
    ("18 pi", "18"), (r"18^{2}", "324"), (r"\not= 18", "18"), ("5-3", "2"), ("2^3", "8"),
    ("9 * 2 * 1", "18"), ("1/2/3", "1/6"), ("36/2*9", "162"), (r"\frac{36}{2\cdot 9}", "2"),
    ("9 x 2", "18"), ("9 * x", "9"), ("0x12", "0"), (r"\$18M", "18"), ("18 = x", "18"),
    ("x = 17 = 18", "17"), ("2x = 18", "9"), ("it is not 18", "18"),
    (r"\text{It is not: }18", "18"), ("this 18", "18"), ("<= 18", "18"), (r"\overline{18}", "18"),
    ("x^{3}5", "x^{35}"), (r"\frac{x+1}{2}", "x+1/2"), ("1/0", "1"), ("0/0", "0"),
    (r"10^{3}5", "10^{35}"), ("inf", "0"), ("-", "0"), ("%", "0"), (",", "0"), ("-.", "0"),
    ("\u0665", "5"), ("\uff15", "5"), ("\u00b2", "2"), ("\u0967,000", "1000"),
    ("9" * 301, "9" * 300), ("10^9999", "10"), ("1e1000", "1"), ("1e999999999", "1"),
    *((r"17 \boxed{18}", truth) for truth in ("17", "18", "1718")),  # a box with a guess and a box
    *((number, "5") for number in HUGE),  # which nothing computes
])
def test_answers_that_are_not_equal(answer, truth):
    assert rule_reward(box(answer), truth) == 0.5
    assert rule_reward(box(truth), answer) == 0.5


@pytest.mark.parametrize("answer, truth", [
    ("Monday", "monday"), ("{A}", "a"), ("$x + 1$", "x+1"), ("x  +\n1", "x + 1"),
    (r"y = \dfrac{x}{2}", r"\frac{x}{2}"), (r"\(x\)", "x"), (r"2 \sqrt{2}", r"2\sqrt{2}"),
    (r"\text{a week}", "a   week"), ("STRASSE", "straße"), ("x²", "x^2"), (r"\mathbb{R}", "R"),
    ("nan", "NaN"), ("9" * 301, "9" * 301), *zip(HUGE, HUGE),
])
def test_text_is_cleaned_and_compared_whole(answer, truth):
    assert isinstance(canonical(answer), str)
    assert rule_reward(box(answer), truth) == 1.5
    assert rule_reward(box(answer + "x"), truth) == 0.5


DIFFERS = {  # where the rule reads less, or more, than a fair reader
    "2^3", "eighteen", "18{,}5", "18 apples and oranges", "18_{10}", "1+x", r"\sqrt{8}", "0.5x",
    r"\{1, 2\}", "x = y = 18", "18 = x",  # missed
    "18 km", "18 cm", r"2 \times 3",  # paid, where the truth has another unit, or is 3 by 2
}


def test_the_table_of_fair_verdicts():
    assert len(answers.PAIRS) > 300
    differ = [pair for pair in answers.PAIRS if answers.ours(pair) != pair["fair"]]
    assert len(differ) == len(DIFFERS) and {pair["answer"] for pair in differ} == DIFFERS
    for pair in answers.PAIRS:                            # whichever of the two is the truth
        if "boxed" not in pair["answer"]:
            turned = {"answer": pair["truth"], "truth": pair["answer"]}
            assert answers.ours(turned) == answers.ours(pair), pair


def any_text(chance, most):
    """Characters of every kind, half of a pair of surrogates too."""
    limits = (0x7F, 0x7F, 0xFF, 0xFFFF, 0x10FFFF)
    return "".join(chr(chance.randrange(chance.choice(limits) + 1))
                   for _ in range(chance.randrange(most + 1)))


def test_any_text_is_scored():
    chance = random.Random(0)
    for _ in range(500):
        text = any_text(chance, 60) if chance.random() < 0.5 else latex_like(chance)
        for response in (text, box(text)):
            found = rule_reward(response, any_text(chance, 8))
            assert found in (0.0, 0.5, 1.5) and type(found) is float
            assert (found == 0.0) == (canonical(extract_boxed(response) or "") == "")


PIECES_OF_IT = [
    "(", ")", "[", "{", "}", "}{", "\\", "\\frac", "\\frac{", "\\frac1", "^", "^{", "1", "1,", "1 ",
    "1/", ",", ",000", ".", "-", "+", "=", "x=", "*", "$", '"', "a", "a-", " ", "\t", "\n", "°",
    "½", "é", "\\text{", "\\text{ or }", "\\{", "\\boxed", "\\boxed{", "\\boxed{ ", "\\boxed ",
    "\\boxed 1.", "\\boxed{1}", "\\boxed{\\boxed{1}", "\\boxed\n1!!!!", "\N{MINUS SIGN}", "\0",
    "\ud800\udfff", "\\math{", "\\text{{", "is ", "not ", "x is ", "\\frac{1}{", "1 000 ", "1,000,",
    "10^", "1*", "= 1", "usd ", "x10^", "\\textcolor{a}{", "M", '"a"', "_{", "(a)", "<", "<think>",
    "</think>", "<think></think><answer>", "</answer>",
]


@pytest.mark.parametrize("piece", PIECES_OF_IT)
def test_hostile_text_is_scored_at_once(piece):
    """It takes milliseconds; in quadratic time it would be many seconds."""
    many = piece * (30_000 // len(piece))
    start = time.process_time()
    for text in (many, box(many), box(f"5{many}"), box(f"{many}5"), many + "}" * len(many)):
        assert rule_reward(text, "5") in (0.0, 0.5, 1.5)
    assert rule_reward(box("5"), many) == 0.5
    for text in (many, f"5{many}", f"5 {many}", f"x{many}"):  # the longest that patterns meet
        canonical(text[: reward.LONGEST])
        canonical(text[: reward.LONGEST - 2] + "=5")
    for text in (many, f"<think>{many}</think><answer>{many}</answer>"):
        assert think_answer_reward(text, "63") in (0.0, 0.5)
    assert time.process_time() - start < 1


# --------------------------------------------------------------------------------------------------
# Problems

def line(question="How many?", answer="Count: 8 * 9 = 72.\n#### 72", **columns):
    return json.dumps({"question": question, "answer": answer, **columns})


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "5 + 4?"},
        {"role": "assistant", "content": "9"}, {"role": "user", "content": "And 8?", "name": "Eve"}]


def load(folder, *lines, **options):
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return load_problems(path, **options)


def test_load_problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([
        line(), "", "  \t", line("Wie viele Eier, süß?", "####  1,000 ", level=3, tags=["a"]),
        line(answer="#### 1 #### 2"), line(answer="a\n#### 0"), line(answer="7"), line(answer=7),
    ]).encode())  # a byte-order mark, Windows line ends, blank lines, no newline at the end
    rest = {"question": "How many?", "level": None, "tags": None}
    assert load_problems(path) == load_problems(str(path)) == [
        {**rest, "answer": "72", "solution": "Count: 8 * 9 = 72."},
        {"question": "Wie viele Eier, süß?", "answer": "1,000", "solution": "", "level": 3,
         "tags": ["a"]},
        {**rest, "answer": "2", "solution": "#### 1"}, {**rest, "answer": "0", "solution": "a"},
        *[{**rest, "answer": "7", "solution": ""}] * 2]
    # Every problem has all columns of the file; a solution of the user's own hides no truth
    problems = load(tmp_path, line(level=3, solution="mine"), line(k=1, solution=None))
    assert [(p["level"], p["k"], p["solution"]) for p in problems] == [
        (3, None, "mine"), (None, 1, None)]
    assert truths_of(problems) == ["72", "72"]


BAD_LINES = [
    (b'{"question": ', "not JSON"), (line().encode() * 2, "not JSON"), (b"[" * 200_000, "not JSON"),
    (b'{"n": ' + b"1" * 5000 + b"}", "not JSON"),
    ('{"question": "süß"'.encode("latin-1"), "not JSON in UTF-8"),
    (line(question="\ud800").encode(), "not JSON in UTF-8"), (b"\0", "not JSON"),
    (b'["question", "answer"]', "object"), (b'"question"', "object"), (b"null", "object"),
    (b'{"answer": "#### 1"}', "'question' is missing, empty or not a string"),
    *((line(question=bad).encode(), "--question-field") for bad in ("", " \n", 5)),
    (b'{"question": "?"}', "'answer' (--answer-field names another column) has no"),
    *((line(answer=bad).encode(), "'72' alone") for bad in ("", None, ["#### 72"])),
    *((line(answer=bad).encode(), "'#### 72'") for bad in (
        "So 72. " * 20, "8 * 9\n= 72", "8 * 9 = 72\n####", "#### 72 ####  \n", "#### $.")),
    *((json.dumps({"messages": messages, "answer": "1"}).encode(), "turns") for messages in (
        "?", {"role": "user"}, ["?"], CHAT[:1], CHAT[:3], [None, CHAT[1]], [{"role": "user"}],
        [{"role": "user", "content": " "}],
        [{"role": "system", "content": [{"type": "text"}]}, CHAT[1]])),
]


@pytest.mark.parametrize("bad, reason", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(tmp_path, bad, reason):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b"\n".join([line().encode(), b"", bad, line().encode()]))
    with value_error(f"^{path}, line 3: .*{re.escape(reason)}"):
        load_problems(path)


@pytest.mark.parametrize("source", ["missing.jsonl", "gsm8k:dev", "", "/dev/zero", "x" * 300,
                                    "folder", "pipe"])
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    with value_error(f"^{re.escape(source or '.')}.*No such file, or a folder, a device, a pipe"):
        load_problems(source)


def test_a_file_that_is_empty_or_cannot_be_read(tmp_path, monkeypatch):
    for content in ("", "\n\n  \n"):
        with value_error("problems.jsonl: no problems"):
            load(tmp_path, content)
    monkeypatch.setattr(Path, "read_bytes", raises(PermissionError(13, "Permission denied")))
    with value_error("problems.jsonl: PermissionError: .*Permission denied"):
        load(tmp_path, line())


def test_the_fields_may_have_other_names(tmp_path):
    row = {"problem": "How many?", "worked": "8 * 9 #### 72", "answer": "mine", "question_id": 3}
    fields = {"question_field": "problem", "answer_field": "worked"}
    assert load(tmp_path, json.dumps(row), **fields) == [
        {**row, "question": "How many?", "answer": "72", "solution": "8 * 9"}]
    for missing in fields.values():
        left = {key: row[key] for key in row if key != missing}
        with pytest.raises(ValueError, match=f"line 1: '{missing}' "):
            load(tmp_path, json.dumps(left), **fields)


@pytest.mark.parametrize("given, answer, truth", [
    ("8 * 9\n#### 72", "72", "72"), ("72", "72", "72"), (72, 72, "72"), (0, 0, "0"),
    (False, False, "False"), (math.nan, math.nan, None), (math.inf, math.inf, None),
    ("Monday", "Monday", "Monday"), ("", "", None), (None, "", None), ("#### ", "#### ", None),
    (["a", "b"], ["a", "b"], None), ("#### A heading\nand text",) * 2 + (None,),
    ("x" * 100,) * 3, ("x" * 101,) * 2 + (None,),
])
def test_answers_of_any_kind_for_a_reward_of_ones_own(tmp_path, given, answer, truth):
    [problem] = load(tmp_path, line(answer=given, level=3), need_answer=False)
    solution = "8 * 9" if "8 * 9" in str(given) else ""
    expected = {"question": "How many?", "answer": answer, "solution": solution, "level": 3}
    assert repr(problem) == repr({**problem, **expected}) and len(problem) == 4  # False is not 0
    assert truths_of([problem]) == [truth] and final_answer(given) == truth
    if truth is None:
        with pytest.raises(ValueError, match="line 1: 'answer'"):
            load(tmp_path, line(answer=given))
    [problem] = load(tmp_path, '{"question": "?"}', need_answer=False)
    assert problem == {"question": "?", "answer": "", "solution": ""}


def test_columns_are_checked_as_they_are_read(tmp_path):
    """A misspelt name would give every row the answer "", and hide a good column."""
    for need in (True, False):
        with value_error("'anwser'"):
            load(tmp_path, line(), answer_field="anwser", need_answer=need)
    some = '{"question": "?", "k": 2}', '{"question": "?"}'
    with value_error("no line has a column 'anwser' .*, there are question, truth, k$"):
        load(tmp_path, '{"question": "?", "truth": 1}', some[0], answer_field="anwser",
             need_answer=False)
    found = load(tmp_path, *some, answer_field="k", need_answer=False)
    assert [problem["answer"] for problem in found] == [2, ""]
    for name in ("prompts", "completions", "completion_ids"):
        with value_error(f"problems.jsonl: the column '{name}' has the name of an argument"):
            load(tmp_path, line(), line(**{name: 1}), need_answer=False)
        assert load(tmp_path, line(**{name: 1}))[0][name] == 1  # the rule has no arguments


def test_a_file_of_another_format_is_recognised(tmp_path):
    for data, looks in (
            (b"PAR1\0\0{", "Parquet"), (gzip.compress(line().encode()), "gzip"),
            (b"question,answer\n4 + 5 ?,9\n", "CSV"), (b'[{"answer": "1"}]', "one JSON text"),
            (b'\n{\n  "question": "?"\n}', "one JSON text")):
        (tmp_path / "x").write_bytes(data)
        with value_error(f"x: looks like {looks}; wanted is one JSON object per line"):
            load_problems(tmp_path / "x")


def test_a_chat_history_in_place_of_the_question(tmp_path):
    row = {"messages": CHAT, "answer": "#### 17"}
    expected = {"messages": CHAT, "question": "And 8?", "answer": "17", "solution": ""}
    for options in ({}, {"question_field": "messages"}):
        assert load(tmp_path, json.dumps(row), **options) == [expected]
    row.pop("answer")
    assert load(tmp_path, json.dumps(row), need_answer=False) == [{**expected, "answer": ""}]
    [plain, _] = load(tmp_path, line(messages=None), json.dumps(row), need_answer=False)
    assert plain["question"] == "How many?" and plain["messages"] is None


def test_hold_out_is_stable():
    problems = [{"question": f"question {i % 900}", "row": i} for i in range(1000)]
    training, held_out = hold_out(problems)
    assert sorted(training + held_out, key=lambda problem: problem["row"]) == problems
    assert 60 < len(held_out) < 140
    assert not {p["question"] for p in training} & {p["question"] for p in held_out}
    rows = [problem["row"] for problem in held_out]
    assert rows == sorted(rows)
    more = problems + [{"question": f"one more {i}", "row": -1} for i in range(500)]
    for others in (random.Random(0).sample(problems, 1000), more):
        assert {problem["row"] for problem in hold_out(others)[1]} - {-1} == set(rows)
    assert 400 < len(hold_out(problems, share=0.5)[1]) < 600
    assert [p["row"] for p in hold_out(problems[:100])[1]] == [1, 49, 62, 66, 96]  # for ever


@pytest.mark.parametrize("share", [0, 1e-9, 0.1, 0.5, 1 - 1e-9, 1])
def test_hold_out_leaves_neither_side_empty(share):
    for count, first in itertools.product((2, 3, 5), range(30)):
        problems = [{"question": f"{first} {i}"} for i in range(count)]
        training, held_out = hold_out(problems, share)
        assert training and held_out and len(training + held_out) == count
    assert hold_out(problems[:1] * 3, share) == (problems[:1] * 3, [])  # one question, for training


def test_any_json_is_read_or_refused_in_one_line(tmp_path):
    path = tmp_path / "anything.jsonl"
    values = [None, True, 0.5, 1e308, math.nan, -math.inf, "", "a\0\ud800", "#### 1", 10**400, [],
              ["#### 1"], {}, {"question": "?", "answer": 1}, [[{}]]]
    rows = [{"question": a, "answer": b} for a, b in itertools.product(values, values)]
    read = 0
    for row in values + rows:
        path.write_text(json.dumps(row))
        try:
            assert all(problem["answer"] and problem["question"] for problem in load_problems(path))
            read += 1
        except ValueError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert read > 4


TRAIN, TEST = f"{line()}\n".encode(), f"{line(answer='#### 5')}\n".encode()


@pytest.fixture
def network(tmp_path, monkeypatch):
    """GSM8K served from a folder: .served; .cache is where it goes."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "train.jsonl").write_bytes(TRAIN)
    (served / "test.jsonl").write_bytes(TEST)
    monkeypatch.setattr(reward, "GSM8K_URL", served.as_uri() + "/")
    monkeypatch.setattr(reward, "GSM8K", {
        "gsm8k": ("train.jsonl", hashlib.sha256(TRAIN).hexdigest()),
        "gsm8k:test": ("test.jsonl", hashlib.sha256(TEST).hexdigest()[:32]),
    })
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return types.SimpleNamespace(served=served, cache=tmp_path / "cache" / "grpo-gsm8k")


def test_gsm8k_is_downloaded_once(network, tmp_path, monkeypatch):
    """Into XDG's cache; without XDG into the home's."""
    for _ in range(3):
        assert [problem["answer"] for problem in load_problems("gsm8k")] == ["72"]
        assert [problem["answer"] for problem in load_problems("gsm8k:test")] == ["5"]
        monkeypatch.setattr(reward, "GSM8K_URL", "")      # nowhere
    assert sorted(path.name for path in network.cache.iterdir()) == ["test.jsonl", "train.jsonl"]
    monkeypatch.setattr(reward, "GSM8K_URL", network.served.as_uri() + "/")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_problems("gsm8k")
    assert (tmp_path / "home" / ".cache" / "grpo-gsm8k" / "train.jsonl").read_bytes() == TRAIN


def test_a_wrong_file_or_none_is_refused_and_nothing_is_kept(network):
    (network.served / "train.jsonl").write_bytes(TRAIN + b" ")
    (network.served / "test.jsonl").unlink()
    for name, reason in (("gsm8k", "invalid hash"), ("gsm8k:test", "URLError")):
        with value_error(f"^{name}: cannot download .*{reason}"):
            load_problems(name)
    assert not list(network.cache.iterdir())
    network.cache.rmdir()
    network.cache.write_text("a file where the folder should be")
    with value_error("^gsm8k: cannot download"):
        load_problems("gsm8k")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here")
@pytest.mark.parametrize("name, count", [("gsm8k", 7473), ("gsm8k:test", 1319)])
def test_the_real_gsm8k(name, count, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reward, "GSM8K_URL", GSM8K.resolve().as_uri() + "/")
    problems = load_problems(name)  # the table's SHA-256 is that of the real file
    assert len(problems) == count
    for problem in problems[::5]:
        truth = problem["answer"]
        assert isinstance(canonical(truth), Fraction)
        for response, paid in ((box(rf"\${truth}.00"), 1.5), (box(f"1{truth}"), 0.5),
                               (problem["solution"], 0.0)):
            assert rule_reward(response, truth) == paid


# --------------------------------------------------------------------------------------------------
# Evaluation figures

@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        correct = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(correct, k))
        exact = Fraction(sum(map(any, subsets)), len(subsets))
        assert pass_at_k([correct], k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_the_mean_over_problems():
    correct = [[True, False, False, False], [True, True, True, True], [False, False, False, False]]
    assert pass_at_k(correct, 2) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert pass_at_k(torch.tensor(correct), 2) == pass_at_k(correct, 2)
    assert type(pass_at_k(torch.tensor(correct), 2)) is float
    assert pass_at_k([[1, 0]], 1) == 0.5
    assert pass_at_k([[True] + [False] * 4999], 2500) == pytest.approx(0.5)  # no overflow
    with pytest.raises(TypeError):  # a reward of 0.5 is not half right
        pass_at_k(torch.tensor([[1.5, 0.5]]), 1)


@pytest.mark.parametrize("correct, k", [
    ([[True]], 0), ([[True]], -1), ([[True]], 2), ([], 1), ([[]], 1), ([[True, True], [True]], 2),
    (torch.zeros(0, 4, dtype=torch.bool), 1),
])
def test_pass_and_majority_at_k_refuse(correct, k):
    with pytest.raises(ValueError):
        pass_at_k(correct, k)
    with pytest.raises(ValueError, match="at least one problem, and k samples of each"):
        majority_at_k([["7"] * len(row) for row in correct], ["7"] * len(correct), k)


@pytest.mark.parametrize("answers, truth, k, expected", [
    (["7", "8", "8"], "7", 3, 0.0), (["7", "8", "8"], "7", 1, 1.0),  # only the first k vote
    (["7", "8", "8"], "7", 2, 1 / 2), (["7", "8", "9"], "7", 3, 1 / 3),  # ties
    (["7", "8", "9"], "6", 3, 0.0), (["7", "7", "8", "8", "9"], "8", 5, 1 / 2),
    ([r"\$7.00", "8", r"7\text{ eggs}", "8", "7.0"], "7", 5, 1.0),  # all for the same number
    (["1,000", "1000", "5"], "1{,}000", 3, 1.0), (["63.0"], 63, 1, 1.0),  # a truth may be a number
    (["Monday", r"\text{monday}", "Tuesday"], "Monday.", 3, 1.0), (["0", "0", "7"], "0", 3, 1.0),
    ([None, None, "7"], "7", 3, 1.0), ([None, "", " ", "$", "7"], "7", 5, 1.0),  # who votes
    ([None, "7"], "7", 1, 0.0), ([None, None], "7", 2, 0.0), ([None, ""], "", 2, 0.0),
])
def test_majority_at_k(answers, truth, k, expected):
    assert majority_at_k([answers], [truth], k) == pytest.approx(expected)
    assert majority_at_k([answers, answers[:k]], [truth] * 2, k) == pytest.approx(expected)
    assert majority_at_k([["7"] * k, answers], ["8", truth], k) == pytest.approx(expected / 2)
    for truths in ([], [truth] * 2):
        with pytest.raises(ValueError):
            majority_at_k([answers], truths, k)


def test_diversity():
    responses = ["a b c \\boxed{7}", "a b c \\boxed{7.0}", "none", "", "", "", "", ""]
    # one different answer of four; (a b c) and (b c box) and (a b c) and (b c other box): 3 of 4
    for texts, size, different, trigrams in (
            (responses, 4, (1 / 4 + 0) / 2, 3 / 4), ([""], 1, 0.0, 0.0),
            ([rf"\boxed{{{i}}} {i} {i} {i}" for i in range(8)], 8, 1.0, 1.0),
            (["x x x x x"] * 2 + ["x y z", "z y x"], 2, 0.0, (1 / 6 + 1) / 2)):
        assert figures_of(texts, [None], size) == {"distinct_answers": different,
                                                   "distinct_3grams": trigrams}


def test_all_figures_of_samples():
    responses = [box(7), box(8), box(7), "x", *[box(9)] * 4]
    answers = [["7", "8", "7", None], ["9"] * 4]
    correct = [[True, False, True, False], [False] * 4]
    expected = figures_of(responses, [None] * 2, 4)
    for k in (1, 2, 4):
        expected |= {f"pass@{k}": pass_at_k(correct, k),
                     f"maj@{k}": majority_at_k(answers, ["7", "8"], k)}
    assert figures_of(responses, ["7", "8"], 4) == expected
    assert {name for name in figures_of(responses[:6], ["7"], 6) if "@" in name} == {
        f"{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2, 4, 6)}


# --------------------------------------------------------------------------------------------------
# A user's own reward: --reward, --reward-weights, --step-reward, --reward-model, the length terms

MINE = """
    def one(completions, **columns):
        return [1.0 for _ in completions]

    def two(completions, level, **columns):
        return [2.0 if mark is None else None for mark in level]

    def steps(completion_ids, **columns):
        return [[(len(ids) - 1, float(sum(ids)))] for ids in completion_ids]

    def rule(completions, **columns):
        return (7.0 for _ in completions)
"""
PROBLEMS = [{"question": "a", "answer": "7", "level": 3},
            {"question": "b", "answer": "8", "level": None}]
FOUR = [box(7), box(8), "x", box(8)]


def write(path, text):
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


@pytest.fixture
def mine_py(tmp_path):
    return write(tmp_path / "mine.py", MINE)


def rollout_of(*responses):
    """Two prompt tokens, then the answer's: 5 6 in the first row, 5 6 7 in the second, and so on"""
    count = len(responses)
    labels = torch.arange(3, 6 + count).repeat(count, 1).tril(3)
    return types.SimpleNamespace(responses=list(responses), labels=labels.where(labels > 4, -100))


def scored(function, rollout=None, problems=PROBLEMS, times=1):
    """--reward f.py:f with this function in its place: two answers to each of two problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "load_function", lambda spec: function)
        reward_of = own_reward_of(["f.py:f"] * times)
    return reward_of(problems, ["<a>", "<b>"], rollout or rollout_of(*FOUR))


def test_a_reward_is_called_as_trl_calls_it():
    seen = {}

    def f(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, ids=completion_ids)
        return [1, 2.5, None, True]

    rollout = rollout_of(*FOUR)
    with pytest.warns(UserWarning, match="every reward gave None for some rows: they count as 0"):
        rewards = scored(f, rollout)
    assert rewards.tolist() == [1.0, 2.5, 0.0, 1.0] and rewards.dtype == torch.float32
    assert list(rollout.reward_parts) == ["f"] and rollout.reward_parts["f"].dtype == torch.float32
    assert rollout.reward_parts["f"].isnan().tolist() == [False, False, True, False]
    assert seen == {
        "prompts": ["<a>", "<a>", "<b>", "<b>"], "completions": FOUR, "question": [*"aabb"],
        "ids": [[5, 6], [5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9]],
        "answer": [*"7788"], "level": [3, 3, None, None]}


def test_every_row_has_columns_of_its_own():
    """A reward that spoils its lists pays siblings, the next reward and the next epoch the same."""
    def spoils(completions, completion_ids, pieces, **columns):
        found = [float(len(row) + row.pop()) for row in pieces]
        for column in (completions, completion_ids, pieces, *columns.values()):
            column.clear()
        return found

    problems = [{"answer": "1", "pieces": [1, 2, 3]}, {"answer": "2", "pieces": [4, 5]}]
    rollout = rollout_of(*FOUR)
    rewards = scored(spoils, rollout, problems, times=2)
    assert rewards.tolist() == [12.0, 12.0, 14.0, 14.0] and rollout.responses == FOUR
    assert [problem["pieces"] for problem in problems] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("indent", ["", "    "], ids=["as it is loaded", "as it is called"])
def test_torch_is_as_it_was_before_a_reward(tmp_path, indent):
    def state():
        return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()

    before = state()
    path = write(tmp_path / "rude.py", "import torch as t\ndef f(completions, **columns):\n"
                 f"    yield from [1] * len(completions)\n{indent}t.set_grad_enabled(False), "
                 "t.set_default_dtype(t.float64), t.set_num_threads(3)\n")
    try:
        scored(load_function(f"{path}:f"))
        assert state() == before
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(before[2])


def test_the_rewards_of_the_flags_are_summed_over_those_that_apply(mine_py):
    answers = [box(7), box(8), "<think>8</think><answer>8</answer>", box(8)]
    rollout = rollout_of(*answers)
    specs = [f"{mine_py}:one", "rule", "think", f"{mine_py}:two"]
    rewards = own_reward_of(specs, [10.0, 1.0, 100.0, 1000.0])(PROBLEMS, ["<a>", "<b>"], rollout)
    assert rewards.tolist() == [11.5, 10.5, 2160.0, 2011.5]
    parts = {name: part.nan_to_num(-1.0).tolist() for name, part in rollout.reward_parts.items()}
    assert parts == {"one": [1.0] * 4, "rule": [1.5, 0.5, 0.0, 1.5], "think": [0.0, 0.0, 1.5, 0.0],
                     "two": [-1.0, -1.0, 2.0, 2.0]}
    assert own_reward_of(["rule"], [])(PROBLEMS, ["", ""], rollout).tolist() == parts["rule"]
    assert not hasattr(rollout, "step_rewards")
    assert own_reward_of(None) is own_reward_of([]) is own_reward_of(None, [1.0]) is None
    rollout = rollout_of(*[box(7)] * 3)
    problems = [{"answer": answer} for answer in ("7", "", ["7"])]
    with pytest.warns(UserWarning, match="None for some rows"):  # where no truth is known
        rewards = own_reward_of(["rule"])(problems, ["", "", ""], rollout)
    assert rewards.tolist() == [1.5, 0, 0]
    assert rollout.reward_parts["rule"].isnan().tolist() == [False, True, True]
    rollout = rollout_of(box(7), "x")  # rewards of steps stand beside the rule's
    rewards = own_reward_of(None, None, f"{mine_py}:steps")(PROBLEMS[:1], ["p"], rollout)
    assert rewards.tolist() == [1.5, 0.0] and list(rollout.reward_parts) == ["rule"]
    assert rollout.step_rewards == [[(1, 11.0)], [(2, 18.0)]]


def test_each_of_several_rewards_has_a_name_of_its_own(mine_py, tmp_path):
    one, far = f"{mine_py}:one", write(tmp_path / "other.py", MINE) + ":one"
    for specs, names in (([one, far, one], ["one", "one 2", "one 3"]),
                         ([f"{mine_py}:rule", "rule"], ["rule", "rule 2"]),
                         (["rule", f"{mine_py}:rule"], ["rule", "rule 2"])):
        rollout = rollout_of("x", "y")
        rewards = own_reward_of(specs)(PROBLEMS[:1], ["p"], rollout)
        assert list(rollout.reward_parts) == names
        assert torch.equal(rewards, sum(rollout.reward_parts.values()))


def gives(*values):
    return lambda **columns: list(values)


HOSTILE = type("Hostile", (), {"__float__": raises(KeyError("no"))})()
STRINGS = "prompts and completions are strings, not messages)"


@pytest.mark.parametrize("function, row, reason", [
    (raises(SystemExit(3)), None, "question, answer, level, prompts, "),
    (lambda completions, **columns: [c[0]["content"] for c in completions], None, STRINGS),
    (lambda completions, mood, **columns: [], None, "required positional argument: 'mood' (called"),
    (lambda completions, **columns: 1 / 0, None, "ZeroDivisionError: division by zero"),
    (lambda **columns: 1.0, None, "TypeError: 'float' object is not iterable"),
    (gives(1, 2, 3), None, "3 rewards for 4 responses"), (gives(), None, "0 rewards for 4 resp"),
    (gives(1, 2, 3, 4, 5), None, "5 rewards for 4"), (gives(1, 2, -math.inf, 4), 2, "-inf is not"),
    (gives(1, "two", 3, 4), 1, "could not convert string to float: 'two'"),
    (gives(1, 2, 3, math.nan), 3, "nan is not a finite float32 number"),
    (gives(1, -1e39, 3, 4), 1, "-1e+39 is not"), (gives(10**400, 2, 3, 4), 0, "OverflowError"),
    (gives(1, 2, [3], 4), 2, "TypeError"), (gives(1, torch.ones(2), 3, 4), 1, "only one element"),
    *((lambda values=values, **columns: values, None, f"TypeError: it gives a {kind}, not a list")
      for kind, values in {"str": "1234", "dict": dict(enumerate("abcd")), "set": {1, 2, 3, 4},
                           "frozenset": frozenset("abcd")}.items()),
    (gives(1, 2, 3, 1j), 3, "TypeError"), (gives(1, 2, HOSTILE, 4), 2, "KeyError: 'no'"),
])
def test_a_reward_that_goes_wrong_is_named(function, row, reason):
    where = ":" if row is None else f", row {row}, response {FOUR[row]!r}:"
    with value_error(f"^{re.escape(f'--reward f.py:f{where} ')}.*{re.escape(reason)}"):
        scored(function)


def test_what_is_wrong_is_told_under_its_flag(mine_py):
    bad = f"{mine_py}:steps"
    for arguments, line in (
            ((["rule", "think"], [1.0]), "--reward-weights: 1 weights for 2 rewards"),
            ((["rule"], [math.nan]), "--reward-weights: 1 weights for 1 rewards; each takes a fin"),
            ((None, [1.0, 2.0], bad), "--reward-weights: 2 weights for 1 rewards"),
            (([f"{mine_py}:none"],), f"--reward {mine_py}:none: the file has no function 'none'"),
            ((["thinks"],), "--reward thinks: no file ''"),
            ((["rule"], None, "x.py:f"), "--step-reward x.py:f: no file 'x.py'")):
        with value_error(f"^{re.escape(line)}"):
            own_reward_of(*arguments)
    for arguments, line in (
            ((["rule", bad],), f"--reward {bad}, row 0, response 'x': TypeError"),
            ((None, None, f"{mine_py}:one"),
             f"--step-reward {mine_py}:one, row 0, response 'x': not a list of (end, reward) p")):
        fn = own_reward_of(*arguments)
        with value_error(f"^{re.escape(line)}"):
            fn(PROBLEMS[:1], ["p"], rollout_of("x", "y"))


def test_a_reward_file_with_dataclasses_and_neighbours(tmp_path):
    for name, points in (("grpo_neighbour.py", 2.0), ("grpo_late_neighbour.py", 3.0)):
        write(tmp_path / name, f"points = {points}")
    write(tmp_path / "json.py", "1 / 0")  # hides no module that is installed
    score = load_function(write(tmp_path / "mine.py", """
        from __future__ import annotations
        import json
        from dataclasses import dataclass
        from grpo_neighbour import points
        from reward import rule_reward

        @dataclass
        class Part:
            value: float

        def score(completions, answer, **columns):
            from grpo_late_neighbour import points as late
            for completion, truth in zip(completions, answer):
                yield Part(points + late + rule_reward(completion, truth)).value
    """) + ":score")
    assert scored(score).tolist() == [6.5, 5.5, 5.0, 6.5]


def test_a_reward_may_pickle_its_classes_and_start_processes(tmp_path):
    score = load_function(write(tmp_path / "grpo_pool.py", """
        import multiprocessing

        class Job:
            def __init__(self, text):
                self.text = text

        def length(job):
            return float(len(job.text))

        def score(completions, **columns):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return pool.map(length, map(Job, completions))
    """) + ":score")
    assert score(completions=["a", "bcd"]) == [1.0, 3.0]


@pytest.mark.parametrize("name", ["json", "reward", "torch", "sys"])
def test_a_reward_file_takes_the_name_of_no_other_module(tmp_path, name):
    before = sys.modules.get(name)
    function = load_function(write(tmp_path / f"{name}.py", "def f(): return 5") + ":f")
    assert function() == 5 and sys.modules.get(name) is before
    write(tmp_path / "grpo_mine.py", "1 / 0")  # a dot in a name is no package
    assert load_function(write(tmp_path / "grpo_mine.v2.py", "def f(): return 6") + ":f")() == 6
    (tmp_path / "more").mkdir()
    for folder in ("", "more"):  # two files of one name, and one that was changed
        for value in (1, 2):
            code = f"def f(): return '{folder} {value}'"
            path = write(tmp_path / folder / "grpo_twice.py", code)
            assert load_function(f"{path}:f")() == f"{folder} {value}"


def test_a_reward_file_that_is_none_or_does_not_load(tmp_path, monkeypatch):
    for code, reason in (
            ("import sys\nsys.exit()\n", "SystemExit"), ("def score(:", "SyntaxError"),
            ("def f():\n    1 / 0\n\nf()\n", "line 2.$"),
            ("raise ValueError('two\\nlines')", "load: ValueError: two lines .mine.py, line 1."),
            ("\0", "null bytes"), ("import grpo_no_such_module", "ModuleNotFoundError"),
            ("score = 1", "no function"), ("other = 1", "no function 'score'")):
        with value_error(f"mine.py:score: the file.*{reason}"):
            load_function(write(tmp_path / "mine.py", code) + ":score")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "notes.txt", "score = max")
    for spec in ("", ":", "mine.py", "mine.py:", "none.py:score", "folder:score", "\0:score",
                 "x" * 5000 + ".py:score", "notes.txt:score"):
        with value_error("no f"):  # no file, or no function
            load_function(spec)


def test_a_reward_model_reads_its_own_template(tiny, monkeypatch):
    model = reward.RewardModel(small_reward_model(), tiny[1], None)
    rollout = rollout_of("7", "8", "7 and 7", "8")
    problems = [PROBLEMS[0], {**PROBLEMS[1], "answer": ""}]
    read_answer = {"7": "1", "": "2"}
    for template, prompts in ((None, ["1 + 2", "5"]), ("its own", "12")):
        monkeypatch.setattr(tiny[1], "chat_template", template)
        scores = model_rewards(model, lambda problem: read_answer[problem["answer"]], problems,
                               ["1 + 2", "5"], rollout)
        each = [prompts[0], prompts[0], prompts[1], prompts[1]]
        expected = reward_model_scores(model.model, tiny[1], each, rollout.responses)
        assert torch.equal(scores, expected)
        read, responses, rule = zip(*rollout.judged)
        assert (list(read), list(responses)) == (each, rollout.responses)
        assert model.pairs == []  # they are kept in training steps alone
        assert rule[:2] == (0.0, 0.0) and math.isnan(rule[2])  # no answer known: no preference


# --------------------------------------------------------------------------------------------------
# Variants

@pytest.mark.parametrize("response, expected", [
    ("<think>9 * 7</think><answer>63</answer>", 1.5),
    (" <think>9 * 7</think>\n\n<answer> $63.00 eggs </answer>\n", 1.5),
    (r"<think>9 < 10 > 8</think> <answer>So \boxed{63}.</answer>", 1.5),
    ("<think></think><answer>50</answer>", 0.5), ("<think>63</think><answer></answer>", 0.5),
    ("<think>63</think><answer>so 63, I think</answer>", 0.5), ("<think>63</think>", 0.0),
    ("<answer>63</answer>", 0.0), ("63", 0.0), ("", 0.0), ("<think>9</think><answer>63", 0.0),
    ("<answer>63</answer><think>63</think>", 0.0), ("<think>9</think>63<answer>63</answer>", 0.0),
    ("x<think>9</think><answer>63</answer>", 0.0), ("<think>9</think><answer>63</answer>.", 0.0),
    ("<think>9</think><answer>50</answer><answer>63</answer>", 0.0),
    ("<think>9</think><think>9</think><answer>63</answer>", 0.0),
    ("<think><think>9</think><answer>63</answer>", 0.0), ("<Think></Think><answer></answer>", 0.0),
    ("<think>9<answer>63</answer></think>", 0.0), ("<think>9<think><answer>63<answer>", 0.0),
])
def test_think_answer_reward(response, expected):
    assert think_answer_reward(response, "63") == expected
    assert type(think_answer_reward(response, "63")) is float
    assert think_answer_reward("<think></think><answer></answer>", "") == 0.5  # nothing is paid


def test_length_rescaled_is_gr3():
    rewards, lengths = torch.tensor([1.0, 0.5, 0.8]), torch.tensor([10, 20, 10])
    scaled = length_rescaled(rewards, lengths, group_size=3)
    assert (scaled - scaled.mean()).tolist() == pytest.approx(
        [0.20915856, -0.25799648, 0.04883792], abs=1e-7)
    twice = length_rescaled(rewards.repeat(2), torch.tensor([10, 20, 10, 5, 10, 5]), 3)
    assert twice.tolist() == pytest.approx(scaled.tolist() * 2)  # lengths count inside their group
    double = length_rescaled(rewards.double(), lengths, 3, alpha=1.0)
    assert double.dtype == torch.float64
    assert double.tolist() == pytest.approx([1 / 1.75, 0.5 / 2.5, 0.8 / 1.75])
    assert length_rescaled(rewards, lengths, 3, alpha=0.0).tolist() == rewards.tolist()
    assert length_rescaled(rewards, [0, 0, 0], 3).tolist() == rewards.tolist()
    assert length_rescaled(torch.tensor([1, 0]), [2, 2], 2).tolist() == pytest.approx([1 / 1.33, 0])
    for rewards, alpha in (([1.0, -0.1], 0.33), ([1.0, math.nan], 0.33), ([1.0, 1.0], -0.1)):
        with pytest.raises(ValueError):
            length_rescaled(torch.tensor(rewards), torch.tensor([1, 1]), 2, alpha)


def test_overlong_penalty_is_dapos():
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100, 101, 500])
    assert overlong_penalty(lengths, limit=100, buffer=20).tolist() == pytest.approx(
        [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1])
    assert overlong_penalty([0, 50, 100], limit=100, buffer=100).tolist() == [0, -0.5, -1]
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, limit=100, buffer=buffer)


# --------------------------------------------------------------------------------------------------
# Several candidates in one answer

def test_candidates_of_the_tiny_policy(tiny):
    answers = [r"9 + 9 = \boxed{ 18 } \boxed{ 9 } 9", "9",
               r"\boxed{ 9 } \boxed{ } \boxed{ 9 \boxed{ 9 }", r"} \boxed{ \boxed{ 3 } }"]
    rows = [words_of(tiny[1], tiny[1](text, add_special_tokens=False).input_ids)
            for text in answers]
    rewards, spans = boxed_candidates(rows, ["18", "9"], 2)
    assert spans == [[(0, 6), (7, 9)], [], [(0, 2), (3, 4), (5, 9)], [(0, 5)]]
    assert rewards == [[1.0, 0.0], [], [1.0, 0.0, 1.0], [0.0]]
    unknown, _ = boxed_candidates(rows, [None, "3"], 2)
    assert unknown == [[0.0, 0.0], [], [0.0, 0.0, 0.0], [1.0]]
    for truths, group_size, n in ((["18"], 2, 4), (["18", "9"], 4, 4), (["18", "9"], 2, 3)):
        with pytest.raises(ValueError):
            boxed_candidates(rows[:n], truths, group_size)


# What an answer may be made of: (text, whether it is a candidate, whether that is right).
PARTS = [
    ("word ", None), ("\n\n", None), ("é中😀", None), ("\\frac{1}{2}", None), ("}}$$. ", None),
    ("\\boxed{7}", 1.0), ("\\boxed{7}}$. ", 1.0), (" \\boxed {7.0} ", 1.0), ("\\boxed 7 ", 1.0),
    ("\\boxed{\\frac{1}{2}}", 0.0), ("\\boxed{中\\{😀}\n", 0.0), ("\\boxed{\\boxed{7}}", 1.0),
    ("\\boxed{}", 0.0), ("\\boxed{7 or \\boxed{7}}", 0.0),
]


@pytest.mark.parametrize("kind", ["one", "three", "words", "qwen"])
def test_a_candidate_ends_with_the_token_that_closes_its_box(request, kind):
    pieces = {"one": ".", "three": ".{1,3}", "words": " ?[^ ]{1,4}| "}.get(kind)
    tokenizer = None if pieces else request.getfixturevalue(kind)
    chance = random.Random(0)
    for _ in range(80):
        parts = chance.choices(PARTS, k=chance.randrange(13))
        text = "".join(part for part, _ in parts)
        if pieces:
            words = re.findall(pieces, text, re.DOTALL)
            shown = ["".join(words[: i + 1]) for i in range(len(words))]
        else:  # half of a character is a token, too
            ids = tokenizer(text).input_ids
            words = words_of(tokenizer, ids)
            shown = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
        expected_rewards, expected_spans, written, first = [], [], "", 0
        for part, right in parts:
            end = written + part.rstrip(" \n.$")[: -1 if part.endswith("}}$. ") else None]
            written += part
            if right is not None:
                last = next(i for i, prefix in enumerate(shown) if prefix.startswith(end))
                if last >= first:  # two boxes that one token closes are one candidate
                    expected_spans.append((first, last))
                    expected_rewards.append(right)
                    first = last + 1
        rewards, spans = boxed_candidates([words], ["7"], 1)
        assert (rewards, spans) == ([expected_rewards], [expected_spans]), text


def test_an_end_token_belongs_to_no_box(qwen):
    ids = qwen(r"\boxed 7<|im_end|>").input_ids
    rollout = types.SimpleNamespace(labels=torch.tensor([ids] * 2), rule_rewards=torch.ones(2),
                                    finished=torch.tensor([True, False]), entropies=None,
                                    mask=None, step_rewards=None)
    s = types.SimpleNamespace(advantage="shape", group_size=2, scale_by_std=True,
                              clip_advantages=None)
    options = train.advantage_options(rollout, train.Batch([{"answer": "7"}], []), qwen, None, s)
    assert options["candidates"][0] == [[1.0], [0.0]]  # the second was cut there by chance


def test_candidates_are_found_at_once():
    start = time.process_time()
    for text, count in (("\\boxed{1}" * 2000, 1999), ("x" * 20_000 + "\\boxed{1}", 1),
                        ("\\boxed{" * 4000 + "}" * 4000, 1), ("\\boxed{1" * 4000, 0)):
        _, [spans] = boxed_candidates([re.findall(".{1,2}", text)], ["1"], 1)
        assert len(spans) >= count
    assert time.process_time() - start < 2
    assert boxed_candidates([[]], ["1"], 1) == ([[]], [[]])
    both_in_one = ["so ", "\\boxed{1}\\boxed{2}", " or ", "\\boxed 1 "]
    assert boxed_candidates([both_in_one], ["1"], 1) == ([[1.0, 1.0]], [[(0, 1), (2, 3)]])


# --------------------------------------------------------------------------------------------------
# A reward model

def small_reward_model(architecture="qwen2", **changes):
    sizes = {"max_position_embeddings": 64, "pad_token_id": None, "num_labels": 1, **changes}
    return small_model(architecture, 0.2, AutoModelForSequenceClassification, **sizes)


ROWS = [[5, 6, 7, 1], [8], [9, 10, 11, 12, 13, 14, 1], [0, 0, 0], [5, 6, 7, 1]]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2", "bert"])
def test_a_row_scores_the_same_alone_and_padded(architecture):
    model = small_reward_model(architecture, pad_token_id=0 if architecture == "bert" else None)
    scores = score_rows(model, ROWS)
    assert scores.shape == (5,) and scores.dtype == torch.float32 and scores.requires_grad
    with torch.no_grad():  # transformers' own, one by one and without padding
        alone = [float(model(input_ids=torch.tensor([row])).logits) for row in ROWS]
    assert scores.tolist() == pytest.approx(alone, abs=1e-5)
    assert min(abs(a - b) for i, a in enumerate(alone[:4]) for b in alone[:i]) > 0.01
    if architecture == "qwen2":
        model.config.pad_token_id = 1  # the end token pads, as in many checkpoints: it counts
        assert torch.equal(score_rows(model, ROWS), scores)
    for rows in ([[5], []], [[5] * 65]):
        with pytest.raises(ValueError, match="tokens"):
            score_rows(model, rows)


def test_reward_model_scores(tiny):
    tokenizer = tiny[1]
    model = small_reward_model()
    prompts, responses = ["1 + 2", "1 + 2", "5", "5"], ["3", "4 and 5 and 6", "", "<|end|>3"]
    scores = reward_model_scores(model, tokenizer, prompts, responses)
    assert scores.shape == (4,) and scores.dtype == torch.float32 and not scores.requires_grad
    rows = reward_model_rows(tokenizer, prompts, responses)
    end = tokenizer.eos_token_id  # at the end alone: what was written is text
    assert all(row[-1] == end and row.count(end) == 1 for row in rows)
    assert rows[0][:-1] == [token for text in ("1 + 2", "3")
                            for token in tokenizer(text, add_special_tokens=False).input_ids]
    assert scores.tolist() == pytest.approx(score_rows(model, rows).tolist(), abs=1e-6)
    one_by_one = reward_model_scores(model, tokenizer, prompts, responses, batch_rows=1)
    assert scores.tolist() == pytest.approx(one_by_one.tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        reward_model_scores(model, tokenizer, prompts[:3], responses)


def test_preference_pairs_are_of_one_group_the_better_first():
    rewards = torch.tensor([0.0, 1.5, 0.5, 1.5, 0.5, 0.5, 0.5, 0.5])
    every = preference_pairs(rewards, 4, pairs_per_group=None)
    assert sorted(every.tolist()) == [[1, 0], [1, 2], [2, 0], [3, 0], [3, 2]]
    turned = preference_pairs(rewards.roll(4), 4, pairs_per_group=None)
    assert sorted(turned.tolist()) == [[5, 4], [5, 6], [6, 4], [7, 4], [7, 6]]
    for none in (rewards[4:], rewards[:0]):
        assert preference_pairs(none, 4).shape == (0, 2)
    drawn = [preference_pairs(rewards, 4, seeded(seed), pairs_per_group=2)
             for seed in (0, 0, 1, 2, 3)]
    assert torch.equal(drawn[0], drawn[1]) and drawn[0].shape == (2, 2)
    assert any(not torch.equal(drawn[0], other) for other in drawn)


def test_bradley_terry_loss():
    chosen, rejected = torch.tensor([[1.0, -1.0, 2.0], [0.0, 0.0, 2.0]])
    expected = [-math.log(1 / (1 + math.exp(-d))) for d in (1.0, -1.0, 0.0)]
    assert float(bradley_terry_loss(chosen, rejected)) == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert float(bradley_terry_loss(chosen[:1] - 1e4, rejected[:1])) == pytest.approx(9999.0)


class Seen:
    """A tokenizer that remembers the texts it was given; one token per letter."""
    eos_token_id = 1

    def __init__(self):
        self.texts = []

    def __call__(self, texts, **options):
        self.texts += texts
        return types.SimpleNamespace(input_ids=[[2 + ord(c) % 60 for c in text] for text in texts])


def learner(pairs=(), replay=()):
    model = small_reward_model()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    return reward.RewardModel(model, Seen(), still, list(pairs), list(replay))


def test_an_iteration_mixes_a_tenth_of_old_pairs():
    pairs, replay = ([("p", f"{name}{i}", "bad") for i in range(count)]
                     for name, count in (("new", 45), ("old", 50)))
    r = learner(pairs, replay)
    figures = train_reward_model(r, seeded())
    seen = r.tokenizer.texts
    assert sorted(text for text in seen if "new" in text) == sorted(p[1] for p in pairs)
    assert len({text for text in seen if "old" in text}) == 5  # 5 of 50
    assert r.pairs == [] and r.replay == replay + pairs
    # With a learning rate of 0, the figures are those of the mix as it was.
    rows = reward_model_rows(Seen(), ["p"] * 100, [t for t in seen if t not in ("p", "bad")]
                             + ["bad"] * 50)
    chosen, rejected = score_rows(r.model, rows).chunk(2)
    assert figures["reward_model_loss"] == pytest.approx(
        bradley_terry_loss(chosen, rejected).item(), abs=1e-5)
    assert figures["reward_model_accuracy"] == int((chosen > rejected).sum()) / 50
    gradients = []  # of the same pair three times: nothing is left over from the step before
    r.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(r.model.score.weight.grad.clone()))
    for _ in range(2):
        r.pairs, r.replay = pairs[:1] * 2, []
        train_reward_model(r, batch_pairs=1)
    assert len(gradients) == 4 and gradients[0].any()
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    few = learner(pairs, replay[:1])
    train_reward_model(few)
    assert sum("old" in text for text in few.tokenizer.texts) == 1
    none = learner(replay=replay)
    assert all(map(math.isnan, train_reward_model(none).values()))
    assert none.replay == replay and none.tokenizer.texts == []


def test_script_shows_the_egg_problem(run_here):
    printed = run_here("reward.py")
    assert [row.split()[0] for row in printed.splitlines()[1:]] == ["1.5", "0.5", "0.0"]
    assert printed.isascii()  # any terminal can show it
    assert run_here("reward.py", box("63.0"), "63") == "1.5\n"
