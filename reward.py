r"""[B] Rule reward: a math answer is scored by a rule, so no reward model has to be trained.

    R(x, y) = 0.5 · [y gives an answer in \boxed{…}]  +  1.0 · [that answer is right]

so R is 0, 0.5 or 1.5. x is the problem, with its known final answer; y is one response to it.

Departures from the theory's code map:
- The response alone is scored. The map scores prompt and response together, and a prompt that shows
  what a \boxed{answer} looks like is then scored as one.
- The last complete box counts, not the first: a model that corrects itself means its last word.
  Braces are balanced: \boxed{\frac{1}{2}} is read whole, where the map's pattern stops at the first
  closing brace.
- Numbers are compared as numbers, exactly: 1,000 = 1000.0 = \$1{,}000. The map compares strings,
  and the theory's other version lets an error under 0.01 pass. An answer inside another (5 in 15)
  is not right.

    python reward.py                        # the egg problem, scored
    python reward.py "So \boxed{63}." 63    # one response against its truth
"""

import bisect
import hashlib
import http.client
import importlib.util
import inspect
import json
import math
import operator
import os
import re
import sys
import tempfile
import urllib.request
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


def rule_reward(response, ground_truth):
    """R(x, y) as above: 0.0, 0.5 (an answer in the right format) or 1.5 (and it is right).

    An empty box is no answer. Any text is scored, none raises, and nothing in it is ever evaluated.
    """
    answer = canonical(extract_boxed(response) or "")
    if answer == "":  # not `if not answer`: zero is an answer
        return 0.0
    return 0.5 + 1.0 * (answer == canonical(str(ground_truth)))


def score_responses(responses, ground_truths, group_size=8, device="cpu"):
    """Score N = B·G responses, prompt-major, against B ground truths: (N,) float32.

    Where the truth is None nothing can be said: NaN. ValueError if N is not B·group_size: rows
    would be scored against another prompt's truth.
    """
    N, B = len(responses), len(ground_truths)
    if N != B * group_size:
        raise ValueError(f"{N} responses are not {B} groups of {group_size}")
    truths = [truth for truth in ground_truths for _ in range(group_size)]  # one per row
    rewards = [math.nan if truth is None else rule_reward(response, truth)
               for response, truth in zip(responses, truths)]
    return torch.tensor(rewards, dtype=torch.float32, device=device)  # (N,)


def is_right(rewards):
    """Rewards (N,) of the rule -> (N,) bool: which answers are right."""
    return torch.as_tensor(rewards) == 1.5


def has_format(rewards):
    """Rewards (N,) of the rule -> (N,) bool: which responses give an answer in a box."""
    return torch.as_tensor(rewards) > 0


BOX = re.compile(
    r"\{|\}\s*|\\[{}]"  # the escaped \{ and \} are printed characters and group nothing
    r"|(?P<box>\\boxed\s*\{)\s*"  # \boxed{ or \boxed {
    r"|\\boxed\s*(?P<bare>[-+]?\.?[0-9](?:[^\s{}$\\]*[^\s{}$\\.,;:!?)*])?)\s*"  # \boxed 18
)


def extract_boxed(text):
    r"""The content of the last complete \boxed{…}, braces balanced; None if there is none.

    A box inside a complete box is part of its content, but \boxed{\boxed{5}} is 5. A box that is
    never closed is passed over. \boxed 18 is read as well, up to the next space.
    """
    boxes = complete_boxes(text)
    return text[boxes[-1][1]] if boxes else None


def complete_boxes(text):
    """The complete boxes that are in no other, in order: [(slice of the box, of its content)].

    One pass with a stack: linear in the length of the text, whatever a model that has lost its way
    may write. White space behind a box belongs to it.
    """
    opened = []  # for each open brace: the token that opened a box, None for a plain brace
    boxes = []
    for token in BOX.finditer(text):
        first = token[0][0]
        if first == "{":
            opened.append(None)
        elif token["box"]:
            opened.append(token)
        elif token["bare"]:
            boxes.append((slice(*token.span()), slice(*token.span("bare"))))
        elif first == "}" and opened and (box := opened.pop()):
            content = slice(box.end("box"), token.start())
            if boxes and boxes[-1][0] == slice(box.end(), token.start()):
                content = boxes[-1][1]  # a box that holds a box and no more
            while boxes and boxes[-1][0].start > box.start():
                boxes.pop()
            boxes.append((slice(box.start(), token.end()), content))
    return boxes


# --------------------------------------------------------------------------------------------------
# Reading an answer: the rule compares what `canonical` makes of the two texts. Mathematics in LaTeX
# has many spellings; a reader of the method may skip how they are read.

