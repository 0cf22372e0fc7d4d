"""The first minutes with a GPU: does it compute what it should, and how near is it to its floor?

    python tests/tools/benchmark.py --first-run

Nothing to install beside requirements.txt, nothing to download: all weights are random, and made
on the device. What each part does stands in its docstring. A line that starts with `pass` or `FAIL`
was checked; the others are figures. A part that fails or runs out of memory is one FAIL line, with
the flag that avoids what it tried, and the next part begins, unless the device does not answer any
more. Everything is written to first_run.txt, too. Exit status 0 if all checks passed, else 1.

A floor is what no program can do without, at the rates that this machine showed a moment before:
every weight, key and value read once per token; every matrix product once, without padding and
without anything computed again. Aims, not checks, and estimated from counts: decoding at 45% of its
floor's bandwidth, the update at 40% of the matrix rate, about 520 kernels per token (17 per layer,
of which attention launches about 5, and 46 beside them), and on an H200 a step under 3 s.

On a CPU the same parts run at a small size, which the test suite does: it shows that they run.
"""

import contextlib
import copy
import dataclasses
import gc
import io
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from unittest.mock import patch

import torch
from benchmark import (
    QWEN,
    SMALL,
    best_time,
    ceilings,
    coin_toss,
    config_of,
    forward_flops,
    now,
    random_model,
    random_questions,
    rollout_bytes,
    word_tokenizer,
)
from torch.profiler import ProfilerActivity, profile

import logprob
import sample
import train
from logprob import plain_logprobs, token_logprobs

SECONDS = 7 * 60  # no new part begins after these
TINY = SMALL | {
    "layers": 2, "hidden": 64, "ffn": 128, "prompt_length": 16, "new_tokens": 12, "prompts": 4,
    "group_size": 4,
}
# The count of the memory assumes prompts of this length.
FULL = QWEN | {"prompt_length": train.PROMPT}
# What the checks are made on: two layers, heads that share keys, enough words for the fast draw.
CHECKED = SMALL | {
    "layers": 2, "hidden": 128, "ffn": 256, "vocab": 1500, "prompt_length": 40, "new_tokens": 40,
    "prompts": 4, "group_size": 4,
}


@dataclasses.dataclass
class Place:
    """Where everything runs, at what size, and what this machine does at best."""

    device: torch.device
    dtype: torch.dtype              # of the weights that compute, as train.py chooses it
    half: torch.dtype               # bfloat16 where the device has it
    size: dict
    free: int | None = None         # bytes, before anything is loaded; None on a CPU
    matrix_rate: float = math.nan   # FLOP/s in `dtype`
    bandwidth: float = math.nan     # bytes/s, read and written
    link: float = math.nan          # bytes/s between host and device

    @property
    def cuda(self):
        return self.device.type == "cuda"


def main():
    # Some images let float32 products round to TF32. Here they are what others are held against.
    torch.set_float32_matmul_precision("highest")
    train.transformers.utils.logging.disable_progress_bar()
    train.transformers.utils.logging.set_verbosity_error()
    device, dtype = train.choose_device(train.Settings())
    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)  # the small sizes gain nothing from more
    place = Place(device, dtype, dtype if cuda else torch.bfloat16, FULL if cuda else TINY)
    lines = Lines("first_run.txt")
    lines.of("this machine", versions, place)
    lines.of("what it does at best", rates, place)
    lines.of("attention kernels", attention_kernels, place, avoid="--plain")
    for dtype in dict.fromkeys((torch.float32, place.half)):
        lines.of(f"drawing, {dtype}", drawing, place, dtype, avoid="--plain")
        lines.of(f"gradients, {dtype}", gradients, place, dtype, avoid="--plain")
    lines.of("three updates", updates, place, avoid="--no-offload --no-gradient-checkpointing")
    lines.of("the program and its resume", program, avoid="--plain, or --device cpu")
    lines.of("decoding", decoding, place, avoid="--plain")
    for words, avoid, changes in WAYS:
        dtype = getattr(torch, changes.get("dtype", ""), place.dtype)
        there = dataclasses.replace(place, dtype=dtype)
        lines.of(f"two steps, {words}", whole_steps, there, avoid=avoid, **changes)
    lines.of("kernels per token", kernels, place)
    return lines.close(place)


