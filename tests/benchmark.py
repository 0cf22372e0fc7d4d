"""How fast and how lean a training step is, beside TRL's GRPOTrainer where that is installed (`pip install trl`).

    python tests/benchmark.py                           # all that a CPU can run; with TRL hours, most of them vocab
    python tests/benchmark.py tiny small --pairs 5      # tiny: the default run;  small: 4 layers, 64 and 256 tokens
    python tests/benchmark.py ragged --new-tokens 128   # end tokens: answers a quarter of the limit; another limit
    python tests/benchmark.py vocab qwen1.5b            # 151,936 words;  the shape of Qwen2.5-1.5B, on a GPU only
    python tests/benchmark.py --scaling                 # ours alone: twice the groups, the answers, the prompts
    python tests/benchmark.py small --against=--no-share-prompts        # ours alone: other flags against the default
    python tests/benchmark.py --head                    # log-probs alone, 8 x 512 tokens: [D]'s head, the full logits

What: a whole step, `train.train_step` here and `GRPOTrainer.train` there, on the same weights (random, but for
tiny), prompts, lengths, reward and threads, on a CPU in float32. TRL gets `loss_type="grpo"`, our beta, learning
rate and optimizer, no checkpointing, logging or saving. Its micro-batch (rows a device batch) is the fastest of a
few; ours is the same number of tokens without checkpointing, and then whatever train.py does by default.

How: every measurement is a process of its own, with one warm-up step and then `--repeat` measured ones. Ours and
TRL's take turns `--pairs` times, and ratios are taken between neighbours, so that a busy machine slows both. Their
spread (lowest-highest) says how well that worked, and so does the ratio of CPU seconds, which other programs hardly
change. Each process measures its ceilings too: the rollout is held against one pass over weights and cache a token at
the memory's bandwidth, the update against its matrix products at the machine's rate. Sampling is `sample_groups` and
the scoring of its answers, and TRL's `_generate`; the update is the rest of the step. Peak memory is the most a
process held, less what it held when policy, reference and optimizer (without its moments) were loaded; on CUDA the
allocator's, else the resident set's, and that includes what the C library keeps of freed memory, on both sides.
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
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from logprob import LeanHead, selected_logprobs  # noqa: E402
from reward import rule_reward  # noqa: E402

SMALL = dict(layers=4, hidden=256, heads=4, kv_heads=2, ffn=1024, vocab=4000, prompt_length=100, new_tokens=64,
             prompts=8, group_size=8, end_chance=1e-12)          # of the end token, a draw: answers of full length
QWEN = dict(layers=28, hidden=1536, heads=12, kv_heads=2, ffn=8960, vocab=151936, prompts=32, new_tokens=512)
PRESETS = {
    "tiny": [],                                                  # tests/tiny with its own recipe
    "small": [SMALL, SMALL | dict(new_tokens=256)],
    "ragged": [SMALL | dict(new_tokens=256, end_chance=1 / 64)],
    "vocab": [SMALL | dict(vocab=151936, hidden=128, ffn=512)],
    "qwen1.5b": [SMALL | QWEN],
}
PAD, END = 0, 1


# ---------------------------------------------------------------------------------------------------------
# One process, one measurement

def measure(job):
    """Steps of one side -> {figure: one number a step}, and one "peak", in MB."""
    settings, _ = train.parse([f"--model={job['folder']}", *job["flags"]])
    policy, _ = train.load_policy(settings)
    tokenizer, prompts, truths = read_prompts(settings)
    run_steps = trl if job["side"] == "trl" else ours
    steps, loaded = run_steps(settings, policy, tokenizer, prompts, truths, job)
    peak, U = peak_memory() - loaded, settings.updates_per_rollout
    P, (matrix_rate, bandwidth) = len(tokenizer(prompts[0]).input_ids), ceilings(policy.device, policy.dtype)
    figures = []
    for seconds, cpu, sampling, lengths in steps[1:]:
        n, update, (flops, traffic) = sum(lengths), seconds - sampling, least_work(policy, P, lengths, settings)
        figures.append({
            "seconds": seconds, "cpu": cpu, "sampling": sampling, "update": update, "length": n / len(lengths),
            "sampling_rate": n / sampling, "update_rate": U * n / update,
            "of_bandwidth": traffic / sampling / bandwidth, "of_matrix_rate": flops / update / matrix_rate})
    return {name: [step[name] for step in figures] for name in figures[0]} | {
        "peak": [peak], "bandwidth": [bandwidth], "matrix_rate": [matrix_rate]}


def least_work(policy, P, lengths, s):
    """What no step can do without: FLOP of the update's matrix products, bytes that the rollout reads.

    Prompts once a group, no padding, no attention, nothing computed again; weights once a token, keys and values once
    for every row that is still being written.
    """
    head, words, c = policy.get_output_embeddings().weight, policy.get_input_embeddings().weight, policy.config
    body, tokens = sum(p.numel() for p in policy.base_model.parameters()) - words.numel(), sum(lengths)
    passes = 3 * s.updates_per_rollout + 1               # forward 1 and backward 2, and the reference forward
    flops = 2 * passes * (body * (tokens + P * s.prompts_per_step) + head.numel() * tokens)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim
    values = (body + head.numel()) * max(lengths) + kv * sum(L * P + L * (L - 1) / 2 for L in lengths)
    return flops, values * head.element_size()


def ceilings(device, dtype):
    """What this machine does at best: FLOP/s of a large matrix product, bytes/s of a copy."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    x, y = torch.ones(2, 2**27, device=device)           # 0.5 GB each

    def best(work):
        times = []
        for _ in range(6):
            start = now()
            work()
            times.append(now()[0] - start[0])
        return min(times)

    return 2 * n**3 / best(lambda: a @ b), 2 * x.nbytes / best(lambda: x.copy_(y))