SPELLINGS = {  # LaTeX and Unicode for the same thing, replaced in this order
    '"': " ", "{,}": ",", "\\!": "", "\\,": " ", "\\;": " ", "\\:": " ", "\\ ": " ", "~": " ",
    "\\quad": " ", "\\qquad": " ", "\\left": "", "\\right": "", "\\(": " ", "\\)": " ", "\\[": " ",
    "\\]": " ", "\\$": "$", "\\%": "%", "^{\\circ}": "°", "^\\circ": "°", "\\degree": "°",
    "\\pounds": "£", "\\approx": "=", "≈": "=", "\\times": "*", "\\cdot": "*", "×": "*", "·": "*",
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "½": " 1/2", "¼": " 1/4", "¾": " 3/4",
    "²": "^2 ", "³": "^3 ", "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-",
}
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed) ?\{([^{}]*)\}")
FRACTION = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")
POWER = re.compile(r"\^ ?\{([^{}]*)\}")
# What may stand before an answer: "x =", "x_1 =", "f(3) =", "\theta =", '"answer: "', a bare "=".
NAME = re.compile(
    r'(?:(?!\\not)\\?[a-z]+(?:_[a-z0-9]+|_\{[a-z0-9]+\})?(?:\([a-z0-9]\))? ?[=:]'
    r'|"[^"]*" ?[=:]|"[^"]*[=:] ?"|=) ?'
)
DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
NUMBER = re.compile(
    r"(?P<sign>[+-]?) ?[$€£]? ?(?:"
    r"(?P<whole>[0-9]+) (?P<part>[1-9][0-9]?) ?/ ?(?P<parts>[0-9]+)"  # 3 1/2
    rf"|(?:(?P<factor>{DECIMAL}) ?[*x] ?)?10 ?\^ ?(?P<power>-?[0-9]{{1,3}})"  # 1.5*10^3
    rf"|(?P<top>{DECIMAL})(?: ?/ ?(?P<bottom>-?{DECIMAL})"  # 1/2 and 1,000.5
    r"|e(?P<exponent>[+-]?[0-9]{1,3}))?)"  # 1e3
)
# A unit is made of signs and of words, each perhaps with a power; no digit and no variable.
UNIT = re.compile(r'[%°€£$ ]|[/*]? ?(?:"[^"0-9]*"|[a-z]+(?:-[a-z]+)*)(?: ?\^ ?-?[0-9] ?)?\.?')
SHORT_UNITS = set("m g s h l km cm mm kg mg lb oz ft in yd mi hr ml".split())  # 18m, but not 18x
NO_UNITS = set(  # words that change the number, or add another
    "k bn hundred hundreds thousand thousands million millions billion billions trillion trillions "
    "dozen dozens lakh crore mil half halves third thirds tenths squared cubed factorial plus "
    "minus mod modulo remainder and or to not is am pm pi zero one two three four five six seven "
    "eight nine ten eleven twelve twenty thirty forty fifty".split()
)
LONGEST = 300  # characters; what is longer is compared as text, so no pattern meets long text


def canonical(answer):
    r"""What an answer is compared by, and what it votes as: its number, or else its cleaned text.

    18, $18, 18.0, x = 18, 18 km, 18\text{ cm}^2 and \frac{36}{2} are one number: a Fraction, which
    is exact, and equal Fractions hash alike. 50\% is 50 and not 1/2. Two numbers (5 or 6), 18x,
    18 dozen, and what would have to be calculated (2^3) are text. Text is compared without case,
    \text{…}, spaces beside signs, dollar signs around it and a full stop behind it. "" means that
    there is no answer. Nothing is evaluated, and the time is linear in the length of the answer.
    """
    if len(answer) > LONGEST:
        return " ".join(answer.split()).casefold()
    text = answer.strip("*")  # Markdown's bold
    for spelling, plain in SPELLINGS.items():
        text = text.replace(spelling, plain)
    # \text{ cm} becomes " cm" in quotes; with a digit in it, it is no unit: \text{18 cm} is 18 cm.
    text = TEXT.sub(lambda word: word[1] if re.search("[0-9]", word[1]) else f'"{word[1]}"', text)
    text = " ".join(text.casefold().split()).lstrip("$ ").rstrip("$ .")
    text = NAME.sub("", text, count=1) if NAME.match(text) else text
    number = as_fraction(text)
    if number is not None:
        return number
    text = re.sub(r" ?([^\w ]) ?", r"\1", text.replace('"', "").strip("$ ."))
    return text[1:-1] if re.fullmatch(r"\([^(),]*\)|\{[^{}]*\}", text) else text


def as_fraction(text):
    """The number that an answer is, apart from its unit, as a Fraction; None if it is none."""
    text = FRACTION.sub(r" \1\2/\3\4 ", text)  # 3\frac{1}{2} is 3 1/2
    text = POWER.sub(r"^\1 ", text)  # 10^{3} is 10^3, and no digit behind it joins it
    text = " ".join(re.sub(r"(?<!\\)[{}]", "", text).split())
    while (text[:1], text[-1:]) in (("(", ")"), ("[", "]")):
        text = text[1:-1].strip("$ ")
    found = NUMBER.match(text)
    if not found or not is_unit(text[found.end() :]):
        return None
    # whole + top / bottom · 10^power, of which each form of number lacks some
    part = {name: digits.replace(",", "").replace(" ", "")
            for name, digits in found.groupdict("").items()}
    top = Fraction(part["part"] or part["top"] or part["factor"] or 1)
    bottom = Fraction(part["parts"] or part["bottom"] or 1)
    power = int(part["power"] or part["exponent"] or 0)  # at most 999, either way
    if bottom == 0:  # 1/0 is text
        return None
    value = Fraction(part["whole"] or 0) + top / bottom * Fraction(10) ** power
    return -value if found["sign"] == "-" else value


