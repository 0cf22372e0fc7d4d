"""Rewards of one's own for sums told as stories, called as TRL calls its reward_funcs.

An answer earns 1 if its last number is the true one, and 0.5 if it ended before it was cut off;
with `right_in_time` only a right answer earns that half. `tests/real_model.py` copies this file
beside the problems that it writes.
"""
import re

END = 2  # SmolLM2's end token, <|im_end|>
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


def last_number(text):
    """The last number of a text, None if it has none. 13, 13.00 and 1,300 are numbers."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
