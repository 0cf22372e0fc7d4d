"""For --reply: it says something twice, where the first answer is not right; at a word in the
environment it fails or exits. Used by tests/test_turns.py."""
import os
import sys

asked = []


def check(prompt, turns):
    asked.append((prompt, list(turns)))
    if os.environ.get("REPLY") == "raise" and len(asked) > 12 and os.environ.get("RANK") != "0":
        raise KeyError("oh")
    if os.environ.get("REPLY") == "exit" and len(asked) > 12:
        sys.exit(0)
    if os.environ.get("REPLY") == "number":
        return 7
    if os.environ.get("REPLY") == "half a character":
        return "\ud800"
    return None if len(turns) > 3 or "boxed" in turns[0] else "How many ?"