def is_unit(text):
    """Whether what stands behind a number leaves it as it is: nothing, or a unit."""
    first = re.match(r"[ /*]*([a-z]{1,2})(?![a-z])", text)  # 18x, 18n and 18 pi are other numbers
    if UNIT.sub("", text) or (first and first[1] not in SHORT_UNITS):
        return False
    return NO_UNITS.isdisjoint(re.findall("[a-z]+", text))


# --------------------------------------------------------------------------------------------------
# Problems: GSM8K, or a JSONL file in its form. What is wrong with a file is told in one line.

GSM8K_URL = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/")
GSM8K = {  # name: (file, its SHA-256)
    "gsm8k": ("train.jsonl", "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "gsm8k:test": ("test.jsonl",
                   "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}


def load_problems(source, question_field="question", answer_field="answer", need_answer=True):
    """Problems from a JSONL path, or from the name `gsm8k` (train, 7473) or `gsm8k:test` (1319).

    A line has GSM8K's fields (arXiv 2110.14168): a question, and a worked solution that ends in
    `#### 72`. It comes back with `question`, `answer` (the bare final answer, "72") and `solution`
    (the worked part, unless the line has its own); all other columns stay, blank lines are skipped.

    question_field, answer_field: the columns that hold the two. In place of the question a line may
    have `messages`, a chat history of {"role": …, "content": …}; `question` is then the user's turn
    at its end. need_answer=False, for rewards that know no truth: an answer without `####` stays as
    it is, no answer is "", and `solution` is None. ValueError, in one line naming the file and the
    line, for whatever is wrong.
    """
    path = gsm8k_file(source) if source in GSM8K else Path(source)
    if not os.path.isfile(path):  # a device or a pipe may never end
        raise ValueError(f"{path}: No such file, or a folder, a device, a pipe")
    with named(f"{path}:", OSError):
        lines = path.read_bytes().split(b"\n")
    problems = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with named(f"{path}, line {number}:"):
                problems.append(read_problem(line, question_field, answer_field, need_answer))
    if not problems:
        raise ValueError(f"{path}: no problems in it")
    return problems


@contextmanager
def named(name, failures=ValueError):
    """What fails inside is told in one line that begins with the name, as a ValueError."""
    try:
        yield
    except failures as error:
        said = error if failures is ValueError else in_one_line(error)  # others say what they are
        raise ValueError(f"{name} {said}") from None


def in_one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def read_problem(line, question_field, answer_field, need_answer):
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()  # "\ud800" is JSON, but no tokenizer takes it
    except UnicodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if "messages" in row and question_field in row and question_field != "messages":
        raise ValueError(f"{question_field!r} and 'messages': which of them is the question?")
    question = last_turn(row["messages"]) if "messages" in row else row.get(question_field)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{question_field!r} is missing, empty or not a string")
    answer = row.get(answer_field)
    worked, marker, final = answer.rpartition("####") if isinstance(answer, str) else ("", "", "")
    final = final.strip()
    if marker and canonical(final) != "" and "\n" not in final:  # #### may also be a heading
        return {"solution": worked.strip()} | row | {"question": question, "answer": final}
    if need_answer:
        raise ValueError(f"{answer_field!r} is missing or does not end in '#### ' and the answer")
    unknown = {"question": question, "answer": "" if answer is None else answer}
    return {"solution": None} | row | unknown


def last_turn(messages):
    """What the user says at the end of a chat history."""
    turns = messages if isinstance(messages, list) else []
    for turn in turns:
        keys = ("role", "content")
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in keys):
            raise ValueError("'messages' is not a list of turns with 'role' and 'content', strings")
    if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
        raise ValueError("'messages' does not end with something that the user says")
    return turns[-1]["content"]


def truths_of(problems):
    """The final answers that the rule can score against; None where a line had no `####`."""
    return [None if p.get("solution", "") is None else p["answer"] for p in problems]


def hold_out(problems, share=0.1):
    """Split problems by a stable hash of the question: (training, held_out), in their order.

    About `share` of them is held out, the same ones whatever the order of the file or what is added
    to it; equal questions stay together. Of two different ones or more neither side is empty.
    """
    hashes = [hashlib.sha256(problem["question"].encode()).digest() for problem in problems]
    places = [int.from_bytes(digest[:8]) / 2**64 for digest in hashes]  # from 0 to 1
    order = sorted(set(places))
    if len(order) < 2:
        return list(problems), []
    limit = min(max(share, order[0]), order[-2])  # the lowest is held out, the highest never
    held_out = [problem for problem, place in zip(problems, places) if place <= limit]
    training = [problem for problem, place in zip(problems, places) if place > limit]
    return training, held_out


def gsm8k_file(name):
    """The cached file of a GSM8K name, downloaded if it is not there or not what it should be."""
    file, sha256 = GSM8K[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "grpo-gsm8k" / file
    failures = (OSError, http.client.HTTPException)
    with named(f"{name}: no download to {path}, a JSONL path works too:", failures):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return path
        with urllib.request.urlopen(GSM8K_URL + file, timeout=60) as reply:
            data = reply.read()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{GSM8K_URL}{file}: its SHA-256 is not {sha256}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as beside:  # written beside, then moved:
            Path(beside, file).write_bytes(data)
            os.replace(Path(beside, file), path)  # nobody ever reads half a file
    return path


# --------------------------------------------------------------------------------------------------
# Evaluation figures: not part of training, but of what is told about it.


def pass_at_k(correct, k):
    """The chance that one of k samples is right, unbiased from n >= k samples, mean over problems.

    correct: (B, n) bools. Of n samples c are right: 1 - C(n-c, k) / C(n, k), which is the paper's
    1 - prod_{i=n-c+1..n} (1 - k/i) (arXiv 2107.03374, eq. 1), in integers that cannot overflow.
    ValueError unless 1 <= k <= n and B > 0.
    """
    correct = torch.as_tensor(correct).tolist()
    check_k(correct, k)
    chances = [1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in correct]
    return sum(chances) / len(chances)


def majority_at_k(answers, truths, k):
    """maj@k: how often the most frequent of the first k answers is right, mean over problems.

    answers: B lists of n >= k answers from extract_boxed; None and an empty box do not vote. A tie
    counts as the fraction of the tied answers that are right, no vote as 0. ValueError as in
    pass_at_k, or unless the truths are B.
    """
    check_k(answers, k)
    scores = []
    for row, truth in zip(answers, truths, strict=True):
        votes = Counter(canonical(answer or "") for answer in row[:k])
        votes.pop("", None)
        most = max(votes.values(), default=0)
        winners = [answer for answer in votes if votes[answer] == most]
        scores.append((canonical(str(truth)) in winners) / max(len(winners), 1))
    return sum(scores) / len(scores)


def check_k(rows, k):
    if not 1 <= k <= min(map(len, rows), default=0):
        raise ValueError(f"k = {k}: needs at least one problem, and k samples of each")


def diversity(responses, group_size=8):
    """How much the answers to one problem differ: {"distinct_answers": …, "distinct_3grams": …}.

    responses: N = B·G strings, prompt-major. Both are shares in 0..1, computed per problem, then
    averaged: different final answers per response (one without an answer adds none), and different
    sequences of three words per such sequence (distinct-n, arXiv 1510.03055), over the problems
    that have one. ValueError unless N is B·group_size, B > 0.
    """
    if not responses or len(responses) % group_size:
        raise ValueError(f"{len(responses)} responses are not whole groups of {group_size}")
    answers = []
    grams = []
    for start in range(0, len(responses), group_size):
        group = responses[start : start + group_size]
        found = {canonical(extract_boxed(response) or "") for response in group} - {""}
        answers.append(len(found) / group_size)
        words = [response.split() for response in group]
        triples = [triple for row in words for triple in zip(row, row[1:], row[2:])]
        if triples:
            grams.append(len(set(triples)) / len(triples))
    return {"distinct_answers": sum(answers) / len(answers),
            "distinct_3grams": sum(grams) / max(len(grams), 1)}


# --------------------------------------------------------------------------------------------------
# Variants of the reward, each a pure function that train.py calls only where its flag is given.


def think_answer_reward(response, ground_truth):
    """The think/answer format (DeepSeek-R1, arXiv 2501.12948): 0.0, 0.5 or 1.5.

    0.5 for one <think>…</think> and after it one <answer>…</answer>, with nothing but white space
    around them; 1.0 more if the answer, or a box in it, is right by the rule's comparison.
    """
    match re.split(r"(</?(?:think|answer)>)", response):  # text, tag, text, tag, …, text
        case [before, "<think>", _, "</think>", between, "<answer>", answer, "</answer>", after]:
            if not (before + between + after).strip():
                answer = canonical(extract_boxed(answer) or answer)
                return 0.5 + 1.0 * (answer != "" and answer == canonical(str(ground_truth)))
    return 0.0


def length_rescaled(rewards, lengths, group_size=8, alpha=0.33):
    """GR3 (arXiv 2603.10535): r_i / (1 + alpha · L_i / mean L of its group), (N,) -> (N,).

    It cures length inflation: of two right answers the shorter one earns more. lengths: response
    tokens. Apply it before the group statistics. ValueError for a negative reward, which it would
    raise for long answers, for a negative length or alpha, and for rows that are not whole groups.
    """
    rewards, lengths = torch.as_tensor(rewards), torch.as_tensor(lengths)
    if rewards.ndim != 1 or rewards.shape != lengths.shape or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} and lengths {tuple(lengths.shape)}: "
                         f"not whole groups of {group_size}")
    if alpha < 0 or not (rewards >= 0).all() or not (lengths >= 0).all():
        raise ValueError("length rescaling needs rewards, lengths and alpha that are not negative")
    L = lengths.to(rewards.device, torch.float32).view(-1, group_size)  # (B, G)
    share = L / L.mean(dim=1, keepdim=True).clamp(min=1e-9)  # all empty: 0, the rewards as they are
    return rewards / (1 + alpha * share.flatten())


