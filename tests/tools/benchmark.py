"""How fast and how lean a training step is, beside TRL's GRPOTrainer where that is installed.

    python tests/tools/benchmark.py tiny small  # the default run; 4 layers, 64 and 256 new tokens
    python tests/tools/benchmark.py ragged vocab  # answers of many lengths; 151,936 words
    python tests/tools/benchmark.py qwen1.5b  # the shape of Qwen2.5-1.5B, on a GPU only
    python tests/tools/benchmark.py qwen0.5b --bf16  # the shape of Qwen2.5-0.5B; in bfloat16
    python tests/tools/benchmark.py small --against=--no-fast           # with and without a flag
    python tests/tools/benchmark.py qwen0.5b --profile  # where a step of ours spends its time

Without a preset all of them run but qwen0.5b, which takes 20 GB; with TRL (`pip install trl`) that
takes hours, most of them vocab.

What: a whole step, `train.train_step` here and `GRPOTrainer.train` there, on the same weights
(random, but for tiny), prompts, lengths, reward and threads; on a CPU in float32 unless --bf16 is
given. TRL gets `loss_type="grpo"`, our beta, learning rate and optimizer, no checkpointing, logging
or saving. Its micro-batch (rows per device batch) is the fastest of a few. Ours is the same number
of tokens without checkpointing, and then whatever train.py does by default.

How: every measurement is a process of its own, with one step of warm-up and then `--repeat`
measured ones. Ours and TRL's take turns `--pairs` times, and ratios are taken between neighbours,
so that a busy machine slows both. The spread (lowest-highest) says how well that worked, and so
does the ratio of CPU seconds, which other programs hardly change. Each process measures its
ceilings too: the rollout is held against one pass over weights and cache per token at the memory's
bandwidth, the update against its matrix products at the machine's rate.

Sampling is `sample_groups` and the scoring of its answers, and TRL's `_generate`; the update is the
rest of the step. Peak memory is the most that a process held, less what it held when policy,
reference and optimizer (without its moments) were loaded. On CUDA it is the allocator's; else it is
the resident set's, and includes what the C library keeps of freed memory, on both sides.
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
import torch.profiler
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402
from reward import load_problems, rule_reward  # noqa: E402

# An end token of this chance per draw never comes: all answers have the full length.
SMALL = {
    "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 1024, "vocab": 4000,
    "prompt_length": 100, "new_tokens": 64, "prompts": 8, "group_size": 8, "end_chance": 1e-12,
}
QWEN = SMALL | {
    "layers": 28, "hidden": 1536, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936,
    "new_tokens": 512,
}
QWEN_SMALL = QWEN | {
    "layers": 24, "hidden": 896, "heads": 14, "ffn": 4864, "prompt_length": 200, "new_tokens": 64,
    "prompts": 2, "group_size": 4,
}
PRESETS = {
    "tiny": [],  # tests/tiny with its own config
    "small": [SMALL, SMALL | {"new_tokens": 256}],
    "ragged": [SMALL | {"new_tokens": 256, "end_chance": 1 / 64}],
    "vocab": [SMALL | {"vocab": 151936, "hidden": 128, "ffn": 512}],
    "qwen0.5b": [QWEN_SMALL],
    "qwen1.5b": [QWEN],
}
# Measured steps per process and turns, where --repeat and --pairs do not say otherwise. A step of
# tiny is short; one of Qwen's is long, and a GPU's clock is steady.
REPEAT = {"tiny": 30, "qwen0.5b": 1, "qwen1.5b": 2}
PAIRS = {"qwen1.5b": 1}
PAD, END = 0, 1


# --------------------------------------------------------------------------------------------------
# One process, one measurement


def measure(job):
    """Steps of one side -> {figure: one number per step}; one "peak", in MB, and the ceilings."""
    settings = train.plan_memory(settings_of(job["folder"], job["flags"]))
    policy, _ = train.load_policy(settings)
    tokenizer, batch = read_batch(settings)
    run_steps = trl if job["side"] == "trl" else ours
    steps, loaded = run_steps(settings, policy, tokenizer, [batch] * (1 + job["repeat"]), job)
    whole = peak_memory()
    matrix_rate, bandwidth = ceilings(policy.device, policy.dtype)
    P = len(tokenizer(batch.prompts[0]).input_ids)
    U = settings.updates_per_rollout
    figures = []
    for seconds, cpu, sampling, lengths in steps[1:]:
        n = sum(lengths)
        update = seconds - sampling
        # The update goes forward once and backward, which is twice that; the reference forward.
        flops = (3 * U + bool(settings.kl_coef)) * forward_flops(policy, P, lengths, settings)
        traffic = rollout_bytes(policy, P, lengths)
        figures.append({
            "seconds": seconds, "cpu": cpu, "sampling": sampling, "update": update,
            "length": n / len(lengths),
            "sampling_rate": n / sampling,
            "update_rate": U * n / update,
            "of_bandwidth": traffic / sampling / bandwidth,
            "of_matrix_rate": flops / update / matrix_rate,
        })
    result = {name: [step[name] for step in figures] for name in figures[0]}
    return result | {"peak": [whole - loaded], "whole": [whole], "bandwidth": [bandwidth],
                     "matrix_rate": [matrix_rate]}


def forward_flops(policy, P, lengths, settings):
    """FLOP of the matrix products in one forward pass over a rollout; no pass can do without them.

    Prompts once per group, no padding, no attention; the head on response tokens alone.
    """
    head = policy.get_output_embeddings().weight.numel()
    n = sum(lengths)
    return 2 * (body_size(policy) * (n + P * settings.prompts_per_step) + head * n)


def rollout_bytes(policy, P, lengths):
    """Bytes that no rollout can do without reading.

    The weights once per token, keys and values once for every row that is still being written.
    """
    config = policy.config
    head = policy.get_output_embeddings().weight
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = (body_size(policy) + head.numel()) * max(lengths)
    cache = kv * sum(L * P + L * (L - 1) / 2 for L in lengths)
    return (weights + cache) * head.element_size()


def body_size(policy):
    """The number of weights without the embeddings, of which a token reads one row."""
    words = policy.get_input_embeddings().weight.numel()
    return sum(p.numel() for p in policy.base_model.parameters()) - words


def ceilings(device, dtype):
    """What this machine does at best: FLOP/s of a large matrix product, bytes/s of a large copy."""
    n = 8192 if device.type == "cuda" else 1024
    # Random numbers: a product of zeros is faster than any that trains a model.
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    x, y = torch.rand(2, 2**28 if device.type == "cuda" else 2**24, device=device)
    product = 2 * n**3 / best_time(lambda: a @ b)
    copying = 2 * x.nbytes / best_time(lambda: x.copy_(y))  # read once, written once
    return product, copying


def best_time(work, turns=3, times=5):
    """Seconds of one `work()`: the best turn, each of several calls, the first turn a warm-up."""
    best = math.inf
    for turn in range(1 + turns):
        start, _ = now()
        for _ in range(times):
            work()
        seconds = (now()[0] - start) / times
        best = min(best, seconds) if turn else best
    return best


def settings_of(folder, flags=()):
    """The settings of tests/tiny or of a folder that make_folder made, and flags over them."""
    folder = Path(folder)
    return train.parse([f"--config={folder / 'grpo.json'}", f"--model={folder}", *flags])


def read_batch(settings):
    """-> tokenizer, Batch. AutoTokenizer would give every Qwen2 the words of Qwen2."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.model)
    problems = load_problems(settings.data)[:settings.prompts_per_step]
    prompts = [train.chat_prompt(tokenizer, problem, settings.system_prompt)
               for problem in problems]
    return tokenizer, train.Batch(problems, prompts)


