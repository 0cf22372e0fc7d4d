r"""[B] reward.py: an answer is scored by a rule.

It promises 0.5 for a final answer in a box and 1.0 more if it is right; that the last complete box
counts, and is read as a fair reader would; that no text is executed, none takes long and none
raises an error. Beyond the ruler: problems from files, users' rewards, figures, reward models.
"""
import gzip
import hashlib
import itertools
import json
import math
import random
import re
import time
from fractions import Fraction
import pytest
import torch
import answers
from chat_families import family
from checks import value_error
from files import ROOT
from spellings import DIFFERS, HUGE, NOT_EQUAL, NUMBERS, PIECES_OF_IT, SAME
import reward
from evaluate import best_of_k, majority_at_k
from reward import (boxed_candidates, canonical, complete_boxes, distinct, extract_boxed,
                    final_answer, hold_out, is_right, length_rescaled, load_problems,
                    mean_and_error, overlong_penalty, rule_reward, score_responses, sign_test,
                    think_answer_reward, truths_of)
from sample import words_of


def test_by_hand():
    """16 eggs a day, 3 are eaten and 4 go into a cake: 9 * 7 = 63 are left in a week."""
    assert rule_reward(r"(16 - 3 - 4) * 7 = \boxed{63}", "63") == 0.5 + 1.0
    assert rule_reward(r"Some \boxed{50}.", "63") == 0.5              # an answer, and a wrong one
    assert rule_reward("It must be 63.", "63") == 0.0                 # no box
    assert rule_reward(r"\boxed{50}? No, \boxed{63}", "63") == 1.5    # the last word counts
    assert rule_reward(r"\boxed{63}? No, \boxed{50}", "63") == 0.5
    assert extract_boxed(r"So \boxed{\frac{126}{2}}.") == r"\frac{126}{2}"
    assert rule_reward(r"So \boxed{\frac{126}{2}}.", "63.0") == 1.5
    assert rule_reward(r"\boxed{62.99}", "63") == 0.5                 # nearly is not equal
    # two problems, a group of two answers to each
    rewards = score_responses([r"\boxed{63}", "63", r"\boxed{8}", r"\boxed{7}"], ["63", "7"], 2)
    assert rewards.tolist() == [1.5, 0.0, 0.5, 1.5]


# --------------------------------------------------------------------------------------------------
# A reader may stop here. What follows: boxes, fair readings, files, rewards of one's own.

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"  # where it stands beside the checkout


def box(answer):
    return rf"So it is \boxed{{{answer}}}."


# --- The rule -------------------------------------------------------------------------------------
@pytest.mark.parametrize("empty", ["", " ", "\n\t", "$", "$$", r"\$", ".", "...", r"\text{}",
                                   r"\text{ }", r"\ ", "\u00a0", "\u2003"])
def test_an_empty_box_is_no_answer(empty):
    assert rule_reward(box(empty), "63") == 0.0 and rule_reward(box(empty), empty) == 0.0
    assert rule_reward(rf"\boxed{{63}} and \boxed{{{empty}}}", "63") == 1.5  # no last word
    for zero in ("0", "0.0", "-0", "$0", ".0", r"0\%"):  # which is an answer
        assert rule_reward(box(zero), "0") == 1.5 == rule_reward(box(zero), 0)  # as a number, too
        assert rule_reward(box(zero), "7") == 0.5


def test_score_responses_is_prompt_major():
    responses = [box(7), box(8), "none", box(8), box(7), box(8)]
    rewards = score_responses(responses, ["7", "8"], group_size=3)
    assert rewards.dtype == torch.float32 and rewards.device.type == "cpu"
    assert rewards.tolist() == [1.5, 0.5, 0.0, 1.5, 0.5, 1.5]
    assert score_responses([box(7)] * 16, ["7", "8"]).tolist() == [1.5] * 8 + [0.5] * 8
    # Where no truth is known, an answer is neither right nor wrong
    rewards = score_responses([box(1)] * 4, ["1", None], group_size=2)
    assert rewards[:2].tolist() == [1.5, 1.5] and rewards[2:].isnan().all()
    assert is_right(rewards).tolist() == [True, True, False, False]
    # A prompt that ends in <think> has begun the reasoning of its answers alone
    answers = [box(7), f"</think> {box(7)}"]
    rewards = score_responses(2 * answers, ["7", "7"], 2, ["How many? <think>\n", "How many?"])
    assert rewards.tolist() == [0.0, 1.5, 1.5, 1.5]
    for rows, truths in ((5, 2), (7, 2), (6, 3), (6, 0)):
        with pytest.raises(ValueError):
            score_responses([box(7)] * rows, ["7"] * truths, 3)


