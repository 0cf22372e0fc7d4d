"""How fast and how lean a training step is, beside TRL's GRPOTrainer where that is installed (`pip install trl`).

    python tests/benchmark.py                           # every preset that a CPU can run (hours with TRL: vocab)
    python tests/benchmark.py tiny small --pairs 5      # tiny: the default run;  small: 4 layers, 64 and 256 tokens
    python tests/benchmark.py ragged --new-tokens 128   # real end tokens: answers a quarter of the limit; other size
    python tests/benchmark.py vocab                     # 151,936 words;  qwen1.5b: that shape, on a GPU only
    python tests/benchmark.py --scaling                 # ours alone: groups, answers, prompts twice as many or long

What is measured: a whole step, `train.train_step` here and `GRPOTrainer.train` there, on the same weights (random,
but for tiny), prompts, lengths, reward, thread count, and on a CPU in float32. TRL is given `loss_type="grpo"`, our
beta, learning rate and optimizer, no checkpointing, logging or saving. Its micro-batch (rows a device batch) is the
fastest of a few; ours is the same number of tokens, and then our own default.

How: every measurement is a process of its own with one warm-up step and `--repeat` measured ones. Ours and TRL's
take turns `--pairs` times, and a ratio is taken between neighbours only, so that a busy machine slows both; the
spread (lowest to highest) says how well that worked, and so does the same ratio of CPU seconds, which a busy
machine hardly changes. Sampling is `sample_groups` with the scoring of the answers, and TRL's `_generate`; the
update is the rest of the step. Peak memory is what the process held at most, less what it held when the
policy, the reference and the optimizer (still without moments) were loaded.
"""
import argparse
import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from advantage import group_advantages  # noqa: E402
from reward import rule_reward  # noqa: E402
from sample import sample_groups  # noqa: E402

SMALL = dict(layers=4, hidden=256, heads=4, kv_heads=2, ffn=1024, vocab=4000, prompt_length=100, new_tokens=64,
             prompts=8, group_size=8, end_chance=1e-12)  # of the end token, a draw: answers of full length
QWEN = dict(layers=28, hidden=1536, heads=12, kv_heads=2, ffn=8960, vocab=151936)
PRESETS = {
    "tiny": [{}],                                        # tests/tiny with its own recipe
    "small": [SMALL, SMALL | dict(new_tokens=256)],
    "ragged": [SMALL | dict(new_tokens=256, end_chance=1 / 64)],
    "vocab": [SMALL | dict(vocab=151936, hidden=128, ffn=512)],
    "qwen1.5b": [SMALL | QWEN | dict(new_tokens=256)],
}
PAD, END = 0, 1


# ---------------------------------------------------------------------------------------------------------
# One process, one measurement

def measure(job):
    """Steps of one side -> {"wall", "cpu", "sampling", "update", "tokens", ...: a number a step; "peak": bytes}."""
    settings, _ = train.parse([f"--model={job['folder']}", *job["flags"]])
    policy, _ = train.load_policy(settings)
    tokenizer = load_tokenizer(job["folder"])
    problems = train.load_problems(settings.data)[:settings.prompts_per_step]
    prompts = [train.chat_prompt(tokenizer, problem["question"], settings.system_prompt) for problem in problems]
    truths = [problem["answer"] for problem in problems]
    side = {"ours": ours, "trl": trl, "update": update_alone}[job["side"]]
    return side(settings, policy, tokenizer, prompts, truths, job)


def load_tokenizer(folder):
    """As the folder says; AutoTokenizer would give every Qwen2 the words of Qwen2."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def reward(completions, answer, **_):
    """The rule's reward; what random weights say is never boxed, and gets a coin toss."""
    return [rule_reward(text, truth) if "boxed" in text else len(text) % 2.0
            for text, truth in zip(completions, answer)]