def coin_toss(completions, answer, **columns):
    """The rule's reward; what random weights say is never boxed, and gets a coin toss."""
    return [rule_reward(text, truth) if "boxed" in text else len(text) % 2.0
            for text, truth in zip(completions, answer)]


def ours(settings, policy, tokenizer, batches, job):
    """-> steps (seconds, CPU seconds, seconds of sampling, lengths), and MB when all was loaded."""
    s = settings
    reference = copy.deepcopy(policy).requires_grad_(False) if s.kl_coef else None
    optimizer = train.make_optimizer(policy, s)
    loaded = memory_loaded(policy, reference)
    steps = []

    def reward_of(rollout):
        truths = [problem["answer"] for problem in rollout.problems]
        return torch.tensor(coin_toss(rollout.responses, truths))

    parts = train.Parts(policy, reference, tokenizer, optimizer, [], [], reward_of=reward_of)
    for batch in batches:
        start = now()
        metrics, rollout = train.train_step(parts, batch, s)
        end = now()
        lengths = rollout.mask.sum(dim=1).tolist()
        steps.append((end[0] - start[0], end[1] - start[1], metrics["seconds_sampling"], lengths))
    return steps, loaded


def trl(settings, policy, tokenizer, batches, job):
    """The same from TRL's trainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    s = settings
    U = s.updates_per_rollout
    cuda = policy.device.type == "cuda"
    half = policy.dtype == torch.bfloat16
    if half:  # float32 weights under bfloat16 autocast: its own default
        policy = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32)
    rollouts = []  # (seconds, lengths) of each
    starts = []    # clocks of each optimizer step
    ends = []

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            start, _ = now()
            out = super()._generate(prompts)
            rollouts.append((now()[0] - start, list(map(len, out[1]))))
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            starts.append(now())

        def on_step_end(self, *args, **kwargs):
            ends.append(now())

    args = GRPOConfig(
        output_dir=job["output"], per_device_train_batch_size=job["rows"],
        gradient_accumulation_steps=s.prompts_per_step * s.group_size // job["rows"],
        num_generations=s.group_size, num_iterations=U, max_steps=U * len(batches),
        max_completion_length=s.max_new_tokens, temperature=s.temperature, top_k=0, top_p=1.0,
        beta=s.kl_coef, epsilon=s.clip_eps, loss_type="grpo",
        learning_rate=s.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=s.max_grad_norm, optim="adamw_torch_fused",
        use_vllm=False, bf16=half, use_cpu=not cuda, gradient_checkpointing=False,
        shuffle_dataset=False, dataloader_pin_memory=False, seed=s.seed,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
    rows = [{"prompt": prompt, "answer": problem["answer"]} for batch in batches
            for prompt, problem in zip(batch.prompts, batch.problems)]
    trainer = Timed(policy, coin_toss, args, processing_class=tokenizer, callbacks=[Clock()],
                    train_dataset=Dataset.from_list(rows))
    loaded = memory_loaded(trainer.model, trainer.ref_model)
    trainer.train()
    steps = [(end[0] - start[0], end[1] - start[1], *rollout)
             for start, end, rollout in zip(starts[::U], ends[U - 1::U], rollouts)]
    return steps, loaded


def parts(job):
    """One step under torch's profiler -> {kind of operation: its seconds on a CPU}."""
    settings = train.plan_memory(settings_of(job["folder"], job["flags"]))
    policy, _ = train.load_policy(settings)
    tokenizer, batch = read_batch(settings)
    ours(settings, policy, tokenizer, [batch], job)  # a warm-up
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        steps, _ = ours(settings, policy, tokenizer, [batch], job)
    found = defaultdict(float)
    for event in seen.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    [(_, cpu, sampling, _)] = steps
    return found | {"all, CPU seconds": cpu, "of them sampling": sampling}


