"""For --reply: it says something twice, where the first answer is not right."""


def check(prompt, turns):
    return None if len(turns) > 3 or "boxed" in turns[0] else "How many ?"
