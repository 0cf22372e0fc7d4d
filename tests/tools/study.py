"""What the theory predicts, tried on the tiny task: every run, its figures, and a verdict.

    python tests/tools/study.py  # all of it, two runs at a time; prints Markdown
    python tests/tools/study.py --only kl --seeds 0 1 2 --steps 40
    python tests/tools/study.py --controls  # what part of GRPO teaches, and what must not teach
    python tests/tools/study.py --controls --real runs/smollm2-sums/config.json --steps 50
    python tests/tools/study.py --kept tests/real/sums_smollm2.json  # what is kept of these runs

A finished run is kept under --output and not run again, so the command can be stopped and repeated.
Delete the folder after a change of the code; runs made by other code are counted and named.

How a figure is read: mean over the seeds ± standard deviation (n-1). `sampled`, `KL`, `entropy` are
those of the final policy, from four answers to each held-out problem at temperature 1, whatever the
run trained with: KL is the mean of log pi - log ref per token, ref the untrained policy. `last ten`
and `length` are of the training answers of the last ten steps, and `at 0.9` is the first step with
that share of them right. Flat groups are those that train: what is left after --max-resample.

--controls: each arm takes something away from GRPO, whose settings it has otherwise. Online
imitation makes the right ones of each step's own answers more likely (A = 1, wrong ones 0): no
comparison of siblings, no KL, no clip. Self-SFT does so with answers of the untrained policy, SFT
with the solutions of train.jsonl. Both take the mean over tokens, as supervised training does (by
the mean over each answer a token of a lucky guess would weigh seven times one of a worked sum).
`at 0.9` is of the policy's own answers there, too, which are drawn for nothing else: their seconds
are not counted. A coin, and the rule's rewards permuted among the answers of a group, tell nothing.
A step of self-SFT has no more right answers than the untrained policy gives. With several passes it
has half a step's rows of them, out of all that this policy draws in as many steps as the run has.
--real: the controls of a pretrained model on the task of real_model.py, two seeds.

The verdict is a rule, the same for every claim: a difference counts if it is larger than the two
spreads together. "Not seen" is no proof of the contrary, on a task as small as this one.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REWARDS = ROOT / "tests" / "real" / "real_reward.py"
CODE = [ROOT / f"{name}.py" for name in ("sample", "reward", "advantage", "logprob", "loss",
                                         "train")]

# --------------------------------------------------------------------------------------------------
# What is tried. The numbers in front of the claims are those of the theory's documents.


@dataclasses.dataclass(frozen=True)
class Arm:
    label: str
    flags: str = ""
    sampled_at: float = 0.0      # temperature of the rollout, where it is not the trainer's
    from_trained: bool = False   # starts from what plain GRPO with the same seed has become
    trains: bool = True          # False: the untrained policy is examined
    imitates: bool = False       # right answers have A = 1, wrong ones 0; siblings do not count
    answers: str = "its own"     # "untrained": that policy's; "kept": its right ones, again and
                                 # again; "worked": the file's own solutions


# Claims: (document, figure, what it says of the arms, in words). `A > B`: the figure of A should be
# larger; `A > 0`: above 0; `A ~ B`: no difference; `A in LOW HIGH`.
GRPO = Arm("GRPO")
EVEN = "--reward {study}:even_box"
IMITATION = "--kl-coef 0 --clip-eps 1 --clip-eps-high 1e6"    # never clipped
TAUGHT = [                                       # by right answers, in one way or another
    GRPO,
    Arm("GRPO, beta 0", "--kl-coef 0"),
    Arm("online imitation", IMITATION, imitates=True),
    Arm("self-SFT", f"{IMITATION} --aggregate token", imitates=True, answers="untrained"),
]


def with_flags(arm, flags, name=""):
    return dataclasses.replace(arm, label=arm.label + name, flags=f"{flags} {arm.flags}".strip())


SEVERAL_PASSES = Arm(
    "self-SFT, several passes",
    f"--config {{real}} {IMITATION} --aggregate token --eval-every 10 --eval-limit 0",
    imitates=True, answers="kept")
STUDY = {
    "objectives": ("Objectives and advantages", ["flat", "std_fall"], [
        GRPO,
        Arm("Dr. GRPO", "--aggregate constant --no-scale-by-std"),
        Arm("DAPO", "--aggregate token --clip-eps-high 0.28 --kl-coef 0 --max-resample 3"),
        Arm("GSPO", "--ratio sequence --clip-eps 3e-4 --clip-eps-high 4e-4"),
        Arm("CISPO", "--objective cispo"),
        Arm("leave-one-out", "--advantage leave-one-out"),
        Arm("GTPO", "--advantage gtpo"),
        Arm("GRPO-S", "--advantage grpo-s"),
    ], [
        ("000", "std_fall", "GRPO > 0", "siblings become alike: the std inside groups falls"),
        ("000", "flat", "GRPO > DAPO", "dynamic sampling leaves fewer groups without signal"),
        ("002", "length", "GRPO > Dr. GRPO", "a mean per answer favours long answers"),
        ("001", "at_09", "GRPO > GTPO", "credit per token by entropy helps: earlier there"),
        ("001", "at_09", "GRPO > GRPO-S", "credit per answer by entropy helps: earlier there"),
    ]),
    "kl": ("Estimator of the KL in the loss, beta 0.1", ["grad_norm"], [
        Arm("beta 0", "--kl-coef 0"),
        Arm("k1", "--kl-coef 0.1 --kl-estimator k1"),
        Arm("k2", "--kl-coef 0.1 --kl-estimator k2"),
        Arm("k3", "--kl-coef 0.1"),
    ], [
        ("001", "kl", "beta 0 > k1", "log pi - log ref (k1) as a penalty keeps the policy near"),
        ("000", "kl", "beta 0 > k3", "the penalty (k3) keeps the policy near the reference"),
        ("004", "kl", "k1 > k3", "k3, never negative and steadier, is the better choice"),
    ]),
    "group": ("Group size, at 128 answers per step", ["flat", "grad_norm"], [
        Arm("G = 2", "--group-size 2 --prompts-per-step 64"),
        Arm("G = 4", "--group-size 4 --prompts-per-step 32"),
        Arm("G = 8"),
        Arm("G = 16", "--group-size 16 --prompts-per-step 8"),
        Arm("G = 32", "--group-size 32 --prompts-per-step 4"),
    ], [
        ("000", "at_09", "G = 2 > G = 8", "two answers make a poor baseline: 8 are there earlier"),
        ("001", "at_09", "G = 4 > G = 8", "G = 4 gives noisy baselines: 8 are there earlier"),
        ("003", "at_09", "G = 8 > G = 16", "below 16 advantages vary much: 16 are there earlier"),
        ("001", "at_09", "G = 16 ~ G = 32", "32 pay only where success is rare: no better here"),
    ]),
    "beta": ("KL coefficient", ["approx_kl", "kl_coef"], [
        Arm("0", "--kl-coef 0"),
        Arm("0.01", "--kl-coef 0.01"),
        Arm("0.02"),
        Arm("0.04", "--kl-coef 0.04"),
        Arm("0.1", "--kl-coef 0.1"),
        Arm("0.5", "--kl-coef 0.5"),
        Arm("adaptive", "--kl-band 0.02 0.05"),
    ], [
        ("001", "kl", "0 > 0.04", "below about 0.001 the policy drifts far"),
        ("002", "sampled", "0.04 > 0", "with too little of it the policy degenerates"),
        ("001", "at_09", "0.5 > 0.02", "above about 0.1 the penalty wins and training stalls"),
        ("001", "approx_kl", "adaptive in 0.02 0.05", "an adaptive beta holds the KL in its band"),
    ]),
    "updates": ("Updates per rollout", ["clip_fraction"], [
        Arm("1", "--updates-per-rollout 1"),
        Arm("2"),
        Arm("4", "--updates-per-rollout 4"),
        Arm("8", "--updates-per-rollout 8"),
    ], [
        ("001", "at_09", "1 > 4", "4 to 8 updates make more of the same answers: earlier there"),
        ("002", "clip_fraction", "4 > 2", "several epochs on one rollout: more ratios clipped"),
        ("002", "sampled", "1 > 8", "one update is the safe choice: more right at the end"),
    ]),
    "temperature": ("Temperature of sampling and scoring", ["flat"], [
        Arm("0.7", "--temperature 0.7"),
        Arm("1.0"),
        Arm("1.3", "--temperature 1.3"),
    ], [
        ("002", "flat", "1.0 > 1.3", "a higher temperature leaves fewer groups without variance"),
        ("004", "sampled", "1.0 > 0.7", "it learns from the variety of its samples"),
    ]),
    "mismatch": ("Sampled at one temperature, scored at 1.0", ["sampler_gap"], [
        Arm("at 1.0"),
        Arm("at 0.7", sampled_at=0.7),
        Arm("at 1.3", sampled_at=1.3),
        Arm("at 1.3, corrected", "--sampler-correction 2.0", sampled_at=1.3),
    ], [
        ("002", "sampler_gap", "at 0.7 > at 1.0", "trainer and sampler differ"),
        ("002", "sampler_gap", "at 1.3 > at 1.0", "trainer and sampler differ"),
        ("002", "sampled", "at 1.0 > at 0.7", "such ratios mean nothing: training suffers"),
        ("002", "sampled", "at 1.0 > at 1.3", "such ratios mean nothing: training suffers"),
    ]),
    "collapse": ("Going on where most problems are mastered", ["flat", "grad_norm"], [
        Arm("as it is", from_trained=True),
        Arm("resampled", "--max-resample 3", from_trained=True),
    ], [
        ("001", "flat", "as it is > resampled", "keeping groups with 1 to G-1 right ones cures it"),
        ("002", "grad_norm", "resampled > as it is", "equal rewards: the gradient collapses"),
        ("000", "sampled", "resampled > as it is", "it works on what is not yet mastered"),
    ]),
    "rates": ("Learning rates of the controls", [], [
        with_flags(arm, f"--lr {rate}", f", {rate}")
        for arm in TAUGHT for rate in ("1e-4", "3e-4", "6e-4", "1e-3")
    ], []),
    "length": ("An even number in the box pays, length does not", ["length_growth", "reward"], [
        Arm("GRPO", EVEN),
        Arm("Dr. GRPO", f"{EVEN} --aggregate constant --no-scale-by-std"),
        Arm("GR3", f"{EVEN} --length-rescale 0.33"),
        Arm("sums, GRPO"),
        Arm("sums, GR3", "--length-rescale 0.33"),
    ], [
        ("001", "length_growth", "GRPO > 0", "answers grow although nothing is gained by it"),
        ("001", "length", "GRPO > GR3", "GR3 keeps them short"),
        ("002", "length", "GRPO > Dr. GRPO", "so does Dr. GRPO's constant divisor"),
        ("001", "sampled", "sums, GRPO ~ sums, GR3", "GR3 costs nothing where length pays"),
    ]),
    "controls": ("Controls", [], [
        Arm("untrained", trains=False),
        *TAUGHT,
        Arm("SFT", f"{IMITATION} --aggregate token --prompts-per-step 64 --group-size 2",
            imitates=True, answers="worked"),
        Arm("a coin", "--reward {study}:coin"),
        Arm("rewards permuted in their group", "--reward {study}:permuted"),
    ], []),
    "real controls": ("Controls of sums of two operations", [], [
        Arm("untrained", "--config {real}", trains=False),
        *(with_flags(arm, "--config {real}") for arm in TAUGHT),
        SEVERAL_PASSES,
        *(with_flags(SEVERAL_PASSES, f"--lr {rate}", f", {rate}") for rate in ("5e-6", "5e-5")),
        Arm("it ends in time, alone", "--config {real} --reward-weights 1 0 "
            "--reward {rewards}:ended {rewards}:right"),
    ], []),
}


def even_box(completions, **columns):
    """The reward of the length study: 1 for a box with an even number, whatever stands before."""
    boxes = [re.search(r"\\boxed\{ (\d+) \}", text) for text in completions]
    return [float(bool(box) and int(box[1]) % 2 == 0) for box in boxes]


def coin(completions, **columns):
    """1 or 0 by chance, whatever the answer is."""
    return [float(COIN.random() < 0.5) for _ in completions]


def permuted(completions, answer, prompts, **columns):
    """The rule's rewards, dealt out anew among the answers to a prompt."""
    rewards = []
    rows = zip(prompts, completions, answer)
    for _, group in itertools.groupby(rows, key=lambda row: row[0]):
        dealt = [float("\\boxed{" in text) / 2 + text.endswith(f"{{ {truth} }}")
                 for _, text, truth in group]
        COIN.shuffle(dealt)
        rewards += dealt
    return rewards


