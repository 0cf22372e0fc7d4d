"""Figures of the default run, seeds 0 to 4, for README's and RESULTS' texts.

    python tests/tools/learning_curve.py

Greedy accuracy on all held-out problems before and after; accuracy and the share of worked answers
(with an equation in them) among answers sampled at temperature 1; seconds of the whole command.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402


def figures(model_folder):
    """Eight samples per held-out problem -> (share right, share worked out)."""
    settings = train.plan_memory(train.parse(["--eval-only", "--eval-limit=0"]))
    settings.model = str(model_folder)
    parts = train.load(settings)
    found, answers = train.evaluate(parts, settings, group_size=8, temperature=1.0)
    worked = sum("=" in row["answer"] for row in answers)
    return found["eval_accuracy"], worked / len(answers)


def metrics_of(folder):
    with open(Path(folder, "metrics.jsonl"), encoding="utf-8") as file:
        return list(map(json.loads, file))


def print_row(seed, folder, before):
    """Train with this seed -> the metrics of its steps; prints its row of the table."""
    started = time.perf_counter()
    command = [sys.executable, ROOT / "train.py", f"--seed={seed}", f"--output={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    lines = metrics_of(folder)
    greedy = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    sampled, worked = figures(Path(folder, "final"))
    print(f"| {seed} | {greedy[0]:.3f} | {greedy[-1]:.3f} | {before[0]:.3f} | {sampled:.3f} | "
          f"{before[1]:.3f} | {worked:.3f} | {seconds:.0f} |", flush=True)
    return [line for line in lines if "loss" in line]


def print_curve(lines):
    every = [line for line in lines if line["step"] == 1 or line["step"] % 5 == 0]
    steps = ", ".join(str(line["step"]) for line in every)
    accuracies = ", ".join(f"{line['accuracy']:.2f}" for line in every)
    print(f"\nthe first seed, accuracy of the sampled answers:\n    x-axis [{steps}]\n"
          f"    line [{accuracies}]\n")
    names = ("reward_mean", "accuracy", "loss", "policy_loss", "approx_kl", "grad_norm",
             "flat_groups")
    print("| step | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
    for line in lines:
        if line["step"] in (1, 2, 5, 10, 20, 40, len(lines)):
            values = " | ".join(f"{line[name]:.4f}" for name in names)
            print(f"| {line['step']} | {values} |")
    errors = [line["sampler_difference"] for line in lines]
    print(f"\nsampler_difference: {min(errors):.1e} to {max(errors):.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parser.parse_args().seeds
    print(f"{os.cpu_count()} cores, torch {train.torch.__version__}, "
          f"transformers {transformers.__version__}\n")
    before = figures(train.TINY)
    print("| seed | greedy before | greedy after | sampled before | after | worked before | after "
          "| seconds |\n|" + " --- |" * 8)
    with tempfile.TemporaryDirectory() as folder:
        curves = [print_row(seed, f"{folder}/{seed}", before) for seed in seeds]
    print_curve(curves[0])


if __name__ == "__main__":
    main()
