"""Write GRPO yourself: `python tests/tools/exercise.py FOLDER` copies the project without answers.

There each plain function has its signature, its docstring and the shapes of its values, then raises
NotImplementedError. Formulas and common mistakes are as they were. What would tell an answer stands
below the line at which a reader of the theory may stop. In FOLDER, as often as you like:

    python -m pytest -m lesson               # from [A] to [G]: which are right, and what is wrong
    python train.py --plain --steps 40       # trains by your functions alone
"""
import argparse
import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
YOURS = {"plain_answer": "sample.py", "extract_boxed": "reward.py", "rule_reward": "reward.py",
         "plain_advantages": "advantage.py", "plain_logprobs": "logprob.py",
         "plain_loss": "loss.py", "plain_step": "train.py"}
STAYS = "Rollout", "sample_groups", "is_equal", "score_responses", "plain_grpo"  # beside yours
RULER = f"# {98 * '-'}\n# A reader of the theory may stop here."


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder.resolve()
    try:
        if folder.is_relative_to(ROOT) or folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} must be new or empty, and outside of the project")
        shutil.copytree(ROOT / "tests" / "tiny", folder / "tests" / "tiny")
    except OSError as error:
        print(f"exercise.py: {error}", file=sys.stderr)
        return 2
    (folder / "tests" / "stages").mkdir()
    # Of the tests only these: the others hold the answers.
    for name in ("LICENSE", "requirements.txt", "tests/conftest.py", "tests/stages/test_lesson.py"):
        shutil.copy(ROOT / name, folder / name)
    for name in set(YOURS.values()):
        source = (ROOT / name).read_text(encoding="utf-8")
        (folder / name).write_text(exercise_of(source), encoding="utf-8")
    print(f"cd {folder}", *(f"{file:14}{name}" for name, file in YOURS.items()), sep="\n")
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
    return "\n\n\n".join([*stays, f"{RULER}{contents}\n\n" + "\n\n\n".join([*moves, code])])


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