COIN = random.Random(0)


# --------------------------------------------------------------------------------------------------
# One run, in a process of its own: train.main with two of its functions watched, then the exam


def folder_of(output, arm, seed, steps):
    """Arms with the same settings share their runs, whatever table they stand in."""
    flags = re.sub("{(study|rewards)}", "", arm.flags)
    name = re.sub(r"[^a-z0-9.]+", "-", flags).strip("-") or "plain"
    name += f"_at-{arm.sampled_at}" * bool(arm.sampled_at) + "_trained" * arm.from_trained
    name += "_imitates" * arm.imitates + f"_{arm.answers}" * (arm.answers != "its own")
    if not arm.trains:
        return Path(output) / f"{name}_untrained"
    return Path(output) / f"{name}_steps-{steps}_seed-{seed}"


def run_one(output, arm, seed, steps, real=""):
    """Train, examine, write figures.json last: a run without it is not finished."""
    sys.path.insert(0, str(ROOT))
    import train
    folder = folder_of(output, arm, seed, steps)
    if not arm.trains:
        folder.mkdir(parents=True, exist_ok=True)
        return keep(folder, real_exam(train, real) if real else exam(train, train.TINY))

    sample_groups = train.sample_groups
    step_metrics = train.step_metrics
    others = OtherAnswers(train, arm.answers, count_own=not real)

    def sample_at(model, tokenizer, prompts, group_size, limit, temperature, generator=None):
        # Evaluation is greedy, and stays so.
        temperature = temperature and arm.sampled_at
        return sample_groups(model, tokenizer, prompts, group_size, limit, temperature, generator)

    def imitate(rewards):
        # Every right answer becomes more likely, and a wrong one teaches nothing.
        return (rewards >= 1).float()

    def with_more(rollout, *rest):
        metrics, settings = step_metrics(rollout, *rest), rest[-1]
        metrics["group_std"] = group_std(rollout.rewards, settings.group_size)
        flat = train.is_flat(rollout.rewards, settings.group_size)
        metrics["flat_groups"] = float(flat.double().mean())
        return metrics | others.accuracy

    train.step_metrics = with_more
    if arm.imitates:
        train.ADVANTAGES["group"] = imitate
    if arm.answers != "its own":
        train.answers_and_rewards = others
    if arm.sampled_at:
        train.sample_groups = sample_at
    if arm.sampled_at or arm.answers != "its own":
        train.check_sampler = lambda *_: None               # else the check would end such a run
    places = {"study": Path(__file__).resolve(), "real": real, "rewards": REWARDS}
    argv = [f"--seed={seed}", f"--steps={steps}", f"--eval-every={steps}", f"--save-every={steps}",
            f"--output={folder}", *(part.format(**places) for part in arm.flags.split())]
    if arm.from_trained:
        # The tiny policy's own settings come with its model; another model brings none.
        argv += ["--config", str(ROOT / "tests" / "tiny" / "grpo.json"),
                 "--model", str(folder_of(output, GRPO, seed, steps) / "final")]
    status = train.main(argv)
    if status:
        return status
    seconds = time.process_time() - others.seconds
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = figures(list(map(json.loads, lines)))
    found["cpu_seconds"] = seconds
    train.sample_groups = sample_groups
    train.answers_and_rewards = others.answer                # or the exam would ask others, too
    if real:
        found |= real_exam(train, real, folder / "final")
        shutil.rmtree(folder / "final")                  # half a GB
    else:
        found |= exam(train, folder / "final")
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return keep(folder, found)


