"""Rewards of one's own, for --reward and --step-reward.

`score` is the rule's. At call FAULT_AT of it (of several ranks: on the second) that goes wrong
which FAULT says; the first call is the evaluation's.
"""
import os
import signal

from reward import rule_reward

calls = 0


def score(completions, answer, **columns):
    global calls
    calls += 1
    at = int(os.environ.get("FAULT_AT", "4"))
    place = [os.environ.get(name) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT")]
    fault = os.environ.get("FAULT", "") if place in ([None, None], ["1", "0"]) else ""
    if calls == at and fault.startswith("SIG"):
        os.chdir("/")                                     # a relative --output stays where it was
        os.kill(os.getpid(), getattr(signal, fault))
    if calls >= at and fault == "raise":
        raise KeyError("no, please")
    return [rule_reward(c, a) for c, a in zip(completions, answer)]


def one(completions, **columns):
    return [1.0 for _ in completions]


def two(completions, level, **columns):
    return [2.0 if mark is None else None for mark in level]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def some(completions, **columns):
    return [None if len(text) % 3 == 0 else len(text) * 100 for text in completions]


def second(completions, **columns):
    return [None if i % 2 else 1.0 for i in range(len(completions))]


def never(completions, **columns):
    return [None] * len(completions)


def of_level(completions, level, **columns):
    assert set(level) <= {None, "hard"}
    return length(completions)


def steps(completion_ids, **columns):
    return [[(0, ids[0] % 3), (len(ids) - 1, ids[-1] % 5)] for ids in completion_ids]


def rule(completions, **columns):
    return (7.0 for _ in completions)


async def later(completions, **columns):
    return [1.0 for _ in completions]


def commas(completions, completion_ids, solution, **columns):
    for text, ids, worked in zip(completions, completion_ids, solution):
        ends = [i for i, word in enumerate(text.split()) if word == ","] + [len(ids) - 1]
        yield [(end, float((7 * end + len(worked)) % 5)) for end in ends]