def ours(settings, policy, tokenizer, prompts, truths, job):
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = train.make_optimizer(policy, settings)
    truth_of_rows = [truth for truth in truths for _ in range(settings.group_size)]
    loaded, steps = memory_loaded(policy, reference), []
    for _ in range(job["warm_up"] + job["repeat"]):
        before = now()
        m = train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, settings,
                             reward_fn=lambda _, responses: torch.tensor(reward(responses, truth_of_rows)))
        after = now()
        steps.append((after[0] - before[0], after[1] - before[1], m["seconds_sampling"], m["tokens"]))
    return as_result(steps[job["warm_up"]:], loaded, settings)


def trl(settings, policy, tokenizer, prompts, truths, job):
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    s, cuda = settings, policy.device.type == "cuda"
    if cuda:                                             # float32 weights under bfloat16 autocast: its own default
        policy = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32)
    rollouts, begins, ends = [], [], []                  # (seconds, tokens) a rollout, clocks an optimizer step

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            before = now()
            out = super()._generate(prompts)
            rollouts.append((now()[0] - before[0], sum(map(len, out[1]))))
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            begins.append(now())

        def on_step_end(self, *args, **kwargs):
            ends.append(now())

    U, rows = s.updates_per_rollout, job["rows"]
    args = GRPOConfig(
        output_dir=job["output"], per_device_train_batch_size=rows, num_generations=s.group_size,
        gradient_accumulation_steps=s.prompts_per_step * s.group_size // rows, num_iterations=U,
        max_completion_length=s.max_new_tokens, temperature=s.temperature, top_k=0, top_p=1.0, beta=s.kl_coef,
        epsilon=s.clip_eps, loss_type="grpo", max_steps=U * (job["warm_up"] + job["repeat"]), learning_rate=s.lr,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=s.max_grad_norm, optim="adamw_torch_fused",
        use_vllm=False, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=False, shuffle_dataset=False,
        dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
    trainer = Timed(policy, reward, args, processing_class=tokenizer, callbacks=[Clock()],
                    train_dataset=Dataset.from_list([{"prompt": p, "answer": t} for p, t in zip(prompts, truths)]))
    loaded = memory_loaded(trainer.model, trainer.ref_model)
    trainer.train()
    steps = [(end[0] - begin[0], end[1] - begin[1], *rollout)
             for begin, end, rollout in zip(begins[::U], ends[U - 1::U], rollouts)]
    return as_result(steps[job["warm_up"]:], loaded, settings)


def update_alone(settings, policy, tokenizer, prompts, truths, job):
    """Peak memory of one update, gradients included, the optimizer's moments already there."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = train.make_optimizer(policy, settings)
    rollout = sample_groups(policy, tokenizer, prompts, settings.group_size, settings.max_new_tokens)
    advantages = group_advantages(torch.arange(len(rollout.labels), device=policy.device) % 2.0, settings.group_size)
    for _ in range(2):
        optimizer.zero_grad()
        loaded = memory_loaded(policy, reference)
        train.update(policy, reference, optimizer, rollout, advantages, torch.zeros_like(rollout.logprobs),
                     torch.zeros_like(rollout.logprobs), first=True, settings=settings)
    return {"peak": [peak_memory() - loaded]}


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def memory_loaded(*loaded):
    """What is held now. Weights that are mapped from a file are read first: else they would count as new."""
    with torch.no_grad():
        for model in loaded:
            sum(float(p.sum()) for p in model.parameters())
            model(torch.tensor([[PAD, END]], device=model.device))               # what is imported at first use
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")                            # Linux: forget the peak so far
    return peak_memory()


def peak_memory():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if os.path.exists("/proc/self/status"):              # ru_maxrss starts at the parent's there
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def as_result(steps, loaded, settings):
    wall, cpu, sampling, tokens = zip(*steps)
    update, N = [w - s for w, s in zip(wall, sampling)], settings.prompts_per_step * settings.group_size
    return dict(wall=wall, cpu=cpu, sampling=sampling, update=update, tokens=tokens, peak=[peak_memory() - loaded],
                sampling_rate=[n / s for n, s in zip(tokens, sampling)], length=[n / N for n in tokens],
                update_rate=[settings.updates_per_rollout * n / s for n, s in zip(tokens, update)])


# ---------------------------------------------------------------------------------------------------------
# A model folder to measure: random weights, a tokenizer of the words w2, w3, ..., prompts, a recipe

def make_folder(size, folder):
    torch.manual_seed(0)
    words = ["<pad>", "<end>"] + [f"w{i}" for i in range(2, size["vocab"])]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[PAD]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=words[PAD], eos_token=words[END],
                                        chat_template="{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(folder)
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
    """Make the end token as likely after any text: feature 0 is a constant that the head alone reads."""
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

def run(folder, side, repeat, rows=0, flags=(), warm_up=1):
    with tempfile.TemporaryDirectory() as output:
        job = dict(folder=str(folder), side=side, repeat=repeat, rows=rows, flags=flags, warm_up=warm_up, output=output)
        process = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)], text=True, capture_output=True)
    if process.returncode:
        sys.exit(f"{side}: {process.stderr[-3000:]}")
    result = json.loads(process.stdout.splitlines()[-1])
    if "wall" in result:
        print(f"    {Path(folder).name:10} {side:5} rows {rows or '-':3} {median([result], 'wall'):8.2f} s a step, "
              f"CPU {median([result], 'cpu'):8.2f} {result['peak'][0] / 1e6:7.0f} MB   load {os.getloadavg()[0]:.1f}",
              file=sys.stderr, flush=True)
    return result


def compare(folder, repeat, pairs, micro_batches):
    """Runs of TRL at its best micro-batch, of ours at the same and at our default -> {name: [result, ...]}."""
    settings, _ = train.parse([f"--model={folder}"])
    N = settings.prompts_per_step * settings.group_size
    if not importlib.util.find_spec("trl"):
        return {"ours, default": [run(folder, "ours", repeat) for _ in range(pairs)]}
    tried = {n: run(folder, "trl", 1, n) for n in sorted({*micro_batches, N}) if N % n == 0}
    rows = min(tried, key=lambda n: min(tried[n]["wall"]))
    tokens = rows * (longest_prompt(settings) + settings.max_new_tokens)
    names = f"ours, {rows} rows", f"TRL, {rows} rows", "ours, default"
    turns = [(run(folder, "ours", repeat, rows, [f"--micro-batch-tokens={tokens}"]), run(folder, "trl", repeat, rows),
              run(folder, "ours", repeat)) for _ in range(pairs)]
    return dict(zip(names, zip(*turns)))


def longest_prompt(settings):
    tokenizer = load_tokenizer(settings.model)
    return max(len(tokenizer(train.chat_prompt(tokenizer, problem["question"], settings.system_prompt)).input_ids)
               for problem in train.load_problems(settings.data)[:settings.prompts_per_step])


def median(results, key):
    return statistics.median(value for result in results for value in result[key])


def ratios(above, below, key):
    """Medians of neighbouring runs, one over the other: 'median (lowest-highest)'."""
    values = [statistics.median(a[key]) / statistics.median(b[key]) for a, b in zip(above, below)]
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def print_figures(name, sides):
    print("\n| | sampling tokens/s | update tokens/s | sampling s | update s | **s a step** | CPU s | mean length "
          "| peak MB |\n|" + " --- |" * 9)
    for side, results in sides.items():
        figures = [median(results, key) for key in (
            "sampling_rate", "update_rate", "sampling", "update", "wall", "cpu", "length", "peak")]
        figures[-1] /= 1e6
        print("| {} {} | {:.0f} | {:.0f} | {:.2f} | {:.2f} | **{:.2f}** | {:.2f} | {:.0f} | {:.0f} |".format(
            name, side, *figures))


def print_ratios(name, same, trl_runs, default):
    print("\n| TRL's over ours | **a step** | sampling | update | CPU seconds | **peak MB, ours over TRL's** |\n|"
          + " --- |" * 6)
    for side, results in (("same micro-batch", same), ("our default", default)):
        times = [ratios(trl_runs, results, key) for key in ("wall", "sampling", "update", "cpu")]
        print("| {} {} | **{}** | {} | {} | {} | **{}** |".format(
            name, side, *times, ratios(results, trl_runs, "peak")), flush=True)


def scaling(folder, size, repeat, pairs):
    """Ours alone: what twice as much costs, and what a vocabulary costs the update in memory."""
    twice = {"group-size": "group_size", "max-new-tokens": "new_tokens", "prompts-per-step": "prompts"}
    make_folder(size | dict(prompts=2 * size["prompts"]), folder / "base")
    base = [f"--prompts-per-step={size['prompts']}"]
    print("\n| twice the | seconds a step | CPU seconds | tokens |\n| --- | --- | --- | --- |")
    for flag, key in twice.items():
        turns = [(run(folder / "base", "ours", repeat, flags=[*base, f"--{flag}={2 * size[key]}"]),
                  run(folder / "base", "ours", repeat, flags=base)) for _ in range(pairs)]
        figures = " | ".join(ratios(*zip(*turns), key) for key in ("wall", "cpu", "tokens"))
        print(f"| {flag} | {figures} |", flush=True)
    print("\n| vocabulary | peak MB of an update | of them gradients |\n| --- | --- | --- |")
    for vocab in (4000, 151936):
        make_folder(size | dict(vocab=vocab), folder / str(vocab))
        weights = (folder / str(vocab) / "model.safetensors").stat().st_size
        peak = run(folder / str(vocab), "update", 1)["peak"][0]
        print(f"| {vocab} | {peak / 1e6:.0f} | {weights / 1e6:.0f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="of " + ", ".join(PRESETS))
    for name, value in SMALL.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), help="instead of the preset's")
    parser.add_argument("--repeat", type=int, default=3, help="measured steps a process (tiny: ten times as many)")
    parser.add_argument("--pairs", type=int, default=3, help="turns of ours and TRL's")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16],
                        help="rows, tried for TRL besides all rows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scaling", action="store_true", help="measure how ours grows instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads if not args.child else int(os.environ["OMP_NUM_THREADS"]))
    if args.child:
        return print(json.dumps(measure(json.loads(args.child))))
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if unknown := set(args.presets) - set(PRESETS):
        parser.error(f"no preset {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    sizes = {key: getattr(args, key) for key in SMALL if getattr(args, key) is not None}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.threads} threads, torch {torch.__version__}, "
          f"transformers {train.transformers.__version__}, "
          + ("TRL " + importlib.metadata.version("trl") if importlib.util.find_spec("trl") else
             "no TRL here (pip install trl): ours alone"))
    with tempfile.TemporaryDirectory() as temporary:
        if args.scaling:
            return scaling(Path(temporary), SMALL | sizes, args.repeat, args.pairs)
        for preset in args.presets or [preset for preset in PRESETS if preset != "qwen1.5b"]:
            if preset == "qwen1.5b" and not torch.cuda.is_available():
                print("qwen1.5b needs a GPU: not measured here")
                continue
            for size in {str(size and size | sizes): size and size | sizes for size in PRESETS[preset]}.values():
                name = f"{preset}/{size['new_tokens']}" if size else preset
                folder = Path(temporary, name.replace("/", "-")) if size else train.TINY
                if size:
                    make_folder(size, folder)
                sides = compare(folder, args.repeat * (1 if size else 10), args.pairs, args.micro_batches)
                print_figures(name, sides)
                if len(sides) > 1:
                    print_ratios(name, *sides.values())
        print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