def keep(folder, found):
    text = json.dumps({"code": digest(), "made": provenance(), "figures": found})
    (folder / "figures.json").write_text(text)
    return 0


def provenance(*packages):
    """What a file of figures says of its origin."""
    import torch
    git = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    machine = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    versions = {name: version(name) for name in ("torch", "transformers", *packages)}
    return {"commit": commit, "machine": machine, **versions}


class OtherAnswers:
    """train.answers_and_rewards with answers that the policy has not written.

    With `count_own` it answers the same problems, too: the share of right ones is the step's
    accuracy, and the seconds for it are no part of the training.
    """

    def __init__(self, train, whose, count_own):
        self.train = train
        self.answer = train.answers_and_rewards
        self.whose = whose                                   # see Arm.answers
        self.count_own = count_own
        self.accuracy = {}
        self.seconds = 0.0
        self.untrained = None
        self.kept = None

    def __call__(self, parts, batch, s, sampler):
        if s.temperature == 0:                               # an evaluation
            return self.answer(parts, batch, s, sampler)
        if not self.untrained:
            untrained = copy.deepcopy(parts.policy_model)
            self.untrained = dataclasses.replace(parts, policy_model=untrained)
        if self.whose == "kept":
            return self.kept_ones(parts, s)
        if self.whose == "worked":
            sampler = self.worked(batch)
        found = self.answer(self.untrained, batch, s, sampler)
        if self.count_own:
            start = time.process_time()
            own, _ = self.answer(parts, batch, s, self.train.sample_groups)
            right = self.train.reward.is_right(own.rule_rewards)
            self.accuracy = {"accuracy": float(right.double().mean())}
            self.seconds += time.process_time() - start
        return found

    def kept_ones(self, parts, s):
        """Half a step's rows, all right: of what the untrained policy draws in a whole run."""
        take = self.train.take
        if not self.kept:
            batches = [self.train.batch_of_step(parts, n, s) for n in range(1, s.steps + 1)]
            drawn = [self.answer(self.untrained, batch, s, parts.sampler)[0] for batch in batches]
            right = [take(some, (some.rewards >= 1).nonzero().flatten()) for some in drawn]
            self.kept = functools.reduce(self.train.sample.joined, right)
            n = len(self.kept.responses)
            distinct = len({*zip(self.kept.prompts, self.kept.responses)})
            self.accuracy = {"kept": n, "distinct": distinct}
            self.order = passes(n, s.seed)
        n_rows = s.prompts_per_step * s.group_size // 2
        rows = list(itertools.islice(self.order, n_rows))
        return take(self.kept, rows), {"seconds_sampling": 0, "seconds_scoring": 0}

    def worked(self, batch):
        """A sampler that gives each problem's own solution, as the tiny policy writes them."""
        def sampler(model, tokenizer, prompts, group_size, *_):
            sample = self.train.sample
            rows = []
            for problem in batch.problems:
                lines = problem["solution"].splitlines() + [f"\\boxed{{ {problem['answer']} }}"]
                ids = sample.ids_of(tokenizer, " , ".join(lines) + " " + tokenizer.eos_token)
                rows += group_size * [(ids, [-1.0] * len(ids))]    # log-probs nobody reads
            prompt_ids = [sample.ids_of(tokenizer, prompt) for prompt in prompts]
            return sample.to_rollout(tokenizer, prompt_ids, rows,
                                     sample.end_token_ids(model, tokenizer))
        return sampler


