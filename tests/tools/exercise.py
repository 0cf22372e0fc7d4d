"""Write GRPO yourself: `python tests/tools/exercise.py FOLDER` copies the project without answers.

FOLDER is a new one, outside of the project. There each plain function has its signature, its
docstring and the shapes of its values, then raises NotImplementedError. Formulas and common
mistakes are as they were. What would tell an answer stands below the line at which a reader of the
theory may stop, behind an empty screen. README.md (exercise.md here) has the path.
"""
import argparse
import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
YOURS = {"plain_answer": "sample.py", "rule_reward": "reward.py",
         "plain_advantages": "advantage.py", "plain_logprobs": "logprob.py",
         "plain_loss": "loss.py", "plain_step": "train.py"}
STAYS = ("Rollout", "sample_groups", "is_equal", "extract_boxed", "complete_boxes",
         "score_responses", "plain_grpo")                               # beside yours
# Of the tests only these: the others hold the answers.
TESTS = ("conftest.py", "stages/test_lesson.py", "stages/known_mistakes.json",
         "tools/page.py", "tools/lesson.py", "tools/ladder.py", "tools/ladder.md")
RULER = f"# {98 * '-'}\n# A reader of the theory may stop here."
SPOILER = "\n# In an exercise the finished code follows, and with it the answers.\n" + 60 * "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new one, outside of the project")
    folder = parser.parse_args(argv).folder.resolve()
    try:
        if folder.is_relative_to(ROOT) or folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} must be new or empty, and outside of the project")
        shutil.copytree(ROOT / "tests" / "tiny", folder / "tests" / "tiny")
    except OSError as error:
        print(f"exercise.py: {error}", file=sys.stderr)
        return 2
    for name in ("LICENSE", "requirements.txt", *(f"tests/{name}" for name in TESTS)):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "tests" / "tools" / "exercise.md", folder / "README.md")
    for name in set(YOURS.values()):
        source = (ROOT / name).read_text(encoding="utf-8")
        (folder / name).write_text(exercise_of(source), encoding="utf-8")
    print(f"README.md has the path. Begin with plain_answer in sample.py; then ask about it:\n\n"
          f"    cd {folder}\n    python -m pytest -m lesson -k plain_answer")
    return 0


def exercise_of(source):
    """A stage's file with YOURS empty; what else computes stands below its ruler."""
    above, below = source.split(RULER)
    opening, *blocks = re.split(r"\n\n\n|\n\n(?=# ---)", above.rstrip())
    stays, moves = [opening], []
    for block in blocks:
        name = getattr(ast.parse(block).body[0], "name", None)  # a table has none
        if name in YOURS:
            stays.append(emptied(block))
        else:
            (stays if name in STAYS else moves).append(block)
    contents, code = below.split("\n\n", 1)
    return "\n\n\n".join([*stays, RULER + contents + SPOILER + "\n\n\n".join([*moves, code])])


def emptied(function):
    """Without its code: of its lines the comments, and the shapes beside the names."""
    lines = function.splitlines()
    end = ast.parse(function).body[0].body[0].end_lineno        # of the docstring
    kept = lines[:end]
    for line in lines[end:]:
        shape = re.match(r" +(return|\w+).*  # ([(\[].*)", line)
        if shape:
            kept.append(f"    # {shape[1]}: {shape[2]}")
        if line.lstrip().startswith("#"):
            kept.append(f"    {line.lstrip()}")
    return "\n".join([*kept, "    raise NotImplementedError"])


if __name__ == "__main__":
    sys.exit(main())
