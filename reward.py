r"""[B] Rule reward: a math answer is scored by a rule, so no reward model is trained.

    R(x, y) = 0.5 · [y gives an answer in \boxed{…}]  +  1.0 · [that answer is right]       in {0, 0.5, 1.5}

x is the problem, with its known final answer; y is one response to it. Where this departs from the theory's
code map, and why:
  - The response alone is scored. The map scores prompt and response together, and a prompt that shows what a
    \boxed{answer} looks like is then scored as one.
  - The last complete box counts, not the first: a model that corrects itself means its last word. Braces are
    balanced: \boxed{\frac{1}{2}} is read whole, where the map's pattern stops at the first closing brace.
  - Numbers are compared as numbers, exactly: 1,000 = 1000.0 = \$1{,}000. The map compares strings, and the
    theory's other version lets an error under 0.01 pass. An answer inside another (5 in 15) is not right.
"""
import hashlib
import http.client
import json
import math
import os
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from decimal import Decimal
from pathlib import Path

import torch


def rule_reward(response: str, ground_truth: str) -> float:
    """R(x, y) as above: 0.0, 0.5 (an answer in the right format) or 1.5 (and it is right).

    An empty box is no answer. Any text is scored, none raises, and nothing in it is ever evaluated.
    """
    answer = canonical(extract_boxed(response) or "")
    if answer == "":  # not `if not answer`: zero is an answer
        return 0.0
    return 0.5 + 1.0 * (answer == canonical(str(ground_truth)))