def passes(n, seed):
    """0 to n - 1 without end, in a new order every time round."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(n), n)


def group_std(rewards, group_size):
    """The std of the rewards inside a group, its mean over the groups."""
    groups = rewards.view(-1, group_size)                                    # (B, G)
    return float(groups.std(dim=1, correction=0).mean())


def exam(train, final, samples=4):
    """A policy on the held-out problems: greedy, and at temperature 1 against the untrained one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    policy = AutoModelForCausalLM.from_pretrained(final).eval()
    ref = AutoModelForCausalLM.from_pretrained(train.TINY).eval()
    tokenizer = AutoTokenizer.from_pretrained(train.TINY)
    problems = train.reward.load_problems(str(train.TINY / "test.jsonl"))
    rows = {"greedy": 0, "sampled": 0}
    right = {"greedy": 0, "sampled": 0}
    tokens = 0
    log_pi = log_ref = 0.0
    for start in range(0, len(problems), 32):
        part = problems[start:start + 32]
        prompts = [train.chat_prompt(tokenizer, problem, "") for problem in part]
        generators = [train.seeded("exam", start, j) for j in range(len(part))]
        for name, n, temperature in (("greedy", 1, 0.0), ("sampled", samples, 1.0)):
            rollout = train.sample_groups(policy, tokenizer, prompts, n, 40, temperature,
                                          generators if temperature else None)
            truths = [problem["answer"] for problem in part]
            rewards = train.score_responses(rollout.responses, truths, n)
            right[name] += int(train.reward.is_right(rewards).sum())
            rows[name] += len(rewards)
        with train.torch.no_grad():                      # of the sampled ones
            ref_logprobs, _ = train.token_logprobs(ref, rollout.input_ids, rollout.labels)
        tokens += int(rollout.mask.sum())
        log_pi += float(rollout.sampler_logprobs.double().sum())
        log_ref += float(ref_logprobs.double().sum())
    return {**{name: right[name] / rows[name] for name in rows}, "tokens": tokens / rows["sampled"],
            "kl": (log_pi - log_ref) / tokens, "entropy": -log_pi / tokens}