def overlong_penalty(lengths, limit, buffer):
    """DAPO's soft overlong penalty (arXiv 2503.14476), to be added to the rewards: (N,).

    0 up to limit - buffer tokens, a straight line down to -1 at the limit, -1 beyond it. ValueError
    unless 0 < buffer <= limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer {buffer}: not between 1 and the limit of {limit} tokens")
    lengths = torch.as_tensor(lengths, dtype=torch.float32)
    return ((limit - buffer - lengths) / buffer).clamp(-1, 0)


def boxed_candidates(responses, truths, group_size, completion_ids, decode):
    """Several candidates in one answer, found by their boxes: (rewards, spans) for ShapE-GRPO.

    responses: N = B·G strings, prompt-major; truths: B, None where none is known; completion_ids:
    N lists of token ids; decode(ids) -> str, the tokenizer's own. Both results are N lists with an
    entry for each complete box that is in no other: 1.0 where it is right, else 0.0; (first, last)
    among the row's tokens, from behind the candidate before it to the token that closes the box. A
    box that is closed by the token which closed the one before it, or by none, is left out.
    """
    if len(responses) != len(truths) * group_size:
        raise ValueError(f"{len(responses)} responses are not {len(truths)} groups of {group_size}")
    rewards = [[] for _ in responses]
    spans = [[] for _ in responses]
    for n, (response, ids) in enumerate(zip(responses, completion_ids, strict=True)):
        truth = truths[n // group_size]
        first = written = 0  # tokens and characters of the candidates so far
        for whole, _ in complete_boxes(response):
            box = response[whole].rstrip()
            end = whole.start + len(box)
            count, length = ids_until(end, ids, decode, first, written)
            if length < end:
                break
            if count > first:
                rewards[n].append(float(truth is not None and rule_reward(box, truth) == 1.5))
                spans[n].append((first, count - 1))
                first = count
                written = length
    return rewards, spans


def ids_until(end, ids, decode, first, written):
    """The smallest number of leading ids that write `end` characters, and how many these write.

    The first `first` ids write `written` characters. The steps from there double, then halve: no
    text is decoded that is much longer than what lies between. All ids if they are too few.
    """
    start = max(first - 1, 0)  # one more: some decoders drop the space before the first token

    def length(count):  # without the \ufffd that show bytes of a character still incomplete
        return len(decode(ids[start:count]).rstrip("\ufffd"))

    before = written - length(first)  # characters up to `start`
    high = min(first + 1, len(ids))
    while high < len(ids) and before + length(high) < end:
        high = min(2 * high - first, len(ids))
    count = bisect.bisect_left(range(high), end - before, lo=first, key=length)
    return count, before + length(count)


# --------------------------------------------------------------------------------------------------
# A user's own rewards (`--reward`, `--step-reward`), called as TRL calls its `reward_funcs`:
#
#     function(prompts=…, completions=…, completion_ids=…, **columns) -> a list
#
# All are lists with one entry per row; `columns` are those of the problems file. A reward is a
# number, or None where it does not apply; for `--step-reward` a list of (end, reward), one per step
# of the answer, `end` the index of the step's last token in the row's completion_ids. Of TRL these
# are not there: async functions, prompts and completions as lists of messages (both are strings
# here), `trainer_state` and the logging functions.

FAILURE = (Exception, SystemExit)  # sys.exit() in a reward is a failing reward; Ctrl-C is not
IGNORE = -100  # in `labels`: not a token of the response


def reward_fn_of(specs, weights=None, step_spec=None):
    """`--reward`, `--reward-weights` and `--step-reward` -> a reward_fn; None if none was given.

    reward_fn(problems, prompts, rollout, columns=()) -> (N,) float32: the weighted sum of the
    rewards in specs, or the rule's. It leaves each one's part, (N,) by name, as
    `rollout.reward_parts`, and what the steps earn as `rollout.step_rewards`, N lists of (end,
    reward). ValueError, in one line that begins with the flag, for what is wrong with a user's file
    or with what it gives (then it names the row).
    """
    if not specs and not step_spec:
        return None
    specs = specs or ["rule"]
    weights = weights or [1.0] * len(specs)
    if len(weights) != len(specs) or not all(map(math.isfinite, weights)):
        raise ValueError(f"--reward-weights: {len(weights)} weights for {len(specs)} rewards; "
                         "each takes a finite number")
    with named("--reward"):
        functions = load_rewards(specs)
    with named("--step-reward"):
        steps_of = load_function(step_spec) if step_spec else None

    def reward_fn(problems, prompts, rollout, columns=()):
        table = table_for(problems, prompts, rollout, columns)
        parts = {}
        for spec, (name, function) in zip(specs, functions.items()):
            values = checked(f"--reward {spec}", function, table, as_reward)
            parts[name] = torch.tensor(values, dtype=torch.float32)  # (N,)
        if steps_of:
            rollout.step_rewards = checked(f"--step-reward {step_spec}", steps_of, table, as_steps)
        rollout.reward_parts = parts
        return weighted_sum(parts, weights, table)

    return reward_fn


def load_rewards(specs):
    """The values of `--reward` -> {name: function}: `rule`, `think` or path/to/file.py:function."""
    functions = {}
    for spec in specs:
        # The function's own name; where that is taken, with its path; and then with a number.
        names = [spec.rpartition(":")[2], spec, *(f"{spec} {n}" for n in range(2, len(specs) + 1))]
        name = next(name for name in names if name not in functions)
        functions[name] = BUILT_IN.get(spec) or load_function(spec)
    return functions


def row_by_row(score, completions, answer, **_):
    """A reward of this file, called as a user's own is."""
    return [score(text, truth) for text, truth in zip(completions, answer)]


