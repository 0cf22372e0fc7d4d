"""For --reply: it says something twice, where the first answer is not right; with REPLY=raise it
fails. Used by test_turns.py."""
import os

asked = []


def check(prompt, turns):
    asked.append((prompt, list(turns)))
    if os.environ.get("REPLY") == "raise" and len(asked) > 12 and os.environ.get("RANK") != "0":
        raise KeyError("oh")
    return None if len(turns) > 3 or "boxed" in turns[0] else "How many ?"