def real_exam(train, config, model=None, samples=64):
    """Right answers of a model to all held-out problems of a task, greedy and sampled, pass@k."""
    given = ["--model", str(model)] if model else []
    settings = train.parse(["--eval-limit=0", "--config", config, *given])
    settings = train.plan_memory(settings, to_train=False)
    parts = train.load(settings, to_train=False)
    found = {"samples": samples, "dtype": settings.dtype}
    for name, n, temperature in (("greedy", 1, 0.0), ("sampled", samples, 1.0)):
        _, rows = train.evaluate(parts, settings, n, temperature)
        right = (train.column(rows, "reward") >= 1).view(-1, n)                      # (B, n)
        found[f"{name}_right"] = right.sum(dim=1).tolist()                           # of n
        if n == 1:
            found["greedy_answers"] = [row["answer"] for row in rows]
    return rates(found)


def rates(run):
    """A real control's figures, from the numbers of right answers that are kept of each problem."""
    found = {name: statistics.fmean(shares(run, name))
             for name in ("greedy", "sampled") if run[f"{name}_right"]}
    return run | found | {f"pass@{k}": statistics.fmean(found_by(k, run)) for k in powers(run)}


def shares(run, name):
    """Of each problem the share of a run's answers that are right."""
    n = run["samples"] if name == "sampled" else 1
    return [count / n for count in run[f"{name}_right"]]


