"""The answers of one H200 to all 1,319 test problems of GSM8K, kept: the table of RESULTS.

    python tests/real/gsm8k_h200.py

gsm8k_h200.json holds, for the untrained model and four trained ones, a character for each problem
(right, boxed, cut: 1 or 0) and the number of tokens, and five metrics of each training step.
"""
import json
import sys
from pathlib import Path
from statistics import fmean

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from reward import column, sign_test, with_error  # noqa: E402


def rows_of(policy):
    """What is kept of a policy's answers, as the rows of an evaluation."""
    kept = [map(int, policy[name]) for name in ("right", "boxed", "cut", "tokens")]
    rows = []
    for right, boxed, cut, tokens in zip(*kept, strict=True):
        rows.append({"right": right, "boxed": boxed, "cut": cut, "tokens": tokens})
        if boxed and not cut:
            rows[-1]["right of boxed and uncut"] = right
    return rows


def print_row(title, rows, before=None):
    """A row of the table; `before`: the policy with which it is compared, problem by problem.

    The coin gets no p: over the problems it would say nothing of other coins.
    """
    right = column(rows, "right")
    cells = [with_error(right), "", ""]
    if before:
        change = right - column(before, "right")
        gained, lost = int((change > 0).sum()), int((change < 0).sum())
        cells[1:] = [with_error(change), f"{gained}, {lost}"]
        if title.startswith("seed"):
            p = sign_test(gained, lost)
            cells[2] += ", < 0.001" if p < 0.001 else f", {p:.3f}"
    for name in ("boxed", "cut", "right of boxed and uncut"):
        cells.append(f"{column(rows, name).nanmean():.3f}")
    print(f"| {title} | {' | '.join(cells)} | {column(rows, 'tokens').mean():.0f} |")


def main():
    kept = json.loads((HERE / "gsm8k_h200.json").read_text(encoding="utf-8"))
    policies = {name: rows_of(policy) for name, policy in kept["policies"].items()}
    untrained = policies.pop("untrained")
    print("| | right | difference | gained, lost, p | boxed | cut | right of boxed and uncut | "
          "tokens |\n|" + " --- |" * 8)
    print_row("untrained", untrained)
    for name, rows in policies.items():
        print_row(name, rows, untrained)
    seeds = torch.stack([column(rows, "right") for name, rows in policies.items()
                         if name.startswith("seed")])                        # (3, problems)
    gains = seeds - column(untrained, "right")
    std = gains.mean(dim=1).std()
    t = float(gains.mean() / (std / 3**0.5))
    p = 1 - abs(t) / (2 + t * t)**0.5                # Student's, two-sided, 2 degrees of freedom
    print(f"\nmean of the 3 seeds: {with_error(seeds.mean(dim=0))}, "
          f"difference {with_error(gains.mean(dim=0))}; std of the seeds' own differences "
          f"{std:.3f}, t = {t:.1f}, p = {p:.2f}")
    formed = ~column(untrained, "right of boxed and uncut").isnan()           # (problems,)
    print("net gains, and where the untrained answer was boxed and uncut:",
          "; ".join(f"{gain.sum():.0f}, {gain[formed].sum():.0f}" for gain in gains), "\n")
    for name, steps in kept["steps"].items():
        right, kl = steps["accuracy"], steps["approx_kl"]
        seconds = sum(steps["seconds"])
        print(f"{name}: sampled {fmean(right[:10]):.3f} in steps 1-10, {fmean(right[-10:]):.3f} "
              f"in the last ten; KL of the last ten {fmean(kl[-10:]):.3f}; "
              f"{seconds / len(right):.2f} s a step, {sum(steps['tokens']) / seconds:,.0f} answer "
              f"tokens a second, peak {steps['peak_memory_gb']:.1f} GB")


if __name__ == "__main__":
    main()