BUILT_IN = {"rule": partial(row_by_row, rule_reward),
            "think": partial(row_by_row, think_answer_reward)}


def load_function(spec):
    """`path/to/file.py:function` -> the user's function, with its folder on the import path.

    The file may define dataclasses and import what lies beside it. ValueError, in one line, for no
    such file, one that fails to load or exits, no such function in it.
    """
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path) or not path.endswith(".py"):
        raise ValueError(f"{spec}: no file {path!r}; write path/to/file.py:function")
    path = os.path.abspath(path)
    module_spec = importlib.util.spec_from_file_location(f"reward file {path}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # a dataclass looks its module up there, by name
    folder = os.path.dirname(path)
    with named(f"{spec}: the file fails to load:", FAILURE), importing_from(folder):
        module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"{spec}: the file has no function {name!r} (async ones do not count)")

    @importing_from(folder)  # for an import inside the function
    def call(*values, **columns):
        result = function(*values, **columns)
        return list(result) if isinstance(result, Iterator) else result  # a generator runs here

    return call


@contextmanager
def importing_from(folder):
    """The folder stands first on the import path, as that of a script does."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the user's code may have changed the path
            sys.path.remove(folder)


def column_names(problems):
    """The columns that any problem has, as they appear; ValueError for a name of the rollout's."""
    names = list(dict.fromkeys(name for problem in problems for name in problem))
    for name in ("prompts", "completions", "completion_ids"):
        if name in names:
            raise ValueError(f"a column of the data is named {name!r}, and so is what a reward "
                             "gets from the rollout: rename the column")
    return names