def read_prompts(settings):
    """Its own tokenizer class, for AutoTokenizer gives every Qwen2 the words of Qwen2."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.model)
    problems = train.load_problems(settings.data)[:settings.prompts_per_step]
    prompts = [train.chat_prompt(tokenizer, problem["question"], settings.system_prompt) for problem in problems]
    return tokenizer, prompts, [problem["answer"] for problem in problems]


def reward(completions, answer, **_):
    """The rule's reward; what random weights say is never boxed, and gets a coin toss."""
    return [rule_reward(text, truth) if "boxed" in text else len(text) % 2.0
            for text, truth in zip(completions, answer)]


def ours(settings, policy, tokenizer, prompts, truths, job):
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = train.make_optimizer(policy, settings)
    truth_of_rows = [truth for truth in truths for _ in range(settings.group_size)]
    steps, lengths, loaded = [], [], memory_loaded(policy, reference)

    def sampled(rollout, *_):
        nonlocal loaded, lengths
        lengths = (rollout.labels != train.IGNORE).sum(dim=1).tolist()
        if job["side"] == "update":                      # its memory alone: from here on, the moments are there
            optimizer.zero_grad()
            loaded = memory_loaded(policy, reference)

    for _ in range(1 + job["repeat"]):
        start = now()
        m = train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, settings, on_rollout=sampled,
                             reward_fn=lambda _, responses: torch.tensor(reward(responses, truth_of_rows)))
        end = now()
        steps.append((end[0] - start[0], end[1] - start[1], m["seconds_sampling"], lengths))
    return steps, loaded