# --- The box --------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, content", [
    (r"\boxed{5}", "5"), (r"\boxed{ 5 }", " 5 "), (r"\boxed{}", None), ("5", None), ("", None),
    (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{1 \boxed{2} 3}", r"1 \boxed{2} 3"),
    ("\\boxed\n  {5}", "5"), (r"\boxed5", "5"), (r"So \boxed -1/2, I think.", "-1/2"),
    (r"$\boxed .5$", ".5"), (r"\boxed 1,000.50.", "1,000.50"), (r"\boxed{4} \boxed 5", "4"),
    (r"\boxed 4 \boxed 5!", "5"), (r"Use \boxed and see.", None), ("\\boxed{1\n2}", "1\n2"),
    (r"boxed{5}", None), (r"\fbox{5} \Boxed{5}", None), ("\\boxed{\0\ud800}", "\0\ud800"),
    (r"\\boxed{5}", "5"),  # a backslash too many, as in a quoted string
    (r"\boxed{5}, \boxed{6}", "5, 6"), (r"$\boxed{5}$ and $\boxed{6}$.", "5, 6"),
    (r"\boxed{4} \boxed{5}", "5"), (r"\boxed{4}. No: \boxed{5}\text{ or }\boxed{6}", "5, 6"),
    (r"\boxed{4}, \boxed{5}, and **\boxed{6}**", "4, 5, 6"), (r"\boxed{5}, so \boxed{6}", "6"),
    (r"\[\boxed{5}\]\quad\text{and}\quad\[\boxed{6}\]", "5, 6"),
    (r"\boxed{5} or \boxed{5.0}", "5.0"),
    (r"\boxed{5} in \boxed{ }", "5"), (r"\boxed{5}, \boxed{6} and \boxed{\text{}}", "5, 6"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # \{ is a sign, not a brace
    (r"\boxed{[0, 1\}}", r"[0, 1\}"), (r"\boxed{a \\{b}}", r"a \\{b}"),
])
def test_extract_boxed(text, content):
    assert extract_boxed(text) == content


def every_complete_box(text):
    """(end, begin, content) of each \\boxed{…}, by counting from its brace: in quadratic time."""
    signs = [sign.end() - 1 for sign in re.finditer(r"\\[{}]|\\\\(?!boxed)", text)]  # also of \{
    for start in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for i in range(start.end(), len(text)):
            depth += ((text[i] == "{") - (text[i] == "}")) * (i not in signs)
            if depth == 0:
                yield i + 1, start.start(), text[start.end() : i]
                break


PIECES = ["\\boxed{", "\\boxed ", "{", "}", "}", "\\{", "\\}", "\\", "5", " ", "$"]


def test_boxes_are_their_definition():
    """Of random pieces: the last complete box; and all those that are in no other."""
    chance = random.Random(0)
    for _ in range(1000):
        text = "".join(chance.choices(PIECES, k=chance.randrange(31)))
        every = sorted(every_complete_box(text))
        bare = re.findall(r"\\boxed *(5+)", text)
        outer = [(end, content) for end, begin, content in every
                 if not any(b < begin and end < e for e, b, _ in every)]
        full = [content for _, content in outer if canonical(content) != ""]
        expected = full[-1] if full else bare[-1] if bare else None
        assert extract_boxed(text) == expected, text
        assert [(box.stop + 1, text[box]) for box in complete_boxes(text)] == outer, text


@pytest.mark.parametrize("number, written", [
    (number, written) for number, forms in NUMBERS.items()
    for written in re.split(r"\s\s+", forms)])
def test_numbers_that_are_equal(number, written):
    assert canonical(written) == Fraction(number) and isinstance(canonical(written), Fraction)
    assert rule_reward(box(written), number) == rule_reward(box(number), written) == 1.5
    assert rule_reward(box(written), str(Fraction(number) + Fraction(1, 10**12))) == 0.5


@pytest.mark.parametrize("answer, truth", NOT_EQUAL)
def test_answers_that_are_not_equal(answer, truth):
    assert rule_reward(box(answer), truth) == 0.5 and rule_reward(box(truth), answer) == 0.5


@pytest.mark.parametrize("answer, truth", [
    ("Monday", "monday"), ("{A}", "a"), ("$x + 1$", "x+1"), ("x  +\n1", "x + 1"),
    (r"y = \dfrac{x}{2}", r"\frac{x}{2}"), (r"\(x\)", "x"), (r"2 \sqrt{2}", r"2\sqrt{2}"),
    (r"\text{a week}", "a   week"), ("STRASSE", "straße"), ("x²", "x^2"), (r"\mathbb{R}", "R"),
    ("nan", "NaN"), ("9" * 301, "9" * 301), *zip(HUGE, HUGE)])
def test_text_is_cleaned_and_compared_whole(answer, truth):
    assert isinstance(canonical(answer), str) and rule_reward(box(answer), truth) == 1.5
    assert rule_reward(box(answer + "x"), truth) == 0.5


