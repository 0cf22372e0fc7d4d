"""What a step takes on the card that is here: memory beside its count, kernel launches, waits.

    python tests/tools/first_run.py                      # the shape of Qwen2.5-1.5B, all weights
    python tests/tools/first_run.py --lora-rank 16       # with these flags of train.py
    python tests/tools/first_run.py --layers 4           # of a smaller model
    python tests/tools/first_run.py --only counts        # launches and waits; or memory

Nothing is downloaded: all weights are random and made on the card. Memory: two steps as train.py
plans them for this card, prompts as long as its count assumes, answers of the full length. Launches
and waits of the host are counted on tests/tiny, per token of decoding and per update. Decoding may
wait for its check at every 16th token, an update where a number is needed.

On a software GPU launches, waits and the allocator's memory are right, the seconds are not.
"""
import argparse
import contextlib
import copy
import dataclasses
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
from benchmark import QWEN, config_of, random_model, random_questions, word_tokenizer
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

import sample
import train

try:
    import softgpu
except ImportError:
    softgpu = None
GB = 1e9


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=QWEN["layers"])
    parser.add_argument("--only", choices=("counts", "memory"))
    args, flags = parser.parse_known_args(argv)
    if not torch.cuda.is_available():
        print("first_run.py: there is no CUDA card here", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, {card.total_memory / GB:.1f} GB, sm_{card.major}{card.minor}; torch "
          f"{torch.__version__}, CUDA {torch.version.cuda}" + ", a software GPU" * bool(softgpu))
    if args.only != "memory":
        print_counts()
    if args.only != "counts":
        print_memory(args.layers, flags)
    return 0


# --------------------------------------------------------------------------------------------------
# Launches and waits

def print_counts():
    """Of the tiny policy, in the precision that train.py chooses for this card."""
    s = train.plan_memory(train.parse(["--device=cuda:0", "--dtype=auto"]))
    policy, tokenizer = train.load_policy(s)
    per_token = decoding(policy, tokenizer)
    print(f"\ndecoding, a token of 16 rows   {per_token}")
    for number, found in enumerate(updates(policy, tokenizer, s), start=1):
        print(f"update {number} of 2, {found.rows} rows       {found}")
    policy.fast.decoder = None


@dataclasses.dataclass
class Count:
    """What happened while something ran."""

    launches: float      # of kernels and of whole graphs, memory copies left out
    waits: float         # of the host for the card
    where: dict          # {line of the code: waits}
    rows: int = 0

    def __str__(self):
        places = "".join(f"\n    {n:3}  {place}" for place, n in self.where.items())
        return f"{self.launches:.4g} launches, {self.waits:.3g} waits{places}"


@contextlib.contextmanager
def counting():
    """Yields a function that gives the Count once the block has ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if softgpu:
            softgpu.reset()
            yield lambda: counted_by_software()
            return
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            torch.cuda.set_sync_debug_mode("warn")
            yield lambda: counted_by_torch(seen, caught)
            torch.cuda.set_sync_debug_mode("default")


def counted_by_software():
    counters = softgpu.counters()
    launches = counters.get("launches", 0) + counters.get("graph_launches", 0)
    return Count(launches, counters.get("syncs", 0), dict(softgpu.waits))


def counted_by_torch(seen, caught):
    """torch warns of most waits, with the line of Python that made the host wait."""
    # The calls of the host, such as cudaLaunchKernel, cuLaunchKernelEx and cudaGraphLaunch
    names = [event.name for event in seen.events() if event.name.startswith("cu")]
    launches = sum("Launch" in name for name in names)
    where = {}
    for warning in caught:
        if "synchroniz" in str(warning.message):
            place = f"{Path(warning.filename).name}:{warning.lineno}"
            where[place] = where.get(place, 0) + 1
    return Count(launches, sum(where.values()), where)


def decoding(policy, tokenizer, short=24, long=88):
    """The Count of a token: that of a long rollout less that of a short one."""
    policy.generation_config.eos_token_id = [len(tokenizer)]  # no row ends
    tokenizer = copy.deepcopy(tokenizer)                     # nor by its own end token
    tokenizer.eos_token, tokenizer.chat_template = None, "{{ messages[-1].content }}"
    counts = []
    for tokens in (short, long):
        for _ in range(2):                                   # the first one captures its graphs
            with counting() as count:
                sample.sample_groups(policy, tokenizer, ["Anna has 9 books ."], 16, tokens)
        counts.append(count())
    few, many = counts
    n = long - short
    return Count((many.launches - few.launches) / n, (many.waits - few.waits) / n, {})


def updates(policy, tokenizer, s):
    """The Counts of a step's two updates, the second one with ratios off 1."""
    policy.generation_config.eos_token_id = tokenizer.eos_token_id
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = train.make_optimizer(policy, s, reference)
    problems = train.reward.load_problems(s.data)
    parts = train.Parts(policy, reference, tokenizer, optimizer, problems, [])
    found = []

    def counted(parts, rollout, settings, measure, step=train.gradient_step):
        with counting() as count:
            metrics = step(parts, rollout, settings, measure)
        found.append(dataclasses.replace(count(), rows=len(rollout.responses)))
        return metrics

    with patch.object(train, "gradient_step", counted):
        for step in (1, 2):                                  # in the first one things are made
            found.clear()
            batch = train.batch_of_step(parts, step, s)
            train.train_step(parts, batch, s)
    return found