def trl(settings, policy, tokenizer, prompts, truths, job):
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    s, U, cuda = settings, settings.updates_per_rollout, policy.device.type == "cuda"
    if cuda:                                             # float32 weights under bfloat16 autocast: its own default
        policy = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32)
    rollouts, starts, ends = [], [], []                  # (seconds, lengths) a rollout, clocks an optimizer step

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            start = now()
            out = super()._generate(prompts)
            rollouts.append((now()[0] - start[0], list(map(len, out[1]))))
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            starts.append(now())

        def on_step_end(self, *args, **kwargs):
            ends.append(now())

    args = GRPOConfig(
        output_dir=job["output"], per_device_train_batch_size=job["rows"], num_generations=s.group_size,
        gradient_accumulation_steps=s.prompts_per_step * s.group_size // job["rows"], num_iterations=U,
        max_completion_length=s.max_new_tokens, temperature=s.temperature, top_k=0, top_p=1.0, beta=s.kl_coef,
        epsilon=s.clip_eps, loss_type="grpo", max_steps=U * (1 + job["repeat"]), learning_rate=s.lr,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=s.max_grad_norm, optim="adamw_torch_fused",
        use_vllm=False, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=False, shuffle_dataset=False,
        dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
    trainer = Timed(policy, reward, args, processing_class=tokenizer, callbacks=[Clock()],
                    train_dataset=Dataset.from_list([{"prompt": p, "answer": t} for p, t in zip(prompts, truths)]))
    loaded = memory_loaded(trainer.model, trainer.ref_model)
    trainer.train()
    return [(end[0] - start[0], end[1] - start[1], *rollout)
            for start, end, rollout in zip(starts[::U], ends[U - 1::U], rollouts)], loaded


def head_alone(job):
    """Log-probs of 8 x 512 tokens, V 151,936, hidden 256, forward and backward, and all that a process holds."""
    hidden, weight = torch.randn(8 * 512, 256, requires_grad=True), torch.randn(151936, 256, requires_grad=True)
    targets, start = torch.randint(len(weight), (len(hidden),)), now()     # logits of std 16, at temperature 16
    if job["side"] == "lean head":
        logprobs, _ = LeanHead.apply(hidden, weight, targets, 16.0, False)
    else:
        logprobs = selected_logprobs(hidden @ weight.T, targets, 16.0)
    logprobs.sum().backward()
    end = now()
    return {"seconds": [end[0] - start[0]], "cpu": [end[1] - start[1]], "peak": [peak_memory()]}


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


@torch.no_grad()
def memory_loaded(*loaded):
    """What is held now. Weights that are mapped from a file are read first: else they would count as new."""
    for model in loaded:
        model(torch.tensor([[PAD, END]], device=model.device))   # and what is imported at first use
        sum(float(p.sum()) for p in model.parameters())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")            # Linux: forget the peak so far
    return peak_memory()


def peak_memory():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    if os.path.exists("/proc/self/status"):                      # there, ru_maxrss starts at the parent's
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# ---------------------------------------------------------------------------------------------------------
# A model folder to measure: random weights, a tokenizer of the words w2, w3, ..., prompts, a recipe

def make_folder(size, folder):
    torch.manual_seed(0)
    words = ["<pad>", "<end>"] + [f"w{i}" for i in range(2, size["vocab"])]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[PAD]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token=words[PAD], eos_token=words[END],
                            chat_template="{{ messages[0]['content'] }}").save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=size["vocab"], hidden_size=size["hidden"], num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"], num_key_value_heads=size["kv_heads"], intermediate_size=size["ffn"],
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=END, pad_token_id=PAD))
    set_end_chance(model, size["end_chance"])
    model.save_pretrained(folder)
    questions = torch.randint(2, size["vocab"], (size["prompts"], size["prompt_length"])).tolist()
    lines = [{"question": " ".join(words[i] for i in ids), "answer": "#### 0"} for ids in questions]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.json").write_text(json.dumps({
        "data": "train.jsonl", "eval-data": "train.jsonl", "system-prompt": "", "group-size": size["group_size"],
        "prompts-per-step": size["prompts"], "max-new-tokens": size["new_tokens"]}))


@torch.no_grad()
def set_end_chance(model, chance):
    """Make the end token about as likely after any text: feature 0 is a constant that the head alone reads."""
    head = model.get_output_embeddings().weight          # (V, H), the embeddings too
    head[:, 0], head[END] = 1, 0
    for layer in model.model.layers:
        layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    hidden = model.model(torch.randint(2, len(head), (1, 256))).last_hidden_state[0, 100:]
    others = (hidden @ head[2:].T).logsumexp(dim=1).mean()
    head[END, 0] = (others + math.log(chance / (1 - chance))) / hidden[:, 0].mean()


# ---------------------------------------------------------------------------------------------------------
# Many processes, taking turns

def run(folder, side, repeat, rows=0, flags=()):
    with tempfile.TemporaryDirectory() as output:
        job = dict(folder=str(folder), side=side, repeat=repeat, rows=rows, flags=flags, output=output)
        done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)], text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print("    {} {} {:3} rows  {:.2f} s a step, CPU {:.2f}, {:.0f} MB, load {:.1f}".format(
        folder.name, side, rows or "all", middle([result], "seconds"), middle([result], "cpu"), result["peak"][0],
        os.getloadavg()[0]), file=sys.stderr, flush=True)
    return result


