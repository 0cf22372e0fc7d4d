"""Dates, a task of one's own: `python dates.py FILE` writes the problems, `right` rewards."""
import datetime
import json
import random
import re
import sys

FORMS = ["{0.day} {0:%B %Y}", "{0:%B} {0.day}, {0.year}", "{0:%b} {0.day}, {0.year}",
         "the {1} of {0:%B %Y}"]


def problem(date):
    told = random.choice(FORMS).format(date, nth(date.day))
    question = f"Write the date {told} as YYYY-MM-DD. Answer with the date alone."
    return {"question": question, "answer": str(date)}


def nth(n):
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}th" if n in (11, 12, 13) else f"{n}{ending}"


def right(completions, answer, **columns):
    """1 for an answer that has the true date and no other."""
    found = [re.findall(r"\d{4}-\d\d-\d\d", text) for text in completions]
    return [set(dates) == {truth} for dates, truth in zip(found, answer)]


if __name__ == "__main__":
    random.seed(0)
    days = random.sample(range(712_000, 741_000), 600)  # of 1950 to 2029
    with open(sys.argv[1], "w") as file:
        for day in days:
            print(json.dumps(problem(datetime.date.fromordinal(day))), file=file)