def powers(run):
    """1, 2, 4 … up to the number of sampled answers to a problem."""
    return [2 ** n for n in range((run["samples"] or 0).bit_length())]


def found_by(k, run):
    """Of each problem the chance that one of k of its answers is right, unbiased as best_of_k."""
    n = run["samples"]
    return [1 - math.comb(n - c, k) / math.comb(n, k) for c in run["sampled_right"]]


def digest():
    return hashlib.sha256(b"".join(path.read_bytes() for path in CODE)).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------
# Figures of a run, their mean and spread over seeds, the verdict on a claim. Pure.


def figures(metrics):
    """The lines of metrics.jsonl -> the figures of one run."""
    steps = [line for line in metrics if "reward_mean" in line or "accuracy" in line]

    def mean(name, lines):
        values = [line[name] for line in lines if line.get(name) is not None]
        return statistics.fmean(values) if values else math.nan

    early, late = steps[:10], steps[-10:]
    good = [line["step"] for line in steps if (line["accuracy"] or 0) >= 0.9]
    return {
        "greedy": [line["eval_accuracy"] for line in metrics if "eval_accuracy" in line][-1],
        "held_out_curve": [line["eval_reward"] for line in metrics if "eval_reward" in line],
        "held_out_right": [line["eval_reward/right"] for line in metrics
                           if "eval_reward/right" in line],
        "right_curve": [line["reward/right"] for line in steps if "reward/right" in line],
        "last_ten": mean("accuracy", late),
        "at_09": good[0] if good else len(steps) + 1,    # one step too many: never
        "never": int(not good),
        "length": mean("response_length_mean", late),
        "length_growth": mean("response_length_mean", late) - mean("response_length_mean", early),
        "std_fall": mean("group_std", early) - mean("group_std", late),
        "flat": mean("flat_groups", late),
        "grad_norm": mean("grad_norm", late),
        "approx_kl": mean("approx_kl", late),
        "kl_coef": mean("kl_coef", late),
        "clip_fraction": mean("clip_fraction", steps),
        "sampler_gap": steps[0]["sampler_difference"],
        "reward": mean("reward_mean", late),
    }