# --------------------------------------------------------------------------------------------------
# Memory

def print_memory(layers, flags):
    """Two whole steps of a random model, as train.py plans them: the peaks beside the count."""
    size = QWEN | {"layers": layers, "prompt_length": train.PROMPT}
    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        # With a correction, steps are taken although random ids are not what was sampled.
        asked = train.parse([f"--model={folder}", "--sampler-correction=2", "--device=cuda:0",
                             f"--eval-data={train.TINY / 'test.jsonl'}", *flags])
        s = train.plan_memory(asked)  # prints what it needs by the rule
    dtype = getattr(torch, s.dtype)
    policy = random_model(size, torch.device("cuda:0"), dtype)
    if s.fast:
        sample.make_fast(policy)
    reference = copy.deepcopy(policy).requires_grad_(False) if s.kl_coef else None
    optimizer = train.make_optimizer(policy, s, reference)
    n = sum(p.numel() for p in policy.parameters())
    print(f"\n{n / 1e9:.2f}e9 weights in {dtype}, {s.prompts_per_step} x {s.group_size} answers of "
          f"{s.max_new_tokens} tokens after {train.PROMPT}, {s.micro_batch_tokens} tokens per "
          "micro-batch" + ", checkpointing" * s.gradient_checkpointing
          + ", offload" * bool(s.offload) + f", LoRA of rank {s.lora_rank}" * (s.lora_rank > 0))
    torch.cuda.reset_peak_memory_stats()
    for step in (1, 2):
        start = time.perf_counter()
        metrics = one_step(policy, reference, optimizer, size, s)
        torch.cuda.synchronize()
        print(f"step {step}: {time.perf_counter() - start:.1f} s, {metrics['tokens']:.0f} tokens, "
              f"micro-batches of {s.micro_batch_tokens} tokens")
    live, held = torch.cuda.max_memory_allocated() / GB, torch.cuda.max_memory_reserved() / GB
    total = torch.cuda.get_device_properties(0).total_memory / GB
    print(f"live peak {live:.1f} GB, reserved {held:.1f} GB ({held / total:.0%} of the card)")


def one_step(policy, reference, optimizer, size, s):
    """train_step on random questions. The answers are drawn, and replaced by other random ones."""
    # On a software GPU large numbers are not computed, and all answers would be equal.
    tokenizer = word_tokenizer(size["vocab"])
    questions = random_questions(size | {"prompts": s.prompts_per_step})
    problems = [{"question": question, "answer": "0"} for question in questions]
    batch = train.Batch(problems, questions)

    def sampler(*given):
        rollout = sample.sample_groups(*given)
        ids = torch.randint(2, size["vocab"], rollout.input_ids.shape).to(rollout.labels.device)
        own = rollout.labels != sample.IGNORE
        rollout.input_ids = ids.where(own, rollout.input_ids)
        rollout.labels = ids.where(own, sample.IGNORE)
        return rollout

    def reward_of(rollout):
        return torch.arange(len(rollout.responses)) % 2.0

    parts = train.Parts(policy, reference, tokenizer, optimizer, [], [], sampler, reward_of)
    metrics, _ = train.train_step(parts, batch, s)
    return metrics


if __name__ == "__main__":
    sys.exit(main())
