"""Rewards of one's own for sums told as stories, called as TRL calls its reward_funcs.

An answer earns 1 if its last number is the true one, and 0.5 if it ended before it was cut off;
with `right_in_time` only a right answer earns that half. `tests/real/real_model.py` copies this
file beside the problems that it writes.
"""
import re

END = 2  # SmolLM2's end token, <|im_end|>
EQUATION = re.compile(r"(\d+(?: ?[-+] ?\d+)+) ?= ?(-?\d+)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(completions, answer, **columns):
    """1 where the last number of the completion is the answer, else 0."""
    return [float(last_number(text) == float(truth)) for text, truth in zip(completions, answer)]


def ended(completion_ids, **columns):
    """0.5 where the policy ended its answer itself: then the last id is the end token."""
    return [0.5 if ids and ids[-1] == END else 0.0 for ids in completion_ids]


def right_in_time(completions, completion_ids, answer, **columns):
    """1 where the last number is right, and 0.5 more where such an answer ended in time."""
    both = zip(right(completions, answer), ended(completion_ids))
    return [is_right * (1 + in_time) for is_right, in_time in both]


def true_equations(completions, **columns):
    """1 where the completion works something out and all of its equations are true, else 0."""
    return [float(all_equations_true(text)) for text in completions]


def right_of(signs):
    """`right` for problems whose equations have these signs, None for all others."""
    def right_of_kind(completions, answer, solution, **columns):
        kinds = ["".join(line.split()[1] for line in lines.splitlines()) for lines in solution]
        return [is_right if kind == signs else None
                for kind, is_right in zip(kinds, right(completions, answer))]
    return right_of_kind


right_plus_plus, right_plus_minus = right_of("++"), right_of("+-")
right_minus_plus, right_minus_minus = right_of("-+"), right_of("--")


def all_equations_true(text):
    """Whether a text has equations such as 6 + 2 = 8, and every one is true. Only + and - count."""
    equations = EQUATION.findall(text)
    return bool(equations) and all(total(left) == int(right) for left, right in equations)


def total(terms):
    """6 + 2 - 5 -> 3"""
    return sum(int(term.replace(" ", "")) for term in re.findall(r"[-+]? ?\d+", terms))


def last_number(text):
    """The last number of a text, None if it has none. 13, 13.00 and 1,300 are numbers."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
