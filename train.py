"""GRPO, online: [G] one training step and [H] the loop around it.

    sample G answers a prompt [A] -> score them [B] -> advantages inside each group [C]
    -> log-probabilities [D] -> clipped loss with a KL leash [E][F] -> gradient step        (and again)

Departures from the theory's code map:
- The ids that were sampled are the ids that are trained on: nothing is decoded and tokenised again.
- A step may take several updates on one rollout. The log-probs of the first pass, taken before anything
  has moved, are the old ones of all of them.
- The batch is cut into micro-batches, and divided once by the size of the whole: the gradient does not
  depend on the cut.

    python train.py                                          # the tiny policy learns to reason, on a laptop
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct       # GSM8K, on a GPU
"""

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

try:
    import fcntl
except ImportError:                                      # Windows: two runs in one folder are not noticed there
    fcntl = None

from advantage import group_advantages
from logprob import IGNORE, can_group, chunks, has_plain_head, token_logprobs
from loss import grpo_loss
from reward import extract_boxed, load_problems, majority_at_k, pass_at_k, score_responses
from sample import sample_groups

# ---------------------------------------------------------------------------------------------------------
# [G] One step: sample, score, normalise, update

def train_step(policy_model, ref_model, optimizer, tokenizer, prompts, ground_truths, settings,
               generator=None, reward_fn=None, on_rollout=None):
    """One GRPO step on B prompts (chat template applied) and their B true answers -> metrics, floats.

    `ref_model` is the frozen reference, None for no KL. `reward_fn(prompts, responses) -> (N,)` replaces the
    rule reward; `on_rollout(rollout, rewards, advantages)` may look at the answers. DeepSeekMath, algorithm 1.
    On several GPUs each has prompts of its own, with all G answers to them; the metrics are of all of them.
    """
    s, started = settings, time.perf_counter()
    with whole_weights(policy_model):
        rollout = sample_groups(policy_model, tokenizer, prompts, s.group_size, s.max_new_tokens,
                                s.temperature, generator)                                        # [A]
    rule_rewards = score_responses(rollout.responses, ground_truths, s.group_size, policy_model.device)
    rewards = reward_fn(prompts, rollout.responses).to(rule_rewards) if reward_fn else rule_rewards      # [B]
    advantages = group_advantages(rewards, s.group_size, scale_by_std=s.scale_by_std)            # [C]
    if on_rollout:
        on_rollout(rollout, rewards, advantages)
    sampled = time.perf_counter()

    old_logprobs = torch.zeros_like(rollout.logprobs)                                            # (N, S-1)
    ref_logprobs = None if ref_model is None else torch.zeros_like(old_logprobs)
    with layers_checkpointed(policy_model, s.gradient_checkpointing):
        updates = [within_memory(s, update, policy_model, ref_model, optimizer, rollout, advantages, old_logprobs,
                                 ref_logprobs, u == 0) for u in range(s.updates_per_rollout)]    # [D] [E] [F]
    optimizer.zero_grad()                                        # the next rollout can use their memory
    trained = time.perf_counter()

    metrics = rollout_metrics(rollout, rewards, rule_rewards, s.group_size)
    metrics |= {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
    metrics |= {name: updates[0][name] for name in ("entropy", "sampler_ratio_error")}           # of the old policy
    metrics["ratio_max_error"] = max(u["ratio_max_error"] for u in updates)
    metrics["skipped_updates"] = sum(u["skipped_updates"] for u in updates)
    return metrics | {"seconds_sampling": sampled - started, "seconds_training": trained - sampled,
                      "tokens_per_second": metrics["tokens"] / (trained - started)}


def update(settings, policy_model, ref_model, optimizer, rollout, advantages, old_logprobs, ref_logprobs, first):
    """One gradient step on the rollout. The first update fills in old_logprobs and ref_logprobs, (N, S-1)."""
    s, totals, drift = settings, {}, torch.zeros(1, device=rollout.labels.device)
    n_rows = total(len(rollout.labels))                          # of the whole batch, on all GPUs
    n_tokens = total(int((rollout.labels != IGNORE).sum()))
    optimizer.zero_grad()
    for rows, width, weight in same_count(micro_batches(rollout, s.micro_batch_tokens, s.share_prompts)):
        ids, labels = rollout.input_ids[rows, :width], rollout.labels[rows, :width]              # (n, w)
        groups = rollout.group_ids[rows] if s.share_prompts else None
        here, mask = (rows, slice(width - 1)), labels[:, 1:] != IGNORE                           # (n, w-1)
        logprobs, entropy = score(policy_model, ids, labels, s.temperature, True, groups)        # [D]
        if first:                                        # nothing has moved yet: these are the old log-probs
            old_logprobs[here] = logprobs.detach()
            if ref_model is not None:
                with torch.no_grad():
                    ref_logprobs[here] = score(ref_model, ids, labels, s.temperature, False, groups)
        loss, metrics = grpo_loss(                                                               # [E] [F]
            logprobs, old_logprobs[here], None if ref_logprobs is None else ref_logprobs[here],
            advantages[rows], mask, s.clip_eps, s.kl_coef, clip_eps_high=s.clip_eps_high,
            kl_estimator=s.kl_estimator, aggregate=s.aggregate, ratio=s.ratio,
            max_new_tokens=s.max_new_tokens, n_rows=n_rows, n_tokens=n_tokens)
        (loss * weight).backward()
        drift = torch.maximum(drift, (logprobs.detach() - old_logprobs[here]).expm1().abs().max())
        metrics["entropy"] = entropy.sum() / n_tokens
        totals = {name: totals.get(name, 0) + (weight > 0) * value for name, value in metrics.items()}
    totals = {name: total(float(value)) for name, value in totals.items()}
    grad_norm = float(full(clip_grad_norm_(optimizer.param_groups[0]["params"], s.max_grad_norm)))
    finite = math.isfinite(grad_norm) and math.isfinite(totals["loss"])
    if finite:
        optimizer.step()
    gap = (old_logprobs - rollout.logprobs).expm1().abs().max()  # trainer against sampler: rounding, no more
    return totals | {"grad_norm": grad_norm, "skipped_updates": int(not finite),
                     "ratio_max_error": float(gathered(drift).max()),                    # max |w - 1|
                     "sampler_ratio_error": float(gathered(gap[None]).max())}


def micro_batches(rollout, token_budget, share_prompts):
    """Cut the rows into micro-batches of at most `token_budget` tokens -> (row indices, width of the longest).

    Rows are sorted by length, so that little padding is computed, the longest first, so that memory runs out at
    once or not at all. Where a prompt is shared there is no padding: groups stay in order, whole where the budget
    allows it, and pay for their prompt once in each micro-batch. A row too long for the budget stands alone.
    """
    labelled, device = rollout.labels != IGNORE, rollout.labels.device
    ends = (labelled * torch.arange(1, labelled.shape[1] + 1, device=device)).amax(dim=1).tolist()   # row lengths
    answers, groups = labelled.sum(dim=1).tolist(), rollout.group_ids.tolist()

    def cost(rows):
        if share_prompts:
            return sum(answers[n] for n in rows) + sum({groups[n]: ends[n] - answers[n] for n in rows}.values())
        return len(rows) * ends[rows[0]]

    parts = [[n] for n in sorted(range(len(ends)), key=lambda n: -ends[n])]
    if share_prompts:
        whole = [list(rows) for _, rows in groupby(range(len(ends)), key=groups.__getitem__)]
        parts = [part for rows in whole for part in ([rows] if cost(rows) <= token_budget else [[n] for n in rows])]
    cut = []
    for part in parts:
        if cut and cost(cut + part) > token_budget:
            yield torch.tensor(cut, device=device), max(ends[n] for n in cut)
            cut = []
        cut = cut + part
    yield torch.tensor(cut, device=device), max(ends[n] for n in cut)


def rollout_metrics(rollout, rewards, rule_rewards, group_size):
    """What the answers were like. `accuracy` and `format_rate` are the rule's, whoever gave the rewards."""
    lengths = (rollout.labels != IGNORE).sum(dim=1).float()
    lengths, rewards, rule_rewards, finished = map(gathered, (lengths, rewards, rule_rewards, rollout.finished))
    groups = rewards.view(-1, group_size)
    return {name: float(value) for name, value in {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(correction=0),
        "accuracy": (rule_rewards == 1.5).float().mean(),
        "format_rate": (rule_rewards >= 0.5).float().mean(),
        "zero_variance_groups": (groups == groups[:, :1]).all(dim=1).float().mean(),     # they teach nothing
        "response_length_mean": lengths.mean(),
        "response_length_p95": lengths.quantile(0.95),
        "truncated_fraction": (~finished).float().mean(),
        "tokens": lengths.sum(),
    }.items()}


# ---------------------------------------------------------------------------------------------------------
# [H] The loop: every step draws fresh answers from the policy as it is now

def train_grpo(policy_model, ref_model, optimizer, tokenizer, problems, eval_problems, settings,
               run=None, reward_fn=None):
    """Steps run.step + 1 .. settings.steps on `problems` ({"question", "answer", ...}, see load_problems).

    Everything random comes from (seed, step, prompt): a resumed run needs to know its step and no more, and
    the answers do not depend on how many GPUs share them.
    """
    s, run = settings, run or Run()
    assert_own_frozen_tensors(ref_model, policy_model)
    if not run.before:
        accuracy, run.before = evaluate(policy_model, tokenizer, eval_problems, s)
        run.log({"step": 0, "eval_accuracy": accuracy})
    with tqdm(total=s.steps, initial=run.step, desc="GRPO", dynamic_ncols=True, disable=rank() > 0) as bar:
        for step in range(run.step + 1, s.steps + 1):
            if run.stopped():
                break
            for group in optimizer.param_groups:
                group["lr"] = s.lr * min(1.0, step / max(s.warmup_steps, 1))
            batch, generators = problems_of_step(problems, step, s)
            prompts = [chat_prompt(tokenizer, problem["question"], s.system_prompt) for problem in batch]
            try:
                metrics = train_step(
                    policy_model, ref_model, optimizer, tokenizer, prompts, [problem["answer"] for problem in batch],
                    s, generators, reward_fn and partial(reward_fn, batch), partial(run.log_samples, step, prompts))
            except RewardFailed:                             # on every rank, and nothing has moved in this step
                run.save_checkpoint(policy_model, optimizer)
                raise
            metrics = {"step": step, "lr": optimizer.param_groups[0]["lr"], **metrics}
            if step % s.eval_every == 0 or step == s.steps:
                metrics["eval_accuracy"], run.after = evaluate(policy_model, tokenizer, eval_problems, s)
            run.log(metrics)
            bar.set_postfix_str("reward {reward_mean:.2f}, accuracy {accuracy:.2f}, length {response_length_mean:.0f}, "
                                "KL {approx_kl:.3f}, flat groups {zero_variance_groups:.2f}".format(**metrics)
                                + (f", {run.skipped} SKIPPED" if run.skipped else ""))
            bar.update()
            if step % s.save_every == 0 or step == s.steps:
                run.save_checkpoint(policy_model, optimizer)


def problems_of_step(problems, step, settings):
    """This GPU's share of the step's B problems, and a random generator for each.

    Every epoch has a new order, drawn from (seed, epoch); its short rest is left out. A prompt's answers are all
    drawn on one GPU: a group that is split has two means and two baselines.
    """
    s, B = settings, settings.prompts_per_step
    epoch, k = divmod(step - 1, len(problems) // B)
    order = torch.randperm(len(problems), generator=seeded(s.seed, 0, epoch))[k * B:(k + 1) * B].tolist()
    mine = range(rank() * B // world(), (rank() + 1) * B // world())
    whose = gathered(torch.tensor([order[j] for j in mine]))
    assert whose.tolist() == order, "every prompt, with its whole group, must live on one rank"
    return [problems[order[j]] for j in mine], [seeded(s.seed, step, j) for j in mine]


def seeded(*numbers):
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def evaluate(model, tokenizer, problems, settings, group_size=1, temperature=0.0, seed=0):
    """Greedy answers (or `group_size` sampled ones) to all problems -> share that is right, responses."""
    s, responses = settings, []
    prompts = [chat_prompt(tokenizer, problem["question"], s.system_prompt) for problem in problems]
    B = max(s.prompts_per_step * s.group_size // group_size, 1)                    # as many rows as in a step
    mine = list(range(rank() * len(prompts) // world(), (rank() + 1) * len(prompts) // world()))
    with whole_weights(model):
        for start in tqdm(range(0, len(mine), B), desc="evaluation", unit="batch", leave=False, dynamic_ncols=True,
                          disable=rank() > 0):
            part = mine[start:start + B]
            responses += sample_groups(model, tokenizer, [prompts[j] for j in part], group_size, s.max_new_tokens,
                                       temperature, [seeded(seed, "evaluation", j) for j in part]).responses
    responses = sum(gathered_objects(responses), [])
    rewards = score_responses(responses, [problem["answer"] for problem in problems], group_size)
    return float((rewards == 1.5).float().mean()), responses


def chat_prompt(tokenizer, question, system_prompt):
    """The text the policy continues: the model's own chat template around the question."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": question})
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:                           # Gemma's template, for one, refuses a system message
        if not system_prompt:
            raise BadInput(f"the model's chat template fails ({one_line(error)})") from None
        return chat_prompt(tokenizer, f"{system_prompt}\n\n{question}", "")


def assert_own_frozen_tensors(ref_model, policy_model):
    """A reference that shares a tensor with the policy moves along with it, and its KL stays 0."""
    def addresses(model):
        return {local(p).data_ptr() for p in model.parameters() if local(p).numel()}

    if ref_model is not None:
        assert not addresses(ref_model) & addresses(policy_model), "the reference shares tensors with the policy"
        assert not any(p.requires_grad for p in ref_model.parameters()), "the reference is not frozen"


# ---------------------------------------------------------------------------------------------------------
# Settings: every flag, one a line, with its default and its reason. A model folder may bring its own
# defaults in a recipe.json ({"lr": 3e-4, ...}); what stands on the command line wins.

TINY = Path(__file__).parent / "tests" / "tiny"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


class BadInput(Exception):
    """What the user gave cannot be used: one line on standard error, exit status 2, no traceback."""


class RewardFailed(BadInput):
    """A user's reward raised, or gave no number: the last step stands, and can be resumed from."""


def flag(default, help, **bounds):                       # bounds: least, above, most, choices
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


@dataclasses.dataclass
class Settings:
    # what is trained, on what
    model: str = flag(str(TINY), "hub name or folder of the policy")
    data: str = flag("gsm8k", "training problems: a JSONL of question and answer, `gsm8k` or `gsm8k:test`")
    eval_data: str = flag("gsm8k:test", "held-out problems, likewise")
    system_prompt: str = flag(BOXED, "system message before every question; empty for none")
    reward: str = flag("", "your own reward, path/to/file.py:function, called as TRL calls its reward_funcs")
    output: str = flag("", "folder of the run; default: runs/MODEL-TIME")
    # the rollout
    steps: int = flag(500, "rollouts in all", least=1)
    prompts_per_step: int = flag(8, "B, questions a step", least=1)
    group_size: int = flag(8, "G, answers a question: their mean is the baseline", least=2)
    max_new_tokens: int = flag(512, "an answer is cut here", least=1)
    temperature: float = flag(1.0, "of the sampler, and of the log-probs", above=0)
    # the objective
    clip_eps: float = flag(0.2, "the ratio is clipped below 1 - this, and above 1 + this", least=0, most=1)
    clip_eps_high: float = flag(None, "above 1 + this instead: DAPO's clip-higher, 0.28", least=0)
    kl_coef: float = flag(0.04, "beta; 0: no KL, and no reference in memory", least=0)
    kl_estimator: str = flag("k3", "estimator of the KL", choices=("k1", "k2", "k3"))
    aggregate: str = flag("sequence", "mean over tokens: GRPO, DAPO, Dr. GRPO",
                          choices=("sequence", "token", "constant"))
    ratio: str = flag("token", "ratio a token, or a sequence: GSPO", choices=("token", "sequence"))
    scale_by_std: bool = flag(True, "divide the advantages by the group's std; off: Dr. GRPO")
    # the update
    lr: float = flag(1e-6, "AdamW's learning rate, constant after the warm-up", above=0)
    warmup_steps: int = flag(10, "the learning rate rises linearly over these", least=0)
    updates_per_rollout: int = flag(1, "gradient steps on the same answers", least=1)
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", above=0)
    share_prompts: bool = flag(True, "run a prompt once for its whole group in the update, and no padding")
    micro_batch_tokens: int = flag(1024, "tokens in a forward and backward pass: memory, not learning; on a GPU 8192",
                                   least=1)
    gradient_checkpointing: bool = flag(False, "keep a layer's input, compute the rest again: less memory, slower; "
                                               "on a GPU True")
    offload: bool = flag(True, "bfloat16 on CUDA: float32 masters and moments live in host memory")
    # measuring and keeping
    eval_every: int = flag(50, "steps between evaluations", least=1)
    eval_limit: int = flag(200, "held-out problems that are asked; 0: all", least=0)
    save_every: int = flag(50, "steps between checkpoints", least=1)
    seed: int = flag(0, "of the problems' order and of the sampling", least=0, most=2**32)
    device: str = flag("auto", "cuda, mps or cpu; auto: the first of them that is there")
    dtype: str = flag("auto", "of the weights that compute; auto: bfloat16 on CUDA, else float32",
                      choices=("auto", "float32", "bfloat16"))
    threads: int = flag(0, "CPU threads; 0: torch's own choice. Small models are fastest, by far, on one", least=0)
    resume: bool = flag(False, "go on with the run in --output")
    eval_only: bool = flag(False, "evaluate --model on --eval-data, greedy and sampled, and stop")
    dry_run: bool = flag(False, "count the memory of these flags, from the model's configuration alone, and stop")


GPU_DEFAULTS = {"micro_batch_tokens": 8192, "gradient_checkpointing": True}    # fast, and short of memory


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(message)


def make_parser():
    parser = Parser(prog="train.py", description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Settings):
        shown = "" if field.default in ("", None) else f" (default: {field.default})".replace("%", "%%")
        how = {"action": argparse.BooleanOptionalAction} if field.type is bool else {
            "type": field.type, "choices": field.metadata.get("choices"), "metavar": field.type.__name__.upper()}
        parser.add_argument(flag_of(field.name), help=field.metadata["help"] + shown, **how)
    return parser


def flag_of(name):
    return "--" + name.replace("_", "-")


def parse(argv):
    """Flags -> (Settings, what the model's recipe.json brought). With --resume the run's own settings stand."""
    given = checked(argv)
    if given.get("resume"):
        return resumed_settings(given)
    path = Path(given.get("model", TINY)) / "recipe.json"
    recipe = read_recipe(path) if path.is_file() else {}
    chosen = {**checked(as_flags(recipe)), **given}
    on_gpu = device_type(Settings(**chosen)) != "cpu"
    return Settings(**{**(GPU_DEFAULTS if on_gpu else {}), **chosen}), recipe


def resumed_settings(given):
    if not given.get("output"):
        raise BadInput("--resume: needs --output, the folder of the run to go on with")
    path = Path(given["output"]) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        saved, recipe = config["settings"], config["recipe"]
        settings = Settings(**{**saved, "resume": True, "output": given["output"]})
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"--output {given['output']}: no run to resume, config.json is missing or not ours") from None
    for name, value in given.items():
        if name not in ("resume", "output", "steps") and value != saved[name]:
            raise BadInput(f"{flag_of(name)} {value}: the run in {given['output']} has {saved[name]}; "
                           "only --steps may change when a run is resumed")
    return dataclasses.replace(settings, steps=given.get("steps", settings.steps)), recipe


def checked(argv):
    """The flags that were given, {name: value}, each within its bounds."""
    given = vars(make_parser().parse_args(argv))
    for field in dataclasses.fields(Settings):
        value, bounds = given.get(field.name), field.metadata
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for wrong, words in ((not math.isfinite(value), "not a finite number"),
                                 (value < bounds.get("least", value), f"must be at least {bounds.get('least')}"),
                                 (value <= bounds.get("above", -math.inf), f"must be above {bounds.get('above')}"),
                                 (value > bounds.get("most", value), f"must be at most {bounds.get('most')}")):
                if wrong:
                    raise BadInput(f"{flag_of(field.name)} {value}: {words}")
    return given


def as_flags(recipe):
    """{"kl-coef": 0.02, "scale-by-std": false} -> ["--kl-coef=0.02", "--no-scale-by-std"]."""
    return [f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
            for name, value in recipe.items()]


def read_recipe(path):
    """The flags in a model folder's recipe.json; a path that stands in that folder is meant there."""
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(recipe, dict):
            raise BadInput("not an object of flags and values")
        recipe = {name.replace("_", "-"): value for name, value in recipe.items()}
        for name in ("data", "eval-data"):
            if (path.parent / str(recipe.get(name) or ":")).is_file():
                recipe[name] = str(path.parent / recipe[name])
        checked(as_flags(recipe))
    except (BadInput, ValueError, OSError, RecursionError) as error:
        raise BadInput(f"{path}: {error}") from None
    return recipe


# ---------------------------------------------------------------------------------------------------------
# Loading: model, tokenizer, problems, reward

def load_policy(s):
    """The policy and its tokenizer: safetensors only, no code of the checkpoint's own."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device, dtype = choose_device(s)
    dtype = torch.float32 if world() > 1 else dtype      # FSDP holds float32 shards and gathers in bfloat16
    try:
        tokenizer = AutoTokenizer.from_pretrained(s.model, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            s.model, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except Exception as error:                           # a foreign folder can be wrong in any way
        raise BadInput(f"--model {s.model}: cannot be loaded from here or from the hub ({one_line(error)})") from None
    if not tokenizer.chat_template:
        raise BadInput(f"--model {s.model}: its tokenizer has no chat template")
    if tokenizer.eos_token_id is None and model.generation_config.eos_token_id is None:
        raise BadInput(f"--model {s.model}: neither generation config nor tokenizer names an end token")
    return model.to(device).eval(), tokenizer


def device_type(s):
    """cuda, mps or cpu; one that was named need not be here: --dry-run counts for it."""
    return choose_device(s)[0].type if s.device == "auto" else s.device.split(":")[0]


def choose_device(s):
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    try:
        device = torch.device(next(d for d in present if present[d]) if s.device == "auto" else s.device)
    except RuntimeError:
        raise BadInput(f"--device {s.device}: not a device torch knows") from None
    if not present.get(device.type):
        raise BadInput(f"--device {s.device}: not on this machine")
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if s.dtype == "bfloat16" and not has_bf16:
        raise BadInput(f"--dtype bfloat16: {device} has no bfloat16")
    auto = "bfloat16" if device.type == "cuda" and has_bf16 else "float32"
    return device, getattr(torch, auto if s.dtype == "auto" else s.dtype)


def load_data(flag_name, source):
    try:
        return load_problems(source)
    except ValueError as error:
        raise BadInput(f"{flag_name}: {error}") from None


def check_lengths(flag_name, problems, model, tokenizer, s):
    """Every prompt and its answer must fit into the positions the model was made for."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    prompts = [chat_prompt(tokenizer, problem["question"], s.system_prompt) for problem in problems]
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False).input_ids]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] + s.max_new_tokens > limit:
        raise BadInput(f"{flag_name}: the prompt of problem {longest + 1} has {lengths[longest]} tokens; with "
                       f"--max-new-tokens {s.max_new_tokens} that is more than the model's {limit} positions")


def load_reward(spec):
    """`path/to/file.py:function` -> reward_fn(problems, prompts, responses) -> (N,) float32."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise BadInput(f"--reward {spec}: no file {path!r}; write path/to/file.py:function")
    try:
        module_spec = importlib.util.spec_from_file_location("user_reward", path)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"--reward {spec}: {path} fails to load: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput(f"--reward {spec}: {path} has no function {name!r}")

    def call(problems, prompts, responses):
        G = len(responses) // len(prompts)
        columns = {key: [problem.get(key) for problem in problems for _ in range(G)] for key in problems[0]}
        values = function(prompts=[p for p in prompts for _ in range(G)], completions=list(responses), **columns)
        return as_rewards(values, len(responses), spec)

    def reward_fn(problems, prompts, responses):
        rewards = fault = None
        try:
            rewards = call(problems, prompts, responses)
        except BadInput as error:
            fault = str(error)
        except Exception as error:
            row, error = first_failing_row(call, problems, prompts, responses, error)
            fault = f"--reward {spec}: {row}: {type(error).__name__}: {one_line(error)}"
        for found in filter(None, gathered_objects(fault)):      # one rank's fault ends the step on all of them
            raise RewardFailed(found)
        return rewards
    return reward_fn


def first_failing_row(call, problems, prompts, responses, error):
    """The batch raised: score its rows one by one to tell which."""
    G = len(responses) // len(prompts)
    for n, response in enumerate(responses):
        try:
            call([problems[n // G]], [prompts[n // G]], [response])
        except Exception as error:
            return f"row {n}, response {response[:60]!r}", error
    return f"{len(responses)} rows together", error


def one_line(error):
    return " ".join(str(error).split())[:300]


def as_rewards(values, n, spec):
    try:
        values = list(values)
    except TypeError:
        raise BadInput(f"--reward {spec}: gave {type(values).__name__}, not a list of numbers") from None
    if len(values) != n:
        raise BadInput(f"--reward {spec}: gave {len(values)} rewards for {n} responses")
    for row, value in enumerate(values):
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
            raise BadInput(f"--reward {spec}: row {row} got {value!r}, not a finite number")
    return torch.tensor([float(value) for value in values])


# ---------------------------------------------------------------------------------------------------------
# Weights. AdamW at 1e-6 moves a weight by about 1e-6; a bfloat16 weight of 0.02 knows no step below 6e-5 and
# would stay where it is. So the optimizer works on float32 masters, and bfloat16 copies of them compute.

def make_optimizer(model, s):
    """AdamW over float32 masters of the model's weights; where the weights are float32, over themselves.

    Moments take 8 bytes a weight, masters 4, their gradients 4. With --offload these 16 live in host memory and
    the GPU holds 2: gradients go over as soon as they are complete, new weights come back once an update.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    if all(w.dtype == torch.float32 for w in weights):
        return torch.optim.AdamW(weights, s.lr, weight_decay=0.0, fused=True)
    home = "cpu" if s.offload else model.device
    masters = [w.detach().to(home, torch.float32) for w in weights]

    def hand_over(master, weight):
        grad, weight.grad = weight.grad.to(home, torch.float32), None
        master.grad = grad if master.grad is None else master.grad.add_(grad)

    @torch.no_grad()
    def copy_back(*_):
        for weight, master in zip(weights, masters):
            weight.copy_(master)

    for weight, master in zip(weights, masters):
        weight.register_post_accumulate_grad_hook(partial(hand_over, master))
    optimizer = torch.optim.AdamW(masters, s.lr, weight_decay=0.0, fused=True)
    optimizer.register_step_post_hook(copy_back)
    return optimizer


@contextlib.contextmanager
def layers_checkpointed(model, on):
    """transformers checkpoints a layer that is in training mode. Its attention is not: no dropout comes back."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if on else []
    for layer in layers:
        layer.training = layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False                       # a rollout needs the cache, which checkpointing forbids


def print_memory(s):
    """--dry-run: what one process of these flags holds, tensor by tensor, counted on a model without storage."""
    device = device_type(s)
    if device not in ("cuda", "mps", "cpu"):
        raise BadInput(f"--device {s.device}: not cuda, mps or cpu")
    dtype = getattr(torch, s.dtype if s.dtype != "auto" else "bfloat16" if device == "cuda" else "float32")
    try:
        config = AutoConfig.from_pretrained(s.model, trust_remote_code=False)
    except Exception as error:
        raise BadInput(f"--model {s.model}: no configuration ({one_line(error)})") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    text, n = config.get_text_config(), sum(p.numel() for p in model.parameters())
    W, prompt, b = int(os.environ.get("WORLD_SIZE", 1)), 256, dtype.itemsize
    rows, length = s.prompts_per_step * s.group_size // W, prompt + s.max_new_tokens
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    layers, layer = text.num_hidden_layers, max(sum(p.numel() for p in m.parameters()) for m in model.modules()
                                                if isinstance(m, GradientCheckpointingLayer))
    masters = W == 1 and dtype != torch.float32          # FSDP's float32 shards are masters and weights in one
    host = masters and s.offload and device != "cpu"
    kept = partial(activations, model, s, prompt)
    chunk = min(chunks(s.micro_batch_tokens, text.vocab_size, torch.device(device))[0].stop, s.micro_batch_tokens)
    lines = [
        ("always", "policy, weights that compute", n * b if W == 1 else 4 * n // W, False),
        ("always", "reference, frozen", bool(s.kl_coef) * n * b // W, False),
        ("always", "float32 masters", 4 * n * masters, host),
        ("always", "AdamW's two moments, float32", 8 * n // W, host),
        ("always", "gradients, float32", 4 * n // W, host),
        ("rollout", "policy, gathered whole", n * b * (W > 1), False),
        ("rollout", "key/value cache", 2 * rows * length * layers * kv_heads * head_dim * b, False),
        ("rollout", "one layer's cache while it grows", 2 * rows * length * kv_heads * head_dim * b, False),
        ("rollout", "logits of a step, and their exp", (b + 2 * 4) * rows * text.vocab_size, False),
        ("update", "layers gathered, two and the head", (2 * layer + n - layers * layer) * b * (W > 1), False),
        ("update", "what a micro-batch keeps for backward", kept(s.gradient_checkpointing), False),
        ("update", "one layer of it, computed again", s.gradient_checkpointing * kept(False) // layers, False),
        ("update", "gradient of the largest tensor", 2 * b * max(p.numel() for p in model.parameters()), False),
        ("update", "a chunk of logits, and its gradient", 3 * 4 * chunk * text.vocab_size, False)]
    print(f"{s.model}: {n:,} weights in {dtype}; {s.prompts_per_step} x {s.group_size} answers of {s.max_new_tokens} "
          f"tokens behind prompts of {prompt}; one of {W} processes; GB = 1e9 bytes\n")
    for when, what, size, on_host in lines:
        print(f"{when:8} {what:38} {size / 1e9:9.3f} GB" + ("   host" if on_host else ""))
    def held(*phases):
        return sum(size for when, _, size, on_host in lines if when in phases and not on_host) / 1e9

    print(f"\n{device}: {held('always', 'rollout'):.2f} GB in the rollout, {held('always', 'update'):.2f} GB in the "
          f"update; host: {sum(size for *_, size, on_host in lines if on_host) / 1e9:.2f} GB. Not counted: CUDA's own "
          "context, the allocator's fragments, the kernels' work space.")


def activations(model, s, prompt, checkpointed):
    """Bytes that one micro-batch keeps for its backward pass: the saved tensors of a pass on the meta device."""
    answer = s.max_new_tokens
    count = max((s.micro_batch_tokens - prompt) // answer, 1)
    groups = [[prompt] + [answer] * min(s.group_size, count - i) for i in range(0, count, s.group_size)]
    T = sum(sum(sizes) for sizes in groups)
    model.set_attn_implementation("grouped")
    ids, seen = torch.zeros(1, T, dtype=torch.long, device="meta"), {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), layers_checkpointed(
            model, checkpointed):
        hidden = model.base_model(input_ids=ids, position_ids=ids, use_cache=False, groups=groups,
                                  attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta"))
    return sum(size for _, size in seen.values()) + hidden.last_hidden_state.nbytes


# ---------------------------------------------------------------------------------------------------------
# Several GPUs (torchrun): torch's own FSDP2. Every rank holds a shard of the float32 weights, gathers a layer
# when it computes, and takes whole groups of its own. On one process all of this is the identity.

def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(tensor):
    """Every rank's rows, in the order of the ranks: (n, ...) -> (n * world, ...)."""
    if world() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(world())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def gathered_objects(value):
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def total(value):
    """The sum over the ranks of a number."""
    return sum(gathered_objects(value))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same_count(cuts):
    """(rows, width) -> (rows, width, weight of the loss). Every rank must run equally many passes, or FSDP's
    gathers wait for ever: the last cut is run again, for nothing. FSDP averages gradients; we want their sum."""
    cuts = list(cuts)
    most = max(gathered_objects(len(cuts)))
    return [(*cut, world()) for cut in cuts] + [(*cuts[-1], 0)] * (most - len(cuts))


def shard(model, compute_dtype):
    """FSDP2 on every decoder layer and on the rest; float32 shards, gathered in the dtype that computes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    has_plain_head(model), can_group(model)              # tried while the weights are whole
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.score = MethodType(token_logprobs, model)      # [D] enters below the model's forward: FSDP must know
    register_fsdp_forward_method(model, "score")
    return model


def score(model, *args):
    return model.score(*args) if world() > 1 else token_logprobs(model, *args)


@contextlib.contextmanager
def whole_weights(model):
    """For a rollout all weights are gathered at once: then no rank waits for another's longer answers."""
    if world() == 1:
        yield
        return
    parts = [module for module in model.modules() if hasattr(module, "unshard")]
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


# ---------------------------------------------------------------------------------------------------------
# A run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoint/, final/

class Run:
    """Where a run stands and where it writes; without a folder nothing is written. Only rank 0 writes."""

    def __init__(self, folder=None):
        self.folder = Path(folder) if folder and rank() == 0 else None
        self.name, self.step, self.saved_step, self.skipped, self.signal = str(folder), 0, None, 0, 0
        self.before, self.after = [], []                 # greedy answers to the held-out problems
        self.lock = None

    def stop_on_signals(self):
        """Ctrl-C and SIGTERM let the step in hand end; the second one does not."""
        def stop(number, _):
            if self.signal:
                os._exit(128 + number)
            self.signal = number
            print(f"\nstopping after this step ({signal.Signals(number).name}; once more: at once)", file=sys.stderr)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)

    def stopped(self):
        self.signal = max(gathered_objects(self.signal))         # one rank's signal stops all of them
        return self.signal

    def log(self, metrics):
        self.step = metrics["step"]
        self.skipped += metrics.get("skipped_updates", 0)
        self.append("metrics.jsonl", [metrics])

    def log_samples(self, step, prompts, rollout, rewards, advantages, groups=2):
        G = len(rollout.responses) // len(prompts)
        self.append("samples.jsonl", [
            {"step": step, "prompt": prompt, "responses": rollout.responses[j * G:(j + 1) * G],
             "rewards": rewards[j * G:(j + 1) * G].tolist(), "advantages": advantages[j * G:(j + 1) * G].tolist()}
            for j, prompt in enumerate(prompts[:groups])])

    def append(self, name, records):
        if self.folder:
            lines = [json.dumps({key: None if value != value else value for key, value in record.items()}) + "\n"
                     for record in records]                      # NaN is no JSON: null
            with self.writing(name), open(self.folder / name, "a", encoding="utf-8") as file:
                file.write("".join(lines))

    def write(self, name, content):
        """A whole file, beside the old one and moved over it."""
        if self.folder:
            with self.writing(name):
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
                (self.folder / f"{name}.tmp").write_text(text, encoding="utf-8")
                os.replace(self.folder / f"{name}.tmp", self.folder / name)

    @contextlib.contextmanager
    def writing(self, what):
        try:
            yield
        except (OSError, SafetensorError) as error:
            last = "none" if self.saved_step is None else f"of step {self.saved_step}, whole"
            raise BadInput(f"--output {self.name}: {what} cannot be written ({one_line(error)}); "
                           f"last checkpoint: {last}") from None

    def save_checkpoint(self, model, optimizer):
        """Masters, moments, counters in one safetensors file, written beside the old one and moved over it.

        Tensors are whole, whatever they were sharded on. What else a step needs (problems, random numbers,
        learning rate) follows from the step and the settings.
        """
        tensors = {}
        for name, master in named_masters(model, optimizer):
            for key, value in {"weight": master.detach(), **optimizer.state.get(master, {})}.items():
                value = full(value)
                if rank() == 0:
                    tensors[f"{key}/{name}"] = value.cpu().contiguous()
        if self.folder:
            state = {"step": self.step, "skipped": self.skipped, "before": self.before}
            path = self.folder / "checkpoint" / "run.safetensors"
            with self.writing("checkpoint"):
                path.parent.mkdir(exist_ok=True)
                save_file(tensors, f"{path}.tmp", metadata={"grpo": json.dumps(state)})
                with open(f"{path}.tmp", "rb") as file:
                    os.fsync(file.fileno())
                os.replace(f"{path}.tmp", path)
        self.saved_step = self.step

    def load_checkpoint(self, model, optimizer):
        """Take up where the checkpoint stands; a run killed before its first one starts again from step 0."""
        path = Path(self.name) / "checkpoint" / "run.safetensors"
        if path.is_file():
            try:
                with safe_open(path, framework="pt") as file:
                    state = json.loads(file.metadata()["grpo"])
                    tensors = {name: file.get_tensor(name) for name in file.keys()}
            except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
                raise BadInput(f"--resume: {path} is torn, or no checkpoint of ours ({one_line(error)})") from None
            take_up(tensors, model, optimizer, path)
            self.step, self.skipped, self.before = state["step"], state["skipped"], state["before"]
        self.saved_step = self.step if path.is_file() else None
        if self.folder:
            self.forget_after(self.step if path.is_file() else -1)

    def forget_after(self, step):
        """Lines of steps that the checkpoint has not seen will be written again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            if (self.folder / name).is_file():
                lines = (self.folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
                self.write(name, "".join(line for line in lines
                                         if line.endswith("\n") and json.loads(line)["step"] <= step))


def named_masters(model, optimizer):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return list(zip(names, optimizer.param_groups[0]["params"]))


@torch.no_grad()
def take_up(tensors, model, optimizer, path):
    """Checkpoint tensors into masters, moments and weights; onto shards where the masters are sharded."""
    def like(master, tensor):
        if not hasattr(master, "device_mesh"):
            return tensor.to(master.device)
        return dist.tensor.distribute_tensor(tensor.to(master.device), master.device_mesh, master.placements)

    weights = dict(model.named_parameters())
    for name, master in named_masters(model, optimizer):
        weight = tensors.get(f"weight/{name}")
        if weight is None or weight.shape != master.shape:
            raise BadInput(f"--resume: {path} is not of this model: {name} is missing or of another shape")
        master.copy_(like(master, weight))
        weights[name].copy_(master)
        if f"exp_avg/{name}" in tensors:
            optimizer.state[master] = {
                "step": tensors[f"step/{name}"],
                **{key: like(master, tensors[f"{key}/{name}"]) for key in ("exp_avg", "exp_avg_sq")}}


# ---------------------------------------------------------------------------------------------------------
# The program

def main(argv=None):
    run, started = None, False

    def say(line, of_all_ranks=True):                    # what every rank has found, rank 0 tells
        if int(os.environ.get("RANK", 0)) == 0 or not of_all_ranks:
            print(f"train.py: {line}", file=sys.stderr)

    try:
        settings, recipe = parse(sys.argv[1:] if argv is None else argv)
        if settings.dry_run:
            print_memory(settings)
            return 0
        join_ranks()
        run, *parts = prepare(settings, recipe)
        if run is None:
            return 0
        started = True
        return train(run, settings, *parts)
    except BadInput as error:
        say(error)
    except KeyboardInterrupt:
        say("interrupted before the first step")
        return 130
    except RuntimeError as error:
        if out_of_memory(error):
            say("out of memory: lower --prompts-per-step, --group-size, --max-new-tokens or --micro-batch-tokens",
                of_all_ranks=False)
        elif started and world() > 1:                    # gloo and NCCL raise this when a peer is gone
            say(f"rank {rank()} lost another rank ({one_line(error)}); go on with: {resume_command(run)}",
                of_all_ranks=False)
        else:
            raise
    finally:
        if run and run.lock:
            run.lock.close()                             # the folder is free again
    return 2


def prepare(s, recipe):
    """Everything that can be refused is looked at here, before a folder is made."""
    if s.threads:
        torch.set_num_threads(s.threads)
    if recipe and rank() == 0:
        print(f"{s.model}/recipe.json: " + " ".join(as_flags(recipe)))
    policy_model, tokenizer = load_policy(s)
    eval_problems = load_data("--eval-data", s.eval_data)[:s.eval_limit or None]
    check_lengths("--eval-data", eval_problems, policy_model, tokenizer, s)
    if s.eval_only:
        print_figures(policy_model, tokenizer, eval_problems, s)
        return [None]
    problems = load_data("--data", s.data)
    check_lengths("--data", problems, policy_model, tokenizer, s)
    if len(problems) < s.prompts_per_step:
        raise BadInput(f"--prompts-per-step {s.prompts_per_step}: --data {s.data} has {len(problems)} problems")
    if s.prompts_per_step % world():
        raise BadInput(f"--prompts-per-step {s.prompts_per_step}: not a multiple of the {world()} processes")
    reward_fn = load_reward(s.reward) if s.reward else None
    if reward_fn:                                        # does it give a number a row?
        reward_fn(problems[:1], [problems[0]["question"]], ["\\boxed{1}"] * s.group_size)
    ref_model = copy.deepcopy(policy_model).requires_grad_(False) if s.kl_coef else None
    if world() > 1:
        compute = choose_device(s)[1]
        policy_model, ref_model = shard(policy_model, compute), ref_model and shard(ref_model.to(compute), compute)
    optimizer = make_optimizer(policy_model, s)
    run = open_run(s)
    if s.resume:
        run.load_checkpoint(policy_model, optimizer)
    run.write("config.json", {"settings": dataclasses.asdict(dataclasses.replace(s, resume=False)), "recipe": recipe,
                              "torch": torch.__version__, "transformers": transformers.__version__})
    if rank() == 0:
        n = sum(p.numel() for p in policy_model.parameters())
        print(f"{s.model}: {n / 1e6:.2f}M parameters in {choose_device(s)[1]} on {policy_model.device}, "
              f"{len(problems)} problems, {len(eval_problems)} held out, {world()} processes; "
              f"run in {run.name}, from step {run.step}")
    return run, policy_model, ref_model, optimizer, tokenizer, problems, eval_problems, reward_fn


def train(run, s, policy_model, ref_model, optimizer, tokenizer, problems, eval_problems, reward_fn):
    run.stop_on_signals()
    train_grpo(policy_model, ref_model, optimizer, tokenizer, problems, eval_problems, s, run, reward_fn)
    if run.step < s.steps:
        run.save_checkpoint(policy_model, optimizer)
        if rank() == 0:
            print(f"\nstopped after step {run.step}; go on with: {resume_command(run)}")
        return 128 + run.signal
    run.after = run.after or evaluate(policy_model, tokenizer, eval_problems, s)[1]
    save_final(policy_model, tokenizer, s, run)
    if rank() == 0:
        print_story(run, eval_problems)
    return 0


def within_memory(settings, update, *args):
    """Out of memory: half the micro-batch, and the update once more. On several ranks the others would wait."""
    try:
        return update(settings, *args)
    except RuntimeError as error:
        if not out_of_memory(error) or world() > 1:
            raise
    settings.micro_batch_tokens = max(settings.micro_batch_tokens // 2, 1)   # outside: `error` held the activations
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tqdm.write(f"out of memory: --micro-batch-tokens is now {settings.micro_batch_tokens}; the update is repeated")
    return update(settings, *args)


def out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "not enough memory", "can't allocate memory"))


def join_ranks():
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def resume_command(run):
    return shlex.join(["python", "train.py", "--output", run.name, "--resume"])


def open_run(s):
    """The run's folder, made and locked; never one that holds something already."""
    folder = Path(s.output or f"runs/{Path(s.model).name}-{time.strftime('%Y%m%d-%H%M%S')}")
    run = Run(gathered_objects(str(folder))[0])
    if not run.folder:
        return run
    try:
        if not s.resume and folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
            raise BadInput(f"--output {folder}: holds a run already; go on with it (--resume) or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        run.lock = open(folder / ".lock", "w")
        if fcntl:
            fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)         # gone with the process, however it ends
    except BlockingIOError:
        raise BadInput(f"--output {folder}: another run is writing there") from None
    except OSError as error:
        raise BadInput(f"--output {folder}: cannot be written ({error.strerror})") from None
    return run


def save_final(model, tokenizer, s, run):
    """final/: a transformers folder, with a recipe.json that brings the run's own flags along."""
    state = {name: full(p.detach()).cpu() for name, p in model.named_parameters()}
    if not run.folder:
        return
    if world() > 1:                                      # a model without FSDP's hooks takes the whole weights
        dtype = choose_device(s)[1]
        model = AutoModelForCausalLM.from_pretrained(s.model, dtype=dtype, use_safetensors=True)
        model.load_state_dict({name: p.to(dtype) for name, p in state.items()}, strict=False)
    folder, beside = run.folder / "final", run.folder / "final.tmp"
    own = {flag_of(f.name)[2:]: getattr(s, f.name) for f in dataclasses.fields(s) if getattr(s, f.name) != f.default
           and f.name not in ("model", "output", "resume", "eval_only", "steps", "seed", "device", "dtype", "reward")}
    own |= {name: os.path.abspath(own[name]) for name in ("data", "eval-data") if os.path.isfile(own.get(name, ""))}
    with run.writing("final"):
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        (beside / "recipe.json").write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)