def summary(values):
    """-> (mean, standard deviation with n-1); one value has a spread of 0; NaN if one is NaN."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def parts_of(relation):
    """"A > B" -> ("A", ">", "B")."""
    return re.fullmatch(r"(.+) (>|~|in) (.+)", relation).groups()


def verdict(figure, relation, results):
    """results: {label: one dict of figures per seed} -> one line: the verdict and its numbers."""
    label, sign, other = parts_of(relation)

    def side(label):
        return summary([run[figure] for run in results[label]])

    others = results.get(other, results[label])          # of `A > 0` there is one side only
    if min(len(results[label]), len(others)) < 2:
        return "cannot be said: fewer than two seeds"
    mean, spread = side(label)
    told = f"{mean:.3g} ± {spread:.2g}"
    if sign == "in":
        low, high = map(float, other.split())
        return f"{'seen' if low <= mean <= high else 'not seen'}: {told}"
    other_mean, other_spread = side(other) if other in results else (0.0, 0.0)
    told += f" against {other_mean:.3g} ± {other_spread:.2g}"
    difference = mean - other_mean
    limit = spread + other_spread
    if math.isnan(difference):
        return f"cannot be said: {told}"
    if sign == "~":
        return f"{'seen' if abs(difference) <= limit else 'not seen'}: {told}"
    if difference > limit:
        return f"seen: {told}"
    return f"the opposite: {told}" if -difference > limit else f"not seen: {told}"


# --------------------------------------------------------------------------------------------------
# Tables, and the command

COLUMNS = {"greedy": "greedy", "sampled": "sampled", "last_ten": "last ten", "at_09": "at 0.9",
           "length": "length", "kl": "KL", "entropy": "entropy", "cpu_seconds": "CPU s"}
MORE = {"flat": "flat groups", "grad_norm": "gradient norm", "approx_kl": "its own KL",
        "kl_coef": "beta", "clip_fraction": "clipped", "sampler_gap": "nats off at step 1",
        "length_growth": "longer by", "reward": "reward", "std_fall": "std falls by"}
OF_CONTROLS = {"greedy": "greedy", "sampled": "sampled", "at_09": "at 0.9", "tokens": "tokens",
               "kl": "KL", "cpu_seconds": "CPU s"}
OF_REAL_CONTROLS = {"greedy": "greedy", "sampled": "sampled", "pass@2": "pass@2",
                    "pass@4": "pass@4", "pass@8": "pass@8", "cpu_seconds": "CPU s"}


def cell(runs, name):
    if not runs:
        return "–"
    values = [run.get(name) for run in runs]
    mean, spread = summary([math.nan if value is None else value for value in values])
    if math.isnan(mean):
        return "–"
    digits = ".3g" if mean < 1000 else ",.0f"
    if len(runs) == 1:
        return f"{mean:{digits}}"
    late = "≥ " if name == "at_09" and any(run["never"] for run in runs) else ""
    return f"{late}{mean:{digits}} ± {spread:.2g}"


def table(name, results, told=None):
    """Markdown: the arms with their figures, then the claims with their verdicts.

    told: {arm: {figure: text}}, in brackets, where the answers behind a figure were not kept.
    """
    title, more, _, claims = STUDY[name]
    columns = {"controls": OF_CONTROLS, "rates": OF_CONTROLS,
               "real controls": OF_REAL_CONTROLS}.get(name, COLUMNS)
    columns = columns | {column: MORE[column] for column in more}
    lines = [f"\n### {title}\n", "| | seeds | " + " | ".join(columns.values()) + " |",
             "|" + " --- |" * (len(columns) + 2)]
    for label, runs in results.items():
        texts = (told or {}).get(label, {})
        cells = [f"({texts[name]})" if name in texts else cell(runs, name) for name in columns]
        lines.append(f"| {label} | {len(runs)} | " + " | ".join(cells) + " |")
    if not claims:
        return "\n".join(lines)
    lines += ["", "| document | what it says | so | seen? |", "| --- | --- | --- | --- |"]
    for document, figure, relation, text in claims:
        found = verdict(figure, relation, results)
        lines.append(f"| {document} | {text} | {columns[figure]}: {relation} | {found} |")
    return "\n".join(lines)


def each_seed(results):
    """The two accuracies of each seed: a mean of controls hides how far apart they end."""
    for label, runs in results.items():
        both = (", ".join(f"{run[name]:.3f}" for run in runs) for name in ("greedy", "sampled"))
        yield f"- {label}: greedy {next(both)}; sampled {next(both)}"


def paired(results):
    """The real controls problem by problem, and the curves of what a policy drew itself."""
    sys.path.insert(0, str(ROOT))
    from reward import compared

    def line(before, after):
        return compared([{"right": x} for x in before], [{"right": x} for x in after], "right")

    # Of kept runs each is compared with the untrained policy as the same machine asked it.
    runs = [(label, n, run) for label in results for n, run in enumerate(results[label], 1)]
    untrained = {run.get("machine"): run for label, _, run in runs if "untrained" in label}
    pairs = [(f"untrained → {label}, run {n}", untrained[run.get("machine")], run)
             for label, n, run in runs if "untrained" not in label and untrained]
    for title, before, after in pairs:
        yield f"- {title}, greedy: {line(shares(before, 'greedy'), shares(after, 'greedy'))}"
        if before["samples"] and before["samples"] == after["samples"]:   # a sign test needs that
            yield f"- {title}, sampled: {line(shares(before, 'sampled'), shares(after, 'sampled'))}"
            for k in powers(before)[1:]:
                yield f"- {title}, pass@{k}: {line(found_by(k, before), found_by(k, after))}"
    # Two arms are compared over their seeds: problems would say nothing of other seeds.
    for one, other in [("online imitation", "GRPO"), ("online imitation", "GRPO, beta 0"),
                       ("self-SFT", "self-SFT, several passes")]:
        gains = [b["greedy"] - a["greedy"] for a, b in zip(results[one], results[other])]
        if len(gains) > 1:
            mean, spread = summary(gains)
            yield (f"- {one} → {other}, greedy: difference {mean:.3f} ± "
                   f"{spread / math.sqrt(len(gains)):.3f} over {len(gains)} seeds")
    for label, n, run in runs:
        curve, held_out = (run.get(name) or [] for name in ("right_curve", "held_out_curve"))
        tens = [statistics.fmean(curve[start:start + 10]) for start in range(0, len(curve), 10)]
        if tens and "SFT" not in label:
            yield f"- {label}, run {n}: right answers, means of ten steps: {in_words(tens)}"
        if right := run.get("held_out_right"):
            yield f"- {label}, run {n}: right at each evaluation: {in_words(right)}"
        elif len(held_out) > 2:
            yield f"- {label}, run {n}: held-out reward of each evaluation: {in_words(held_out)}"


def in_words(numbers):
    return ", ".join(f"{number:.2f}" for number in numbers)


def seconds_of(arm, steps):
    """A rough price: measured on one idle core, torch 2.13."""
    updates = re.search(r"--updates-per-rollout (\d+)", arm.flags)
    if not arm.trains:
        return 60
    if "{real}" in arm.flags:
        return 30 + steps * (8 + 10 * (int(updates[1]) if updates else 1))
    resampling = 0.15 if "--max-resample" in arm.flags else 0.0
    return 7 + steps * (0.1 + 0.07 * (int(updates[1]) if updates else 2) + resampling)


def start_run(output, real, job):
    arm, seed, steps = job
    folder = folder_of(output, arm, seed, steps)
    shutil.rmtree(folder, ignore_errors=True)
    # One thread each: two runs share two cores.
    command = [sys.executable, __file__, "--output", output, "--seeds", str(seed), "--real", real,
               "--steps", str(steps), "--run", json.dumps(vars(arm))]
    done = subprocess.run(command, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    trouble = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    print(f"{folder.name}: " + (f"FAILED, {trouble}" if done.returncode else "done"),
          file=sys.stderr, flush=True)


def read_runs(output, arm, seeds, steps):
    """The finished runs of an arm."""
    paths = [folder_of(output, arm, seed, steps) / "figures.json" for seed in seeds]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = [name for name in STUDY if "controls" not in name]
    parser.add_argument("--only", nargs="+", choices=tiny, default=tiny, metavar="NAME",
                        help="of " + ", ".join(tiny))
    parser.add_argument("--controls", action="store_true", help="their table")
    parser.add_argument("--real", default="", metavar="CONFIG",
                        help="with --controls: of a pretrained model, on the task of this file")
    parser.add_argument("--kept", type=Path, help="a file: prints the real controls kept in it")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 to 4; --real: 0 and 1")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; --real: 5 GB each")
    parser.add_argument("--output", default=str(Path(tempfile.gettempdir()) / "grpo-study"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.real and not (args.controls or args.run):
        parser.error("--real: needs --controls")
    if args.run:
        arm = Arm(**json.loads(args.run))
        sys.exit(run_one(args.output, arm, args.seeds[0], args.steps, args.real))
    if args.kept:
        kept = json.loads(args.kept.read_text())
        results = {label: list(map(rates, runs)) for label, runs in kept["arms"].items()}
        print(table("real controls", results, kept["told"]), *paired(results), sep="\n")
        return
    if args.controls:
        args.only = ["real controls" if args.real else "controls"]
    args.seeds = args.seeds or list(range(2 if args.real else 5))

    arms = [arm for name in args.only for arm in STUDY[name][2]]
    # Runs that go on from a trained policy wait for the runs that train it.
    waves = [[GRPO] * any(arm.from_trained for arm in arms)
             + [arm for arm in arms if not arm.from_trained],
             [arm for arm in arms if arm.from_trained]]
    waves = [{folder_of(args.output, arm, seed, args.steps): (arm, seed, args.steps)
              for arm in wave for seed in args.seeds} for wave in waves]
    todo = [[job for folder, job in wave.items() if not (folder / "figures.json").is_file()]
            for wave in waves]
    seconds = sum(seconds_of(arm, steps) for wave in todo for arm, _, steps in wave)
    print(f"{sum(map(len, waves))} runs, {sum(map(len, todo))} of them to do: about "
          f"{seconds / 60 / args.jobs:.0f} minutes on {args.jobs} idle cores, in {args.output}",
          file=sys.stderr)
    for wave in todo:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            try:
                list(pool.map(lambda job: start_run(args.output, args.real, job), wave))
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                sys.exit(130)

    missing = other_code = 0
    for name in args.only:
        results = {}
        for arm in STUDY[name][2]:
            runs = read_runs(args.output, arm, args.seeds, args.steps)
            missing += len(args.seeds) - len(runs)
            other_code += sum(run["code"] != digest() for run in runs)
            results[arm.label] = [run["figures"] for run in runs]
        more = {"controls": each_seed, "rates": each_seed, "real controls": paired}.get(name)
        lines = more(results) if more else []
        print(table(name, results), *lines, sep="\n", flush=True)
    print(f"\n{len(args.seeds)} seeds, {args.steps} steps; {missing} runs missing, {other_code} "
          "made by other code than this")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