# Two steps are measured in each of these ways; a card of 16 GB has room for the last two.
WAYS = [
    ("no offload, no checkpointing", "--gradient-checkpointing",
     dict(offload=False, gradient_checkpointing=False)),
    ("no offload, checkpointing", "--offload", dict(offload=False, gradient_checkpointing=True)),
    ("offload, checkpointing", "--lora-rank 16 --no-offload",
     dict(offload=True, gradient_checkpointing=True)),
    ("LoRA, checkpointing", "--lora-rank 0",
     dict(offload=False, gradient_checkpointing=True, lora_rank=16)),
    ("LoRA in float16, checkpointing", "--dtype bfloat16 or float32",
     dict(offload=False, gradient_checkpointing=True, lora_rank=16, dtype="float16")),
]


class Lines:
    """Prints what the parts find, as they find it, also into a file; remembers what failed."""

    def __init__(self, path=os.devnull):
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self.dead = False
        self.start = time.perf_counter()
        self.passed = 0
        self.failed = []

    def say(self, line):
        print(line, flush=True)
        print(line, file=self.file, flush=True)

    def of(self, title, part, *args, avoid="", **changes):
        """`part(*args)` yields pairs (True, False or None for a mere figure, one line).

        `avoid` are the flags of train.py that do without what the part tries.
        """
        if self.dead:
            return
        seconds = time.perf_counter() - self.start
        self.say(f"\n{title}   [{seconds:.0f} s]")
        if seconds > SECONDS:
            self.print(title, False, f"left out: {SECONDS} s are over")
            return
        fault = None
        sample.PLAIN = logprob.PLAIN = None  # what an earlier part has given up
        before = len(self.failed)
        try:
            for verdict, words in part(*args, **changes):
                self.print(title, verdict, words)
        except Exception as error:
            fault = f"{type(error).__name__}: {train.one_line(error)}"
            if train.out_of_memory(error):
                fault = f"out of memory ({train.one_line(error)[:120]})"
        # Outside of `except`, for there the error still holds the tensors.
        for words in filter(None, (fault, sample.PLAIN, logprob.PLAIN)):
            self.print(title, False, words)
        if avoid and len(self.failed) > before:
            self.failed[-1] += f"; it is avoided by {avoid}"
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            forget()
        except RuntimeError as error:  # no later call can work
            self.dead = True
            self.print(title, False, f"the device does not answer ({train.one_line(error)[:80]}): "
                       f"this ends here. The first fault was in: {self.failed[0][:80]}. Again with "
                       "CUDA_LAUNCH_BLOCKING=1 the fault is reported where it happens")

    def print(self, title, verdict, words):
        mark = {True: "pass", False: "FAIL", None: "    "}[verdict]
        self.say(f"  {mark}  {words}")
        self.passed += verdict is True
        if verdict is False:
            self.failed.append(f"{title}: {words}")

    def close(self, place):
        """The last lines -> exit status."""
        self.say(f"\n{self.passed} checks passed, {len(self.failed)} failed, "
                 f"{time.perf_counter() - self.start:.0f} s")
        for line in self.failed:
            self.say(f"  FAIL  {line}")
        if not place.cuda:
            self.say(NO_GPU)
        self.file.close()
        return 1 if self.failed else 0


NO_GPU = "There is no CUDA GPU here: NOTHING WAS MEASURED ON A GPU."


def forget():
    """Give back what the last part held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------
# The machine, and its ceilings


def versions(place):
    """What runs here, and on what."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield None, (f"Python {platform.python_version()}, torch {torch.__version__}, "
                 f"transformers {train.transformers.__version__}, {platform.machine()}, "
                 f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {host:.0f} GB")
    if not place.cuda:
        yield None, NO_GPU
        return
    card = torch.cuda.get_device_properties(place.device)
    place.free, total = torch.cuda.mem_get_info(place.device)
    yield None, (f"{card.name}, compute capability {card.major}.{card.minor}, "
                 f"{card.multi_processor_count} multiprocessors, {place.free / 1e9:.1f} of "
                 f"{total / 1e9:.1f} GB free")
    yield None, (f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, weights in "
                 f"{place.dtype}, built for {' '.join(torch.cuda.get_arch_list())}")
    with contextlib.suppress(OSError):  # AMD's cards have none
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        yield None, f"driver {subprocess.run(asked, capture_output=True, text=True).stdout.strip()}"


