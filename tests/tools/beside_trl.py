"""The same training here and in TRL's GRPOTrainer: do both learn alike, and what does it cost?

    pip install trl  # into an environment that has this project's packages
    python tests/tools/beside_trl.py --config tests/real/small.json --model runs/smollm2 \\
        --data runs/dates.jsonl --reward tests/real/dates.py:right
    python tests/tools/beside_trl.py --kept tests/real/dates_trl.json  # the table of what is kept

Flags that are not its own are train.py's. README, "A task of your own", makes model and problems.

Both of a seed's runs go at the same time, each on one thread, so that both see the same load. They
have the same weights and dtype, problems in the same order, prompts, rewards, rate, warm-up, beta
and groups, and the same evaluator asks the held-out problems. TRL samples by transformers' generate
and has two settings that are not its defaults: `loss_type` "grpo", the paper's, and no
`use_bias_correction_kl`. What stays different: its std divides by G - 1, ours by G.

CPU seconds are those of training, without loading and evaluations. kept.json in the folder --output
holds it all.
"""
import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

from study import ROOT, provenance

sys.path.insert(0, str(ROOT))
import train  # noqa: E402
from reward import load_function  # noqa: E402

TRAINERS = ("here", "TRL")


# --------------------------------------------------------------------------------------------------
# One run

def one_run(trainer, flags, path):
    """Train once. After each evaluation `path` holds answers, seconds and memory until then."""
    s = train.plan_memory(train.parse([*flags, "--threads", 1]))
    kept = {"trainer": trainer, "seed": s.seed, "dtype": s.dtype, "cpu_seconds": {}, "right": {},
            "answers": {}}
    evaluating = []                                      # seconds of each evaluation
    evaluate = train.evaluate

    def timed(*given, **how):
        now = time.process_time()
        step = len(evaluating) * s.eval_every
        metrics, rows = evaluate(*given, **how)
        kept["cpu_seconds"][step] = round(now - start - sum(evaluating))
        kept["right"][step] = bits(rows, s)
        kept["answers"][step] = [row["answer"] for row in rows]
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kept["peak_gb"] = round(kib * 1024 / 1e9, 2)
        path.write_text(json.dumps(kept))
        evaluating.append(time.process_time() - now)
        return metrics, rows

    train.evaluate = timed
    run = train_here(s) if trainer == "here" else train_by_trl(s)
    start = time.process_time()
    run()


def bits(rows, s):
    """A character per problem: 1 where the first reward has paid 1."""
    name = train.reward_names(rows)[0]
    return "".join(str(int(row[name] == 1)) for row in rows)


def train_here(s):
    parts = train.load(s)
    return lambda: train.train_grpo(parts, s, train.Run())


def train_by_trl(s):
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    s.fast = False                                       # a plain model of transformers
    parts = train.load(s, to_train=False)                # TRL has its own reference, and optimizer
    if not parts.problems:
        parts.problems = train.checked_problems("--data", s.data, parts.tokenizer, s)
    rows = []                                            # in train.py's order
    for step in range(1, s.steps + 1):
        batch = train.batch_of_step(parts, step, s)
        rows += [{**problem, "prompt": prompt}
                 for problem, prompt in zip(batch.problems, batch.prompts)]

    class AsHere(TrainerCallback):
        """Rates and evaluations of train.py."""

        def on_train_begin(self, *_, **__):
            train.evaluate(parts, s)

        def on_step_begin(self, _, state, control, optimizer, **__):
            train.set_learning_rate(optimizer, state.global_step + 1, s)

        def on_step_end(self, _, state, *__, **___):
            if state.global_step % s.eval_every == 0:
                train.evaluate(parts, s)

    model = parts.policy_model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.learning_rate, weight_decay=s.weight_decay, fused=True)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    config = GRPOConfig(
        output_dir="runs/trl-unused", seed=s.seed, max_steps=s.steps,
        num_generations=s.group_size, per_device_train_batch_size=s.group_size,
        gradient_accumulation_steps=s.prompts_per_step, max_completion_length=s.max_new_tokens,
        temperature=s.temperature, top_k=0, top_p=1.0, loss_type="grpo", epsilon=s.clip_eps,
        beta=s.kl_coef, use_bias_correction_kl=False, reward_weights=s.reward_weights,
        max_grad_norm=s.max_grad_norm, bf16=False, gradient_checkpointing=False, use_cpu=True,
        shuffle_dataset=False, report_to="none", save_strategy="no", logging_strategy="no")
    trainer = GRPOTrainer(
        model, [load_function("--reward", name) for name in s.reward], config,
        train_dataset=Dataset.from_list(rows), processing_class=parts.tokenizer,
        callbacks=[AsHere()], optimizers=(optimizer, constant))
    return trainer.train


# --------------------------------------------------------------------------------------------------
# All of them

def all_runs(args, flags):
    """Both runs of each seed, at the same time -> what is kept."""
    args.output.mkdir(parents=True)
    for seed in args.seeds:
        runs = []
        for trainer in TRAINERS:
            command = [sys.executable, __file__, "--trainer", trainer, "--output", args.output,
                       "--seeds", seed, *flags]
            runs.append(subprocess.Popen(list(map(str, command))))
        if any([run.wait() for run in runs]):
            sys.exit(1)
    found = [json.loads(path.read_text()) for path in sorted(args.output.glob("*-*.json"))]
    return {"made": provenance("trl"), "flags": flags, "runs": found}


def print_table(kept):
    """Right of the held-out problems by step, seconds and memory: means and deviations of seeds."""
    runs = kept["runs"]
    steps = max((list(run["right"]) for run in runs), key=len)
    print(f"| | {' | '.join(f'step {step}' for step in steps)} | CPU s a step | peak GB |")
    print("|" + " --- |" * (len(steps) + 3))
    for trainer in TRAINERS:
        mine = [run for run in runs if run["trainer"] == trainer]
        cells = [spread([share(run["right"][step]) for run in mine if step in run["right"]])
                 for step in steps]
        last = [list(run["right"])[-1] for run in mine]
        seconds = [run["cpu_seconds"][step] / int(step) for run, step in zip(mine, last)
                   if step in run["cpu_seconds"]]
        cells += [spread(seconds), spread([run["peak_gb"] for run in mine])]
        print(f"| {trainer} | {' | '.join(cells)} |")
    for run in runs:
        curve = ", ".join(f"{share(bits):.3f}" for bits in run["right"].values())
        print(f"{run['trainer']}, seed {run['seed']}: {curve}")


def share(bits):
    return bits.count("1") / len(bits)


def spread(values):
    if not values:
        return "–"
    if len(set(values)) < 2:
        return f"{mean(values):.3g}"
    return f"{mean(values):.3g} ± {stdev(values):.2g}"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/trl"), help="a new folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trainer", choices=TRAINERS, help="one run alone, of the first seed")
    parser.add_argument("--kept", type=Path, help="print the table of this file, train nothing")
    args, flags = parser.parse_known_args()
    seed = args.seeds[0]
    if args.kept:
        print_table(json.loads(args.kept.read_text(encoding="utf-8")))
        return
    if args.trainer:
        one_run(args.trainer, [*flags, "--seed", seed], args.output / f"{args.trainer}-{seed}.json")
        return
    kept = all_runs(args, flags)
    (args.output / "kept.json").write_text(json.dumps(kept, indent=1))
    print_table(kept)


if __name__ == "__main__":
    main()
