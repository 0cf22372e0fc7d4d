"""The README's figures of the default run: `python tests/learning_curve.py` trains seeds 0-4 and prints them.

Greedy accuracy on all held-out problems before and after; accuracy and the share of worked answers (an answer
with an equation in it) among answers sampled at temperature 1; the wall-clock seconds of the whole command.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train  # noqa: E402


def figures(model_folder):
    """Sampled accuracy and share of worked answers of a policy, one sample a held-out problem, eight times."""
    settings, _ = train.parse(["--eval-limit=0"])
    settings.model = str(model_folder)
    train.torch.set_num_threads(settings.threads)
    model, tokenizer = train.load_policy(settings)
    problems = train.load_problems(settings.eval_data)
    accuracy, responses = train.evaluate(model, tokenizer, problems, settings, group_size=8, temperature=1.0)
    return accuracy, sum("=" in response for response in responses) / len(responses)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parser.parse_args().seeds
    print(f"{os.cpu_count()} cores, torch {train.torch.__version__}, transformers {train.transformers.__version__}\n")
    sampled, worked = figures(train.TINY)
    print("| seed | greedy before | greedy after | sampled before | after | worked before | after | seconds |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            started = time.perf_counter()
            subprocess.run([sys.executable, ROOT / "train.py", f"--seed={seed}", f"--output={folder}/{seed}"],
                           check=True, capture_output=True)
            seconds = time.perf_counter() - started
            lines = [json.loads(line) for line in open(f"{folder}/{seed}/metrics.jsonl", encoding="utf-8")]
            greedy = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
            sampled_after, worked_after = figures(f"{folder}/{seed}/final")
            print(f"| {seed} | {greedy[0]:.3f} | {greedy[-1]:.3f} | {sampled:.3f} | {sampled_after:.3f} | "
                  f"{worked:.3f} | {worked_after:.3f} | {seconds:.0f} |", flush=True)
        lines = [json.loads(line) for line in open(f"{folder}/{seeds[0]}/metrics.jsonl", encoding="utf-8")][1:]

    print(f"\nseed {seeds[0]}, accuracy of the sampled answers:")
    every = [line for line in lines if line["step"] == 1 or line["step"] % 5 == 0]
    print("    x-axis [" + ", ".join(str(line["step"]) for line in every) + "]\n"
          "    line [" + ", ".join(f"{line['accuracy']:.2f}" for line in every) + "]\n")
    names = ("reward_mean", "accuracy", "loss", "policy_loss", "approx_kl", "grad_norm", "zero_variance_groups")
    print("| step | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
    for line in lines:
        if line["step"] in (1, 2, 5, 10, 20, 40, len(lines)):
            print(f"| {line['step']} | " + " | ".join(f"{line[name]:.4f}" for name in names) + " |")


if __name__ == "__main__":
    main()