@pytest.mark.parametrize("row", SAME.strip().splitlines())
def test_signs_have_several_spellings(row):
    spellings = re.split(r"\s\s+", row)
    for answer, truth in itertools.product(spellings, repeat=2):
        assert rule_reward(box(answer), truth) == 1.5, (answer, truth)
        assert rule_reward(box(answer + "x"), truth) == 0.5


def test_the_table_of_fair_verdicts():
    assert len(answers.PAIRS) > 300
    differ = [pair for pair in answers.PAIRS if answers.ours(pair) != pair["fair"]]
    assert len(differ) == len(DIFFERS) and {pair["answer"] for pair in differ} == DIFFERS
    for pair in answers.PAIRS:                            # whichever of the two is the truth
        if "boxed" not in pair["answer"]:
            turned = {"answer": pair["truth"], "truth": pair["answer"]}
            assert answers.ours(turned) == answers.ours(pair), pair


@pytest.mark.parametrize("piece", PIECES_OF_IT)
def test_hostile_text_is_scored_at_once(piece):
    """It takes a fraction of a second; in quadratic time it would be minutes."""
    many = piece * (30_000 // len(piece))
    start = time.process_time()
    for text in (many, box(many), box(f"5{many}"), box(f"{many}5"), many + "}" * len(many)):
        assert rule_reward(text, "5") in (0.0, 0.5, 1.5)
    assert rule_reward(box("5"), many) == 0.5
    for text in (many, f"5{many}", f"5 {many}", f"x{many}"):  # the longest that patterns meet
        canonical(text[: reward.LONGEST])
        canonical(text[: reward.LONGEST - 2] + "=5")
        canonical(text[: reward.LONGEST - 1] + "!")       # all is read, and then it is no number
    for text in (many, f"<think>{many}</think><answer>{many}</answer>"):
        assert think_answer_reward(text, "63") in (0.0, 0.5)
    assert time.process_time() - start < 10


# --- Problems -------------------------------------------------------------------------------------
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
        line(), "", "  \t", line("Wie viele Eier, süß?", "####  1,000 ", level=3),
        line(answer="#### 1 #### 2"), line(answer=7, solution="mine"),
    ]).encode())  # a byte-order mark, Windows line ends, blank lines, no newline at the end
    rest = {"question": "How many?", "level": None}  # every problem has all columns of the file
    assert load_problems(path) == load_problems(str(path)) == [
        {**rest, "answer": "72", "solution": "Count: 8 * 9 = 72."},
        {"question": "Wie viele Eier, süß?", "answer": "1,000", "solution": "", "level": 3},
        {**rest, "answer": "2", "solution": "#### 1"}, {**rest, "answer": "7", "solution": "mine"}]


def chat(*messages):
    return json.dumps({"messages": messages, "answer": "1"})


BAD_LINES = [
    '{"question": ', line() * 2, "[" * 200_000, "\0", '["question", "answer"]', "null",  # no object
    f"[{line()}]", "question,answer", *(line(question=bad) for bad in (None, "", " \n", 5)),
    *(line(answer=bad) for bad in (
        "", None, [], ["", None], {"a": 1}, "So 72. " * 20, "8 * 9\n= 72", "8 * 9 = 72\n####",
        "#### 72 ####  \n", "#### $.")),
    chat(), chat("?"), chat(*CHAT[:1]), chat(CHAT[2]), chat({"role": "user", "content": " "})]


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(tmp_path, bad):
    is_object = BAD_LINES.index(bad) > 7
    with value_error("problems.jsonl, line 3: " + ("" if is_object else "no JSON object .*jq -c")):
        load(tmp_path, line(), "", bad, line())


@pytest.mark.parametrize("name, content", [
    ("missing.jsonl", None), ("gsm8k:dev", None), ("", None), ("x" * 300, None), ("folder", None),
    ("openai/gsm8k", None), ("UTF-16", line().encode("utf-16")),
    ("gzip", gzip.compress(b"{}")),
    ("GBK", line(question="Q").replace("Q", "六").encode("gbk")), ("Parquet", b"PAR1\x15\xa8\xe5")],
    ids=range(10))