def score_responses(responses, ground_truths, group_size=8, device="cpu") -> torch.Tensor:
    """Score N = B·G responses, prompt-major, against B ground truths: (N,) float32.

    ValueError if N is not B·group_size: rows would be scored against another prompt's truth.
    """
    if len(responses) != len(ground_truths) * group_size:
        raise ValueError(f"{len(responses)} responses are not {len(ground_truths)} groups of {group_size}")
    rewards = [rule_reward(response, ground_truths[i // group_size]) for i, response in enumerate(responses)]
    return torch.tensor(rewards, dtype=torch.float32, device=device)  # (N,)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{…}, braces balanced; None if there is none.

    Last means starting last, so \boxed{\boxed{5}} gives 5; a box that is never closed is passed over. One
    pass with a stack: linear in the length of the text, whatever a model that has lost its way may write.
    """
    opened = []  # for each brace still open: where its box's content starts, -1 if it opened no box
    start = end = -1
    for token in re.finditer(r"\\boxed\{|\\[{}]|[{}]", text):
        if token[0] in ("{", r"\boxed{"):  # the escaped \{ and \} are printed characters and group nothing
            opened.append(token.end() if token[0] != "{" else -1)
        elif token[0] == "}" and opened and (content := opened.pop()) > start:
            start, end = content, token.start()
    return None if start < 0 else text[start:end]


# ----- number comparison ------------------------------------------------------------------------------------

LATEX = {"\\$": "$", "\\%": "%", "{,}": ",", "\\!": "", "\\,": " ", "\\ ": " ", "~": " ",
         "\N{MINUS SIGN}": "-"}
TEXT = r"\\(?:text|textbf|mathrm|mathbf)"
WRAPPED = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")  # \text{Monday}
# Sign, digits (commas as thousands separators only), percent sign, unit. [0-9], since \d also takes the
# digits of other scripts; and no digit in the unit, so that 5\text{ or 6} is not 5.
NUMBER = re.compile(
    r"([+-]?) ?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    rf" ?%? ?(?:{TEXT}\{{[^{{}}0-9]*\}})?"
)
LONGEST_NUMBER = 100  # characters; also bounds the work of the pattern and of Decimal


def canonical(answer: str) -> Decimal | str:
    r"""What an answer is compared by, and what it votes as: its number, or else its cleaned text.

    18, $18, 18.0, 18. and 18\text{ dollars} are one number, and 50\% is 50; a fraction stays text. Text is
    compared without case, dollar signs around it or full stop behind it. "" means there is no answer.
    """
    for latex, plain in LATEX.items():
        answer = answer.replace(latex, plain)
    text = " ".join(answer.split()).lstrip("$ ").rstrip("$ .").casefold()
    if wrapped := WRAPPED.fullmatch(text):
        return canonical(wrapped[1])
    if len(text) <= LONGEST_NUMBER and (number := NUMBER.fullmatch(text)):
        return Decimal(number[1] + number[2].replace(",", ""))  # exact; equal numbers hash alike
    return text


def is_right(rewards):
    return rewards == 1.5


def has_format(rewards):
    return rewards >= 0.5


def load_reward(spec):
    import importlib.util
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{spec}: no file {path!r}; write path/to/file.py:function")
    try:
        s = importlib.util.spec_from_file_location("user_reward", path)
        module = importlib.util.module_from_spec(s)
        s.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{spec}: {path} fails to load: {type(error).__name__}: {error}") from None
    f = getattr(module, name, None)
    if not callable(f):
        raise ValueError(f"{spec}: {path} has no function {name!r}")
    return f


def user_rewards(functions, weights, problems, prompts, responses, completion_ids=None):
    G = len(responses) // len(prompts)
    (spec, function), = functions.items()
    def call(problems, prompts, responses):
        G = len(responses) // len(prompts)
        columns = {key: [problem.get(key) for problem in problems for _ in range(G)] for key in problems[0]}
        values = function(prompts=[p for p in prompts for _ in range(G)], completions=list(responses), **columns)
        return [float(v) for v in values]
    try:
        return torch.tensor(call(problems, prompts, responses)), {}
    except (Exception, SystemExit) as error:
        for n, response in enumerate(responses):
            try:
                call([problems[n // G]], [prompts[n // G]], [response])
            except (Exception, SystemExit) as e:
                raise ValueError(f"{spec}: row {n}, response {response[:60]!r}: {type(e).__name__}: {e}")
        raise ValueError(f"{spec}: {error}")


def hold_out(problems, share=0.1):
    n = max(int(len(problems) * share), 1)
    return problems[n:], problems[:n]


# ----- problems ---------------------------------------------------------------------------------------------

GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
GSM8K = {  # name: (file, its SHA-256)
    "gsm8k": ("train.jsonl", "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "gsm8k:test": ("test.jsonl", "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}


def load_problems(source, question_field='question', answer_field='answer', need_answer=True) -> list[dict]:
    """Problems from a JSONL path, or from the name `gsm8k` (train, 7473) or `gsm8k:test` (1319).

    A line has GSM8K's fields (arXiv 2110.14168): `question`, and `answer`, a worked solution, then `#### 72`.
    `answer` comes back as the bare final answer and the worked part as `solution`; other columns stay as they
    are. Blank lines are skipped. ValueError, in one line naming the file and the line, for whatever is wrong.
    """
    path = _gsm8k_file(source) if source in GSM8K else Path(source)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                problems.append(_problem(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise ValueError(f"{path}: no problems in it")
    return problems


def _problem(line: bytes) -> dict:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()  # "\ud800" is JSON, but no tokenizer can encode it
    except UnicodeError as error:
        raise ValueError("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ValueError(f"{field!r} is missing, empty or not a string")
    solution, marker, answer = row["answer"].rpartition("####")
    if not marker or canonical(answer) == "":
        raise ValueError("'answer' does not end in '#### ' and the final answer")
    return {**row, "answer": answer.strip(), "solution": solution.strip()}


def _gsm8k_file(name: str) -> Path:
    """The cached file of a GSM8K name, downloaded if it is not there or not what it should be."""
    file, sha256 = GSM8K[name]
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-gsm8k" / file
    try:
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
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{name}: no download to {path} ({error}); a JSONL path works too") from error
    return path


# ----- evaluation figures -----------------------------------------------------------------------------------


def pass_at_k(correct, k: int) -> float:
    """The chance that one of k samples is right, unbiased from n >= k (arXiv 2107.03374), mean over problems.

    correct: (B, n) bools. Of n samples c are right: 1 - C(n-c, k) / C(n, k), which is the paper's
    1 - prod_{i=n-c+1..n} (1 - k/i), in integers that cannot overflow. ValueError unless 1 <= k <= n, B > 0.
    """
    correct = torch.as_tensor(correct).tolist()
    _check_k(correct, k)
    chances = [1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in correct]
    return sum(chances) / len(chances)


def majority_at_k(answers, truths, k: int) -> float:
    """maj@k: how often the most frequent of the first k answers is right, mean over problems.

    answers: B lists of n >= k answers from extract_boxed; None and an empty box do not vote. A tie counts as
    the fraction of the tied answers that are right, no vote as 0. ValueError as in pass_at_k, or unless the
    truths are B.
    """
    _check_k(answers, k)
    scores = []
    for row, truth in zip(answers, truths, strict=True):
        votes = Counter(canonical(answer or "") for answer in row[:k])
        votes.pop("", None)
        most = max(votes.values(), default=0)
        winners = [answer for answer in votes if votes[answer] == most]
        scores.append((canonical(str(truth)) in winners) / max(len(winners), 1))
    return sum(scores) / len(scores)


def _check_k(rows, k: int) -> None:
    if not 1 <= k <= min(map(len, rows), default=0):
        raise ValueError(f"k = {k} needs at least one problem, and 1 <= k <= samples of each problem")


# ----- script: python reward.py [RESPONSE TRUTH] ------------------------------------------------------------

if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(rule_reward(sys.argv[1], sys.argv[2]))
    elif len(sys.argv) == 1:
        print("16 eggs a day, 3 are eaten and 4 go into a cake: how many are left in a week? Truth: 63")
        for response in (r"(16 - 3 - 4) * 7 = \boxed{63}", r"Some \boxed{50}.", "It must be 63."):
            print(f"{rule_reward(response, '63'):.1f}  {response}")
    else:
        print("usage: python reward.py [RESPONSE TRUTH]", file=sys.stderr)
        sys.exit(2)