def kind_of(operation):
    """What an operation of torch is counted as; one that is neither has its own name."""
    name = operation.removeprefix("aten::")
    if "scaled_dot_product" in name or "flash_attention" in name:
        return "attention"
    if name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear") or "mkldnn" in name:
        return "products"
    return name


def now():
    """-> (clock, CPU seconds of this process), when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()
    return time.perf_counter(), time.process_time()


@torch.no_grad()
def memory_loaded(*loaded):
    """What is held now. Weights that are mapped from a file are read first, or they look new."""
    for model in filter(None, loaded):
        model(torch.tensor([[PAD, END]], device=model.device))  # and what is imported at first use
        sum(float(p.sum()) for p in model.parameters())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    return peak_memory()


def peak_memory():
    """MB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    if os.path.exists("/proc/self/status"):
        # On Linux ru_maxrss starts at the parent's.
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return int(status["VmHWM"].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# --------------------------------------------------------------------------------------------------
# What is measured: random weights, a tokenizer of the words w2, w3, ..., prompts, a config


def make_folder(size, folder):
    """A model folder that train.py takes, with problems and a config beside it."""
    device, dtype = train.choose_device(train.Settings())
    tokenizer = word_tokenizer(size["vocab"])
    tokenizer.save_pretrained(folder)
    random_model(size, device, getattr(torch, dtype)).save_pretrained(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the processes that measure need it
    lines = [{"question": question, "answer": "#### 0"} for question in random_questions(size)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "grpo.json").write_text(json.dumps({
        "data": "train.jsonl", "eval_data": "train.jsonl", "system_prompt": "",
        "group_size": size["group_size"], "prompts_per_step": size["prompts"],
        "max_new_tokens": size["new_tokens"]}))


def word_tokenizer(vocab):
    # Whoever opens the folder with AutoTokenizer gets Qwen2's class, which knows this end token.
    words = ["<pad>", "<|endoftext|>"] + [f"w{i}" for i in range(2, vocab)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w2"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=words[PAD],
                                   eos_token=words[END],
                                   chat_template="{{ messages[0]['content'] }}")


def random_questions(size):
    """One for each prompt of a step, strings of `prompt_length` words."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(2, size["vocab"], (size["prompts"], size["prompt_length"]),
                        generator=chance)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def random_model(size, device, dtype):
    """A Qwen2 of this size with random weights, made where it will live."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as where a policy is opened
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype).eval()
    set_end_chance(model, size["end_chance"])
    return model


def config_of(size):
    return Qwen2Config(
        vocab_size=size["vocab"], hidden_size=size["hidden"], num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"], num_key_value_heads=size["kv_heads"],
        intermediate_size=size["ffn"], tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=PAD)


@torch.no_grad()
def set_end_chance(model, chance):
    """Make the end token about as likely after any text: feature 0 is a constant that the head
    alone reads.
    """
    head = model.get_output_embeddings().weight                              # (V, H), tied
    head[:, 0] = 1
    head[END] = 0
    for layer in model.model.layers:
        layer.input_layernorm.weight[0] = 0
        layer.post_attention_layernorm.weight[0] = 0
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    text = torch.randint(2, len(head), (1, 256), device=head.device)
    hidden = model.model(text).last_hidden_state[0, 100:]                    # (156, H)
    others = (hidden @ head[2:].T).float().logsumexp(dim=1).mean()
    head[END, 0] = (others + math.log(chance / (1 - chance))) / hidden[:, 0].float().mean()


# --------------------------------------------------------------------------------------------------
# Many processes, taking turns


def run(folder, side, repeat, rows=0, flags=()):
    """One measurement in a process of its own -> what `measure` or `parts` returned there."""
    with tempfile.TemporaryDirectory() as output:
        job = {"folder": str(folder), "side": side, "repeat": repeat, "rows": rows,
               "flags": flags, "output": output}
        done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)],
                              text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if side == "parts":
        return result
    print(f"    {folder.name} {side} {rows or 'all':3} rows  "
          f"{middle([result], 'seconds'):.2f} s per step, CPU {middle([result], 'cpu'):.2f}, "
          f"{result['peak'][0]:.0f} MB, load {os.getloadavg()[0]:.1f}",
          file=sys.stderr, flush=True)
    return result