def test_a_bad_file_is_named(tmp_path, monkeypatch, name, content):
    """Of one in another form it is told what it has to become."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if content:
        (tmp_path / name).write_bytes(content)
    with value_error(f"^{re.escape(name or '.')}: neither gsm8k nor gsm8k:test, nor a file"):
        load_problems(name)


@pytest.mark.parametrize("content, words", [
    ("version https://git-lfs.github.com/spec/v1\noid sha256:5d\nsize 5\n", "git lfs pull"),
    (f"[{line()}]", "jq -c"), (f"[\n  {line()},\n  {line()}\n]", "line 1: .*jq -c"),
    ("question,answer\n5,6", "line 1: no JSON object")])
def test_a_file_of_another_kind_is_told_what_to_do(tmp_path, content, words):
    with value_error(words):
        load(tmp_path, content)


def test_the_fields_may_have_other_names(tmp_path):
    row = {"problem": "How many?", "worked": "8 * 9 #### 72", "answer": "mine", "question_id": 3}
    fields = {"question_field": "problem", "answer_field": "worked"}
    assert load(tmp_path, json.dumps(row), **fields) == [
        {**row, "question": "How many?", "answer": "72", "solution": "8 * 9"}]
    for missing in ("problem", "worked"):
        with value_error(f"line 1: '{missing}'.*line has problem, worked, answer, question_id$"):
            load(tmp_path, json.dumps({**row, missing: None}), **fields)
    # Where the named one is missing, the usual ones are read
    [problem] = load(tmp_path, line(), **fields)
    assert (problem["question"], problem["answer"]) == ("How many?", "72")
    some = '{"question": "?", "k": 2}', '{"question": "?"}'
    found = load(tmp_path, *some, answer_field="k", need_answer=False)
    assert [problem["answer"] for problem in found] == [2, ""]


@pytest.mark.parametrize("given, answer, truth", [
    ("8 * 9\n#### 72", "72", "72"), ("72", "72", "72"), (72, 72, "72"), (0, 0, "0"),
    (False, False, "False"), (math.nan, math.nan, None), ("Monday", "Monday", "Monday"),
    ("", "", None), (None, "", None), ("#### ", "#### ", None), ([], [], None),
    (["a", "b"], ["a", "b"], ["a", "b"]), (["8 * 9\n#### 72", 7], ["72", "7"], ["72", "7"]),
    ([None, 7.5, "", "x" * 101], [None, 7.5, "", "x" * 101], ["7.5"]),
    ("#### A heading\nand text",) * 2 + (None,), ("x" * 100,) * 3, ("x" * 101,) * 2 + (None,),
    ("The answer is 72.",) * 2 + ("72.",), (" 72 ", " 72 ", "72")])
def test_answers_of_any_kind_for_a_reward_of_ones_own(tmp_path, given, answer, truth):
    [problem] = load(tmp_path, line(answer=given, level=3), need_answer=False)
    solution = "8 * 9" if "8 * 9" in str(given) else ""
    expected = {"question": "How many?", "answer": answer, "solution": solution, "level": 3}
    assert repr(problem) == repr({**problem, **expected}) and len(problem) == 4  # False is not 0
    assert truths_of([problem]) == [truth] and final_answer(given) == truth


@pytest.mark.parametrize("given, truth", [
    (r"2+3=5, so the answer is $\boxed{5}$.", "5"), ("<answer> 5 </answer>", "5"),
    ("2+3=5. The answer is: 5", "5"), ("The answer is 4.\nNo: the final Answer is 5", "5"),
    (r"2+3 = \boxed{4}? " + "Long. " * 99 + r"\boxed{5}, I hope", "5"), (r"\boxed 5.", "5"),
    ("<think>4</think>\n<answer>\n5\n</answer>\n", "5"), (r"<answer>\boxed{5}</answer>", "5"),
    (r"\boxed{4} #### 5", "5"), (r"#### $\boxed{5}$", "5"), ("5 (apples)", "5"),
    (r"\boxed{\text{the answer is }5}", "5"), ("\u0665", "5"), (r"\boxed{\frac{1}{2}}", "0.5")])
def test_truths_that_an_answer_can_meet(tmp_path, given, truth):
    for options in ({}, {"need_answer": False}):
        truths = truths_of(load(tmp_path, line(answer=given), **options))
        assert score_responses([box(truth), box("7")], truths, 2).tolist() == [1.5, 0.5]
    assert final_answer(final_answer(given)) == final_answer(given)
    assert final_answer("<answer></answer>") is final_answer("2+3=5. The answer is") is None


@pytest.mark.parametrize("given, truth", [
    (0.1 + 0.2, "0.3"), (2.5000000000000004, "5/2"), (1.1 * 1.1, "1.21"), (1000.1 - 1000, "0.1"),
    (-0.7 - 0.1, "-0.8"), (4.35 * 100, "435"), (72.0, "72"), (123456789012345.0, "123456789012345"),
    (1e300, "1e300"), (1e-7, "1e-7"), (1e15 / 3, "333333333333000")])
def test_a_number_of_json_has_no_noise(tmp_path, given, truth):
    for answer in (given, [given], [7, given]):
        truths = truths_of(load(tmp_path, line(answer=answer)))
        assert score_responses([box(truth), box("8")], truths, 2).tolist() == [1.5, 0.5]


def test_several_answers_may_be_right(tmp_path):
    """Everywhere a truth may be a list: in the rule, in figures, for people."""
    [problem] = load(tmp_path, line(answer=["10", "ten", r"So \boxed{20/2}", 11.0]))
    truth, = truths_of([problem])
    assert problem["answer"] == truth == ["10", "ten", "20/2", "11.0"]
    assert reward.truth_in_words(problem) == "10 or ten or 20/2 or 11.0"
    assert [rule_reward(box(text), truth) for text in ("10.0", "Ten", "11", "12", "")] == [
        1.5, 1.5, 1.5, 0.5, 0.0]
    assert think_answer_reward("<think></think><answer>ten</answer>", truth) == 1.5
    rewards = score_responses([box("ten"), "x", box(9), box(8)], [truth, ["8", "9"]], 2)
    assert rewards.tolist() == [1.5, 0.0, 1.5, 1.5]
    # Two spellings of one number are one winner; two right answers that tie are two
    for votes, score in ((["10", "10.0", "7"], 1.0), (["10", "ten", "7", "7"], 0.0),
                         (["10", "ten"], 1.0), (["10", "ten", "7"], 2 / 3)):
        assert majority_at_k([votes], [truth], len(votes)).tolist() == [score]
    assert boxed_candidates([[box("11")]], [truth]) == [[(0, 0, 1.0)]]
    assert reward.truth_in_words({"answer": ""}) == "not known"


@pytest.mark.parametrize("named, asked", [
    (None, "And 8?"), ("question", "And 8?"), ("problem", "How many?"), ("missing", "And 8?")])
def test_a_question_field_that_is_named_wins(tmp_path, named, asked):
    """Over messages, which are cut where the assistant ends them."""
    row = json.dumps({"messages": [*CHAT, {"role": "assistant", "content": "17"}], "answer": "17",
                      "problem": "How many?"})
    [problem] = load(tmp_path, row, **({"question_field": named} if named else {}))
    assert problem["question"] == asked
    assert problem.get("messages") == (None if named == "problem" else CHAT)


SLIPS = r"""\frac{1}{3}  \tfrac12  so \boxed{10}  \binom{4}{2}  \beta  5\text{ cm}  \textbf{5}
2 \times 3  2\times3  \theta  (1\right)  \rho=3  x \neq 3  x\neq3  \forall x  \bar x
\begin{array}{c}  \triangle ABC  \tbinom  \textit {a}  \fbox{3}"""


@pytest.mark.parametrize("slip", re.split(r"\s\s+|\n", SLIPS))
def test_a_backslash_that_json_has_read_is_named(tmp_path, slip):
    """In a question, a message, a truth or one of several; not if it is written twice."""
    text = json.loads(f'"{slip}"')
    assert text != slip
    for bad, good in ((line(question=f"Solve: {text}"), line(question=f"Solve: {slip}")),
                      (line(answer=f"#### {text}"), line(answer=f"#### {slip}")),
                      (line(answer=["5", text]), line(answer=["5", slip])),
                      (chat({"role": "user", "content": text}), None)):
        with value_error("line 2: .*control character.*two backslashes"):
            load(tmp_path, line(), bad)
        assert good is None or load(tmp_path, line(), good)


@pytest.mark.parametrize("text", [
    "a\nb", "The end.\nEq. 5", "pane\ne latte", "x\tan apple\t5", "name\ttext\tvalue", "a\r\nright",
    "How many? \nIf u know", "\n\nNot 5", "do\nu know", "- a\n- b", "if x:\n\treturn\n\tan = 5",
    "x = (\n    u, v)", "Line \nu can see", "ends so \ne poi", "a\teq\tb", "\textra cheese",
    "x\to\ty",    "2\n3", "\t5", "I have 5 \nuntil", "so\noten", r"\frac{1}{2} \times \neq"])
def test_line_ends_and_tabs_are_no_slips(tmp_path, text):
    assert load(tmp_path, line(question=text))[0]["question"] == text


def test_a_chat_history_in_place_of_the_question(tmp_path):
    row = {"messages": CHAT, "answer": "#### 17"}
    expected = {"messages": CHAT, "question": "And 8?", "answer": "17", "solution": ""}
    for options in ({}, {"question_field": "messages"}):
        assert load(tmp_path, json.dumps(row), **options) == [expected]
    [plain, chatted] = load(tmp_path, line(messages=None), json.dumps(row), need_answer=False)
    assert (plain["question"], plain["messages"], chatted) == ("How many?", None, expected)


def test_messages_as_others_write_them(tmp_path):
    """Parts of text are joined; the question's column may hold the messages."""
    texts = [{"type": "text", "text": "5 "}, {"type": "text", "text": "+ 4?"}]
    system = {"role": "system", "content": texts[:1]}
    row = {"prompt": [system, {"role": "user", "content": texts}], "answer": "9"}
    [problem] = load(tmp_path, json.dumps(row), question_field="prompt")
    assert problem == {**row, "solution": "", "question": "5 + 4?", "messages": [
        {"role": "system", "content": "5 "}, {"role": "user", "content": "5 + 4?"}]}
    for bad in ([*texts, {"type": "image_url"}], ["5 + 4?"], 5, {"result": 5}):
        with value_error("line 1: .*content that is no text"):
            load(tmp_path, chat({"role": "system", "content": bad}, *CHAT[-1:]))