def rates(place):
    """A large matrix product, a large copy on the device, and copies to and from pinned memory."""
    place.matrix_rate, place.bandwidth = ceilings(place.device, place.dtype)
    n = 2**28 if place.cuda else 2**22
    there = torch.zeros(n, device=place.device)
    here = torch.zeros(n, pin_memory=place.cuda)
    down = there.nbytes / best_time(lambda: here.copy_(there, non_blocking=True), times=1)
    up = there.nbytes / best_time(lambda: there.copy_(here, non_blocking=True), times=1)
    place.link = min(down, up)
    yield None, f"matrix product in {place.dtype}: {place.matrix_rate / 1e12:.3g} TFLOP/s"
    yield None, f"copy on the device: {place.bandwidth / 1e9:.4g} GB/s, read and written"
    yield None, f"device to host {down / 1e9:.3g} GB/s, host to device {up / 1e9:.3g} GB/s"


# --------------------------------------------------------------------------------------------------
# Is it right? A small random model, every weight large enough to matter


def small_policy(place, dtype, **changes):
    model = random_model(CHECKED | changes, place.device, torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    # One draw in twenty ends an answer: rows of many lengths.
    model.generation_config.eos_token_id = list(range(1, CHECKED["vocab"], 20))
    return model.to(dtype)


def small_rollout(model, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return sample.sample_groups(model, word_tokenizer(CHECKED["vocab"]), ragged_questions(),
                                CHECKED["group_size"], CHECKED["new_tokens"], 1.0, chance)


def ragged_questions():
    """Prompts of different lengths."""
    questions = random_questions(CHECKED)
    return [" ".join(text.split()[:len(text.split()) - 7 * i]) for i, text in enumerate(questions)]


def attention_kernels(place):
    """Which of torch's attention operations every shape takes, on a GPU with the heads of
    Qwen2.5-1.5B. There none may be cuDNN's: it plans anew for every shape, and has been wrong
    with masks.
    """
    heads = {}
    if place.cuda:
        heads = {name: FULL[name] for name in ("hidden", "heads", "kv_heads")}
    for dtype in dict.fromkeys((place.half, torch.float32)):
        for shape, names in attention_of_shapes(place, small_policy(place, dtype, **heads)):
            right = bool(names) and not (place.cuda and any("cudnn" in name for name in names))
            yield right, f"{dtype}, {shape}: {', '.join(names) or 'none seen'}"


def attention_of_shapes(place, model):
    prompts = prompt_ids()
    ends = sample.end_token_ids(model, None)
    chance = chance_of(place, len(prompts), 2, 4)
    rollout = small_rollout(model)  # the model's fast forms are tried here, once
    rows = rollout.input_ids, rollout.labels
    groups = rollout.group_ids
    logprob.forms_of(model)
    sample.release(model)  # or a graph would be replayed, of which no operation is seen
    yield "prefill", attention_in(sample.prefill, model, prompts)
    yield "prefill and decoding", attention_in(
        sample.write_answers, model, prompts, chance, 1.0, ends)
    yield "padded rows", attention_in(backward_through, model, *rows)
    yield "grouped rows", attention_in(backward_through, model, *rows, group_ids=groups)


def attention_in(work, *args, **kwargs):
    """The names of the attention operations that `work()` runs."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work(*args, **kwargs)
    names = {event.name.split("::")[-1].lstrip("_") for event in seen.events()
             if event.name.startswith(("aten::_", "torch_attn::"))}
    return sorted(name for name in names if "attention" in name or "varlen" in name)


def backward_through(*args, **kwargs):
    token_logprobs(*args, **kwargs).sum().backward()


def prompt_ids():
    tokenizer = word_tokenizer(CHECKED["vocab"])
    return [tokenizer(text).input_ids for text in ragged_questions()]


def chance_of(place, B, group_size, T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sample.uniform_numbers(generator, B, group_size, T, place.device)


@torch.no_grad()
def drawing(place, dtype):
    """[A] The decode step of our own, on a GPU in graphs, against the plain loop.

    In float32 the same chance draws the same ids. Rounded to bfloat16 two right programs part ways
    somewhere; there the log-probs are held against the definition. The second round finds weights
    that have been moved in place, as an optimizer does, and the graphs of the first round.
    """
    model = small_policy(place, dtype)
    for form, used in sample.forms_of(model).items():
        yield used, f"{form}: {'taken' if used else sample.REFUSED[model][form]}"
    prompts = prompt_ids()
    ends = sample.end_token_ids(model, None)
    what = "graphs" if place.cuda else "own decode step"
    for when in ("first rollout", "weights have moved"):
        if dtype == torch.float32:
            chance = chance_of(place, len(prompts), CHECKED["group_size"], CHECKED["new_tokens"])
            plain = sample.decode(model, prompts, chance, 1.0, ends, sample.PlainStep)
            plain = [ids for ids, _ in sample.cut_at_end(*plain, ends)]
            fast = [ids for ids, _ in sample.write_answers(model, prompts, chance, 1.0, ends)]
            same = sum(a == b for a, b in zip(plain, fast))
            yield same == len(plain), (f"{what} against the plain loop, {when}: same ids in {same} "
                                       f"of {len(plain)} rows of {min(map(len, plain))} to "
                                       f"{max(map(len, plain))} tokens")
        rollout = small_rollout(model)
        exact = plain_logprobs(model, rollout.input_ids, rollout.labels)
        error = (rollout.logprobs - exact)[exact != 0].abs().mean()
        allowed = 1e-4 if dtype == torch.float32 else 0.05
        yield bool(error <= allowed), (f"{what} against the definition, {when}: log-probs "
                                       f"{error:.1e} nats apart, {allowed:g} allowed")
        for weight in model.parameters():
            weight.mul_(1.05)
    sample.release(model)


def gradients(place, dtype):
    """[D] Log-probs by their definition, in padded rows, in grouped rows: the same gradient."""
    model = small_policy(place, dtype)
    for form, used in logprob.forms_of(model).items():
        yield used, f"{form}: {'taken' if used else logprob.REFUSED[model][form]}"
    rollout = small_rollout(model)
    rows = rollout.input_ids, rollout.labels
    chance = torch.Generator().manual_seed(0)
    weights = torch.randn(rollout.logprobs.shape, generator=chance).to(place.device)

    def gradient(logprobs_of):
        model.zero_grad()
        (logprobs_of(model, *rows) * weights).sum().backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    definition = gradient(plain_logprobs)
    padded = gradient(token_logprobs)
    grouped = gradient(partial(token_logprobs, group_ids=rollout.group_ids))
    yield alike("padded rows against the definition, gradients", padded, definition, dtype)
    yield alike("grouped against padded rows, gradients", grouped, padded, dtype)


def alike(name, a, b, dtype):
    """a = b but for rounding: a small distance, and no factor between them.

    Rounding points in no direction: it hardly touches the factor (a . b) / (b . b), which therefore
    shows a fault of a hundredth where rounding alone is as large.
    """
    distance = float((a - b).norm() / b.norm())
    factor = float((a @ b) / (b @ b))
    allowed = 1e-3 if dtype == torch.float32 else 0.1
    good = distance <= allowed and abs(factor - 1) <= allowed / 20
    return good, (f"{name}: relative distance {distance:.1e}, factor {factor:.5f}; "
                  f"{allowed:g} and 1 +- {allowed / 20:g} allowed")


def updates(place):
    """[G] Three updates on the same rollouts, whatever the memory flags: the same first moments,
    which are sums of gradients, and the same float32 masters, of which the weights are copies.
    """
    start = small_policy(place, place.half)
    rollouts = [small_rollout(start, seed) for seed in range(3)]
    for rollout in rollouts:
        rollout.advantages = torch.randn(len(rollout.labels)).to(place.device)
    # Nothing is clipped, for that would hide a factor.
    plain = train.Settings(group_size=CHECKED["group_size"], prompts_per_step=CHECKED["prompts"],
                           max_new_tokens=CHECKED["new_tokens"], kl_coef=0.0, lr=1e-3,
                           max_grad_norm=1e9, micro_batch_tokens=256, offload=False,
                           gradient_checkpointing=False, rounding="nearest")
    moments, moved, stale = three_updates(start, rollouts, plain)
    yield stale == 0, f"no offload, no checkpointing: {stale} weights are not their masters' copies"
    for name in ("offload", "gradient_checkpointing"):
        s = dataclasses.replace(plain, **{name: True})
        its_moments, its_moved, stale = three_updates(start, rollouts, s)
        name = name.replace("_", " ")
        yield stale == 0, f"{name}: {stale} weights are not their masters' copies"
        yield alike(f"{name} against none, first moments", torch.cat(its_moments),
                    torch.cat(moments), place.half)
        a = torch.cat(its_moved)
        b = torch.cat(moved)
        distance = float((a - b).norm() / b.norm())
        # AdamW goes a long way even where a gradient is mere rounding: but it goes.
        ways = [float(a.norm() / b.norm()) for a, b in zip(its_moved, moved)]
        good = distance <= 0.1 and 0.5 <= min(ways) and max(ways) <= 2
        yield good, (f"{name} against none, weights after three updates: {distance:.1e} of their "
                     f"way apart, 0.1 allowed; of each tensor's way {min(ways):.2f} to "
                     f"{max(ways):.2f}, 0.5 to 2 allowed")


def three_updates(start, rollouts, settings):
    """-> first moments and ways moved, a flat tensor per weight; how many weights are stale."""
    model = copy.deepcopy(start)
    optimizer = train.make_optimizer(model, settings)
    masters = optimizer.param_groups[0]["params"]
    before = [master.detach().clone() for master in masters]
    for rollout in rollouts:
        # A rollout remembers its old log-probs: every run has copies of its own.
        train.update(model, optimizer, dataclasses.replace(rollout), settings)
    moments = [optimizer.state[master]["exp_avg"].flatten().cpu() for master in masters]
    moved = [(master.detach() - old).flatten().cpu() for master, old in zip(masters, before)]
    weights = [weight.detach().clone() for weight in model.parameters()]
    if isinstance(optimizer, train.MasterAdamW):
        optimizer.round()  # once more: the same masters give the same weights
    stale = sum(not torch.equal(*pair) for pair in zip(weights, model.parameters()))
    return moments, moved, stale


# --------------------------------------------------------------------------------------------------
# How fast is decoding?


def decoding(place):
    """Milliseconds per token, and seconds per graph, of 8 x 8 rows at the exact shape."""
    size = place.size
    model = random_model(size, place.device, place.dtype)
    P, B, G = size["prompt_length"], size["prompts"], size["group_size"]
    refused = [form for form, used in sample.forms_of(model).items() if not used]
    yield not refused, f"forms refused: {refused or 'none'}"
    short, long = (4, 12) if not place.cuda else (16, 144)
    first = seconds_to_write(place, model, G, long)
    again = seconds_to_write(place, model, G, long)
    token = (again - seconds_to_write(place, model, G, short)) / (long - short)
    seen = P + (short + long) // 2  # keys of a row, halfway
    floor = rollout_bytes(model, seen, [1] * (B * G)) / place.bandwidth
    yield None, (f"{B * G} rows, {1e3 * token:.2f} ms per token; the floor is {1e3 * floor:.2f} "
                 f"ms, {floor / token:.0%} of {place.bandwidth / 1e9:.0f} GB/s")
    yield None, (f"{B * G} rows: the first rollout took {first - again:.2f} s more than the "
                 "second" + ", in which its graphs were there" * place.cuda)
    for g in (G // 2, G // 4):
        first = seconds_to_write(place, model, g, short)
        again = seconds_to_write(place, model, g, short)
        yield None, (f"{B * g} rows: {first - again:.2f} s more"
                     + ", the price of one more graph" * place.cuda)
    sample.release(model)


@torch.no_grad()
def seconds_to_write(place, model, group_size, T):
    """Prefill and T tokens for each row."""
    size = place.size
    prompts = torch.randint(2, size["vocab"], (size["prompts"], size["prompt_length"])).tolist()
    ends = [1]
    chance = chance_of(place, size["prompts"], group_size, T)
    start, _ = now()
    sample.write_answers(model, prompts, chance, 1.0, ends)
    return now()[0] - start


def kernels(place):
    """Kernels per token, and the five that take most of the time, by torch's profiler.

    Last of all, for a profiler may slow down what comes after it. The host looks for ended rows
    every 16 tokens: 16 tokens hold one such look. A layer alone takes more than ten: where fewer
    are seen, the profiler does not look into graphs.
    """
    model = random_model(place.size, place.device, place.dtype)
    short, long = (2, 6) if not place.cuda else (17, 33)
    G = place.size["group_size"]
    seconds_to_write(place, model, G, long)
    few = kernels_in(place, seconds_to_write, place, model, G, short)
    many = kernels_in(place, seconds_to_write, place, model, G, long)
    per_token = (len(many) - len(few)) / (long - short)
    layers = place.size["layers"]
    what = "kernels (aim: about 520)" if place.cuda else "operations of the CPU"
    yield per_token > 10 * layers, f"{per_token:.0f} {what} per token, {layers} layers"
    times = {}
    for event in many:
        times[event.name] = times.get(event.name, 0) + event.time_range.elapsed_us()
    for name in sorted(times, key=times.get, reverse=True)[:5]:
        yield None, f"{times[name] / sum(times.values()):4.0%}  {name[:80]}"
    sample.release(model)


def kernels_in(place, work, *args):
    """What ran on the device while `work(*args)` did: a list of profiler events."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * place.cuda
    with profile(activities=activities) as seen:
        work(*args)
    if place.cuda:
        return [event for event in seen.events()
                if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event for event in seen.events() if not event.cpu_children]


# --------------------------------------------------------------------------------------------------
# How fast and how large is a step?


def program():
    """train.py on the tiny policy: one step, and a second one after a resume."""
    folder = train.TINY
    with tempfile.TemporaryDirectory() as place:
        run = os.path.join(place, "run")
        for flags in ([f"--output={run}", f"--data={folder / 'train.jsonl'}", "--steps=1",
                       f"--config={folder / 'grpo.json'}", "--device=auto", "--eval-limit=8"],
                      [f"--resume={run}", "--steps=2"]):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = train.main(flags)
            last = said.getvalue().strip().splitlines()[-1:]
            yield status == 0, f"train.py {flags[-1]}: exit status {status}" + (
                f", {last[0]}" if status else "")


def whole_steps(place, **changes):
    """Two whole steps with these settings: every phase beside its floor, memory beside its
    count. The first step pays for the graphs and for what is made once.
    """
    size = place.size
    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        asked = train.Settings(
            model=folder, group_size=size["group_size"], prompts_per_step=size["prompts"],
            max_new_tokens=size["new_tokens"], **changes)
        s = train.plan_memory(asked)
        model = train.model_without_storage(s, place.dtype)
    counted = sum(train.memory(s, model).values()) / 1e9
    fits = place.free is None or counted <= 0.9 * place.free / 1e9
    planned = s.micro_batch_tokens
    yield None, (f"{s.prompts_per_step} x {s.group_size} answers of {s.max_new_tokens} tokens, "
                 f"{planned} tokens per micro-batch, counted {counted:.2f} GB")
    try:
        yield from steps(place, s)
    except RuntimeError as error:
        if fits or not train.out_of_memory(error):
            raise
        yield None, "out of memory, as the count says"
        return
    yield s.micro_batch_tokens == planned, (f"micro-batches of {s.micro_batch_tokens} tokens, "
                                            f"{planned} planned")
    if place.cuda:
        peak = torch.cuda.max_memory_allocated() / 1e9
        # The choice of the flags leaves a tenth of the memory free.
        yield peak <= counted / 0.9, (f"peak {peak:.2f} GB, {peak / counted:.0%} of the count; "
                                      f"{torch.cuda.max_memory_reserved() / 1e9:.2f} GB reserved")


def steps(place, settings):
    s = settings
    policy = random_model(place.size, place.device, place.dtype)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = train.make_optimizer(policy, s, reference)
    tokenizer = word_tokenizer(place.size["vocab"])
    questions = random_questions(place.size)
    problems = [{"question": question, "answer": "0"} for question in questions]
    batch = train.Batch(problems, questions, torch.Generator().manual_seed(0))
    if place.cuda:
        torch.cuda.reset_peak_memory_stats()

    def reward_of(problems, prompts, rollout):
        return torch.tensor(coin_toss(rollout.responses, ["0"] * len(rollout.labels)))

    for step in (1, 2):
        with stopwatch(optimizer) as seconds:
            start, _ = now()
            metrics, rollout = train.train_step(policy, reference, optimizer, tokenizer, batch, s,
                                                train.sample_groups, reward_of)
            whole = now()[0] - start
        yield not metrics["skipped_updates"], (f"step {step}: {whole:.2f} s, "
                                               f"{metrics['tokens'] / whole:.0f} tokens/s")
        seconds["forward and backward"] = seconds.pop("update") - seconds["optimizer"]
        seconds["the rest"] = whole - sum(seconds.values())
        for phase, floor, of in floors(place, policy, rollout.mask.sum(dim=1).tolist(), s):
            yield None, (f"  {phase:22} {seconds[phase]:7.3f} s, floor {floor:7.3f} s: "
                         f"{floor / seconds[phase]:4.0%} of {of}")
        yield None, f"  {'the rest':22} {seconds['the rest']:7.3f} s"
        if whole > SECONDS / 7:
            yield False, "too slow for a second step"
            break
    sample.release(policy)


@contextlib.contextmanager
def stopwatch(optimizer):
    """Seconds of the phases of train_step, {phase: seconds}; waits for the device at each."""
    seconds = dict.fromkeys(("sampling", "reference", "update", "optimizer"), 0.0)

    def timed(phase, owner, name):
        function = getattr(owner, name)

        def run(*args, **kwargs):
            start, _ = now()
            result = function(*args, **kwargs)
            seconds[phase] += now()[0] - start
            return result
        return patch.object(owner, name, run)

    with timed("sampling", train, "sample_groups"), \
            timed("reference", train, "fill_in_logprobs"), \
            timed("update", train, "update"), \
            timed("optimizer", optimizer, "step"):
        yield seconds


def floors(place, policy, lengths, settings):
    """(phase, the least seconds that it can take, of which rate)."""
    s = settings
    P = place.size["prompt_length"]
    flops = forward_flops(policy, P, lengths, s)
    n = sum(p.numel() for p in policy.parameters())
    masters = place.dtype != torch.float32
    memory = f"{place.bandwidth / 1e9:.0f} GB/s"
    matrices = f"{place.matrix_rate / 1e12:.3g} TFLOP/s"
    yield "sampling", rollout_bytes(policy, P, lengths) / place.bandwidth, memory + ", aim 45%"
    yield "reference", flops / place.matrix_rate, matrices
    yield "forward and backward", 3 * flops / place.matrix_rate, matrices + ", aim 40%"
    if s.lora_rank:
        # Initial weight read, new weight written
        yield "optimizer", 2 * n * place.dtype.itemsize / place.bandwidth, memory
    elif masters and s.offload:
        # A float32 gradient goes over, a new weight comes back.
        yield "optimizer", 6 * n / place.link, f"{place.link / 1e9:.0f} GB/s to and from the host"
    else:
        # Gradient read; master and two moments read and written; the new weight written.
        traffic = n * (4 + 3 * 8 + (place.dtype.itemsize if masters else 0))
        yield "optimizer", traffic / place.bandwidth, memory


if __name__ == "__main__":
    sys.exit(main())
