"""What arrives of a step in bfloat16 and float16: two tables, on a real model.

    python tests/real/real_model.py                  # makes the model and its problems, once
    python tests/tools/precision.py                   # three trainings, then the tables

The model is first written out in bfloat16, as pretrained models nearly always are: its weights then
lie on bfloat16's grid. The three trainings have the same model, problems and seed; they compute in
float32, bfloat16 and float16. Then the float32 run's whole change of the weights, and parts of it,
are rounded to bfloat16 and float16: as they are, or from masters that begin off the grid, which is
train.py's way. The first table says how much arrives of what the change means for the log-probs of
answer tokens.
`--only table` makes that table alone, from a float32 run that is there already.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402
from logprob import token_logprobs  # noqa: E402
from reward import load_problems  # noqa: E402
from sample import chat_prompt, open_policy, sample_groups  # noqa: E402

WAYS = [("bfloat16", "on grid"), ("bfloat16", "off grid"),
        ("float16", "on grid"), ("float16", "off grid")]
PARTS = (0.01, 0.1, 0.25, 1.0)


def rounded(weights, dtype, masters, change=None, part=0):
    """{name: float32}, moved by a part of the change, rounded to `dtype` and back."""
    found = {}
    for i, (name, weight) in enumerate(weights.items()):
        half = weight.to(dtype)
        master = train.dither(half, 0, i) if masters == "off grid" else half.float()
        if change:
            master += part * change[name]
        found[name] = master.to(dtype).float()
    return found


@torch.no_grad()
def logprobs_under(model, weights, rollout):
    """The log-probs (M,) of the rollout's answer tokens, of weights in float32."""
    for name, p in model.named_parameters():
        p.copy_(weights[name])
    found = [token_logprobs(model, rollout.input_ids[n:n + 8], rollout.labels[n:n + 8])[0]
             for n in range(0, len(rollout.labels), 8)]
    return torch.cat(found)[rollout.mask].double()


def print_arrivals(settings, end):
    """How much arrives of the change from the start, on bfloat16's grid, to `end`."""
    model, tokenizer = open_policy(settings.model, "cpu", torch.float32)
    problems = load_problems(settings.eval_data, need_answer=False)[:32]
    prompts = [chat_prompt(tokenizer, problem, settings.system_prompt) for problem in problems]
    rollout = sample_groups(model, tokenizer, prompts, 1, settings.max_new_tokens, 1.0,
                            torch.Generator().manual_seed(0))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = rounded(start, torch.bfloat16, "on grid")
    final, _ = open_policy(end, "cpu", torch.float32)
    change = {name: p.detach() - start[name] for name, p in final.named_parameters()}
    before = logprobs_under(model, start, rollout)
    starts = {}
    for dtype, masters in WAYS:
        # float16 cannot hold the smallest of bfloat16's numbers: it has a start of its own.
        old = rounded(start, getattr(torch, dtype), masters)
        starts[dtype, masters] = old, logprobs_under(model, old, rollout)
    print(f"{len(before)} answer tokens\n\n| part of the run's change | meant, rms nats | "
          + " | ".join(f"{dtype}, {how}" for dtype, how in WAYS) + " |\n"
          + "| --- " * (2 + len(WAYS)) + "|")
    for part in PARTS:
        moved = {name: start[name] + part * change[name] for name in start}
        meant = logprobs_under(model, moved, rollout) - before
        cells = []
        for dtype, masters in WAYS:
            old, old_logprobs = starts[dtype, masters]
            new = rounded(start, getattr(torch, dtype), masters, change, part)
            arrived = logprobs_under(model, new, rollout) - old_logprobs
            stayed = sum(int((new[name] == old[name]).sum()) for name in new)
            stayed /= sum(weight.numel() for weight in new.values())
            share = float(arrived @ meant / (meant @ meant))
            alike = float(torch.corrcoef(torch.stack((arrived, meant)))[0, 1])
            cells.append(f"{share:.1%} ({alike:.3f}; {stayed:.1%} stay)")
        rms = float(meant.square().mean().sqrt())
        print(f"| {part:g} | {rms:.4f} | " + " | ".join(cells) + " |", flush=True)


def on_the_grid(settings, folder):
    """The model, its weights rounded to bfloat16, in a folder of its own."""
    if not folder.is_dir():
        model, tokenizer = open_policy(settings.model, "cpu", torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def trained(config, folder, dtype, steps):
    """One training -> (the metrics of its steps, its CPU seconds)."""
    if not (folder / "final").is_dir():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, ROOT / "train.py", f"--config={config}", f"--output={folder}",
                   f"--model={folder.parent / 'model'}", f"--dtype={dtype}",
                   f"--steps={steps}", f"--eval-every={steps}", f"--save-every={steps}",
                   "--lr=1e-5", "--temperature=1.0", "--eval-limit=1", "--threads=1"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (folder / "cpu_seconds").write_text(f"{seconds:.1f}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    return steps, float((folder / "cpu_seconds").read_text())


def print_curves(config, output, steps):
    every = [step for step in range(1, steps + 1) if step == 1 or step % 3 == 0]
    print("| weights | reward, steps " + ", ".join(map(str, every))
          + f" | KL, steps {steps // 2}, {steps} | "
          "`sampler_difference` | CPU seconds per step |\n" + "| --- " * 5 + "|")
    for dtype in ("float32", "bfloat16", "float16"):
        rows, seconds = trained(config, output / dtype, dtype, steps)
        curve = ", ".join(f"{rows[step - 1]['reward_mean']:.2f}" for step in every)
        errors = [row["sampler_difference"] for row in rows]
        error = f"{sum(errors) / len(errors):.5f} (at most {max(errors):.5f})"
        print(f"| {dtype} | {curve} | {rows[steps // 2 - 1]['approx_kl']:.4f}, "
              f"{rows[-1]['approx_kl']:.4f} | {error} | {seconds / steps:.0f} |",
              flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=ROOT / "runs" / "smollm2-sums" / "config.json",
                        help="of train.py; default: the one that tests/real/real_model.py writes")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "precision",
                        help="folder of the trainings; finished ones are not run again")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=("table", "curves"))
    args = parser.parse_args(argv)
    settings = train.parse([f"--config={args.config}"])
    torch.set_num_threads(1)
    on_the_grid(settings, args.output / "model")
    if args.only != "table":
        print_curves(args.config, args.output, args.steps)
    if args.only != "curves":
        print_arrivals(settings, args.output / "float32" / "final")


if __name__ == "__main__":
    main()