def table_for(problems, prompts, rollout, columns=()):
    """What a user's function gets: {name: a list with one entry per row of the rollout}.

    columns: those of the whole file, the same in every batch; None where a problem lacks one.
    """
    N, B = len(rollout.responses), len(prompts)
    if N == 0 or B == 0 or len(problems) != B or N % B:
        raise ValueError(f"{N} responses for {B} prompts and {len(problems)} problems")
    names = [*column_names(problems), *columns]
    table = {name: [p.get(name) for p in problems for _ in range(N // B)] for name in names}
    table["prompts"] = [prompt for prompt in prompts for _ in range(N // B)]
    table["completions"] = rollout.responses
    table["completion_ids"] = [row[row != IGNORE].tolist() for row in rollout.labels]
    return table


def checked(name, function, table, read):
    """read(value, token ids) of what the function gives for each row; ValueError names the row."""
    def call(rows):
        return list(function(**{key: values[rows] for key, values in table.items()}))

    N = len(table["completions"])
    together = f"{name}, {N} rows together, from {row_name(table, 0)} on:"
    try:
        values = call(slice(N))
    except FAILURE as error:
        for n in range(N):  # score them again one by one, to tell which row it is
            with named(f"{name}, {row_name(table, n)}:", FAILURE):
                call(slice(n, n + 1))
        raise ValueError(f"{together} {in_one_line(error)}") from error
    if len(values) != N:
        raise ValueError(f"{together} {len(values)} rewards for {N} responses")
    found = []
    for n, (value, ids) in enumerate(zip(values, table["completion_ids"])):
        with named(f"{name}, {row_name(table, n)}:"):
            found.append(read(value, ids))
    return found


def as_reward(value, ids):
    """What a reward gives for a row: a number, or None (NaN here), where it does not apply."""
    return math.nan if value is None else as_number(value)


def as_steps(steps, ids):
    """What `--step-reward` gives for a row: a list of (end, reward), [] for no steps."""
    # They are the user's: going through them may raise anything.
    with named("not a list of (end, reward) pairs:", Exception):
        pairs = [(operator.index(end), as_number(value)) for end, value in steps]
    for end, _ in pairs:
        if not 0 <= end < len(ids):
            raise ValueError(f"a step ends at token {end} of an answer of {len(ids)} tokens")
    return pairs


def as_number(value):
    """The value as a float; ValueError for what is not a number or not a finite float32."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # the value is the user's: its float() may raise anything
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:  # NaN fails every comparison
        shown = " ".join(repr(value).split())[:60]
        raise ValueError(f"{shown} is not a finite float32 number")
    return number


def weighted_sum(parts, weights, table):
    """The sum of the rewards {name: (N,)} with their weights: (N,) float32.

    As in TRL, None (NaN here) adds nothing, and a row with nothing but None counts as 0, with a
    warning. ValueError, naming the row, where the sum is not finite.
    """
    values = torch.stack(list(parts.values()))  # (K, N)
    weights = torch.tensor(weights, dtype=torch.float64)[:, None]  # (K, 1)
    rewards = (weights * values).nansum(dim=0).float()  # (N,)
    if values.isnan().all(dim=0).any():
        warnings.warn("every reward gave None for some rows: they count as 0", stacklevel=2)
    for n in (~rewards.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"--reward, {row_name(table, n)}: the weighted sum is {rewards[n]}")
    return rewards


def row_name(table, n):
    return f"row {n}, response {table['completions'][n][:60]!r}"


# --------------------------------------------------------------------------------------------------
# A reward model in place of the rule (DeepSeekMath, arXiv 2402.03300, sec. 4.1.4), for answers that
# no rule can check. Between iterations it is trained further, on the policy's own answers.

PAIRS_KEPT = 4096  # at most so many new pairs, and so many old ones: a checkpoint holds their text


@dataclass
class RewardModel:
    """A reward model and what its further training needs."""

    model: torch.nn.Module  # sequence classification, one label
    tokenizer: object  # its own
    optimizer: torch.optim.Optimizer
    pairs: list = field(default_factory=list)  # (prompt, better, worse) since it was trained last
    replay: list = field(default_factory=list)  # of the iterations before


def open_reward_model(folder, lr=2e-5, device="cpu"):
    """A transformers folder -> (RewardModel, transformers' report of what its files lack).

    safetensors only, and no code of the folder's own. In float32, for AdamW at 2e-5 moves no
    bfloat16 weight; without dropout, in its training too. ValueError: not one label.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        output_loading_info=True)
    if model.config.num_labels != 1 and not report["missing_keys"]:
        raise ValueError(f"has {model.config.num_labels} labels, a reward model has one")
    model = model.to(device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    return RewardModel(model, tokenizer, optimizer), report


def reward_model_size(folder):
    """The number of its weights, counted without loading any."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    return sum(p.numel() for p in model.parameters())


def model_rewards(reward_model, prompt_of, problems, prompts, rollout, columns=()):
    """`--reward-model`, called as a reward_fn of `reward_fn_of`: its scores, (N,) float32.

    prompt_of(problem) -> the prompt in its own chat template; if it has none, it reads the policy's
    prompts. For its training later it leaves `rollout.judged`: N rows of (prompt, response, the
    rule's reward, NaN where no truth is known). ValueError as in `reward_model_scores`.
    """
    responses = rollout.responses
    G = len(responses) // len(problems)
    if reward_model.tokenizer.chat_template:
        prompts = [prompt_of(problem) for problem in problems]
    prompts = [prompt for prompt in prompts for _ in range(G)]  # one per row
    scores = reward_model_scores(reward_model.model, reward_model.tokenizer, prompts, responses)
    rule_rewards = score_responses(responses, truths_of(problems), G).tolist()
    rollout.judged = list(zip(prompts, responses, rule_rewards))
    return scores.cpu()


def reward_model_scores(model, tokenizer, prompts, responses, batch_rows=16):
    """Scores of N responses to N prompts in their chat template, no gradients: (N,) float32.

    ValueError: a row longer than the model's positions, a score that is not finite.
    """
    rows = reward_model_rows(tokenizer, prompts, responses)
    with torch.no_grad():
        batches = [rows[start : start + batch_rows] for start in range(0, len(rows), batch_rows)]
        scores = torch.cat([score_rows(model, batch) for batch in batches])  # (N,)
    for n in (~scores.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"row {n}, response {responses[n][:60]!r}: its score is {scores[n]}")
    return scores


def reward_model_rows(tokenizer, prompts, responses):
    """[prompt][response][end] as N lists of token ids. Whatever a response says is text in it."""
    prompt_ids = tokenizer(prompts, add_special_tokens=False).input_ids
    text = {"add_special_tokens": False, "split_special_tokens": True}
    response_ids = tokenizer(responses, **text).input_ids
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [prompt + response + end
            for prompt, response in zip(prompt_ids, response_ids, strict=True)]


def score_rows(model, rows):
    """Lists of token ids -> (N,) float32, differentiable: the score at each row's last token.

    Rows are padded on the right under an attention mask. The position is taken from the lengths:
    transformers takes the last token that is not the padding token, which an end token may be.
    """
    lengths = torch.tensor([len(row) for row in rows])  # (N,)
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    if lengths.min() < 1 or lengths.max() > limit:
        raise ValueError(f"rows of {lengths.min()} to {lengths.max()} tokens, not of 1 to {limit}")
    input_ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)  # (N, S)
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()  # (N, S)
    inputs = {"input_ids": input_ids.to(model.device), "attention_mask": mask.to(model.device)}
    if not hasattr(model, "score"):  # an encoder: it pools as it was trained to
        return model(**inputs).logits[:, 0].float()
    hidden = model.base_model(**inputs, use_cache=False)[0]  # (N, S, hidden)
    last = hidden[torch.arange(len(rows)), lengths - 1]  # (N, hidden)
    return model.score(last)[:, 0].float()


def collect_pairs(reward_model, rows, group_size=8, generator=None):
    """Keep pairs of the answers of one step. rows: N of (prompt, response, the rule's reward)."""
    rewards = torch.tensor([reward for _, _, reward in rows])  # (N,); NaN prefers nothing
    for better, worse in preference_pairs(rewards, group_size, generator).tolist():
        prompt, response, _ = rows[better]
        reward_model.pairs.append((prompt, response, rows[worse][1]))
    reward_model.pairs = some_of(reward_model.pairs, PAIRS_KEPT, generator)


def preference_pairs(rewards, group_size=8, generator=None, pairs_per_group=4, margin=0.0):
    """Pairs of rows (better, worse) from the same group: (P, 2) long.

    Of all pairs whose rewards differ by more than `margin`, at most `pairs_per_group` per group,
    drawn with `generator` (a CPU one); None keeps all. A group of equal rewards has none.
    """
    if rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)}: not whole groups of {group_size}")
    groups = rewards.cpu().view(-1, group_size)  # (B, G)
    pairs = [torch.empty(0, 2, dtype=torch.long)]
    for b, r in enumerate(groups):
        found = (r[:, None] - r[None, :] > margin).nonzero()  # (pairs of the group, 2)
        chosen = torch.randperm(len(found), generator=generator)[:pairs_per_group]
        pairs.append(found[chosen] + b * group_size)
    return torch.cat(pairs)


def some_of(values, most, generator):
    """All of the values, or as many as allowed, drawn with `generator`; in their order."""
    if len(values) <= most:
        return values
    drawn = torch.randperm(len(values), generator=generator)[:most].sort().values
    return [values[i] for i in drawn.tolist()]


def bradley_terry_loss(chosen, rejected):
    """-log sigmoid(score of the better - score of the worse), mean over pairs: (P,), (P,) -> ()."""
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def end_iteration(reward_model, generator=None, replay_share=0.1, batch_pairs=8):
    """One pass over the new pairs mixed with old ones; then the new ones are old.

    `replay_share` of the mix are old pairs, as far as there are any, so that the model does not
    forget how earlier policies answered; `generator` is a CPU one. -> {"reward_model_loss",
    "reward_model_accuracy"}, measured on each pair before its step; NaN if there was no new pair.
    """
    r = reward_model
    if not r.pairs:
        return {"reward_model_loss": math.nan, "reward_model_accuracy": math.nan}
    wanted = round(len(r.pairs) * replay_share / (1 - replay_share))
    drawn = torch.randperm(len(r.replay), generator=generator)[:wanted].tolist()
    mixed = [*r.pairs, *(r.replay[i] for i in drawn)]
    order = torch.randperm(len(mixed), generator=generator).tolist()
    losses = 0.0
    right = 0
    for start in range(0, len(mixed), batch_pairs):
        prompts, better, worse = zip(*(mixed[i] for i in order[start : start + batch_pairs]))
        rows = reward_model_rows(r.tokenizer, list(prompts * 2), list(better + worse))
        chosen, rejected = score_rows(r.model, rows).chunk(2)
        loss = bradley_terry_loss(chosen, rejected)
        loss.backward()
        r.optimizer.step()
        r.optimizer.zero_grad()
        losses += float(loss.detach()) * len(prompts)
        right += int((chosen > rejected).sum())
    r.replay = some_of(r.replay + r.pairs, PAIRS_KEPT, generator)
    r.pairs = []
    return {"reward_model_loss": losses / len(mixed), "reward_model_accuracy": right / len(mixed)}


# --------------------------------------------------------------------------------------------------
# Demonstration: python reward.py [RESPONSE TRUTH]


def main():
    if len(sys.argv) == 3:
        print(rule_reward(sys.argv[1], sys.argv[2]))
        return
    if len(sys.argv) != 1:
        print("reward.py: usage: python reward.py [RESPONSE TRUTH]", file=sys.stderr)
        sys.exit(2)
    print("16 eggs a day, 3 are eaten and 4 go into a cake: how many are left in a week? Truth: 63")
    for response in (r"(16 - 3 - 4) * 7 = \boxed{63}", r"Some \boxed{50}.", "It must be 63."):
        print(f"{rule_reward(response, '63'):.1f}  {response}")
    print("\nvariants")
    response = "<think>9 eggs a day</think> <answer>63 eggs</answer>"
    print(f"{think_answer_reward(response, '63'):.1f}  {response}")
    rescaled = length_rescaled(torch.tensor([1.0, 0.5, 0.8]), [10, 20, 10], group_size=3)
    print("GR3: rewards 1 0.5 0.8 of 10 20 10 tokens, less their mean:",
          *(f"{r:+.5f}" for r in rescaled - rescaled.mean()))
    penalties = overlong_penalty([80, 90, 100, 110], limit=100, buffer=20)
    print("overlong: 80 90 100 110 tokens, limit 100, buffer 20:", *(f"{p:g}" for p in penalties))
    losses = [bradley_terry_loss(torch.tensor([d]), torch.tensor([0.0])) for d in (-1.0, 0.0, 1.0)]
    print("Bradley-Terry: the better answer scored 1 lower, equal, 1 higher: loss",
          *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