def compare(name, folder, repeat, pairs, micro_batches):
    """Ours and TRL's at its best micro-batch, and our default, in turns; without TRL our default alone."""
    settings, _ = train.parse([f"--model={folder}"])
    if not importlib.util.find_spec("trl"):
        return print_figures(name, {"ours, default": [run(folder, "ours", repeat) for _ in range(pairs)]})
    N = settings.prompts_per_step * settings.group_size
    rows = [n for n in micro_batches if N % n == 0] or [N]
    if len(rows) > 1:                                    # the clock of a busy CPU would choose by chance
        key = "seconds" if torch.cuda.is_available() else "cpu"
        rows.sort(key=lambda n: middle([run(folder, "trl", max(repeat // 3, 1), n)], key))
    tokenizer, prompts, _ = read_prompts(settings)
    tokens = rows[0] * (max(map(len, tokenizer(prompts).input_ids)) + settings.max_new_tokens)
    same = [f"--micro-batch-tokens={tokens}", "--no-gradient-checkpointing"]
    turns = [(run(folder, "ours", repeat, rows[0], same), run(folder, "trl", repeat, rows[0]),
              run(folder, "ours", repeat)) for _ in range(pairs)]
    sides = dict(zip((f"ours, {rows[0]} rows", f"TRL, {rows[0]} rows", "ours, default"), zip(*turns)))
    print_figures(name, sides)
    print_ratios(name, *sides.values())


def middle(results, key):
    return median(value for result in results for value in result[key])


def ratios(above, below, key):
    """One run over its neighbour: median (lowest-highest)."""
    values = [median(a[key]) / median(b[key]) for a, b in zip(above, below)]
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def print_figures(name, sides):
    keys = ("sampling_rate", "update_rate", "length", "peak", "sampling", "update", "cpu", "seconds")
    print("\n| | sampling tokens/s | update tokens/s | mean length | peak MB | sampling s | update s | CPU s "
          "| **s a step** |\n|" + " --- |" * 9)
    for side, results in sides.items():
        print("| {} {} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.2f} | {:.2f} | {:.2f} | **{:.2f}** |".format(
            name, side, *(middle(results, key) for key in keys)), flush=True)
    for side, results in sides.items():
        print("\n{} {}: rollout at {:.0%} of the memory's {:.1f} GB/s, update at {:.0%} of a matrix product's {:.3f} "
              "TFLOP/s".format(name, side, middle(results, "of_bandwidth"), middle(results, "bandwidth") / 1e9,
                      middle(results, "of_matrix_rate"), middle(results, "matrix_rate") / 1e12))


def print_ratios(name, same, theirs, default):
    print("\n| TRL's over ours | **a step** | sampling | update | CPU seconds | **peak MB, ours over TRL's** |\n|"
          + " --- |" * 6)
    for side, results in (("same micro-batch", same), ("our default", default)):
        times = (ratios(theirs, results, key) for key in ("seconds", "sampling", "update", "cpu"))
        print("| {} {} | **{}** | {} | {} | {} | **{}** |".format(
            name, side, *times, ratios(results, theirs, "peak")), flush=True)


def against(name, folder, repeat, pairs, flags):
    """Ours with these flags and without, in turns."""
    sides = list(zip(*[(run(folder, "ours", repeat, flags=flags), run(folder, "ours", repeat)) for _ in range(pairs)]))
    print(f"\n| {' '.join(flags)}, over the default | a step | sampling | update | CPU seconds | peak MB |\n|"
          + " --- |" * 6)
    print(f"| {name} | " + " | ".join(ratios(*sides, key) for key in ("seconds", "sampling", "update", "cpu", "peak"))
          + " |", flush=True)


def head(pairs):
    turns = [(run(Path("8 x 512 tokens"), "full logits", 1), run(Path("8 x 512 tokens"), "lean head", 1))
             for _ in range(pairs)]
    print("\n| 8 x 512 tokens, V 151,936, hidden 256 | forward + backward, s | CPU s | peak MB, the whole process |\n|"
          + " --- |" * 4)
    for side, results in zip(("full logits", "lean head"), zip(*turns)):
        print("| {} | {:.1f} | {:.1f} | {:.0f} |".format(
            side, *(middle(results, key) for key in ("seconds", "cpu", "peak"))))
    print(f"| full logits over lean head | {ratios(*zip(*turns), 'seconds')} | {ratios(*zip(*turns), 'cpu')} | "
          f"{ratios(*zip(*turns), 'peak')} |")


def scaling(folder, size, repeat, pairs):
    """Ours alone: what twice as much costs, and what a vocabulary costs the update in memory."""
    make_folder(size | dict(prompts=2 * size["prompts"]), folder / "twice")
    once = [f"--prompts-per-step={size['prompts']}"]
    print("\n| twice the | seconds a step | CPU seconds |\n| --- | --- | --- |")
    for flag, n in (("group-size", "group_size"), ("max-new-tokens", "new_tokens"), ("prompts-per-step", "prompts")):
        turns = [(run(folder / "twice", "ours", repeat, flags=[*once, f"--{flag}={2 * size[n]}"]),
                  run(folder / "twice", "ours", repeat, flags=once)) for _ in range(pairs)]
        print(f"| {flag} | {ratios(*zip(*turns), 'seconds')} | {ratios(*zip(*turns), 'cpu')} |", flush=True)
    print("\n| vocabulary | peak MB of an update | of them gradients |\n| --- | --- | --- |")
    for vocab in (4000, 151936):
        make_folder(size | dict(vocab=vocab), folder / str(vocab))
        weights = (folder / str(vocab) / "model.safetensors").stat().st_size
        print(f"| {vocab} | {run(folder / str(vocab), 'update', 1)['peak'][0]:.0f} | {weights / 1e6:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="of " + ", ".join(PRESETS))
    for name, value in SMALL.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), help="instead of the preset's")
    parser.add_argument("--repeat", type=int, default=3, help="measured steps a process (tiny: ten times as many)")
    parser.add_argument("--pairs", type=int, default=3, help="turns of ours and TRL's")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16, 64, 128], help="rows, for TRL")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scaling", action="store_true", help="measure how ours grows instead")
    parser.add_argument("--against", metavar="FLAGS", help="measure ours with these flags, against the default")
    parser.add_argument("--head", action="store_true", help="measure [D]'s head alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.presets) - set(PRESETS):
        parser.error(f"no preset {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    try:
        train.checked((args.against or "").split())
    except train.BadInput as error:
        parser.error(f"--against: {error}")
    if args.child:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        job = json.loads(args.child)
        return print(json.dumps((head_alone if job["side"] in ("lean head", "full logits") else measure)(job)))
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    has_trl = importlib.util.find_spec("trl")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.threads} threads, torch {torch.__version__}, "
          f"transformers {train.transformers.__version__}, "
          + ("TRL " + importlib.metadata.version("trl") if has_trl else "no TRL here (pip install trl): ours alone"))

    def measured(name, folder, repeat):
        if args.against:
            against(name, folder, repeat, args.pairs, args.against.split())
        else:
            compare(name, folder, repeat, args.pairs, args.micro_batches)

    sizes = {name: getattr(args, name) for name in SMALL if getattr(args, name) is not None}
    with tempfile.TemporaryDirectory() as temporary:
        if args.head:
            return head(args.pairs)
        if args.scaling:
            return scaling(Path(temporary), SMALL | sizes, args.repeat, args.pairs)
        for preset in args.presets or PRESETS:
            if preset == "qwen1.5b" and not torch.cuda.is_available():
                print("\nqwen1.5b needs a GPU, and there is none here: NOT MEASURED")
                continue
            if preset == "tiny":
                measured("tiny", train.TINY, 10 * args.repeat)
                continue
            for size in {row["new_tokens"]: row for row in (row | sizes for row in PRESETS[preset])}.values():
                folder = Path(temporary, f"{preset}-{size['new_tokens']}")
                make_folder(size, folder)
                measured(f"{preset}/{size['new_tokens']}", folder, args.repeat)
        print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