def print_story(run, eval_problems):
    """One held-out problem, answered before and after; the held-out accuracy, before, during, after."""
    truths = [problem["answer"] for problem in eval_problems]
    right = [score_responses(answers, truths, 1).eq(1.5).tolist() for answers in (run.before, run.after)]
    i = next((i for i, (before, after) in enumerate(zip(*right)) if after and not before), 0)
    print(f"\nquestion  {eval_problems[i]['question']}\nbefore    {run.before[i]}\nafter     {run.after[i]}\n"
          f"truth     {truths[i]}\n")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = " ".join(f"{m['step']}:{m['eval_accuracy']:.3f}" for m in lines if "eval_accuracy" in m)
    print(f"held-out accuracy, step:greedy  {curve}\n"
          f"{run.name}: config.json metrics.jsonl samples.jsonl checkpoint/ final/")


def print_figures(model, tokenizer, problems, s):
    """--eval-only: greedy accuracy, and from G samples a problem accuracy, pass@k and maj@k."""
    G = s.group_size
    greedy, _ = evaluate(model, tokenizer, problems, s)
    sampled, responses = evaluate(model, tokenizer, problems, s, G, s.temperature, s.seed)
    truths = [problem["answer"] for problem in problems]
    correct = (score_responses(responses, truths, G) == 1.5).view(-1, G)                 # (B, G)
    answers = [[extract_boxed(r) for r in responses[j * G:(j + 1) * G]] for j in range(len(problems))]
    print(f"{len(problems)} problems of {s.eval_data}")
    print(f"greedy accuracy           {greedy:.4f}")
    print(f"sampled at temperature {s.temperature:g}  {sampled:.4f}   ({G} samples a problem)")
    for k in sorted({1 << i for i in range(G.bit_length()) if 1 << i <= G} | {G}):
        print(f"pass@{k:<3} {pass_at_k(correct, k):.4f}   maj@{k:<3} {majority_at_k(answers, truths, k):.4f}")


if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:                             # an orderly exit now and then aborts in gloo's threads
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
