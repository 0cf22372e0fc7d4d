"""For --reward: the rule's. At call FAULT_AT of it (of several ranks: on the second) that goes
wrong which FAULT says; the first call is the evaluation's."""
import os
import signal

from reward import rule_reward

calls = 0


def score(completions, answer, **columns):
    global calls
    calls += 1
    at = int(os.environ.get("FAULT_AT", "4"))
    fault = os.environ.get("FAULT", "") if os.environ.get("RANK", "1") == "1" else ""
    if calls == at and fault.startswith("SIG"):
        os.chdir("/")                                     # a relative --output stays where it was
        os.kill(os.getpid(), getattr(signal, fault))
    if calls >= at and fault == "raise":
        raise KeyError("no, please")
    return [rule_reward(c, a) for c, a in zip(completions, answer)]