def test_calls_of_tools_have_no_text_and_their_results_may_be_last(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    for end in ({"role": "user", "content": "So?"}, {"role": "tool", "content": "9"}):
        [problem] = load(tmp_path, chat(*CHAT[:2], call, end))
        assert problem["question"] == end["content"]
        assert problem["messages"] == [*CHAT[:2], {**call, "content": ""}, end]


def questions(problems):
    return {problem["question"] for problem in problems}


def test_a_tenth_of_the_questions_is_held_out_by_chance_with_all_their_lines():
    """The order of the lines decides nothing, and lines that are added later move none."""
    problems = [{"question": f"question {i % 900}", "row": i} for i in range(1000)]
    training, held_out = hold_out(problems)
    assert training == [row for row in problems if row["question"] not in questions(held_out)]
    assert len(questions(held_out)) == len(held_out) == 90
    rows = [problem["row"] % 900 for problem in distinct(held_out)]
    assert 0 < sum(row % 10 == 0 for row in rows) < 30 and 25 < sum(row % 2 for row in rows) < 65
    for again in (problems[::-1], problems + problems[:500]):
        assert questions(hold_out(again)[1]) == questions(held_out)
    more = hold_out([*problems, *({"question": f"more {i}"} for i in range(100))])[1]
    assert len(questions(more) - questions(held_out)) < 30
    assert [len(questions(hold_out(problems[:n])[1])) for n in (5, 40, 41)] == [3, 20, 5]


def test_a_limit_chooses_by_chance_and_asks_each_conversation_once():
    """Those of a limit are among those of a larger one."""
    problems = [{"question": f"question {i % 300}", "row": i} for i in range(900)]
    rows = [problem["row"] for problem in distinct(problems, 60)]
    assert rows == sorted({*rows}) and len(rows) == 60 and 5 < sum(row < 60 for row in rows) < 25
    for other, most in ((problems[::-1], 60), (problems[300:], 80)):
        assert questions(distinct(problems, 60)) <= questions(distinct(other, most))
    assert [problem["row"] for problem in distinct(problems)] == list(range(300))
    same = [{"question": "5?", "messages": [{"role": "user", "content": "5?"}]}, {"question": "5?"}]
    assert len(distinct(same)) == 1 and len(distinct([{**same[0], "tools": [{}]}, *same])) == 2


def test_conversations_that_end_alike_are_different_problems():
    """Whether their first turns differ or their system turns; the same one is not trained on."""
    end = {"role": "user", "content": "How many?"}
    problems = [{"question": "How many?", "messages": [{"role": role, "content": f"{i % 6}"}, end]}
                for i in range(12) for role in ("system", "user")]
    training, held_out = hold_out(problems)
    assert len(training) == 12 and len(held_out) == 6     # each of these once
    assert not any(problem in training for problem in held_out)
    assert hold_out(problems[:1] * 8) == ([], problems[:1])


def test_gsm8k_is_downloaded_once_and_nothing_that_is_not_gsm8k(tmp_path, monkeypatch):
    """From a folder; a wrong file, or none, is refused, and nothing of it is kept."""
    served, names = tmp_path / "served", {"gsm8k": "train.jsonl", "gsm8k:test": "test.jsonl"}
    served.mkdir()
    (served / "train.jsonl").write_text(line())
    (served / "test.jsonl").write_text(line(answer="#### 5"))
    monkeypatch.setattr(reward, "GSM8K", {
        name: (file, hashlib.sha256((served / file).read_bytes()).hexdigest()[:32])
        for name, file in names.items()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for url in (served.as_uri() + "/", "nowhere"):
        monkeypatch.setattr(reward, "GSM8K_URL", url)
        assert [load_problems(name)[0]["answer"] for name in names] == ["72", "5"]
    assert {path.name for path in (tmp_path / "grpo-gsm8k").iterdir()} == {*names.values()}
    monkeypatch.setattr(reward, "GSM8K_URL", served.as_uri() + "/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (served / "train.jsonl").write_text(line() + " ")
    (served / "test.jsonl").unlink()
    for name in names:
        with value_error(f"^{name}: cannot download"):
            load_problems(name)
    assert not list((tmp_path / "other" / "grpo-gsm8k").iterdir())


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
        for answer, paid in ((rf"\${truth}.00", 1.5), (f"1{truth}", 0.5)):
            assert rule_reward(box(answer), truth) == paid


# --- Evaluation figures ---------------------------------------------------------------------------
def test_the_mean_of_the_problems_and_its_error():
    rights = torch.tensor([1.0] * 68 + [0.0] * 132, dtype=torch.float64)
    mean, error, _ = mean_and_error(rights)
    assert float(mean) == 0.34 and float(error) == pytest.approx(math.sqrt(0.34 * 0.66 / 199))
    some = torch.tensor([1.0, math.nan, 0.0, 1.0])        # one does not apply
    assert [float(x) for x in mean_and_error(some)] == pytest.approx([2 / 3, 1 / 3, 3])
    assert mean_and_error(some[:1])[1].isnan()            # of one problem nobody knows
    assert all(value.isnan() for value in mean_and_error(some[1:2])[:2])


@pytest.mark.parametrize("gained, lost", [(0, 0), (1, 0), (2, 0), (3, 5), (6, 6), (0, 12), (9, 2)])
def test_the_sign_test_counts_all_ways_in_which_coins_fall(gained, lost):
    n = gained + lost
    heads = [sum(fall) for fall in itertools.product((0, 1), repeat=n)]
    uneven = sum(abs(2 * count - n) >= abs(gained - lost) for count in heads)
    assert sign_test(gained, lost) == pytest.approx(uneven / len(heads), rel=1e-12)
    assert 0 < sign_test(2000, 900) < 1e-90               # no overflow


@pytest.mark.parametrize("n", range(1, 8))
def test_the_best_of_k_is_the_mean_over_all_sets_of_k(n):
    """Of right answers, pass@k, it is the share of sets that have one; of rewards their best."""
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [1.0] * c + [0.0] * (n - c)
        grades = [(7 * i % 5) / 4 - c for i in range(n)]
        expected = [float(sum(map(max, itertools.combinations(map(Fraction, values), k)))
                          / math.comb(n, k)) for values in (right, grades)]
        found = best_of_k(torch.tensor([right, grades]), k)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
    many = torch.arange(5000)[None] == 3
    assert best_of_k(many, 2500).tolist() == pytest.approx([0.5])         # no overflow


@pytest.mark.parametrize("answers, truth, k, expected", [
    (["7", "8", "8"], "7", 3, 0.0), (["7", "8", "8"], "7", 1, 1.0),  # only the first k vote
    (["7", "8", "8"], "7", 2, 1 / 2), (["7", "8", "9"], "7", 3, 1 / 3),  # ties
    (["7", "7", "8", "8", "9"], "8", 5, 1 / 2),
    ([r"\$7.00", "8", r"7\text{ eggs}", "8", "7.0"], "7", 5, 1.0),  # all for the same number
    (["1,000", "1000", "5"], "1{,}000", 3, 1.0), (["63.0"], 63, 1, 1.0),  # a truth may be a number
    (["Monday", r"\text{monday}", "Tuesday"], "Monday.", 3, 1.0), (["0", "0", "7"], "0", 3, 1.0),
    ([None, None, "7"], "7", 3, 1.0), ([None, "", None, "7"], "7", 4, 1.0),  # who votes
    ([None, "7"], "7", 1, 0.0), ([None, None], "7", 2, 0.0), ([None, ""], "", 2, 0.0)])
def test_majority_at_k(answers, truth, k, expected):
    shares = majority_at_k([["7"] * k, answers], ["8", truth], k)
    assert shares.tolist() == pytest.approx([0, expected])


# --- Variants -------------------------------------------------------------------------------------
@pytest.mark.parametrize("response, expected", [
    ("<think>9 * 7</think><answer>63</answer>", 1.5),
    (" <think>9 * 7</think>\n\n<answer> $63.00 eggs </answer>\n", 1.5),
    (r"<think>9 < 10 > 8</think> <answer>So \boxed{63}.</answer>", 1.5),
    ("<think></think><answer>50</answer>", 0.5), ("<think>63</think><answer></answer>", 0.5),
    ("<think>63</think><answer>so 63, I think</answer>", 0.5), *((wrong, 0.0) for wrong in (
        "", "63", "<think>63</think>", "<answer>63</answer>", "<think>9</think><answer>63",
        "<answer>63</answer><think>63</think>", "<think>9</think>63<answer>63</answer>",
        "x<think>9</think><answer>63</answer>", "<think>9</think><answer>63</answer>.",
        "<think>9</think><answer>50</answer><answer>63</answer>",
        "<think><think>9</think><answer>63</answer>", "<think>9<answer>63</answer></think>",
        "<Think></Think><answer></answer>", "<think>9<think><answer>63<answer>"))])
def test_think_answer_reward(response, expected):
    assert think_answer_reward(response, "63") == expected
    # A chat template that writes the first tag itself; the prompt's own text earns nothing
    head, tag, rest = response.partition("<think>")
    if tag and not head.strip():
        assert think_answer_reward(rest, "63", "Q <think>\n") == expected
        assert tag in rest or think_answer_reward(rest, "63", "<think> Q") == 0.0


def test_length_rescaled_is_gr3():
    rewards, lengths = torch.tensor([1.0, 0.5, 0.8]), torch.tensor([10, 20, 10])
    scaled = length_rescaled(rewards, lengths, group_size=3)
    assert (scaled - scaled.mean()).tolist() == pytest.approx(
        [0.20915856, -0.25799648, 0.04883792], abs=1e-7)
    twice = length_rescaled(rewards.repeat(2), torch.tensor([10, 20, 10, 5, 10, 5]), 3)
    assert twice.tolist() == pytest.approx(scaled.tolist() * 2)  # lengths count inside their group
    assert length_rescaled(rewards, lengths, 3, alpha=1.0).tolist() == pytest.approx(
        [1 / 1.75, 0.5 / 2.5, 0.8 / 1.75])
    unscored = length_rescaled(torch.tensor([1, math.nan, 0.5, 0.8]), torch.tensor([10, 9, 20, 10]),
                               4)                           # as if it were not there
    assert unscored[[0, 2, 3]].tolist() == pytest.approx(scaled.tolist()) and unscored[1].isnan()
    for rewards in ([1.0, -0.1], [math.nan, -0.1]):
        with pytest.raises(ValueError):
            length_rescaled(torch.tensor(rewards), torch.tensor([1, 1]), 2)


def test_overlong_penalty_is_dapos():
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100, 101, 500])
    assert overlong_penalty(lengths, limit=100, buffer=20).tolist() == pytest.approx(
        [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1])
    assert overlong_penalty(torch.tensor([0, 50, 100]), 100, 100).tolist() == [0, -0.5, -1]


# --- Several candidates in one answer -------------------------------------------------------------
# What an answer may be made of: (text, whether it is a candidate, whether that is right).
PARTS = [
    ("word ", None), ("\n\n", None), ("é中😀", None), ("\\frac{1}{2}", None), ("}}$$. ", None),
    ("\\boxed{7}", 1.0), ("\\boxed{7}}$. ", 1.0), (" \\boxed {7.0} ", 1.0), ("\\boxed 7 ", None),
    ("\\boxed{\\frac{1}{2}}", 0.0), ("\\boxed{中{😀}}\n", 0.0), ("\\boxed{\\boxed{7}}", 1.0),
    ("\\boxed{}", 0.0), ("\\boxed{7 or \\boxed{7}}", 0.0)]


@pytest.mark.parametrize("kind", ["one", "three", "words", "qwen"])
def test_a_candidate_ends_with_the_token_that_closes_its_box(kind):
    pieces = {"one": ".", "three": ".{1,3}", "words": " ?[^ ]{1,4}| "}.get(kind)
    tokenizer = None if pieces else family(kind)
    chance = random.Random(0)
    for _ in range(80):
        parts = chance.choices(PARTS, k=chance.randrange(13))
        text = "".join(part for part, _ in parts)
        words = (re.findall(pieces, text, re.DOTALL) if pieces
                 else words_of(tokenizer, tokenizer(text).input_ids))  # some are half a character
        token_of = [n for n, word in enumerate(words) for _ in word]  # of each character
        candidates, first, written = [], 0, 0
        for part, right in parts:
            closing = written + len(part.rstrip(" \n.$")) - 1 - part.endswith("}}$. ")
            written += len(part)
            # Two boxes that one token closes are one candidate
            if right is not None and token_of[closing] >= first:
                candidates.append((first, token_of[closing], right))
                first = token_of[closing] + 1
        assert boxed_candidates([words], ["7"]) == [candidates], text


def test_candidates_are_found_at_once():
    start = time.process_time()
    for text, count in (("\\boxed{1}" * 2000, 1999), ("x" * 20_000 + "\\boxed{1}", 1),
                        ("\\boxed{" * 4000 + "}" * 4000, 1), ("\\boxed{1" * 4000, 0)):
        [candidates] = boxed_candidates([re.findall(".{1,2}", text)], ["1"])
        assert len(candidates) >= count
    assert time.process_time() - start < 10
    both_in_one = ["so ", "\\boxed{1}\\boxed{2}", " or ", "\\boxed{1} "]
    for truths, paid in ((["1", "1"], 1.0), (["2", "3"], 0.0)):
        expected = [[(0, 1, paid), (2, 3, paid)]] * 2
        assert boxed_candidates([both_in_one] * 2, truths) == expected


def test_script_shows_the_egg_problem(run_here):
    printed = run_here("reward.py")
    assert [row.split()[0] for row in printed.splitlines()[1:]] == ["1.5", "0.5", "0.0"]
    assert printed.isascii()  # any terminal can show it
    assert run_here("reward.py", box("63.0"), "63") == "1.5\n"