def compare(name, folder, repeat, pairs, micro_batches, flags=()):
    """Ours and TRL's at its best micro-batch, and our default, in turns; without TRL ours alone."""
    flags = list(flags)
    settings = settings_of(folder)
    if not importlib.util.find_spec("trl"):
        alone = [run(folder, "ours", repeat, flags=flags) for _ in range(pairs)]
        print_figures(name, {"ours, default": alone})
        return
    N = settings.prompts_per_step * settings.group_size
    rows = [n for n in micro_batches if N % n == 0] or [N]
    if len(rows) > 1:
        # The clock of a busy CPU would choose by chance.
        key = "seconds" if torch.cuda.is_available() else "cpu"
        seconds = {n: middle([run(folder, "trl", max(repeat // 3, 1), n, flags)], key)
                   for n in rows}
        rows.sort(key=seconds.get)
    best = rows[0]
    tokenizer, batch = read_batch(settings)
    longest = max(map(len, tokenizer(batch.prompts).input_ids)) + settings.max_new_tokens
    same = [f"--micro-batch-tokens={best * longest}", "--no-gradient-checkpointing"]
    ours_same, theirs, ours_default = zip(*[
        (run(folder, "ours", repeat, best, [*same, *flags]),
         run(folder, "trl", repeat, best, flags),
         run(folder, "ours", repeat, flags=flags)) for _ in range(pairs)])
    print_figures(name, {f"ours, {best} rows": ours_same, f"TRL, {best} rows": theirs,
                         "ours, default": ours_default})
    print_ratios(name, ours_same, theirs, ours_default)


def middle(results, key):
    return median(value for result in results for value in result[key])


def ratios(above, below, key):
    """One run over its neighbour: median (lowest-highest)."""
    values = [median(a[key]) / median(b[key]) for a, b in zip(above, below)]
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(*names):
    """The head of a table."""
    print(f"\n| {' | '.join(names)} |\n|" + " --- |" * len(names))


def print_figures(name, sides):
    table("", "sampling tokens/s", "update tokens/s", "mean length", "peak MB",
          "of the process", "sampling s", "update s", "CPU s", "**s per step**")
    for side, results in sides.items():
        m = {key: middle(results, key) for key in results[0]}
        print(f"| {name} {side} | {m['sampling_rate']:.0f} | {m['update_rate']:.0f} "
              f"| {m['length']:.0f} | {m['peak']:.0f} | {m['whole']:.0f} | {m['sampling']:.2f} "
              f"| {m['update']:.2f} | {m['cpu']:.2f} | **{m['seconds']:.2f}** |", flush=True)
    for side, results in sides.items():
        m = {key: middle(results, key) for key in results[0]}
        print(f"\n{name} {side}: rollout at {m['of_bandwidth']:.0%} of the memory's "
              f"{m['bandwidth'] / 1e9:.1f} GB/s, update at {m['of_matrix_rate']:.0%} of a matrix "
              f"product's {m['matrix_rate'] / 1e12:.3f} TFLOP/s")


def print_ratios(name, same, theirs, default):
    table("TRL's over ours", "**a step**", "sampling", "update", "CPU seconds",
          "**peak MB, ours over TRL's**", "peak MB of the process")
    for side, results in (("same micro-batch", same), ("our default", default)):
        step, *others = (ratios(theirs, results, key)
                         for key in ("seconds", "sampling", "update", "cpu"))
        print(f"| {name} {side} | **{step}** | {' | '.join(others)} "
              f"| **{ratios(results, theirs, 'peak')}** | {ratios(results, theirs, 'whole')} |",
              flush=True)


def against(name, folder, repeat, pairs, flags):
    """Ours with these flags and without, in turns."""
    turns = [(run(folder, "ours", repeat, flags=flags), run(folder, "ours", repeat))
             for _ in range(pairs)]
    keys = ("seconds", "sampling", "update", "cpu", "peak")
    table(f"{' '.join(flags)}, over the default", "a step", "sampling", "update", "CPU seconds",
          "peak MB")
    print(f"| {name} | {' | '.join(ratios(*zip(*turns), key) for key in keys)} |", flush=True)


def print_parts(name, folder, flags):
    """Seconds of one step by kind of operation, the largest first."""
    found = run(folder, "parts", 1, flags=flags)
    whole = found["all, CPU seconds"]
    table(name, "seconds", "of the CPU seconds")
    for kind, seconds in sorted(found.items(), key=lambda item: -item[1])[:16]:
        print(f"| {kind} | {seconds:.2f} | {seconds / whole:.0%} |", flush=True)


# --------------------------------------------------------------------------------------------------
# The command


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="of " + ", ".join(PRESETS))
    for name, value in SMALL.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value),
                            help="instead of the preset's")
    parser.add_argument("--bf16", action="store_true", help="both in bfloat16")
    parser.add_argument("--repeat", type=int,
                        help="measured steps per process; default 3, tiny 30, qwen1.5b 2")
    parser.add_argument("--pairs", type=int,
                        help="turns of ours and TRL's; default 3, qwen1.5b 1")
    parser.add_argument("--micro-batches", type=int, nargs="+",
                        help="rows, for TRL")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", metavar="FLAGS",
                        help="measure ours with these flags, against the default")
    parser.add_argument("--profile", action="store_true", help="seconds of a step by operation")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def measure_presets(args, folder):
    sizes = {name: getattr(args, name) for name in SMALL if getattr(args, name) is not None}
    flags = ["--dtype=bfloat16" if args.bf16 else "--dtype=auto"]
    for preset in args.presets or [name for name in PRESETS if name != "qwen0.5b"]:
        if preset == "qwen1.5b" and not torch.cuda.is_available():
            print("\nqwen1.5b needs a GPU, and there is none here: NOT MEASURED")
            continue
        repeat = args.repeat or REPEAT.get(preset, 3)
        pairs = args.pairs or PAIRS.get(preset, 3)
        runs = {"tiny": train.TINY} if preset == "tiny" else {}
        for row in PRESETS[preset]:
            size = row | sizes
            name = f"{preset}/{size['new_tokens']}"
            if name not in runs:
                runs[name] = folder / name.replace("/", "-")
                make_folder(size, runs[name])
        for name, model in runs.items():
            if args.profile:
                print_parts(name, model, flags)
            elif args.against:
                against(name, model, repeat, pairs, args.against.split())
            else:
                compare(name, model, repeat, pairs, args.micro_batches or [4, 8, 16, 64, 128],
                        flags)


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    if unknown := set(args.presets) - set(PRESETS):
        parser.error(f"no preset {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    try:
        train.parse((args.against or "").split())
    except train.BadInput as error:
        parser.error(f"--against: {error}")
    if args.child:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        job = json.loads(args.child)
        print(json.dumps(parts(job) if job["side"] == "parts" else measure(job)))
        return 0
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false",
                   "HF_HUB_OFFLINE": "1"}
    rival = "no TRL here (pip install trl): ours alone"
    if importlib.util.find_spec("trl"):
        rival = "TRL " + importlib.metadata.version("trl")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.threads} threads, "
          f"torch {torch.__version__}, transformers {transformers.__version__}, {rival}")
    with tempfile.TemporaryDirectory() as temporary:
        measure_presets(args, Path(temporary))
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
