"""Write GRPO yourself: `python tests/tools/exercise.py FOLDER` copies the project without answers.

FOLDER is a new one, outside of the project. There each plain function has its signature, its
docstring and the shapes of its values, then raises NotImplementedError. Formulas and common
mistakes are as they were. The finished code stands below the line at which a reader of the theory
may stop, behind an empty screen. README.md has the path from function to function.
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
READ = {
    "plain_answer": "Where the answers come from: DeepSeekMath (2402.03300), 4.1.1",
    "rule_reward": "`extract_boxed` and `is_equal` beside it, which you may call",
    "plain_advantages": "DeepSeekMath, 4.1.2: outcome supervision",
    "plain_logprobs": "How rows, labels and entries lie: the end of the file's opening",
    "plain_loss": "DeepSeekMath, equations 3 and 4; for the clip PPO (1707.06347), section 3",
    "plain_step": "DeepSeekMath, algorithm 1; `Rollout` in sample.py"}
RULER = f"# {98 * '-'}\n# A reader of the theory may stop here."
SPOILER = "\n# In an exercise the finished code follows, and with it the answers.\n" + 60 * "\n"
REWARDS = "0.9141 0.8750 0.9688 1.0938 1.1328 1.1094 1.1641 1.3203 1.2344 1.2969"  # --plain
PATH = """# Write GRPO yourself
Six functions are empty. The file of each opens with its formula and with the mistakes that are
often made, and its docstring says what it takes and gives. Write them in this order. Every command
may be given as often as you like: it says what is right, or which mistake it has found. Far below
in each file stands the finished code, behind an empty screen. It can wait.
{steps}
## Then
    python -m pytest -m lesson             # all of them
    python train.py --plain --steps 10     # trains by your functions alone, in a minute or two

The ten rewards are {rewards}.
With `--steps 40` it learns on, in five minutes. To see at work what you have written:

{tools}
"""
TOOLS = {
    "lesson.py": "lesson.html: your lines, and what each computes",
    "ladder.py": "guess what happens; your functions answer"}


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
    # Of the tests only these: the others hold the answers.
    for name in ("LICENSE", "requirements.txt", "tests/conftest.py", "tests/stages/test_lesson.py",
                 *(f"tests/tools/{name}" for name in ("page.py", "ladder.md", *TOOLS))):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in set(YOURS.values()):
        source = (ROOT / name).read_text(encoding="utf-8")
        (folder / name).write_text(exercise_of(source), encoding="utf-8")
    (folder / "README.md").write_text(path_of(folder), encoding="utf-8")
    name, file = next(iter(YOURS.items()))
    print(f"cd {folder}", f"Write {name} in {file}, then ask about it:", command_of(name),
          "README.md has the whole path.", sep="\n")
    return 0


def command_of(name):
    return f"    python -m pytest -m lesson -k {name}"


def path_of(folder):
    """What README.md says."""
    steps = ""
    for number, (name, file) in enumerate(YOURS.items(), 1):
        opening = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        title, formula, *_ = opening.split("\n\n")
        steps += (f"\n## {number}. `{name}` in {file}\n{title}\n\n```text\n{formula}\n```\n\n"
                  f"Read: {READ[name]}.\n\n{command_of(name)}\n")
    tools = [f"    python tests/tools/{name:13} # {what}" for name, what in TOOLS.items()
             if (folder / "tests" / "tools" / name).exists()]
    return PATH.format(steps=steps, rewards=", ".join(REWARDS.split()), tools="\n".join(tools))


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
