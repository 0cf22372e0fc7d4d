"""[G] One training step and [H] the loop around it: GRPO, online.

    sample G answers to each prompt [A] -> score them [B] -> compare siblings [C]
    -> log-probabilities [D] -> clipped objective [E], KL [F] -> gradient step -> and again

Departures from the theory's code map:
- The ids that were sampled are the ids that are trained on: no text is tokenised again.
- A step may take several updates on one rollout. All of them use the old log-probs that the first
  update computes, before any weight has moved.
- The batch is cut into micro-batches, and the loss is divided once, by the size of the whole batch:
  the gradient does not depend on the cut.

    python train.py                                       # the tiny policy learns to reason
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct    # GSM8K, on a GPU
"""

import argparse
import copy
import dataclasses
import hashlib
import html
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

# Threads that wait for each other sleep: if they spin while other programs run, rounding and the
# model itself lose their speed. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import advantage
import logprob
import loss
import reward
import sample
from advantage import advantages_for, is_flat
from logprob import IGNORE, layers_checkpointed, token_logprobs
from loss import grpo_loss, next_kl_coef
from reward import is_right, score_responses, truths_of
from sample import chat_prompt, out_of_memory, sample_groups

# --------------------------------------------------------------------------------------------------
# [G] One step: sample, score, normalise, update

@dataclasses.dataclass
class Batch:
    """The problems of a step: B of them on this GPU."""

    problems: list                   # B dicts, see reward.load_problems
    prompts: list                    # their B prompts, chat template applied
    generators: list | None = None   # of random numbers, one per prompt
    more: object = None              # (attempt, n) -> Batch of n other problems
    resampled: int = 0               # groups that --max-resample has redrawn


def train_step(policy_model, ref_model, optimizer, tokenizer, batch, settings,
               sampler=sample_groups, reward_of=None):
    """One GRPO step on a Batch -> (its metrics, floats by name; the Rollout).

    DeepSeekMath, algorithm 1. ref_model: the frozen reference, None for no KL. `sampler` is called
    like sample_groups. `reward_of(problems, prompts, rollout) -> (N,)` replaces the rule's reward.
    Each of several GPUs has its own batch; the metrics cover all. BadInput: a reward that
    fails or is not (N,) numbers.
    """
    s = settings
    clock = [time.perf_counter()]

    # [A] G answers to each prompt, drawn from the policy as it is now.
    rollout = answers_to(batch, policy_model, tokenizer, s, sampler)
    clock.append(time.perf_counter())

    # [B] One number per answer, (N,); what fails on one GPU fails on all of them.
    agreed(set_rewards, rollout, batch, reward_of)
    if s.max_resample:
        rollout = without_flat_groups(rollout, policy_model, tokenizer, batch, s, sampler,
                                      reward_of)
    add_length_terms(rollout, s)
    clock.append(time.perf_counter())

    # [D] The reference's log-probs. The first update computes the policy's own.
    within_memory(fill_in_logprobs, policy_model, ref_model, rollout, s)

    # [C] Each answer is compared with its siblings: (N,), or (N, S-1) if tokens differ.
    options = advantage_options(rollout, batch, tokenizer, reward_of, s)
    advantages = advantages_for(s.advantage, rollout.rewards, s.group_size, **options)
    rollout.advantages = advantages.to(rollout.labels.device)

    # [D] [E] [F] One gradient step by default. With more steps the answers come from an older
    # policy, which the ratio and its clip correct for.
    updates = []
    for _ in range(s.updates_per_rollout):
        for part in mini_batches(rollout, s):
            updates.append(update(policy_model, optimizer, part, s))
    optimizer.zero_grad()  # the next rollout can use the gradients' memory
    return step_metrics(rollout, batch, updates, clock, s), rollout


def update(policy_model, optimizer, rollout, settings):
    """One gradient step on the rollout -> metrics of the batch."""
    s = settings
    sums, logprobs, entropies = within_memory(gradient_of, policy_model, optimizer, rollout, s)
    # Before the first update no weight has moved: its log-probs are the old ones, all ratios 1.
    if rollout.old_logprobs is None:
        rollout.old_logprobs = logprobs
        rollout.entropies = entropies

    # [G] The gradient step. A step that would write NaN into the weights is skipped and counted.
    grad_norm = clip_grad_norm_(unscaled(optimizer), s.max_grad_norm)
    metrics = update_metrics(sums, grad_norm, logprobs, rollout.old_logprobs)
    if not metrics["skipped_updates"]:
        optimizer.step()
    return metrics | adapt_loss_scale(optimizer, metrics["skipped_updates"])


def gradient_of(policy_model, optimizer, rollout, s):
    """[D] [E] [F] Backward through the loss -> (sums of its metrics; log-probs, entropies)."""
    logprobs = torch.zeros_like(rollout.logprobs)                                      # (N, S-1)
    entropies = torch.zeros_like(rollout.logprobs)                                     # (N, S-1)
    # The loss is divided once, by the rows and tokens of the whole batch. Then micro-batches of n
    # rows, w tokens wide, simply add up: they save memory and change nothing else.
    mask = loss_mask(rollout, s)                                                       # (N, S-1)
    sizes = summed({"n_rows": len(mask), "n_tokens": mask.sum()})
    sums = {}
    optimizer.zero_grad()
    for part, here, weight in micro_batches(rollout, s):
        # [D] of the policy as it is now, with a gradient: (n, w-1)
        logp, entropies[here] = logprobs_of(policy_model, part, s)
        logprobs[here] = logp.detach()
        # [E] [F] against the policy that drew the answers, and against the reference
        old = logp.detach() if part.old_logprobs is None else part.old_logprobs
        value, metrics = grpo_loss(logp, old, part.ref_logprobs, part.advantages,
                                   loss_mask(part, s), **loss_options(part, s), **sizes)
        # Both factors are 1 except on several GPUs (micro_batches) and in float16 (MasterAdamW).
        (value * weight * loss_scale_of(optimizer)).backward()
        for name in metrics:
            sums[name] = sums.get(name, 0) + metrics[name] * (weight > 0)
    return sums, logprobs, entropies


# --------------------------------------------------------------------------------------------------
# [H] The loop: every step draws fresh answers from the policy as it is now

def train_grpo(policy_model, ref_model, optimizer, tokenizer, problems, eval_problems, settings,
               run=None, sampler=sample_groups, reward_of=None, reward_model=None):
    """Steps run.step + 1 .. settings.steps on `problems` (dicts, see reward.load_problems).

    `sampler` and `reward_of` are those of train_step; `reward_model` is the model behind
    `reward_of`, if it is trained further with every new reference. Everything random follows from
    (seed, step, prompt): a resumed run only needs its step, and the answers do not depend on the
    number of GPUs. The settings come from plan_memory(). BadInput: too few problems.
    """
    s = settings
    check_arguments(problems, eval_problems, s)
    run = run or Run()
    held_out = partial(evaluate, policy_model, tokenizer, eval_problems, s, sampler, reward_of)
    if not run.held_out:
        figures, run.before = held_out()
        run.held_out = [(0, figure_of(figures))]
        run.log({"step": 0, **figures})
    with tqdm(total=s.steps, initial=run.step, desc="GRPO", disable=rank() > 0) as bar:
        for step in range(run.step + 1, s.steps + 1):
            if run.stopped():
                break
            set_learning_rate(optimizer, step, s)
            # Fresh problems and fresh answers: no step reuses the answers of an earlier step.
            batch = batch_of_step(tokenizer, problems, step, s)
            metrics, rollout = train_step(policy_model, ref_model, optimizer, tokenizer, batch, s,
                                          sampler, reward_of)
            check_sampler(rollout, s)
            run.log_samples(step, batch, rollout, s.renew_reference or not ref_model)
            metrics = {"step": step, "lr": optimizer.param_groups[0]["lr"], **metrics}
            if reward_model:
                remember(reward_model, rollout, step, s)
            # Iterative GRPO: a new reference, and the reward model is trained further.
            if s.renew_reference and step % s.renew_reference == 0:
                metrics |= renew(ref_model, policy_model, reward_model, step, s)
            if step % s.eval_every == 0 or step == s.steps:
                figures, run.after = held_out()
                metrics |= figures
                run.held_out.append((step, figure_of(figures)))
                keep_best(policy_model, tokenizer, s, run)
            run.log(metrics)
            if "eval_accuracy" in metrics:
                write_page(run, policy_model, ref_model, tokenizer, s)
            if s.kl_band and math.isfinite(metrics["approx_kl"]):  # a skipped step says nothing
                s.kl_coef = next_kl_coef(s.kl_coef, metrics["approx_kl"], *s.kl_band)
            run.kl_coef = s.kl_coef
            show(bar, metrics, run)
            if step % s.save_every == 0 or step == s.steps:
                save_checkpoint(run, policy_model, optimizer)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows: helpers of train_step and of train_grpo, known
# failures, settings (every flag), loading, weights and optimizer, LoRA, a count of the memory,
# several GPUs, the files of a run, checkpoints, the program. From here on `s` is the Settings.
#
# Helpers of train_step: the options of [B], [C] and [E][F], log-probs by micro-batches

# The flags that grpo_loss takes under the same names
OF_LOSS = ("clip_eps", "clip_eps_high", "kl_coef", "objective", "ratio", "kl_estimator",
           "aggregate", "max_new_tokens")


def loss_options(part, s):
    """The flags of [E][F]; with --sampler-correction also the sampler's log-probs."""
    options = {name: getattr(s, name) for name in OF_LOSS}
    if s.sampler_correction:
        # The sampler's own numbers come from other kernels than [D]'s; plain GRPO ignores them.
        options["sampler_logprobs"] = part.logprobs
        options["sampler_cap"] = s.sampler_correction
    return options


def answers_to(batch, model, tokenizer, s, sampler):
    """[A] -> Rollout; a fault on one GPU ends the step on all of them."""
    if s.around_best:
        # The rule decides which answers are best, and it needs the batch's true answers.
        truths = truths_of(batch.problems)
        sampler = partial(sample.sample_around, best=s.around_best, rewards_of=lambda _, responses:
                          score_responses(responses, truths, s.group_size // 2))
    with whole_weights(model):
        return agreed(sampler, model, tokenizer, batch.prompts, s.group_size, s.max_new_tokens,
                      s.temperature, batch.generators)


def set_rewards(rollout, batch, reward_of=None):
    """[B] Set rollout.rewards and rollout.rule_rewards, (N,) each; equal without a `reward_of`."""
    N = len(rollout.responses)
    truths = truths_of(batch.problems)
    rewards = score_responses(rollout.responses, truths, N // len(truths))
    rollout.rule_rewards = rewards  # always, because accuracy comes from them
    if reward_of:
        try:
            rewards = reward_of(batch.problems, batch.prompts, rollout)
        except (BadInput, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RewardFailed(f"reward_of: {type(error).__name__}: {one_line(error)}") from None
        fits = isinstance(rewards, torch.Tensor) and rewards.shape == (N,)
        if not (fits and rewards.is_floating_point() and rewards.isfinite().all()
                and not rewards.requires_grad):
            raise RewardFailed(f"reward_of: it must return a tensor of {N} rewards, one per answer,"
                               f" floats without a gradient, and gave {one_line(rewards)[:60]}")
    rollout.rewards = rewards.cpu()


def add_length_terms(rollout, s):
    """GR3's rescaling and DAPO's penalty for answers that are almost too long, if asked for."""
    lengths = rollout.mask.sum(dim=1).cpu()                                            # (N,)
    # GR3 has no meaning for negative rewards, but a user's function may give some.
    with telling("--length-rescale:", RewardFailed):
        if s.length_rescale:
            rollout.rewards = reward.length_rescaled(rollout.rewards, lengths, s.group_size,
                                                     s.length_rescale)
    if s.overlong_buffer:
        rollout.rewards = rollout.rewards + reward.overlong_penalty(lengths, s.answer_tokens,
                                                                    s.overlong_buffer)


def advantage_options(rollout, batch, tokenizer, reward_of, s):
    """What the kinds of [C] read besides the rewards; plain GRPO reads only the last two."""
    candidates = None
    if s.advantage == "shape":
        words = []  # the texts of each answer's tokens, without its end token
        for row, finished in zip(rollout.labels, rollout.finished):
            ids = row[row != IGNORE].tolist()
            ids = ids[:-1] if finished else ids
            words.append(sample.words_of(tokenizer, ids))
        candidates = reward.boxed_candidates(words, truths_of(batch.problems), s.group_size)
    # With a user's own reward, an answer counts as right if its reward is positive.
    right = None if reward_of else is_right(rollout.rule_rewards)
    return {"entropies": rollout.entropies, "mask": rollout.mask, "right": right,
            "step_rewards": rollout.step_rewards, "candidates": candidates,
            "scale_by_std": s.scale_by_std, "clip": s.clip_advantages}


def loss_mask(rollout, s):
    """The tokens in the loss, (N, S-1): the responses, with --mask-truncated only finished ones."""
    # Truncated ones are masked only here: their rewards belong to their siblings' mean.
    return rollout.mask & rollout.finished[:, None] if s.mask_truncated else rollout.mask


# No stage imports another, and both ask these questions: [D] gets the answers of [A].
logprob.flash_works = sample.flash_works
logprob.out_of_memory = sample.out_of_memory


def logprobs_of(model, part, s, with_entropy=True):
    """[D] of one micro-batch: log-probs and entropies, (n, w-1), or 0 where nobody needs these."""
    # A sharded model must be entered through a method that FSDP knows, see shard().
    score = getattr(model, "token_logprobs", partial(token_logprobs, model))
    groups = part.group_ids if s.share_prompts else None
    # Without a gradient nothing is kept that checkpointing could save.
    with layers_checkpointed(model, s.gradient_checkpointing and torch.is_grad_enabled()):
        found = score(part.input_ids, part.labels, s.temperature, with_entropy, groups)
    return found if with_entropy else (found, 0.0)


@torch.no_grad()
def logprobs_of_all(model, rollout, s, with_entropy=True):
    """[D] of the whole rollout, micro-batch by micro-batch: log-probs and entropies, (N, S-1)."""
    logprobs = torch.zeros_like(rollout.logprobs)
    entropies = torch.zeros_like(rollout.logprobs)
    for part, here, _ in micro_batches(rollout, s):
        logprobs[here], entropies[here] = logprobs_of(model, part, s, with_entropy)
    return logprobs, entropies


def fill_in_logprobs(policy_model, ref_model, rollout, s):
    """[D] before any update: the reference's log-probs, and the policy's if needed now."""
    if s.offload:  # memory is short: free the rollout's cache and graphs for the update
        sample.release(policy_model)
    if ref_model is not None:
        rollout.ref_logprobs, _ = logprobs_of_all(ref_model, rollout, s, with_entropy=False)
    # Usually the first update computes the policy's log-probs. But [C] may need entropies, and with
    # mini-batches the policy moves before the last one is scored.
    if s.minibatches > 1 or s.advantage in ("gtpo", "grpo-s"):
        rollout.old_logprobs, rollout.entropies = logprobs_of_all(policy_model, rollout, s)


def mini_batches(rollout, s):
    """--minibatches: the groups split in order, as evenly as possible -> Rollouts."""
    if s.minibatches == 1:
        return [rollout]  # no copy: the first update stores its log-probs there
    rows = torch.arange(len(rollout.responses))                                        # (N,)
    groups = rows.view(-1, s.group_size)                                               # (B, G)
    parts = groups.tensor_split(s.minibatches)
    return [rollout.take(rows.flatten().tolist()) for rows in parts]


def micro_batches(rollout, s):
    """Yields for each: its rows as a Rollout, their place in (N, S-1), the weight of its loss."""
    cuts = logprob.micro_batches(rollout.labels, rollout.group_ids, s.micro_batch_tokens,
                                 s.share_prompts)
    # Answers differ in length, so GPUs may have different numbers of micro-batches. All must run
    # the same number, or FSDP's gathers wait for ever: a GPU with fewer runs its last one again,
    # with weight 0. And FSDP averages the gradients of the GPUs, but we need their sum: so the
    # weight of a real pass is the number of GPUs.
    most = max(gathered_objects(len(cuts)))
    for n in range(most):
        rows, width = cuts[min(n, len(cuts) - 1)]
        weight = world() if n < len(cuts) else 0
        rows = rows.tolist()
        yield rollout.take(rows, width), (rows, slice(width - 1)), weight


def update_metrics(sums, grad_norm, logprobs, old_logprobs):
    """The metrics of all micro-batches, on all GPUs, and whether to skip the step."""
    metrics = summed(sums)
    metrics["grad_norm"] = float(full(grad_norm))
    finite = math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])
    metrics["skipped_updates"] = int(not finite)
    metrics["ratio_max_error"] = largest_ratio_error(logprobs, old_logprobs)
    return metrics


def largest_ratio_error(logprobs, old_logprobs):
    """max over all tokens, on all GPUs, of |exp(log pi - log pi_old) - 1|."""
    largest = (logprobs - old_logprobs).expm1().abs().max()
    return max(gathered_objects(float(largest)))


def step_metrics(rollout, batch, updates, clock, s):
    """The metrics of a step: its answers, the mean of its updates, its time."""
    lengths = gathered(rollout.mask.sum(dim=1).float())                                # (N,)
    rewards = gathered(rollout.rewards)                                                # (N,)
    # Accuracy and format always come from the rule; they are NaN if no true answer is known.
    known = gathered(rollout.rule_rewards)
    known = known[~known.isnan()]
    entropy = summed({"entropy": rollout.entropies.sum()})["entropy"]
    started, sampled, scored = clock
    seconds = time.perf_counter() - started
    metrics = {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(correction=0),
        "accuracy": is_right(known).float().mean(),
        "format_rate": reward.has_format(known).float().mean(),
        # Groups whose rewards are all equal teach nothing: all of their advantages are 0.
        "zero_variance_groups": is_flat(rewards, s.group_size).float().mean(),
        "response_length_mean": lengths.mean(),
        "response_length_p95": lengths.quantile(0.95),
        "truncated_fraction": (~gathered(rollout.finished)).float().mean(),
        "tokens": lengths.sum(),
        "entropy": entropy / lengths.sum(),  # per token, of the policy that drew the answers
        "kl_coef": s.kl_coef,
        # trainer against sampler, before any weight has moved: only rounding
        "sampler_ratio_error": largest_ratio_error(rollout.old_logprobs, rollout.logprobs),
        **{name: sum(u[name] for u in updates) / len(updates) for name in updates[0]},
        "ratio_max_error": max(u["ratio_max_error"] for u in updates),
        "skipped_updates": sum(u["skipped_updates"] for u in updates),
        "seconds_sampling": sampled - started,
        "seconds_scoring": scored - sampled,
        "seconds_training": seconds - (scored - started),
        "peak_memory_gb": peak_memory() / 1e9,
        "tokens_per_second": lengths.sum() / seconds,
    }
    if s.max_resample:
        metrics["resampled_groups"] = sum(gathered_objects(batch.resampled))
    for name, values in (rollout.reward_parts or {}).items():
        values = gathered(values)  # NaN where this reward does not apply
        metrics[f"reward/{name}"] = values.nanmean()
        centred = values - values.nanmean()
        metrics[f"reward_std/{name}"] = centred.square().nanmean().sqrt()
    return {name: float(value) for name, value in metrics.items()}


def peak_memory():
    """Bytes: of the allocator on CUDA, else of the whole process; NaN if it is unknown."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with suppress(ImportError):  # Windows
        import resource
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return math.nan


# --------------------------------------------------------------------------------------------------
# Dynamic sampling (DAPO, arXiv 2503.14476): a group whose rewards are all equal teaches nothing and
# is replaced by a group of another problem

def without_flat_groups(rollout, model, tokenizer, batch, s, sampler, reward_of):
    """Replace groups without variance -> Rollout; `batch` is changed in place."""
    G = s.group_size
    N = len(rollout.responses)
    for attempt in range(1, s.max_resample + 1):  # groups that stay flat have advantages of 0
        flat = torch.where(is_flat(rollout.rewards, G))[0].tolist()
        if not any(gathered_objects(len(flat))):
            break  # every group of every rank teaches something
        # A rank that needs no group still draws one: the others wait for it in FSDP.
        others = batch.more(attempt, max(len(flat), 1))
        new = answers_to(others, model, tokenizer, s, sampler)
        agreed(set_rewards, new, others, reward_of)
        # A new group takes the place of a flat one, unless it is flat itself.
        useful = torch.where(~is_flat(new.rewards, G))[0].tolist()
        rows = list(range(N))
        for j, k in zip(flat, useful):
            batch.problems[j] = others.problems[k]
            batch.prompts[j] = others.prompts[k]
            start = N + k * G
            rows[j * G:(j + 1) * G] = range(start, start + G)
        both = sample.joined(rollout, new).take(rows)
        rollout = dataclasses.replace(both, group_ids=rollout.group_ids)
        batch.resampled += len(flat)
    return rollout


# --------------------------------------------------------------------------------------------------
# Helpers of train_grpo: problems and random numbers of a step, evaluation, the bar

def check_arguments(problems, eval_problems, s):
    """BadInput for what would fail in the middle of a step."""
    if not eval_problems:
        raise BadInput(f"--eval-data {s.eval_data or s.data}: no problem is left to hold out")
    if len(problems) < s.prompts_per_step and not s.eval_only:
        raise BadInput(f"--prompts-per-step {s.prompts_per_step}: --data {s.data} has only "
                       f"{len(problems)} to train on")


def batch_of_step(tokenizer, problems, step, s, attempt=0, n=None):
    """This GPU's share of the step's B problems -> Batch; in a resampling attempt, n others."""
    B = s.prompts_per_step
    # Every epoch has a new order; the few problems that do not fill a step are left out.
    epoch, k = divmod(step - 1, len(problems) // B)  # steps count from 1
    order = shuffled(len(problems), s.seed, 0, epoch)
    order = order[k * B:(k + 1) * B]
    names = (s.seed, step)
    if attempt:
        names = (s.seed, "resample", step, attempt)
        # The step's own problems come last.
        order = sorted(shuffled(len(problems), *names), key=order.__contains__)
    mine = share_of_rank(B)[:n]  # whole groups: one split over GPUs would have two means
    chosen = [problems[order[j]] for j in mine]
    prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in chosen]
    generators = [seeded(*names, j) for j in mine]
    more = partial(batch_of_step, tokenizer, problems, step, s)
    return Batch(chosen, prompts, generators, more)


def check_sampler(rollout, s):
    """Give the fast forms up if sampler and trainer differ by more than 0.1 nats in the mean."""
    apart = (rollout.logprobs - rollout.old_logprobs).abs().sum()
    sums = summed({"nats": apart, "tokens": rollout.mask.sum()})
    mean = sums["nats"] / sums["tokens"]
    if mean > 0.1 and not sample.PLAIN:
        give_up(s, f"sampler and trainer differ by {mean:.2g} nats a token", sample, logprob)


def give_up(s, reason, *stages):
    """No fast form of these stages is used any more."""
    for stage in stages:
        stage.PLAIN = reason
    s.share_prompts = False
    say(f"fast forms given up: {reason}; what follows is slower")


def shuffled(n, *names):
    return torch.randperm(n, generator=seeded(*names)).tolist()


def seeded(*names, device="cpu"):
    """A random generator that follows from these numbers and words alone."""
    # A hash, because seed + step would be the same for step 2 of seed 0 and step 1 of seed 1.
    digest = hashlib.sha256(repr(names).encode()).digest()
    # manual_seed takes a signed 64-bit number: one bit fewer than eight bytes have.
    number = int.from_bytes(digest[:8], "little") >> 1
    return torch.Generator(device).manual_seed(number)


def remember(reward_model, rollout, step, s):
    """Keep pairs of this step's answers to train the reward model: the same on every rank."""
    rows = sum(gathered_objects(rollout.judged), [])
    generator = seeded(s.seed, "pairs", step)
    reward.collect_pairs(reward_model, rows, s.group_size, generator)


def renew(ref_model, policy_model, reward_model, step, s):
    """DeepSeekMath's iterative GRPO: the reference becomes the current policy -> figures."""
    follow(ref_model, policy_model)
    figures = {"reference_renewed": 1.0}
    if reward_model:  # every rank takes the same steps on the same pairs
        figures |= reward.train_reward_model(reward_model, seeded(s.seed, "reward model", step))
        for p in reward_model.model.parameters() if world() > 1 else ():
            dist.broadcast(p.data, 0)  # a GPU's sums may differ in their last digit
    return figures


@torch.no_grad()
def follow(ref_model, policy_model):
    """Copy the current policy into the reference."""
    for part in [*ref_model.modules(), *policy_model.modules()]:
        if hasattr(part, "reshard"):
            part.reshard()  # FSDP may still hold gathered weights: writes to them are lost
    for ref, p in zip(ref_model.parameters(), policy_model.parameters()):
        ref.copy_(p)


def figure_of(figures):
    """The figure that judges an evaluation: the user's own reward, or else accuracy."""
    return figures.get("eval_reward", figures["eval_accuracy"])


def keep_best(model, tokenizer, s, run):
    """--keep-best: save best/ beside final/ if the held-out figure is the highest so far."""
    *others, (_, figure) = run.held_out[1:]  # the first is from before training
    if s.keep_best and all(figure > other for _, other in others):
        save_folder(model, tokenizer, run, "best")


def set_learning_rate(optimizer, step, s):
    """A linear warm-up; then constant, or a linear or cosine decay to 0 after the last step."""
    # At first Adam's second moment is a mean of few gradients: small steps until it is reliable.
    rate = min(1.0, step / max(s.warmup_steps, 1))
    # 1 until the end of the warm-up; the last step's rate is above 0, so that it is not wasted.
    decaying = max(s.steps - s.warmup_steps, 1)
    left = min(1.0, (s.steps - step + 1) / decaying)
    if s.lr_schedule == "linear":
        rate *= left
    elif s.lr_schedule == "cosine":
        rate *= (1 - math.cos(math.pi * left)) / 2
    for group in optimizer.param_groups:
        group["lr"] = s.lr * rate


def evaluate(model, tokenizer, problems, s, sampler=sample_groups, reward_of=None,
             group_size=1, temperature=0.0, seed=0):
    """Greedy answers (or group_size sampled ones) to all problems -> (figures, responses)."""
    B = s.prompts_per_step * s.group_size // group_size  # as many rows at a time as a step has
    mine = share_of_rank(len(problems))

    def answers():
        rows = []
        starts = range(0, len(mine), B)
        for start in tqdm(starts, "evaluation", leave=False, disable=rank() > 0):
            chosen = mine[start:start + B]
            part = [problems[j] for j in chosen]
            prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in part]
            generators = [seeded(seed, "evaluation", j) for j in chosen]
            rollout = sampler(model, tokenizer, prompts, group_size, s.max_new_tokens, temperature,
                              generators)
            set_rewards(rollout, Batch(part, prompts), reward_of)
            judged = rollout.rule_rewards.tolist(), rollout.rewards.tolist()
            rows += zip(rollout.responses, *judged)
        return rows

    # Not RewardFailed, which saves the weights as those of the step before: they have moved.
    # The weights stay gathered for all batches, because ranks may have different numbers of them.
    with telling("", BadInput, of=RewardFailed), whole_weights(model):
        found = gathered_objects(agreed(answers))
    responses, rewards, own = zip(*sum(found, []))
    known = torch.tensor(rewards)
    known = known[~known.isnan()]
    # The rule judges accuracy: NaN if no true answer is known
    figures = {"eval_accuracy": float(is_right(known).float().mean())}
    if reward_of:
        figures["eval_reward"] = sum(own) / len(own)
    return figures, list(responses)


def show(bar, metrics, run):
    """Update the bar, trouble first; after an evaluation print one answer, to watch it change."""
    words = [f"{run.skipped} SKIPPED"] if run.skipped else []
    words.append("reward {reward_mean:.2f}")
    if metrics["format_rate"] > 0:  # else nothing is boxed, and the rule has nothing to judge
        words.append("acc {accuracy:.2f}")
    words.append(f"held out {run.held_out[-1][1]:.2f}")
    words.append("len {response_length_mean:.0f}")
    words.append("KL {approx_kl:.3f}")
    bar.set_postfix_str(", ".join(words).format(**metrics))
    bar.update()
    if "eval_accuracy" in metrics:
        say(f"step {metrics['step']}, first held out: {one_line(run.after[0])[-100:]}")


# --------------------------------------------------------------------------------------------------
# The known failures of GRPO runs: how the metrics show them, and which flag may help

# How far rounding alone moves the worst token's ratio from 1 before the first update, at most
NORMAL_RATIO_ERROR = {torch.float32: 0.1, torch.float16: 0.2, torch.bfloat16: 1.0}


def symptoms(history, dtype=torch.float32):
    """Metrics of the steps so far -> {what: (how bad, one line with its number)}. Pure.

    `dtype` is that of the model's weights. Most numbers are means over the last ten steps.
    Some of these states are normal in a healthy run; README, "Reading a run", says more.
    """
    def mean_of(name, rows=history[-10:]):
        # A metric that is null counts as NaN, and no comparison with NaN is true.
        values = [row.get(name) for row in rows]
        values = [math.nan if value is None else value for value in values]
        return sum(values) / len(values) if values else math.nan

    # Compare twenty steps with the twenty before: lengths and accuracies of single steps jump.
    last = history[-20:]
    before = history[-40:-20] if len(history) >= 40 else []
    growth = mean_of("response_length_mean", last) / mean_of("response_length_mean", before) - 1
    gain = mean_of("accuracy", last) - mean_of("accuracy", before)
    # A jump shows in one step, so this is no mean of ten.
    norm = mean_of("grad_norm", history[-1:])
    earlier = history[-40:-20] if len(history) > 25 else []
    usual = mean_of("grad_norm", earlier)
    kl = mean_of("approx_kl")
    # Right after a renewal the KL is 0 in any case; with --renew-reference 1, in every step.
    stuck = kl == 0 and mean_of("grad_norm") > 0 and "reference_renewed" not in history[-1]
    flat = mean_of("zero_variance_groups")
    cut = mean_of("truncated_fraction")
    ratio = mean_of("sampler_ratio_error")
    entropy = mean_of("entropy")
    # How far each of several rewards has risen: the policy may learn only the easier one.
    rewards = [name for name in history[-1] if name.startswith("reward/")]
    first = history[:5]
    risen = [(mean_of(name) - mean_of(name, first), name) for name in rewards]
    risen = sorted(risen) or [(0.0, "")]
    missed, least = risen[0]
    gained, most = risen[-1]
    known = [
        ("length", growth > 0.2 and gain < 0.01, growth,
         f"in 20 steps answers grew {growth:.0%}, accuracy {gain:.3f}: --length-rescale 0.33"),
        ("gradient", norm > 10 * usual, norm,
         f"the gradient norm is {norm:.3g}, it was {usual:.3g}; if that lasts: a lower --lr"),
        ("kl", kl > 0.05, kl,
         f"KL is {kl:.3f} nats per token; if the reward falls: --kl-band 0.02 0.05"),
        ("one reward", kl > 0.2 and gained > 0.2 and missed < 0.01, kl,
         f"{most} has risen by {gained:.2f}, {least} by {missed:.2f}, and KL is {kl:.2f}: "
         "the policy learns only the easier reward; a lower --temperature"),
        ("reference", stuck and len(history) > 3, 1,
         "KL is exactly 0 while the policy has gradients: does the reference share its weights, "
         "or is --lr too small to move it?"),
        ("flat", flat > 0.5, flat,
         f"{flat:.0%} of the groups have no variance; if most answers are wrong: --max-resample 3, "
         "or if they lack the rule's box: solved examples in --system-prompt"),
        ("cut", cut > 0.95 and len(history) >= 10, cut,
         f"{cut:.0%} of the answers are cut: a longer --max-new-tokens, or a model whose end token "
         "is the one that its chat template writes"),
        ("ratio", ratio > NORMAL_RATIO_ERROR[dtype], ratio,
         f"before the first update a ratio is off 1 by {ratio:.2f}: sampler "
         "and trainer differ; --sampler-correction 2.0, --dtype float32"),
        ("entropy", entropy < 0.1 * mean_of("entropy", first), 1 / max(entropy, 1e-9),
         f"entropy is {entropy:.4f} nats per token, a tenth of what it was; if most answers are "
         "wrong: --clip-eps-high 0.28"),
    ]
    return {what: (bad, line) for what, holds, bad, line in known if holds}


# --------------------------------------------------------------------------------------------------
# Settings: every flag, one per line, with its default, its bounds and its reason. A config file
# overrides the defaults, and the command line overrides both.

HERE = Path(__file__).resolve().parent
TINY = HERE / "tests" / "tiny"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ROUNDINGS = ("threshold", "nearest")
ABOVE_0 = 1e-12
BIG = 2**31 - 1


class BadInput(Exception):
    """The user's input cannot be used: one line on standard error, exit status 2."""


class RewardFailed(BadInput):
    """A user's function raised, or gave no number: the run can be resumed from the step before."""


@contextmanager
def telling(flags, kind=BadInput, of=ValueError):
    """A ValueError of a stage becomes one line that begins with these flags."""
    # of=Exception is for reading foreign files: what can be wrong with them has no list.
    try:
        yield
    except of as error:
        raise kind(f"{flags} {one_line(error)}".strip()) from None


def one_line(text):
    """Text in one line; an exception is cut, because some are pages long."""
    line = " ".join(str(text).split())
    return line[:600] if isinstance(text, Exception) else line


def flag(default, help, low=0, high=BIG, kept=True, free=False, head=None, **how):
    """A field of Settings. low, high: the bounds of a number. kept: config.json holds it. free: a
    resumed run may change it. head: a group of flags begins here. `how` goes to add_argument.
    """
    how["help"] = help if default in (None, "") else f"{help} [{default}]"
    return dataclasses.field(default=default, metadata={
        "bounds": (low, high), "kept": kept, "free": free, "head": head, "how": how})


def path(text, folder=""):
    """An absolute file, or file.py:function: a resumed run may start in another folder."""
    file, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    found = os.path.abspath(os.path.join(folder, file))
    # What does not exist in this folder is a name: gsm8k, or a model on the hub.
    return found + colon + function if file and os.path.exists(found) else text


@dataclasses.dataclass
class Settings:
    model: path = flag(str(TINY), "hub name or folder of the policy, or a run's folder",
                       head="model, data, rewards")
    data: path = flag("gsm8k", "training problems: a JSONL file, `gsm8k` or `gsm8k:test`")
    eval_data: path = flag("", "held-out problems; default: gsm8k:test, or a tenth of your --data")
    question_field: str = flag("question", "the column of the JSONL that holds the question")
    answer_field: str = flag("answer", "the column that ends in `#### ` and the final answer")
    system_prompt: str = flag(BOXED, "system message before every question; empty for none")
    reward: path = flag(None, "own file.py:function, called like TRL's, or our `rule`, `think`; "
                        "several are added", nargs="+", action="extend")
    reward_weights: float = flag(None, "one for each --reward; default: 1", low=-BIG, nargs="+")
    step_reward: path = flag(None, "file.py:function that rewards steps: process supervision")
    reward_model: path = flag("", "folder of a sequence classifier; its scores are the rewards")
    reward_model_lr: float = flag(2e-5, "with --renew-reference, which trains it", low=ABOVE_0)
    reply: path = flag(None, "file.py:function that gives the user's next message: a tool, say")
    max_turns: int = flag(4, "at most this many answers in a --reply conversation", low=1)
    steps: int = flag(500, "number of rollouts", low=1, free=True, head="the rollout")
    prompts_per_step: int = flag(8, "B, questions per step", low=1)
    group_size: int = flag(8, "G, answers per question: their mean is the baseline", low=2)
    max_new_tokens: int = flag(512, "an answer is cut at this length", low=1)
    max_prompt_tokens: int = flag(0, "longer prompts are left out; 0: an error if one does not fit")
    temperature: float = flag(1.0, "of the sampler, and of the log-probs", low=ABOVE_0)
    max_resample: int = flag(0, "DAPO: rounds in which groups without variance are drawn anew")
    around_best: int = flag(0, "half of a group continues this many best answers of the other")
    clip_eps: float = flag(0.2, "the ratio is clipped below 1 - this and above 1 + this", high=1,
                           head="the objective")
    clip_eps_high: float = flag(None, "upper clip at 1 + this: DAPO's clip-higher, 0.28")
    kl_coef: float = flag(0.04, "beta; 0: no KL, and no reference in memory")
    kl_estimator: str = flag("k3", "estimator of the KL", choices=loss.KL_ESTIMATORS)
    aggregate: str = flag("sequence", "how tokens are averaged", choices=loss.AGGREGATES)
    ratio: str = flag("token", "ratio per token, or per sequence: GSPO", choices=loss.RATIOS)
    objective: str = flag("clip", "clip, or CISPO's weighted log-probs", choices=loss.OBJECTIVES)
    sampler_correction: float = flag(0.0, "weight tokens by min(trainer / sampler, this): 2.0")
    mask_truncated: bool = flag(False, "leave truncated answers out of the loss")
    renew_reference: int = flag(0, "every so many steps the reference becomes the policy; 0: never")
    kl_band: float = flag(None, "LOW HIGH: adapt beta to keep the KL there: 0.02 0.05", nargs=2)
    advantage: str = flag("group", "how siblings are compared", choices=advantage.ADVANTAGES,
                          head="the advantage")
    scale_by_std: bool = flag(True, "divide the advantages by the group's std; off: Dr. GRPO")
    clip_advantages: float = flag(None, "clip advantages to -this and this: 5", low=ABOVE_0)
    length_rescale: float = flag(0.0, "GR3's alpha: rewards shrink with length, 0.33")
    overlong_buffer: int = flag(0, "DAPO: the last tokens before the limit cost up to 1")
    lr: float = flag(1e-6, "AdamW's learning rate, after the warm-up", low=ABOVE_0,
                     head="the update")
    lr_schedule: str = flag("constant", "after the warm-up; others end at 0", choices=SCHEDULES)
    weight_decay: float = flag(0.0, "AdamW's")
    lora_rank: int = flag(0, "LoRA: train factors of this rank for every Linear; 0: all weights")
    lora_alpha: float = flag(None, "W = W0 + this / rank * B A; default: 2 rank", low=ABOVE_0)
    warmup_steps: int = flag(10, "the learning rate rises linearly over these")
    updates_per_rollout: int = flag(1, "passes over the answers of a rollout", low=1)
    minibatches: int = flag(1, "gradient steps per pass, each on its share of the groups", low=1)
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm", low=ABOVE_0)
    share_prompts: bool = flag(True, "run a prompt once for its whole group in the update",
                               head="only memory and time; auto: the fastest that fits")
    plain: bool = flag(False, "no fast form at all: slow, and works everywhere", free=True)
    micro_batch_tokens: int = flag("auto", "tokens per forward and backward pass", low=1, free=True)
    gradient_checkpointing: bool = flag("auto", "recompute layers to save memory", free=True)
    offload: bool = flag("auto", "keep masters and moments in host memory", free=True)
    eval_every: int = flag(50, "steps between evaluations", low=1, free=True,
                           head="measuring and keeping")
    eval_limit: int = flag(200, "held-out problems to evaluate; 0: all")
    save_every: int = flag(50, "steps between checkpoints", low=1, free=True)
    keep_best: bool = flag(False, "also keep best/, by held-out accuracy")
    page: bool = flag(True, "write page.html at every evaluation", free=True)
    seed: int = flag(0, "of the problems' order and of the sampling", high=2**32)
    device: str = flag("auto", "cuda, mps or cpu; auto: the first of them that is available")
    dtype: str = flag("auto", "of the model's weights; auto: bfloat16 where that is fast",
                      choices=DTYPES)
    rounding: str = flag("threshold", "of half-precision weights: each at a threshold of its own, "
                         "or to nearest, which loses small steps", choices=ROUNDINGS)
    threads: int = flag(0, "on the CPU; 0: torch's choice. Small models: use 1", 0, 1024, free=True)
    config: path = flag("", "JSON of flags and values, like a run's config.json", kept=False,
                        head="for this call only")
    output: str = flag("", "folder of the run; default: runs/MODEL-TIME", kept=False)
    resume: str = flag("", "continue the run in this folder", kept=False, free=True)
    eval_only: bool = flag(False, "evaluate --model, greedy and sampled, and stop", kept=False)
    trace: bool = flag(False, "print one step stage by stage, and stop", kept=False)
    dry_run: bool = flag(False, "count the memory of these flags, and stop", kept=False, free=True)

    @property
    def answer_tokens(self):
        """The most tokens that the policy writes in a row; with --reply it has several turns."""
        return self.max_new_tokens * (self.max_turns if self.reply else 1)

    @property
    def is_whole(self):
        """Whether a rank has all weights, and no shard: with LoRA only factors have gradients."""
        return world() == 1 or self.lora_rank > 0


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(f"{message} (--help lists the flags)")


def given_flags(argv, folder=""):
    """The flags in argv, paths from `folder` -> {name: value}, of their types, within bounds."""
    # Without defaults, the result holds only the flags that were given.
    parser = Parser(prog="train.py", usage="train.py [--FLAG VALUE ...]", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS,
                    description="Group Relative Policy Optimization. See README.md. [] holds "
                    "the default, {} the tiny policy's value, which counts without --model.")
    tiny = json.loads((TINY / "grpo.json").read_text(encoding="utf-8"))
    for field in FIELDS.values():
        if head := field.metadata["head"]:
            group = parser.add_argument_group(head)
        how = {"type": partial(value_of, field, folder)}
        if field.type is bool:
            how = {"action": argparse.BooleanOptionalAction}
        how |= field.metadata["how"]
        if field.name in tiny:
            how["help"] += f" {{{tiny[field.name]}}}"
        group.add_argument(flag_of(field.name), **how)
    return vars(parser.parse_args(argv))


def value_of(field, folder, text):
    """The text of a flag in its type, for argparse, which prints what this raises."""
    if field.type is path:
        return path(text, folder)
    if field.type is str or text == field.default:
        return text  # auto
    low, high = field.metadata["bounds"]
    with suppress(ValueError):
        value = field.type(text)
        if low <= value <= high:  # false for NaN
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no {field.type.__name__} from {low} to {high}")


def flag_of(name):
    return "--" + name.replace("_", "-")


def parse(argv):
    """Flags -> Settings: the defaults, then a config file, then `argv`; None: the command line."""
    if isinstance(argv, str) or not all(isinstance(word, str) for word in argv or ()):
        raise BadInput(f"{argv!r}: flags and values are texts, as in ['--steps', '3']")
    given = given_flags(argv)
    if "resume" in given:
        return resumed_settings(given)
    layers = [given]
    if "config" in given:
        layers.insert(0, read_config(given["config"]))
    if not any("model" in layer for layer in layers):
        own = str(TINY / "grpo.json")  # the tiny policy has its own config
        layers.insert(0, {**read_config(own), "config": own})
    values = {}
    for layer in layers:
        if "data" in layer:
            # Held-out problems of another data set would measure something else.
            values.pop("eval_data", None)
        was = values.get("lora_rank")
        if bool(layer.get("lora_rank", was)) != bool(was):
            values.pop("lr", None)  # a rate for all weights does not fit factors, nor the reverse
        values |= layer
    model = values.get("model", TINY)
    if os.path.isfile(os.path.join(model, "final", "config.json")):
        values["model"] = os.path.abspath(os.path.join(model, "final"))  # a run's folder was named
    elif os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise BadInput(f"--model {model}: an adapter needs its model; final/ beside it has both "
                       "in one")
    if "lora_rank" in values and "lr" not in values:
        rate, what = ("1e-4", "factors") if values["lora_rank"] else ("1e-6", "all weights")
        values["lr"] = float(rate)
        say(f"--lr is not given: {rate}, because --lora-rank {values['lora_rank']} trains {what}")
    return Settings(**values)


def read_config(file):
    """A JSON object of flags and values -> the same, parsed as if they were typed."""
    with telling(f"{file}:", of=Exception):
        config = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object of flags and values")
        if isinstance(config.get("settings"), dict):
            raise ValueError("an older train.py made this run; give its final/ to --model")
        argv = []
        for name, value in config.items():
            field = FIELDS.get(name.replace("-", "_"))
            if field is None or not field.metadata["kept"]:
                raise ValueError(f"{flag_of(name)} is no flag for a config file")
            argv += as_flags(name, value)
        return given_flags(argv, os.path.dirname(file))


def as_flags(name, value):
    """kl_coef, 0.02 -> ["--kl-coef=0.02"]; None keeps the default."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    if isinstance(value, list):
        for word in value:
            if isinstance(word, str) and word.startswith("-"):
                raise ValueError(f"{flag_of(name)}: {word!r} would be read as a flag")
        return [flag_of(name), *map(str, value)]
    return [f"{flag_of(name)}={value}"]


def resumed_settings(given):
    """--resume: the run's own settings. Flags that change what is learned are fixed."""
    folder = given["resume"]
    file = os.path.join(folder, "config.json")
    if not os.path.isfile(file):
        raise BadInput(f"--resume {folder}: no run to resume, it has no config.json")
    saved = Settings(**read_config(file))
    for name, new in given.items():
        old = getattr(saved, name)
        free = FIELDS[name].metadata["free"]
        if name == "steps" and saved.lr_schedule != "constant":
            free = False  # the learning rate of every step depends on how many there are
        if new != old and not free:
            line = f"{flag_of(name)} {new}: the run in {folder} has {old!r}"
            if isinstance(new, bool):
                line = f"{as_flags(name, new)[0]}: the run in {folder} was begun without it"
            raise BadInput(f"{line}, and a resumed run cannot change it")
        if new != old and name == "threads":
            say(f"--threads {new}: the run had {old}; sums differ in their last digit, and so will "
                "the metrics")
    return dataclasses.replace(saved, **given, output=folder)


# --------------------------------------------------------------------------------------------------
# Loading: device, model, tokenizer, problems, reward. Bad input is found here, before a folder is
# made.

def load(s):
    """-> the parts of a run, named like train_grpo's arguments."""
    # Kept with the run, because the last digit of sums depends on the number of threads.
    s.threads = s.threads or torch.get_num_threads()
    torch.set_num_threads(s.threads)
    reward_model = load_reward_model(s) if s.reward_model else None
    reward_of = load_reward_of(s, reward_model)
    sampler = sample_groups
    if s.reply:
        with telling("--reply"):
            reply = reward.load_function(s.reply)
        talk = partial(sample.sample_conversations, reply=reply, max_turns=s.max_turns)
        sampler = telling("--reply", RewardFailed)(talk)
    sample.PLAIN = logprob.PLAIN = "--plain" if s.plain else None
    whole, tokenizer = agreed(load_policy, s)
    everywhere = agreed if s.is_whole else on_rank_0
    forms = everywhere(check_forms, whole, s)
    if not forms["grouped rows"]:
        s.share_prompts = False  # its rows are padded, and the padding is counted
    problems, eval_problems = load_data(s, tokenizer)
    on_rank_0(check_template, whole, tokenizer, s)
    policy_model = whole if s.is_whole else shard(whole, s)
    ref_model = optimizer = None
    if s.kl_coef and not s.eval_only:  # the initial policy, frozen
        ref_model = copy.deepcopy(policy_model) if s.is_whole else shard(whole, s)
        ref_model.requires_grad_(False)
    if not s.eval_only:
        optimizer = make_optimizer(policy_model, s, ref_model)
        start_from_file(optimizer, policy_model, s)
    if ref_model:
        follow(ref_model, policy_model)
    return SimpleNamespace(
        policy_model=policy_model, ref_model=ref_model, tokenizer=tokenizer, reward_of=reward_of,
        optimizer=optimizer, problems=problems, eval_problems=eval_problems, sampler=sampler,
        reward_model=reward_model if s.renew_reference else None)  # if it is trained further


def check_combinations(s):
    """BadInput for flags that a stage would refuse in the middle of a step, or misunderstand."""
    low, high = s.kl_band or (1, 1)
    share, rest = divmod(s.prompts_per_step, world())
    refused = [
        (rest, f"--prompts-per-step {s.prompts_per_step}: not a multiple of {world()} processes"),
        (s.minibatches > share, f"--minibatches {s.minibatches}: more than a process's prompts"),
        (world() > 1 and ":" in s.device,
         f"--device {s.device}: torchrun gives every process its card; name only cuda"),
        (s.kl_band and not s.kl_coef, "--kl-band: needs a --kl-coef above 0"),
        (not 0 < low <= high, "--kl-band: not two numbers above 0, the lower one first"),
        (s.renew_reference and not s.kl_coef, "--renew-reference: needs a --kl-coef above 0"),
        (s.overlong_buffer > s.max_new_tokens,
         f"--overlong-buffer {s.overlong_buffer}: longer than --max-new-tokens"),
        (s.max_turns != Settings.max_turns and not s.reply, "--max-turns: only with --reply"),
        (s.lora_alpha and not s.lora_rank, "--lora-alpha: only with --lora-rank"),
        # The rule judges each box: rewards of whole answers would only be shown.
        (s.advantage == "shape" and (s.reply or s.reward or s.reward_model or s.length_rescale
                                     or s.overlong_buffer or s.max_resample),
         "--advantage shape: rewards each box by the rule, and not with --reply, --reward, "
         "--reward-model, --length-rescale, --overlong-buffer or --max-resample"),
        (s.reward_weights and not s.reward, "--reward-weights: only with --reward"),
        (s.reward_model and s.reward, "--reward-model and --reward: only one can give the rewards"),
        (s.around_best and s.group_size % (2 * s.around_best),
         f"--around-best {s.around_best}: does not divide half of --group-size {s.group_size}"),
        (s.around_best and (s.reply or s.reward or s.reward_model),
         "--around-best: uses the rule, not with --reply, --reward or --reward-model"),
        (not s.scale_by_std and (s.step_reward or s.advantage != "group"),
         "--no-scale-by-std: only with --advantage group, without --step-reward"),
        # Rewards of steps replace the rewards of answers, on which these flags work.
        (s.step_reward and (s.advantage != "group" or s.reward_model or s.length_rescale
                            or s.overlong_buffer or s.max_resample),
         "--step-reward: only with --advantage group, and not with --reward-model, "
         "--length-rescale, --overlong-buffer or --max-resample"),
    ]
    for holds, line in refused:
        if holds:
            raise BadInput(line)


def tell_idle(s):
    """Print a line for every flag that changes nothing beside the others."""
    on_policy = s.updates_per_rollout * s.minibatches == 1 and "no effect: every ratio is 1"
    per_answer = s.advantage in ("group", "leave-one-out") and not s.step_reward
    z_scores = s.advantage == "group" and s.scale_by_std and not s.step_reward
    weight = min(s.reward_weights or [0])
    one_reward = len(s.reward or ()) == 1 and not s.overlong_buffer
    idle = [  # flags, and false or why they have no effect
        ("clip_eps clip_eps_high objective", on_policy),
        ("ratio", per_answer and on_policy),
        ("clip_eps", s.objective == "cispo" and s.clip_eps_high is not None
         and "no effect: CISPO has no lower clip, and --clip-eps-high is its upper one"),
        ("kl_estimator", not s.kl_coef and "no effect: --kl-coef is 0"),
        ("clip_advantages", z_scores and (s.clip_advantages or 0) ** 2 >= s.group_size - 1
         and f"no effect: with {s.group_size} answers no advantage is as large"),
        ("reward reward_weights", s.step_reward and "only measured, because --step-reward trains"),
        ("reward_weights", z_scores and one_reward and weight > 0
         and "no effect: it scales the std, too"),
        ("reward_model_lr", not (s.reward_model and s.renew_reference)
         and "no effect without --reward-model and --renew-reference"),
        ("rounding", s.dtype == "float32" and "no effect: float32 weights are not rounded"),
    ]
    for names, why in idle:
        for name in names.split():
            if why and getattr(s, name) != FIELDS[name].default:
                say(f"{flag_of(name)}: {why}")


def choose_device(s):
    """-> (torch.device, dtype of the model's weights)."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    best = next(name for name in present if present[name])
    with telling(f"--device {s.device}:", of=RuntimeError):
        device = torch.device(best if s.device == "auto" else s.device)
    if not present.get(device.type):
        raise BadInput(f"--device {s.device}: not on this machine")
    if device.index and device.type == "cuda":
        torch.cuda.set_device(device)  # what names no card is then about this one, too
    # Older cards emulate bfloat16, which is slow.
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if s.dtype == "bfloat16" and not has_bf16:
        raise BadInput(f"--dtype bfloat16: {device} has no bfloat16")
    if s.dtype != "auto":
        return device, getattr(torch, s.dtype)
    if device.type == "cpu":
        return device, dtype_of_cpu(s.model)
    if device.type == "cuda" and has_bf16:
        return device, torch.bfloat16
    # From Volta on, float16 has tensor cores and float32 has none.
    volta = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
    return device, torch.float16 if volta else torch.float32


def check_card(s, device):
    """BadInput for a card that torch cannot use, before anything is loaded."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or s.device == "cpu"
    if device.type == "cpu" and not hidden and shutil.which("nvidia-smi"):
        query = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
        raise BadInput(
            f"--device auto: torch {torch.__version__}, built for CUDA {torch.version.cuda}, does "
            f"not work with this card and driver: {one_line(subprocess.getoutput(query))}. Install "
            "a newer driver or a torch for an older CUDA (pytorch.org), or use --device cpu")
    if device.type == "cuda":
        kernels = " ".join(torch.cuda.get_arch_list())
        with telling(f"--device {device}: torch {torch.__version__} is for {kernels}, and fails on "
                     f"{torch.cuda.get_device_name(device)}:", of=RuntimeError):
            (torch.ones(1, device=device) + 1).item()
        if (cards := torch.cuda.device_count()) > world() == 1:
            all_cards = shlex.join(["torchrun", f"--nproc-per-node={cards}", *sys.argv])
            say(f"one of {cards} cards is used; for all of them: {all_cards}")


def dtype_of_cpu(model):
    """bfloat16 if this CPU multiplies it in hardware and the model spends its time with that."""
    with suppress(Exception):  # load_policy reports what is wrong with its files
        text = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        if text.hidden_size >= 512 and torch.cpu.get_capabilities().get("amx_bf16"):
            return torch.bfloat16
    return torch.float32


def load_policy(s):
    """The policy and its tokenizer; if it will be sharded, rank 0 holds it, in host memory."""
    device, dtype = choose_device(s)
    with telling(f"--model {s.model}:", of=(OSError, ValueError)):
        if rank() > 0 and not s.is_whole:
            return None, AutoTokenizer.from_pretrained(s.model)
        return sample.open_policy(s.model, device if s.is_whole else "cpu", dtype)


def load_reward_model(s):
    """--reward-model: a RewardModel, the same on every rank."""
    with telling(f"--reward-model {s.reward_model}: cannot be loaded:", of=Exception):
        found, report = reward.open_reward_model(s.reward_model, s.reward_model_lr,
                                                 choose_device(s)[0])
        sample.check_loaded(found.model, found.tokenizer, report)
    return found


def check_forms(model, s):
    """Print the fast forms of [A] and [D] that fit this model, and why others are refused."""
    with telling(f"--model {s.model}:"):
        of_rows = logprob.forms_of(model)
        forms = {**sample.forms_of(model), **of_rows}
    why = {**sample.REFUSED[model], **logprob.REFUSED[model]}
    lines = [form if forms[form] else f"{form} refused: {why[form]}" for form in forms]
    say("fast forms: " + "; ".join(lines))
    text = model.config.get_text_config()
    if any(getattr(text, name, 0) for name in ("num_experts", "num_local_experts",
                                               "n_routed_experts")):
        say("a mixture of experts: no balance or z-loss is added for its routers")
    return forms


def check_template(model, tokenizer, s):
    """Say where the chat template leaves the system prompt out, or has another end token."""
    problem = {"question": "?"}
    without = chat_prompt(tokenizer, problem, "")
    if s.system_prompt and chat_prompt(tokenizer, problem, s.system_prompt) == without:
        say("--system-prompt: the chat template of --model leaves it out")
    ends = sample.end_token_ids(model, tokenizer)
    ends = tokenizer.batch_decode([[end] for end in ends])
    with suppress(ValueError, IndexError):  # nothing between two answers
        between = tokenizer.decode(sample.ids_between_turns(tokenizer, "?", None, []))
        written = between.split()[0]
        if not written.startswith(tuple(ends)):
            say(f"the chat template writes {written} after an answer, but the model's end tokens "
                f"are {' '.join(ends)}: answers may run on until they are cut")


def load_data(s, tokenizer):
    """Training and held-out problems -> two lists of dicts."""
    # Our own rewards compare with a true answer: without one they would be 0 for ever.
    only_rules = not s.reward_model and set(s.reward or []) <= {"rule", "think"}
    def load_problems(name, source):
        with telling(f"{name}:"):
            return reward.load_problems(source, s.question_field, s.answer_field,
                                        need_answer=only_rules)

    held_out = s.eval_data or ("gsm8k:test" if s.data == "gsm8k" else None)
    # --eval-only needs --data only to hold some of it out.
    problems = [] if s.eval_only and held_out else load_problems("--data", s.data)
    if held_out:
        eval_problems = load_problems("--eval-data", held_out)
    else:
        problems, eval_problems = reward.hold_out(problems)
        say(f"--eval-data is not given: {len(eval_problems)} of {s.data} are held out")
    eval_problems = fitting("--eval-data", eval_problems[:s.eval_limit or None], tokenizer, s)
    problems = fitting("--data", problems, tokenizer, s)
    check_arguments(problems, eval_problems, s)  # before a folder is made
    return problems, eval_problems


def fitting(name, problems, tokenizer, s):
    """The problems within --max-prompt-tokens; BadInput if one is too long for the model."""
    with telling(f"{name} for --model {s.model}:"):
        prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
    _, words = sample.marks_of(tokenizer, str(tokenizer.chat_template))
    texts = [str(row.get("messages") or row["question"]) for row in problems]
    for mark in dict.fromkeys(words):
        found = sum(mark in text for text in texts)
        if found:
            say(f"{name}: {found} of {len(problems)} problems hold {mark!r}, which the chat "
                "template writes between turns as plain text")
    ids = tokenizer(prompts, add_special_tokens=False).input_ids if prompts else []
    tokens = sum(map(len, ids))
    unknown = sum(row.count(tokenizer.unk_token_id) for row in ids)
    if unknown > 0.05 * tokens:
        say(f"{name}: {unknown / tokens:.0%} of the prompts' tokens are unknown to the tokenizer "
            f"of --model {s.model}, which cannot read them; another --model may")
    most = s.max_prompt_tokens or math.inf
    kept = [problem for problem, row in zip(problems, ids) if len(row) <= most]
    if len(kept) < len(problems):
        say(f"{name}: {len(problems) - len(kept)} of {len(problems)} prompts are longer than "
            f"--max-prompt-tokens {most}, and are left out")
    # The longest prompt is checked now, not in the step that happens to draw it.
    longest = max((n for n in map(len, ids) if n <= most), default=0)
    limit = sample.length_limit(AutoConfig.from_pretrained(s.model))
    if longest + s.answer_tokens > limit:
        turns = f" or --max-turns (now {s.max_turns})" if s.reply else ""
        raise BadInput(f"{name}: a prompt of {longest} tokens and {s.answer_tokens} of an answer "
                       f"are more than the model's {limit} positions: lower --max-new-tokens (now "
                       f"{s.max_new_tokens}){turns}, or leave long prompts out with "
                       "--max-prompt-tokens")
    return kept


def load_reward_of(s, reward_model=None):
    """-> reward_of(problems, prompts, rollout) -> (N,); None: the rule's rewards count."""
    if reward_model:
        prompt_of = partial(chat_prompt, reward_model.tokenizer, system_prompt=s.system_prompt)
        reward_of = partial(reward.model_rewards, reward_model, prompt_of)
        return telling("--reward-model:", RewardFailed)(reward_of)
    with telling(""):
        reward_of = reward.own_reward_of(s.reward, s.reward_weights, s.step_reward)
    return reward_of and telling("", RewardFailed)(reward_of)


# --------------------------------------------------------------------------------------------------
# Weights. AdamW at 1e-6 moves a weight by about 1e-6. A bfloat16 weight of 0.02 can move by 1.2e-4
# or not at all. So the optimizer works on float32 masters, and the model's weights are rounded from
# them after every step.

# How many last bits of a float32 these drop: neighbours are 2^16 (2^13) float32 numbers apart.
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def make_optimizer(model, s, ref_model=None):
    """AdamW over the model's weights, or over float32 masters if the weights have fewer bits.

    Per weight, moments take 8 bytes, a master 4, its gradient 4. With --lora-rank: LoraAdamW, which
    needs no copy of the initial weights if `ref_model` keeps them.
    """
    how = {"lr": s.lr, "weight_decay": s.weight_decay, "fused": True}
    if s.lora_rank:
        return LoraAdamW(model, None if s.renew_reference else ref_model, s, **how)
    weights = [p for p in model.parameters() if p.requires_grad]
    if all(weight.dtype == torch.float32 for weight in weights):
        return with_moments(torch.optim.AdamW(weights, **how))
    home = torch.device("cpu") if s.offload and world() == 1 else model.device
    thresholds = s.rounding == "threshold"
    return MasterAdamW(weights, home, thresholds, s.seed, **how)


def with_moments(optimizer):
    """Make AdamW's moments now: a step that ran out of memory between two of them would be lost."""
    for p in optimizer.param_groups[0]["params"]:
        # The fused kernel needs the number of steps on the weights' device.
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


class MasterAdamW(torch.optim.AdamW):
    """AdamW on float32 masters of bfloat16 or float16 weights; rounding that loses no step.

    Pretrained weights lie on the grid of their dtype. Rounded to nearest, a weight would stay there
    until its master has moved by half a unit, for hundreds of steps at 1e-6. Here each weight has
    its own threshold, uniform between 0 and 1 unit, and is rounded up if its master's remainder
    reaches it. So a move by a hundredth of a unit moves one weight in a hundred by a whole unit: on
    average the intended change arrives. The thresholds follow from the seed and never change, but
    of several GPUs each has its own, so a run that is resumed on another number gets others.
    (Stochastic rounding, arXiv 2010.06192, draws at every step, and needs no masters.)

    `moved` is what AdamW moves, if not the masters: LoraAdamW computes the masters from it.

    Masters and moments are on the device `home`. With --offload that is host memory: the GPU sums
    gradients, sends them once per update, and gets rounded weights back.
    """

    def __init__(self, weights, home, thresholds, seed, moved=None, **how):
        self.weights = weights
        self.thresholds = thresholds
        self.seed = seed
        # Gradients below 6e-8 are 0 in float16: the loss is multiplied by this before backward().
        self.loss_scale = 2.0**16 if weights[0].dtype == torch.float16 else 1.0
        self.updates_since = 0  # updates since a new loss scale or a skipped one
        self.arrived = math.nan
        if moved is None:
            moved = [weight.detach().to(home, torch.float32, copy=True) for weight in weights]
        super().__init__(moved, **how)
        with_moments(self)
        for weight in weights:
            weight.grad_dtype = None  # any, because widen() changes it
            weight.register_post_accumulate_grad_hook(widen)
        self.away = home != weights[0].device
        self.copies = weights  # rounding writes there
        if self.away:
            kinds = torch.float32, weights[0].dtype
            try:
                found = [pinned_like(weights, kind, torch.cuda.is_available()) for kind in kinds]
            except RuntimeError as error:  # a system limits how much may be pinned
                say(f"--offload: no pinned memory ({one_line(error)[:80]}), so copies are slower")
                found = [pinned_like(weights, kind) for kind in kinds]
            self.grads, self.copies = found
            self.round()  # fills the copies

    def masters(self, few=BIG):
        """The masters that weights are rounded from; at least their first `few` numbers."""
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self):
        masters = self.param_groups[0]["params"]
        for i, (master, weight) in enumerate(zip(masters, self.weights)):
            if weight.grad is not None:
                grad = weight.grad
                if self.away:  # torch refuses a gradient that is not on its tensor's device
                    grad = self.grads[i].copy_(grad, non_blocking=True)
                master.grad = grad
        self.wait_for_copies()  # the CPU must not read gradients before they arrive
        before = self.beginnings()
        super().step()
        self.round()
        after = self.beginnings()
        meant = after[0] - before[0]
        written = after[1] - before[1]
        self.arrived = float(written @ meant / (meant @ meant))

    def wait_for_copies(self):
        """Between host and GPU: pinned memory may be read and written again after that."""
        if self.away and torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.no_grad()
    def round(self):
        """Round the masters into the model's weights."""
        self.wait_for_copies()  # the last rounding's copies to the GPU may still be on their way
        for i, (master, weight) in enumerate(zip(self.masters(), self.weights)):
            where = local(self.copies[i])
            part = rank() if hasattr(master, "to_local") else 0  # a shard has its own thresholds
            seed = (self.seed, "thresholds", i, part) if self.thresholds else None
            round_into(where, local(master), seed)
            if self.away:
                weight.copy_(where, non_blocking=True)

    def beginnings(self, few=2**14):
        """The first numbers of each tensor, of the masters and of the weights.

        `arrived` is the share of the intended change that is written, in its direction.
        """
        found = []
        for tensors in (self.masters(few), self.copies):
            beginnings = [local(tensor).flatten()[:few] for tensor in tensors]
            found.append(torch.cat(beginnings).float())
        return found

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        for weight in self.weights:
            weight.grad = None


def round_into(weight, master, seed=None):
    """weight <- master in the weight's dtype: at thresholds that follow from `seed`, or to nearest.

    Both are contiguous and of one shape, `master` in float32.
    """
    if seed is None or weight.dtype == master.dtype:
        weight.copy_(master)
        return
    dropped = DROPPED_BITS[weight.dtype]
    half = 1 << dropped - 1
    generator = seeded(*seed, device=master.device)
    # The pieces fit a CPU's cache; a GPU launches seven kernels for each, so there they are larger.
    size = 2**24 if master.is_cuda else 2**18
    size = min(size, -(-master.numel() // 4) * 4)
    # 64 random bits give the thresholds of four weights.
    drawn = torch.empty(size // 4, dtype=torch.int64, device=master.device)
    pieces = (tensor.view(-1).split(size) for tensor in (weight, master))
    for w, m in zip(*pieces):
        drawn.random_(-2**63, None, generator=generator)
        noise = drawn.view(torch.int16)[:len(m)] >> 16 - dropped
        # The bits of a float32, read as an integer, grow with its size. The threshold is
        # noise + half, from 0 to 1 unit; what is less than a unit is then cut off.
        bits = m.view(torch.int32) + noise
        bits.add_(half).bitwise_and_(-2 * half)
        w.copy_(bits.view(torch.float32))


def widen(weight):
    """After the first micro-batch: the others are added to its gradient, so in float32, too."""
    dtype = torch.promote_types(weight.grad.dtype, torch.float32)
    weight.grad = weight.grad.to(dtype)


def pinned_like(tensors, dtype, pin=False, slab=2**30):
    """Empty tensors of these shapes in host memory that a GPU copies to and from without waiting.

    Torch rounds each pinned block up to a power of two, so these are parts of large blocks.
    """
    found = []
    rest = torch.empty(0)
    for tensor in tensors:
        n = tensor.numel()
        if n > len(rest):
            length = max(slab // dtype.itemsize, n)
            rest = torch.empty(length, dtype=dtype, pin_memory=pin)
        found.append(rest[:n].view(tensor.shape))
        rest = rest[n:]
    return found


def loss_scale_of(optimizer):
    """The factor of the loss in float16; 1 otherwise."""
    return getattr(optimizer, "loss_scale", 1.0)


def unscaled(optimizer):
    """The tensors that have a gradient, after dividing it by the loss scale.

    The optimizer moves these tensors, or takes the gradients of these weights.
    """
    known = optimizer.param_groups[0]["params"] + getattr(optimizer, "weights", [])
    tensors = [p for p in known if p.grad is not None]
    for p in tensors if loss_scale_of(optimizer) != 1 else ():
        p.grad /= loss_scale_of(optimizer)
    if isinstance(optimizer, LoraAdamW) and world() > 1:
        for p in tensors:  # FSDP averages a shard's gradients over the ranks; here we do
            dist.all_reduce(p.grad)
            p.grad /= world()
    return tensors


def adapt_loss_scale(optimizer, skipped):
    """The next loss scale of a MasterAdamW -> the metrics of its rounding; {} for plain AdamW."""
    if not isinstance(optimizer, MasterAdamW):
        return {}
    scale = optimizer.loss_scale
    optimizer.updates_since += 1
    # float16: halve it after an update that was not finite, double it after 200 that were.
    if skipped:
        optimizer.updates_since = 0
        optimizer.loss_scale = max(scale / 2, 1.0)
    elif scale != 1 and optimizer.updates_since % 200 == 0:
        optimizer.loss_scale = 2 * scale
    return {"arrived": math.nan if skipped else optimizer.arrived, "loss_scale": scale}


@torch.no_grad()
def start_from_file(optimizer, model, s):
    """Give the masters all digits of the model's files, which may have more than the weights."""
    # LoRA's W0 is the reference's weight, which has no more digits than the policy's.
    masters = type(optimizer) is MasterAdamW
    if not masters or AutoConfig.from_pretrained(s.model).dtype == model.dtype:
        return
    whole = {}
    if rank() == 0:
        whole = dict(AutoModelForCausalLM.from_pretrained(
            s.model, dtype=torch.float32, use_safetensors=True).named_parameters())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for name, master in zip(names, optimizer.param_groups[0]["params"]):
        # The other ranks pass an empty tensor of that shape and get their shard of rank 0's.
        weight = whole.get(name, torch.empty(master.shape))
        master.copy_(sharded_like(master, weight))
    optimizer.round()


# --------------------------------------------------------------------------------------------------
# LoRA (Hu et al., arXiv 2106.09685): W = W0 + s B A for every Linear but the head, with factors
# A (R, in), B (out, R) and s = alpha / R. Usually the factors are a second path beside W0, and are
# merged for a fast sampler. Here only the optimizer knows them: the model has plain weights W, so
# every fast form works, and W is written anew after each step.

class LoraAdamW(MasterAdamW):
    """AdamW on the factors; the weights are rounded from W0 + s B A, computed when needed.

    As soon as a backward pass has the gradient dW of a weight, the factors get dA = s B^T dW, dB =
    s dW A^T, and dW is freed: only one dW exists at a time. W0 is the weight of `ref_model`, or
    without a reference a copy, which --offload keeps in host memory.
    """

    def __init__(self, model, ref_model, s, **how):
        self.scale = (s.lora_alpha or 2 * s.lora_rank) / s.lora_rank
        self.parts = []  # (W0, A, B) of each weight
        self.factors = {}  # A and B, under their names in PEFT
        linears = linears_of(model)
        home = "cpu" if s.offload else model.device
        model.requires_grad_(False)
        for i, (name, W) in enumerate(linears.items()):
            if ref_model:
                W0 = ref_model.get_submodule(name).weight
            else:
                W0 = W.data.to(home, copy=True)
            # PEFT begins with the same distribution. B is 0: the first W is W0.
            chance = seeded(s.seed, "lora", i)
            n_out, n_in = W.shape
            A = 2 * torch.rand(s.lora_rank, n_in, generator=chance) - 1
            A = A.div(math.sqrt(n_in)).to(W.device)                                    # (R, in)
            B = torch.zeros(n_out, s.lora_rank, device=W.device)                       # (out, R)
            self.parts.append((W0, A, B))
            self.factors[f"base_model.model.{name}.lora_A.weight"] = A
            self.factors[f"base_model.model.{name}.lora_B.weight"] = B
            W.requires_grad_()
        weights = list(linears.values())
        thresholds = s.rounding == "threshold"
        factors = list(self.factors.values())
        super().__init__(weights, model.device, thresholds, s.seed, factors, **how)
        for W, (_, A, B) in zip(self.weights, self.parts):  # after widen()
            W.register_post_accumulate_grad_hook(partial(self.take_gradient, A, B))

    @torch.no_grad()
    def take_gradient(self, A, B, W):
        """Add a weight's gradient to those of its factors, and free it."""
        dW = W.grad.mul_(self.scale)                                                   # (out, in)
        W.grad = None
        dA = B.T @ dW                                                                  # (R, in)
        dB = dW @ A.T                                                                  # (out, R)
        for factor, grad in ((A, dA), (B, dB)):
            factor.grad = grad if factor.grad is None else factor.grad + grad

    def masters(self, few=BIG):
        for W0, A, B in self.parts:
            rows = slice(1 + few // A.shape[1])
            W = W0[rows].to(B, copy=True)                                              # (out, in)
            yield W.addmm_(B[rows], A, alpha=self.scale)


def linears_of(model):
    """{name: weight (out, in)} of every Linear but the head.

    BadInput: a matrix of another kind that is no embedding. It would silently stay frozen.
    """
    found = {}
    for name, part in model.named_modules():
        matrix = any(p.ndim > 1 for p in part.parameters(recurse=False))
        if matrix and not isinstance(part, (torch.nn.Linear, torch.nn.Embedding)):
            raise BadInput(f"--lora-rank: {name}: not a Linear, and would not be trained")
        if isinstance(part, torch.nn.Linear) and part is not model.get_output_embeddings():
            found[name] = part.weight
    return found


def save_adapter(run, optimizer, s):
    """adapter/ beside final/: the factors alone, as PEFT writes and reads them."""
    modules = {name.split(".")[-3] for name in optimizer.factors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": s.model,
        "r": s.lora_rank,
        "lora_alpha": optimizer.scale * s.lora_rank,
        "target_modules": sorted(modules),
    }
    with run.replacing("adapter") as place:
        place.mkdir()
        (place / "adapter_model.safetensors").write_bytes(save(optimizer.factors))
        (place / "adapter_config.json").write_text(json.dumps(config, indent=2))


# --------------------------------------------------------------------------------------------------
# Memory: a count by formula, which --dry-run prints and `auto` follows; and a second try if memory
# still runs out

PROMPT = 256  # tokens of a prompt that the count assumes
MEMORY = ("offload", "gradient_checkpointing", "micro_batch_tokens")  # the flags with an `auto`
# The choices for `auto`, the fastest first; the last number divides the tokens of a micro-batch.
WAYS = ((False, False, 1), *((offload, True, parts) for offload in (False, True)
                             for parts in (1, 2, 4)))


def plan_memory(s):
    """Settings -> the same without `auto`: the fastest that fit. BadInput: none does; what would"""
    check_combinations(s)  # cheap checks first: flags, then the card, files, the model
    device, dtype = choose_device(s)
    check_card(s, device)
    s = dataclasses.replace(s, dtype=str(dtype).removeprefix("torch."))  # config.json keeps it
    tell_idle(s)
    if s.eval_only:
        return ways_to_save(s, device.type)[0]  # these flags are for training
    model = model_without_storage(s, dtype)
    free = free_memory(device)
    try:
        way, counted = first_that_fits(s, model, device.type, free)
    except AttributeError as error:  # a family whose layers are of another kind
        say(f"memory cannot be counted ({error}): using the leanest settings")
        return ways_to_save(s, device.type)[-1]
    count = "counted " + ", ".join(
        f"{need / 1e9:.1f} of {room / 1e9:.1f} GB of free {where} memory"
        for where, need, room in zip((device.type, "host"), counted, free))
    if not way:
        raise BadInput(f"--model {s.model}: {count}, of which a tenth must stay free; "
                       + what_fits(s, model, device.type, free))
    chosen = [as_flags(name, getattr(way, name))[0] for name in MEMORY]
    say(f"{count}, see --dry-run: " + " ".join(chosen))
    return way


def first_that_fits(s, model, device, free):
    """-> the first of ways_to_save() that fits, or None; its count, or that of the last."""
    for way in ways_to_save(s, device):
        counted = needed(way, model, device)
        # A tenth is left for what is not counted: CUDA itself, the allocator's fragments.
        if all(count < 0.9 * room for count, room in zip(counted, free)):
            return way, counted
    return None, counted


def ways_to_save(s, device):
    """WAYS as Settings without `auto`; where the device is the host there is no offload."""
    # Two groups, or part of very long ones; a CPU is fastest with what fits its cache.
    tokens = min(2 * (PROMPT + s.group_size * s.answer_tokens), 16384)
    if device == "cpu":
        tokens = 2048 if s.dtype == "bfloat16" else 1024
    ways = []
    for offload, checkpointing, parts in WAYS if device == "cuda" else WAYS[:4]:
        values = (offload, checkpointing, tokens // parts)
        pairs = zip(MEMORY, values)
        auto = {name: value for name, value in pairs if getattr(s, name) == "auto"}
        way = dataclasses.replace(s, **auto)
        if way not in ways:
            ways.append(way)
    return ways


def what_fits(s, model, device, free):
    """The smallest sets of flags with which a run fits, three at most, each with its count."""
    has_bf16 = device != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    changes = [("lora_rank", s.lora_rank or 16), ("dtype", "bfloat16" if has_bf16 else "float16"),
               ("gradient_checkpointing", True), ("micro_batch_tokens", 1024), ("kl_coef", 0.0),
               ("offload", True), ("prompts_per_step", max(s.prompts_per_step // 4, 1))]
    found = {}
    sizes = range(1, len(changes) + 1)
    sets = (some for n in sizes for some in combinations(changes, n))
    for chosen in sets:  # the smallest first
        if len(found) == 3 or any(set(chosen) > set(fewer) for fewer in found):
            continue
        there = dataclasses.replace(s, **dict(chosen))
        with suppress(BadInput):  # flags that do not go together, a model without Linears
            check_combinations(there)
            model = model.to(getattr(torch, there.dtype))
            way, counted = first_that_fits(there, model, device, free)
            if way:
                flags = " ".join(as_flags(*change)[0] for change in chosen)
                found[chosen] = f"{flags} ({counted[0] / 1e9:.1f} GB)"
    return "what would fit: " + ("; ".join(found.values()) or "only a smaller --model")


def needed(s, model, device):
    """Bytes that a run needs, by count: [of the device's memory, of the host's if it is apart]."""
    if device != "cuda":
        s = dataclasses.replace(s, offload=False)
        return [sum(memory(s, model, device).values())]
    # Weights pass through host memory when they are loaded.
    weights = sum(p.nbytes for p in model.parameters())
    host = max(weights, optimizer_memory(s, model)[1])
    return [sum(memory(s, model, device).values()), host]


def free_memory(device):
    """Bytes that a process can take: [of the device's memory, of the host's]."""
    free = host = host_memory() / rank("LOCAL_WORLD_SIZE", 1)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory()
    return [free, host]


def host_memory():
    """Bytes that programs can still take; infinite where Linux does not tell it."""
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if "MemAvailable" in line)
        return 1024 * int(line.split()[1])  # it counts in kB
    return math.inf


def model_without_storage(s, dtype):
    with telling(f"--model {s.model}: cannot be loaded:", of=Exception):
        config = AutoConfig.from_pretrained(s.model, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def memory(s, model, device="cuda"):
    """The memory of one process on its GPU, or "cpu", row by row: {what: bytes}.

    `model` may be on the meta device.
    """
    text = model.config.get_text_config()
    hidden = text.hidden_size
    layers = text.num_hidden_layers
    # All heads together may be wider than the hidden states, as in Qwen3-4B.
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    queries = heads * head_dim
    keys = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    size = model.dtype.itemsize
    n = sum(p.numel() for p in model.parameters())
    rows = s.prompts_per_step * s.group_size // world()
    # The numbers per token that a layer keeps for its backward pass: two norms, the MLP, the
    # attention, and norms of queries and keys if it has them.
    kept = 8 * hidden + 4 * (getattr(text, "intermediate_size", None) or 4 * hidden)
    kept += 5 * queries + keys
    if any("q_norm" in name for name, _ in model.named_parameters()):
        kept += 3 * (queries + keys)
    # With checkpointing each layer keeps only its input, and one at a time is recomputed.
    kept = kept + layers * hidden if s.gradient_checkpointing else layers * kept
    with telling(f"--reward-model {s.reward_model}: cannot be loaded:", of=OSError):
        scorer = reward.reward_model_size(s.reward_model) if s.reward_model else 0
    count = {
        "policy, weights that compute": n * size,
        "reference, frozen": n // (1 if s.is_whole else world()) * size * bool(s.kl_coef),
        **optimizer_memory(s, model)[0],
        "reward model": scorer * (16 if s.renew_reference else 4),
        "key/value cache": 2 * rows * (PROMPT + s.answer_tokens) * layers * keys * size,
        "kept for the backward pass": s.micro_batch_tokens * kept * size,
        # an eighth at a time, their gradient, and the head's gradient, except with LoRA
        "logits": 12 * min(2**28, s.micro_batch_tokens * text.vocab_size // 8)
                  + 2 * size * text.vocab_size * hidden * (not s.lora_rank),
    }
    if device == "cpu" and size < 4:
        # [D]'s head is then in float32, and oneDNN keeps its kernels, for a thousand shapes.
        count["for bfloat16 on a CPU"] = 4 * text.vocab_size * hidden + 9e8
    return count


def optimizer_memory(s, model):
    """The rows of memory() that the optimizer fills, and the bytes of host memory for --offload."""
    if s.lora_rank:
        weights = list(linears_of(model).values())
        n = s.lora_rank * sum(sum(W.shape) for W in weights)  # numbers in the factors
        # The reference holds the initial weights unless it is renewed.
        moves = s.renew_reference > 0 or not s.kl_coef
        first = sum(W.nbytes for W in weights) * moves
        return {
            "LoRA's first weights": first * (not s.offload),
            "float32 masters": 4 * n,
            "AdamW's two moments": 8 * n,
            # Those of the factors and of one weight; or two masters, while weights are written
            "gradients, float32": 4 * n + 8 * max(W.numel() for W in weights),
        }, first * s.offload
    n = sum(p.numel() for p in model.parameters()) // world()
    half = model.dtype != torch.float32
    away = s.offload and half and world() == 1
    rows = {
        "float32 masters": 4 * n * (half and not away),
        "AdamW's two moments": 8 * n * (not away),
        "gradients, float32": 4 * n,
    }
    return rows, (4 + 8 + 4 + model.dtype.itemsize) * n * away  # and the rounded weights


def print_memory(s):
    """--dry-run: print the count for each choice of `auto`, and for LoRA beside them."""
    device, dtype = s.device, getattr(torch, s.dtype, torch.bfloat16)
    if device != "cuda" or torch.cuda.is_available():  # else the card of another machine
        place, dtype = choose_device(s)
        device = place.type
    model = model_without_storage(s, dtype)
    ways = ways_to_save(s, device)
    columns = []
    with telling(f"--model {s.model}: its memory cannot be counted:", of=Exception):
        with suppress(BadInput):  # a model without Linears
            linears_of(model)
            way = ways[:2][-1]
            ways.append(dataclasses.replace(way, lora_rank=s.lora_rank or 16))
        for way in ways:
            column = memory(way, model, device)
            column["sum"] = sum(column.values())
            column["host memory"] = optimizer_memory(way, model)[1]
            columns.append(column)
    print(f"{s.model}: {sum(p.numel() for p in model.parameters()):,} weights in {model.dtype}; "
          f"{s.prompts_per_step} x {s.group_size} answers of {s.answer_tokens} tokens after "
          f"prompts of {PROMPT}; one of {world()} processes, GB = 1e9 bytes of {device} memory\n")
    for name in (*MEMORY, "lora_rank"):
        print(f"{flag_of(name):30}" + "".join(f"{getattr(way, name)!s:>8}" for way in ways))
    for what in columns[-1]:
        cells = [column.get(what, 0) / 1e9 for column in columns]
        print(f"{what:30}" + "".join(f"{cell:8.2f}" for cell in cells))


def within_memory(function, *args):
    """function(*args); if memory runs out, again with half the micro-batch; after another error
    without the fast forms of [D]. Not on several GPUs. `function` may move no weight.
    """
    s = args[-1]
    while True:
        try:
            return function(*args)
        except RuntimeError as error:
            fault = None if out_of_memory(error) else one_line(error)
            if world() > 1 or (logprob.PLAIN if fault else s.micro_batch_tokens < 256):
                raise
        if fault:  # outside of `except`: there the error keeps the activations alive
            give_up(s, fault, logprob)
            continue
        s.micro_batch_tokens //= 2
        say(f"out of memory: --micro-batch-tokens is now {s.micro_batch_tokens}; "
            "the update is repeated")


# --------------------------------------------------------------------------------------------------
# Several GPUs (torchrun): torch's own FSDP2. Every rank holds a shard of the weights and of their
# masters, gathers a layer when it computes, and works on its own whole groups. With one process all
# of this is the identity.

def rank(name="RANK", alone=0):
    """A number that torchrun puts into the environment; join_ranks() refuses anything else."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else alone


def world():
    return rank("WORLD_SIZE", 1)


def join_ranks():
    """Meet the other processes. BadInput if torchrun has not made the environment."""
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    if all(os.environ.get(name, number) == number for name, number in alone.items()):
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(name, "").isdecimal():
            raise BadInput(f"RANK or WORLD_SIZE is set and {name} is not a number: start several "
                           "processes with torchrun")
    if dist.is_initialized():
        return
    with telling("the processes cannot meet:", of=Exception):
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # NCCL exchanges CUDA tensors, gloo exchanges Python objects and CPU tensors.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def share_of_rank(n):
    """The part of n things that this rank takes: a range."""
    return range(rank() * n // world(), (rank() + 1) * n // world())


def gathered_objects(value):
    """Every rank's value, a list."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def gathered(tensor):
    """Every rank's rows, in the order of the ranks: (n, ...) -> (n * world, ...)."""
    return torch.cat(gathered_objects(tensor.cpu()))


def summed(numbers):
    """{name: number} -> the same, summed over the ranks."""
    mine = {name: float(value) for name, value in numbers.items()}
    everywhere = gathered_objects(mine)
    return {name: sum(each[name] for each in everywhere) for name in numbers}


def agreed(function, *args):
    """The function's result on this rank; a BadInput of one rank is raised on all of them."""
    result = fault = None
    try:
        result = function(*args)
    except BadInput as error:
        fault = error
    # All ranks meet here, whether they failed or not: the others would wait for one that left.
    for found in gathered_objects(fault):
        if found:
            raise found
    return result


def on_rank_0(function, *args):
    """The function's result on rank 0, given to every rank; its BadInput on all."""
    result = agreed(function, *args) if rank() == 0 else agreed(lambda: None)
    return gathered_objects(result)[0]


def full(tensor):
    """A sharded tensor, gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    """This rank's shard of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_like(p, tensor):
    """The whole tensor on p's device; this rank's shard of it where p is sharded."""
    tensor = tensor.to(p.device, copy=True)  # without a copy it would stay a view of the file
    if not hasattr(p, "device_mesh") or tensor.ndim == 0:
        return tensor
    return dist.tensor.distribute_tensor(tensor, p.device_mesh, p.placements)


def shard(whole, s):
    """FSDP2 on every decoder layer and on the rest: shards, gathered when they compute."""
    # `whole` is the model on rank 0, in host memory, and None elsewhere: no other rank ever holds
    # more than its shards and one tensor in transit.
    from torch.distributed import fsdp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    device, dtype = choose_device(s)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = model_without_storage(s, dtype)
    sample.switch_off_dropout(model)
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in next(lists):  # the decoder layers
        fsdp.fully_shard(layer, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)  # the rest: embeddings, last norm, head
    model.to_empty(device=device)  # storage for this rank's shards
    model.tie_weights()
    set_model_state_dict(model, whole.state_dict() if whole else {}, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))
    for name, buffer in model.named_buffers():  # those that no state_dict holds
        if whole:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)
    # The forms of [D] were tried on the whole model.
    found = whole and (whole.generation_config, logprob.forms_of(whole))
    model.generation_config, logprob.FORMS[model] = gathered_objects(found)[0]
    if logprob.FORMS[model]["grouped rows"]:
        model.set_attn_implementation("grouped")
    # [D] does not call the model's forward, and FSDP gathers only in methods that it knows.
    model.token_logprobs = partial(token_logprobs, model)
    fsdp.register_fsdp_forward_method(model, "token_logprobs")
    return model


@contextmanager
def whole_weights(model):
    """Gather all weights for a rollout, so that no rank waits for another's long answers."""
    parts = [module for module in model.modules() if hasattr(module, "unshard")]
    for part in parts:
        part.unshard()
        # Otherwise a layer would drop its gathered weights after the first token.
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


# --------------------------------------------------------------------------------------------------
# A run: its state, and its folder with config.json, inputs.json, metrics.jsonl,
# samples.jsonl, page.html, checkpoint/, final/

class Run:
    """The state of a run and its folder. Only rank 0 writes, and only if it has a folder."""

    def __init__(self, folder=None):
        self.name = str(folder)
        self.folder = Path(folder) if folder and rank() == 0 else None
        self.opened = ExitStack()  # the lock
        self.signal = 0
        self.step = 0  # the last step that is done
        self.saved = None  # what error lines say about the last checkpoint, once there is a run
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.kl_coef = None  # of --kl-band
        self.held_out = []  # (step, figure_of an evaluation)
        # the metrics that symptoms() reads, and how bad each symptom was when it was reported
        self.history = []
        self.told = {}
        self.dtype = torch.float32
        # what training moves besides the policy, so the checkpoint holds it
        self.reward_model = None
        self.ref_model = None
        self.before = []  # greedy answers to the held-out problems
        self.after = []  # the same, after training

    def claim_folder(self, s):
        """On rank 0: make and lock the folder, which may hold only a run to resume -> its name."""
        model = Path(s.model.removesuffix("/final"))  # a run's, whose name says more
        name = s.output or f"runs/{model.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(os.path.abspath(name))  # a reward may change the folder
        with telling(f"--output {name!a}: cannot be written, or another run writes there:",
                     of=(OSError, UnicodeError)):
            str(self.folder).encode()  # final/ is written by a library that takes UTF-8 only
            self.folder.mkdir(parents=True, exist_ok=True)
            files = [self.folder / name for name in (*LOGS, ".lock")]
            if any(file.is_symlink() for file in files):
                raise BadInput(f"--output {name}: has links to files elsewhere")
            begun = {path.name for path in self.folder.iterdir()} - {".lock", "unfinished"}
            if begun and not s.resume:
                raise BadInput(f"--output {name}: holds a run already; continue it (--resume) or "
                               "name another folder")
            lock = self.opened.enter_context(open(self.folder / ".lock", "w"))
            with suppress(ImportError):  # Windows has no fcntl, and so no lock
                import fcntl
                # The lock is gone when the process ends, however it ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that a kill or a full disk left unfinished may be as large as a checkpoint.
            shutil.rmtree(self.folder / "unfinished", ignore_errors=True)
        return str(self.folder)

    @property
    def resume_command(self):
        return command("train.py", "--resume", self.name)

    @contextmanager
    def stopping_on_signals(self):
        """Ctrl-C, SIGTERM and SIGHUP let the current step end; a second signal stops at once."""
        def stop(number, _):
            self.signal = number
            signal.signal(number, signal.SIG_DFL)
            name = signal.Signals(number).name
            say(f"\nstopping after this step ({name}; a second one stops at once)", sys.stderr)

        def in_child():
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
            go_on()

        numbers = []  # of the signals that have the handler; none after this run
        with ExitStack() as put_back:
            put_back.callback(numbers.clear)
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                # Windows has no SIGHUP, and only the main thread may set handlers.
                with suppress(AttributeError, ValueError):
                    number = getattr(signal, name)
                    put_back.callback(signal.signal, number, signal.signal(number, stop))
                    numbers.append(number)
            if hasattr(os, "fork"):
                # A process that a reward forks has the default handlers: a worker of a pool that
                # waits for work would never come to run `stop`. Until it has them, signals wait.
                wait, go_on = (partial(signal.pthread_sigmask, how, numbers)
                               for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
                os.register_at_fork(before=wait, after_in_parent=go_on, after_in_child=in_child)
            yield

    def stopped(self):
        """One rank's signal stops all of them."""
        self.signal = max(gathered_objects(self.signal))
        return self.signal

    def log(self, metrics):
        """Write a line of metrics, with a warning if a known failure may begin to show."""
        self.step = metrics["step"]
        if "loss" in metrics:
            self.history.append(as_json(metrics))
            lines = []
            for what, (bad, line) in symptoms(self.history, self.dtype).items():
                if bad > 3 * self.told.get(what, 0):  # once, and again if it is clearly worse
                    self.told[what] = bad
                    lines.append(line)
            if lines:
                self.history[-1]["warning"] = metrics["warning"] = "; ".join(lines)
                say(f"step {self.step}: {metrics['warning']}", sys.stderr)
        self.append("metrics.jsonl", [metrics])
        skipped = metrics.get("skipped_updates", 0)
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + skipped if skipped else 0
        if self.skipped_in_a_row >= 10:
            raise BadInput(
                f"{self.skipped_in_a_row:.0f} updates in a row had a loss or gradient that is not "
                "finite, and were skipped: --lr or a reward may be too large, or --temperature too "
                "small")

    def curve(self, name):
        """A metric over the steps: (step, value), without values that are null."""
        return [(m["step"], m[name]) for m in self.history if m[name] is not None]

    def log_samples(self, step, batch, rollout, with_logprobs=False, groups=2):
        """Write a few whole groups, as they were scored, with the ids that were drawn."""
        G = len(rollout.responses) // len(batch.prompts)
        records = []
        for j, (problem, prompt) in enumerate(zip(batch.problems[:groups], batch.prompts)):
            group = range(j * G, (j + 1) * G)
            part = rollout.take(list(group))
            ids = part.input_ids.tolist()
            rows = [*map(sample.turns_of, ids, part.labels.tolist())]
            # In a conversation, the replies are included.
            records.append({"step": step, "question": problem["question"], "prompt": prompt,
                            "responses": part.turns or part.responses,
                            "finished": part.finished.tolist(),
                            "rewards": part.rewards.tolist(),
                            "advantages": part.advantages.tolist(),
                            "prompt_ids": rows[0][0], "ids": [turns for _, *turns in rows]})
            if with_logprobs:  # what the page compares with, where the start is not at hand
                records[-1]["logprobs"] = own_of(part.old_logprobs, part)
        self.append("samples.jsonl", records)

    def append(self, name, records):
        """Append lines of JSON to a file."""
        if self.folder:
            path = self.folder / name
            with self.writing(name), open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(as_json(record)) + "\n" for record in records)

    def writing(self, name):
        """Any failure with this file becomes one line; the run can be resumed."""
        # The tokenizers' own library raises a bare Exception when the disk is full.
        return telling(f"--output {self.name}: {name} cannot be written:", of=Exception)

    @contextmanager
    def replacing(self, name):
        """Yields a path beside the file or folder; once it is complete, it replaces the old one."""
        aside = self.folder / "unfinished"
        new = aside / name
        old = self.folder / name
        with self.writing(name):
            shutil.rmtree(aside, ignore_errors=True)
            new.parent.mkdir(parents=True)
            old.parent.mkdir(exist_ok=True)
            yield new
            if new.is_dir():
                # A folder cannot replace another in one move, unlike a file.
                shutil.rmtree(old, ignore_errors=True)
            else:
                reach_the_disk(new)
            os.replace(new, old)
            shutil.rmtree(aside)


def as_json(record):
    """NaN and Infinity become null, because JSON has neither."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()}


def reach_the_disk(path):
    with open(path, "ab") as file:
        os.fsync(file.fileno())


def inputs_of(s, problems, eval_problems):
    """SHA-256 of a run's inputs, and versions -> {name: text}."""
    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name, rows in (("--data", problems), ("--eval-data", eval_problems)):
        text = json.dumps(rows, sort_keys=True)
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    # The files of a model folder that define what it computes; it may hold others, too.
    patterns = ("*.safetensors", "*config.json", "*token*", "vocab*", "merges*", "*.jinja")
    models = {"--model": s.model, "--reward-model": s.reward_model}
    for flag, model in models.items():
        for pattern in patterns if model else ():
            folder = Path(transformers.utils.cached_file(model, "config.json")).parent
            for file in sorted(folder.glob(pattern)):
                found[f"{flag} {file.name}"] = digest(file)
    for spec in (*(s.reward or ()), s.step_reward, s.reply):
        if spec and ":" in spec:
            found[spec] = digest(spec.rpartition(":")[0])
    return found


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_inputs(run, found):
    """--resume: BadInput that names an input which has changed since the run began."""
    file = run.folder / "inputs.json"
    if not file.is_file():
        return
    with telling(f"{file}:", of=Exception):
        saved = dict(json.loads(file.read_text(encoding="utf-8")))
    for name in {**saved, **found}:
        if saved.get(name) == found.get(name):
            continue
        if name.startswith("--"):
            raise BadInput(f"--resume: {name}: the content is not what the run in {run.name} "
                           "started from")
        # Versions may change, and so may a reward: the user may have to repair one that failed.
        say(f"{name} has changed since this run began")


def save_folder(model, tokenizer, run, name):
    """Save a folder that from_pretrained opens; it replaces the old one."""
    weights = whole_on_rank_0(dict(model.named_parameters())) if world() > 1 else None
    if run.folder:
        with run.replacing(name) as place:
            model.save_pretrained(place, state_dict=weights)
            tokenizer.save_pretrained(place)


# --------------------------------------------------------------------------------------------------
# A checkpoint: all tensors that training moves, and Run's counters. Everything else that a step
# needs (problems, random numbers, learning rate) follows from the step and the settings.

COUNTERS = ("step", "skipped", "kl_coef", "held_out", "told", "before")
LOGS = ("samples.jsonl", "metrics.jsonl")


def what_moves(run, model, optimizer):
    """Yields what training moves: (name in a checkpoint, float32 tensor, AdamW's state)."""
    learners = [("", model, optimizer)]
    if run.reward_model:
        learners.append(("reward_model/", run.reward_model.model, run.reward_model.optimizer))
    for prefix, part, adamw in learners:
        names = [name for name, p in part.named_parameters() if p.requires_grad]
        names = getattr(adamw, "factors", names)  # of LoRA
        # AdamW's own list, because it moves float32 masters if the weights have fewer bits.
        for name, master in zip(names, adamw.param_groups[0]["params"]):
            yield prefix + name, master, adamw.state[master]
    reference = run.ref_model.named_parameters() if run.ref_model else ()
    for name, p in reference:
        yield "reference/" + name, p, {}


def save_checkpoint(run, model, optimizer):
    """Write one safetensors file and move it over the old one. Sharded tensors are saved whole."""
    tensors = whole_on_rank_0({
        f"{key}/{name}": value for name, tensor, state in what_moves(run, model, optimizer)
        for key, value in {"weight": tensor, **state}.items()})
    # After a skipped update, or with weights that are not finite, the previous checkpoint stays.
    finite = all(tensor.isfinite().all() for tensor in tensors.values())
    if run.skipped_in_a_row or not all(gathered_objects(finite)):
        return
    if run.folder:
        counters = {name: getattr(run, name) for name in COUNTERS}
        if isinstance(optimizer, MasterAdamW):
            counters["loss_scale"] = [optimizer.loss_scale, optimizer.updates_since]
        if run.reward_model:
            counters["pairs"] = [run.reward_model.pairs, run.reward_model.replay]
        # The counters are a tensor, too: the text may be long, and the file's header has a limit.
        text = bytearray(json.dumps(counters).encode())
        tensors["counters"] = torch.frombuffer(text, dtype=torch.uint8)
        with run.replacing("checkpoint/run.safetensors") as place:
            for name in LOGS:  # first: a checkpoint ahead of its lines would leave a gap
                reach_the_disk(run.folder / name)
            save_file(tensors, place)
            # safetensors lets only the owner read the file; here it gets the umask's mode.
            shutil.copymode(run.folder / "config.json", place)
    run.saved = f"of step {run.step}"


@torch.no_grad()
def load_checkpoint(run, model, optimizer):
    """Restore what the checkpoint holds; a run killed before its first one starts from step 0."""
    path = Path(run.name, "checkpoint", "run.safetensors")
    if not path.is_file():
        on_rank_0(forget_after, run, -1)  # step 0 is its first evaluation
        return
    with (telling(f"--resume: {path} is damaged, or not of this model:", of=Exception),
          safe_open(path, framework="pt") as file):
        counters = json.loads(file.get_tensor("counters").numpy().tobytes())
        vars(run).update({name: counters[name] for name in COUNTERS})
        run.held_out = [(step, float(figure)) for step, figure in run.held_out]
        run.before = [str(text) for text in run.before]
        scale, since = counters.get("loss_scale", (1, 0))
        counts = [run.step, run.skipped, run.kl_coef or 0, scale - 1, since]
        counts += run.told.values()
        finite = all(0 <= count < math.inf for count in counts)
        if not isinstance(run.step, int) or not finite:
            raise ValueError(f"step {run.step}, counters {counts}")
        if run.reward_model:
            run.reward_model.pairs, run.reward_model.replay = counters["pairs"]
        for name, tensor, state in what_moves(run, model, optimizer):
            for key, place in {"weight": tensor, **state}.items():
                found = file.get_tensor(f"{key}/{name}")
                fits = found.shape == place.shape and found.dtype == place.dtype
                if not fits or not found.isfinite().all():
                    raise ValueError(f"{key}/{name} has another shape or dtype, or is not finite")
                place.copy_(sharded_like(place, found))
    if isinstance(optimizer, MasterAdamW):
        optimizer.loss_scale, optimizer.updates_since = scale, since
        optimizer.round()  # the weights are still those of the start
    run.saved = f"of step {run.step}"
    on_rank_0(forget_after, run, run.step)


def forget_after(run, step):
    """Cut off the lines of steps after the checkpoint; they will be written again."""
    for name in LOGS:
        path = run.folder / name
        with telling(f"--resume: {path}: not lines of train.py:", of=Exception):
            path.touch()  # a run that was killed early may have none
            # After the last end of a line there is nothing, or a line that a kill has cut off.
            lines = path.read_bytes().split(b"\n")[:-1]
            records = [json.loads(line) for line in lines]
            kept = [record for record in records if record["step"] <= step]
        with run.writing(name):
            length = sum(len(line) + 1 for line in lines[:len(kept)])
            os.truncate(path, length)
    run.history = [record for record in kept if "loss" in record]  # of the last file, metrics.jsonl


@torch.no_grad()
def whole_on_rank_0(tensors):
    """{name: tensor}, sharded or not -> the same whole, in host memory; elsewhere {}."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = full(tensor)  # every rank takes part in gathering, one keeps it
        if rank() == 0:
            whole[name] = tensor.detach().cpu().contiguous()
    return whole


# --------------------------------------------------------------------------------------------------
# The program: parse, load, open the folder, train, save, report

def main(argv=None):
    """-> exit status: 0 done; 2 bad input, one line on standard error; 128 + signal if stopped."""
    run = Run()
    status = 2
    try:
        settings = parse(argv)
        if settings.dry_run:
            print_memory(settings)
            return 0
        join_ranks()
        settings = on_rank_0(plan_memory, settings)  # ranks must not differ in it
        parts = load(settings)
        if settings.eval_only or settings.trace:
            (print_figures if settings.eval_only else print_trace)(parts, settings)
            return 0
        return train(parts, run, settings)
    except BadInput as error:
        fault = error
    except KeyboardInterrupt:
        fault = "interrupted"
        status = 130
    except Exception as error:
        if out_of_memory(error):
            fault = ("out of memory: lower --prompts-per-step, --group-size, --max-new-tokens or "
                     "--micro-batch-tokens")
            if not run.saved and not settings.eval_only:  # while it was loaded: the count was low
                device, dtype = choose_device(settings)
                model = model_without_storage(settings, dtype)
                less = [0.75 * count for count in needed(settings, model, device.type)]
                fault = f"out of memory; {what_fits(settings, model, device.type, less)}"
        elif isinstance(error, RuntimeError) and run.saved and world() > 1:
            # gloo and NCCL raise this when a peer is gone. It may be rank 0: so every rank prints.
            print(f"train.py: rank {rank()} lost another rank ({one_line(error)}); continue with: "
                  f"{run.resume_command}", file=sys.stderr)
            return status
        else:
            same = run.resume_command if run.saved else "the same command and"
            error.add_note(f"train.py: go on with: {same} --plain")  # the traceback's last line
            raise
    finally:
        with suppress(OSError):  # a full disk has been reported already
            run.opened.close()
    if run.saved:
        fault = f"{fault}; last checkpoint: {run.saved}; continue with: {run.resume_command}"
    say(f"train.py: {fault}", sys.stderr)
    return status


def train(parts, run, s):
    """A run from its folder to its final/ -> exit status."""
    run.name = on_rank_0(run.claim_folder, s)
    begin(run, parts, s)
    model = parts.policy_model
    try:
        # From here on a signal lets the step end; until here there was nothing to save.
        with run.stopping_on_signals():
            train_grpo(**vars(parts), settings=s, run=run)
    except RewardFailed:  # on every rank, before this step moves anything
        save_checkpoint(run, model, parts.optimizer)
        raise
    if run.step < s.steps:
        save_checkpoint(run, model, parts.optimizer)
        write_page(run, model, parts.ref_model, parts.tokenizer, s)
        say(f"\nstopped after step {run.step}; continue with: {run.resume_command}")
        return 128 + run.signal
    if not run.after:  # a finished run was resumed
        problems = parts.eval_problems
        _, run.after = evaluate(model, parts.tokenizer, problems, s, parts.sampler)
    save_folder(model, parts.tokenizer, run, "final")
    if s.lora_rank and run.folder:
        save_adapter(run, parts.optimizer, s)
    if parts.reward_model:
        save_folder(parts.reward_model.model, parts.reward_model.tokenizer, run, "reward_model")
    print_story(run, parts.eval_problems, "reward" if parts.reward_of else "accuracy")
    return 0


def begin(run, parts, s):
    """Restore the checkpoint, write the run's settings and inputs, print what starts."""
    model = parts.policy_model
    run.dtype = model.dtype
    # The checkpoint holds only what moves; the first reference is the initial policy.
    run.reward_model = parts.reward_model
    run.ref_model = parts.ref_model if s.renew_reference else None
    if run.reward_model:
        with_moments(run.reward_model.optimizer)
    inputs = inputs_of(s, parts.problems, parts.eval_problems)
    if s.resume:
        on_rank_0(check_inputs, run, inputs)
        load_checkpoint(run, model, parts.optimizer)
        if s.steps < run.step:
            raise BadInput(f"--steps {s.steps}: the run in {run.name} is at step {run.step}")
    names = [name for name in FIELDS if FIELDS[name].metadata["kept"]]
    kept = {name: getattr(s, name) for name in names}
    files = {"config.json": kept, "inputs.json": inputs}
    for name, content in files.items() if run.folder else ():
        with run.replacing(name) as place:
            place.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    run.saved = run.saved or "none"
    n = sum(p.numel() for p in model.parameters())
    source = "its config.json" if s.resume else s.config or "the command line"
    say(f"{s.model}: {n / 1e6:.2f}M parameters in {run.dtype} on "
        f"{model.device}, {len(parts.problems)} problems, "
        f"{len(parts.eval_problems)} held out, {world()} processes; settings of {source}; "
        f"run in {run.name}, from step {run.step}")
    # Only now, because config.json holds the coefficient that the run began with.
    s.kl_coef = s.kl_coef if run.kl_coef is None else run.kl_coef


def say(line, file=None):
    """Rank 0 prints the line, above the progress bars."""
    if rank() == 0:
        with tqdm.external_write_mode(file):
            print(line, file=file, flush=True)


def print_story(run, eval_problems, judged_by):
    """Print one held-out problem, answered before and after; the curves; what to do next."""
    # A problem that was wrong before training and is right after it; if there is none, the first.
    truths = truths_of(eval_problems)
    before = is_right(score_responses(run.before, truths, 1))
    after = is_right(score_responses(run.after, truths, 1))
    i = int((after & ~before).int().argmax())
    say(f"\nquestion  {eval_problems[i]['question']}\nbefore    {run.before[i]}\n"
        f"after     {run.after[i]}\ntruth     {truths[i] or 'not known'}\n")
    say(f"{f'held-out {judged_by}':22}" + small_curve(run.held_out))
    boxed = any(m["format_rate"] for m in run.history)
    for name in ("accuracy",) * boxed + ("reward_mean", "approx_kl", "response_length_mean"):
        say(f"{name:22}" + small_curve(run.curve(name)))
    page = Path(run.name, "page.html")
    seen = f"see what it learned  {page}\n" if page.is_file() else ""
    talk = command("sample.py", "--model", run.name)
    again = command("train.py", "--config", f"{run.name}/config.json", "--model",
                    f"{run.name}/final")
    say(f"\n{seen}talk to the result   {talk} \"YOUR QUESTION\"\ngo on from it        {again}")


def command(program, *flags):
    """The command to type into a shell, in any folder."""
    # sys.executable: outside its virtual environment a bare `python` would not find torch.
    return shlex.join([sys.executable, str(HERE / program), *flags])


def small_curve(points, width=50):
    """(step, value) points as one line of blocks, from the lowest value to the highest."""
    if not points:
        return ""
    means = pooled([value for _, value in points], width)
    low = min(means)
    span = max(means) - low or 1
    heights = [int(7 * (mean - low) / span) for mean in means]
    blocks = "".join("▁▂▃▄▅▆▇█"[height] for height in heights)
    return f"{means[0]:8.3f} {blocks} {means[-1]:.3f}"


def pooled(values, width):
    """The means of at most `width` stretches of nearly equal length."""
    values = torch.tensor([values], dtype=torch.float64)
    width = min(width, values.shape[1])
    return torch.nn.functional.adaptive_avg_pool1d(values, width)[0].tolist()


# --------------------------------------------------------------------------------------------------
# page.html: the curves of a run, and groups whose tokens are tinted by how far the policy has moved

CURVES = ("reward_mean", "approx_kl", "response_length_mean", "entropy", "zero_variance_groups")
MOST_BYTES = 450_000  # of the groups
MOST_TINTED = 5000  # tokens, those that have moved most
STYLE = """
:root { color-scheme: light dark; --up: 37 105 214; --down: 230 112 10; --line: #8884
} body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.6 system-ui }
div { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 0 1rem }
figure, section { border: 1px solid var(--line); border-radius: 10px; margin: 0 0 1rem;
  padding: .6rem 1rem; break-inside: avoid } h2 { margin: 0; font-size: 1rem }
h2 small, figure b { float: right } rect { fill: rgb(var(--down)) }
polyline { fill: none; stroke: rgb(var(--up)) } q { quotes: none; display: block }
.y { display: flex; flex-wrap: wrap; border-top: 1px solid var(--line); margin-top: .3rem }
.y > * { flex: 0 0 4.2rem } .y p { flex: 1 1 20rem; margin: 0 } .y b { flex: 0 0 2rem }
.y p, pre { font: 13px/1.85 monospace; white-space: pre-wrap; overflow-wrap: anywhere }
i { font-style: normal; border-radius: 3px; print-color-adjust: exact; background:
  linear-gradient(rgb(var(--up) / min(var(--d) * .3, .6)) 0 0),
  linear-gradient(rgb(var(--down) / min(var(--d) * -.3, .6)) 0 0) }
.y s { flex: 0 0 7rem } s i { display: block; height: .5rem; margin-top: .5rem }
"""


def write_page(run, model, ref_model, tokenizer, s):
    """page.html from the run's folder and its two models: every rank computes, rank 0 writes."""
    groups = on_rank_0(groups_to_show, run) if s.page else []
    if not groups:
        return
    # As `to_rollout` takes them: the prompt, what the policy wrote, what it was told, ...
    rows = []
    for group in groups:
        for turns in group["ids"]:
            rows.append([(group["prompt_ids"], None)])
            for k, ids in enumerate(turns):
                own = None if k % 2 else [0.0] * len(ids)
                rows[-1].append((ids, own))
    ends = sample.end_token_ids(model, tokenizer)
    rollout = sample.to_rollout(tokenizer, rows, ends, s.group_size, model.device)
    now, _ = within_memory(logprobs_of_all, model, rollout, s)                         # (N, S-1)
    start = [row for group in groups for row in group.get("logprobs", ())]
    if not start:
        start = own_of(within_memory(logprobs_of_all, ref_model, rollout, s)[0], rollout)
    pairs = zip(own_of(now, rollout), start)
    moved = ([new - old for new, old in zip(*pair)] for pair in pairs)
    for group in groups:
        group["d"] = [next(moved) for _ in group["ids"]]
    if run.folder:
        with run.replacing("page.html") as place:
            place.write_text(page_of(run, groups, tokenizer, s), encoding="utf-8")


def own_of(table, rollout):
    """(N, S-1) -> N lists: the entries of the tokens that the policy wrote."""
    return [row[own].tolist() for row, own in zip(table, rollout.mask)]


def groups_to_show(run):
    """One group of steps 1, 2, 4, 8, ... and of the last one, from samples.jsonl."""
    found = {}
    with open(run.folder / "samples.jsonl" if run.folder else os.devnull) as file:
        for group in map(json.loads, file):
            step = group["step"]
            if "ids" in group and (step == run.step or step & step - 1 == 0):
                # the step's first group that teaches something
                teaches = len(set(group["rewards"])) > 1
                if step not in found or teaches and not found[step][0]:
                    found[step] = teaches, group
    return [group for _, group in found.values()]


def page_of(run, groups, tokenizer, s):
    """The HTML. A group's "d": log pi now - log pi of the start, of each token of its answers."""
    curves = {"held out": run.held_out}
    for name in run.history[-1]:
        if name.startswith("reward/") or name in CURVES:
            curves[name] = run.curve(name)
    rows = [m for m in run.history if "warning" in m]
    warned = [(m["step"], shown(m["warning"])) for m in rows]
    marks = "".join(f'<rect x="{300 * step / run.step:.1f}" width=".7" height="80"><title>{line}'
                    "</title></rect>" for step, line in warned)
    known = {name: points for name, points in curves.items() if points}
    figures = "".join(figure_of_curve(shown(name), points, run.step, marks)
                      for name, points in known.items())
    rows = [row for group in groups for row in group["d"]]
    moves = sorted(abs(d) for row in rows for d in row)
    least = moves[-MOST_TINTED:][0]
    room = MOST_BYTES // len(groups)
    sections = "".join(section_of(group, tokenizer, room, least) for group in groups)
    then = "at the start: log π − log π<sub>ref</sub>, the −d of [F]"
    if "logprobs" in groups[0]:
        then = "when it drew them: log π − log π<sub>old</sub>"
    name = shown(run.folder.name)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body><h1>{name}</h1><p>GRPO of {shown(Path(s.model).name)}: {run.step} steps of
B = {s.prompts_per_step} questions and G = {s.group_size} answers to each, lr {s.lr:g}</p>
<div>{figures}</div><ul>{"".join(f"<li>step {step}: {line}</li>" for step, line in warned)}</ul>
<h1>What it learned</h1><p>x is a question, y<sub>i</sub> an answer of its group, r<sub>i</sub> its
reward and A<sub>i</sub> its advantage. Tinted tokens are now <i style="--d:2">more likely</i> or
<i style="--d:-2">less likely</i> than {then}. Hover for the number, in nats.</p>
{sections}</body></html>
"""


def figure_of_curve(name, points, last, marks):
    """A curve of (step, value) points; its width are the steps 0 ... `last`."""
    steps, values = zip(*points)
    means = pooled(values, 120)
    low = min(means)
    span = max(means) - low or 1
    line = " ".join(f"{300 * step / last:.1f},{78 - 76 * (mean - low) / span:.1f}"
                    for step, mean in zip(pooled(steps, 120), means))
    return (f"<figure>{name}<b>{values[0]:.3g} → {values[-1]:.3g}</b>"
            f'<svg viewBox="0 0 300 80">{marks}<polyline points="{line}"></polyline></svg>'
            "</figure>")


def section_of(group, tokenizer, room, least):
    """A group: its question x; of its answers r, A and y, as many as `room` bytes can hold."""
    r = torch.tensor(group["rewards"])
    text = (f"step {group['step']} <small>mean r {r.mean():.3g}, std r {r.std(correction=0):.3g}"
            f"</small></h2><details><summary><b>x</b> {shown(group['question'][-2000:])}</summary>"
            f"<pre>{shown(group['prompt'][-4000:])}</pre></details>")
    rows = zip(group["ids"], group["d"], group["advantages"], group["finished"])
    for n, (turns, d, A, finished) in enumerate(rows):
        # Tokens of an answer may have advantages of their own; then their mean is shown.
        A = A if isinstance(A, float) else sum(A) / len(d)
        d = iter(d)
        y = ""
        for k, ids in enumerate(turns):
            words = sample.words_of(tokenizer, ids)
            words = [shown(word).replace("\n", "↵\n") for word in words]
            y += f"<q>{''.join(words)}</q>" if k % 2 else tinted(words, d, least)
        cut = "" if finished else " <small>cut at the limit</small>"
        width = 50 * min(abs(A) / 3, 1)
        bar = f"--d:{9 * A};width:{width}%;margin-left:{50 - width * (A < 0)}%"
        answer = (f'<div class="y"><b>y<sub>{n + 1}</sub></b><span>r {r[n]:.4g}</span><span>'
                  f'A {A:+.2f}</span><s><i style="{bar}"></i></s><p dir="auto">{y}{cut}</p></div>')
        if len((text + answer).encode()) > room:
            text += f"{n} of {len(r)} answers are shown"
            break
        text += answer
    return f"<section><h2>{text}</section>"


def tinted(words, values, least):
    """Words as HTML; those that have moved by `least` nats or more have a tint and a number."""
    return "".join(f'<i style="--d:{d:.2f}" title="{d:+.6f}">{word}</i>' if abs(d) >= least else
                   word for word, d in zip(words, values))


def shown(text):
    """Escaped for HTML; what is not printable, or turns a line around, stands as its number."""
    return html.escape("".join(letter if letter.isprintable() or letter == "\n"
                               else f"‹{ord(letter):04X}›" for letter in text))


def print_figures(parts, s):
    """--eval-only: greedy accuracy, and from G samples per problem accuracy, pass@k and maj@k."""
    problems = parts.eval_problems
    figures_of = partial(evaluate, parts.policy_model, parts.tokenizer, problems, s, parts.sampler,
                         parts.reward_of)
    greedy, _ = figures_of()
    how = {"group_size": s.group_size, "temperature": s.temperature, "seed": s.seed}
    sampled, responses = figures_of(**how)
    say(f"{len(problems)} problems, {s.group_size} samples of each at temperature {s.temperature}")
    for name, value in greedy.items():
        say(f"{name}: greedy {value:.4f}, sampled {sampled[name]:.4f}")
    figures = reward.figures_of(responses, truths_of(problems), s.group_size)
    for name, value in figures.items():
        say(f"{name:18} {value:.4f}")


def print_trace(parts, s):
    """--trace: print one step on one group, stage by stage, like the theory's walkthrough."""
    # Use a problem whose answers have different rewards: else all advantages are 0.
    tries = 0 if s.step_reward else 20
    s = dataclasses.replace(s, prompts_per_step=world(), max_resample=tries, updates_per_rollout=1,
                            minibatches=1)
    model = parts.policy_model
    batch = batch_of_step(parts.tokenizer, parts.problems, 1, s)
    metrics, rollout = train_step(model, parts.ref_model, parts.optimizer, parts.tokenizer, batch,
                                  s, parts.sampler, parts.reward_of)
    mask = rollout.mask                                                                # (G, S-1)
    A = rollout.advantages
    A = A.view(len(A), -1).expand(mask.shape)                                          # (G, S-1)
    say(f"\n[A] sample_groups: {s.group_size} answers to\n{batch.prompts[0]}\n\n"
        f"[B] score_responses: rewards, the truth is {batch.problems[0]['answer']}\n"
        f"[C] advantages_for {s.advantage!r}, of each answer's first token")
    for n, response in enumerate(rollout.responses):
        say(f"  y_{n + 1}  {mask[n].sum():3} tokens, r {rollout.rewards[n]:g}, "
            f"A {A[n][mask[n]][0]:+.4f}: {one_line(response)[:60]}")

    # The plain terms of the loss after the update; before it every ratio was 1.
    new, _ = logprobs_of_all(model, rollout, s, with_entropy=False)                    # (G, S-1)
    old = rollout.old_logprobs
    ref = old if rollout.ref_logprobs is None else rollout.ref_logprobs
    log_ratio = new - old
    clip_high = s.clip_eps_high or s.clip_eps
    J, clipped = loss.clipped_objective(log_ratio, A, s.clip_eps, clip_high)
    kl = loss.kl_estimate(new, ref, s.kl_estimator)
    say("\n[D] token_logprobs, [E] clipped_objective, [F] kl_estimate: the first tokens, after the "
        "update\n  answer token        log old  log ref  log new   ratio     term        KL")
    for n, t in mask.nonzero().tolist():
        if mask[n, :t].sum() < 4:
            token = int(rollout.input_ids[n, t + 1])
            word = parts.tokenizer.decode([token])
            say(f"  y_{n + 1:<4} {word[:10]!r:13}{old[n, t]:9.4f}{ref[n, t]:9.4f}{new[n, t]:9.4f}"
                f"{log_ratio[n, t].exp():8.4f}{J[n, t]:+9.4f}{kl[n, t]:10.5f}"
                + (" clipped" if clipped[n, t] else ""))
    moved = (log_ratio * A > 0)[mask]
    arrived = f"; {metrics['arrived']:.0%} of it arrived" if "arrived" in metrics else ""
    say(f"\n[G] grpo_loss before the update {metrics['loss']:+.6f}, norm of its gradient "
        f"{metrics['grad_norm']:.4f}; after optimizer.step at --lr {s.lr:g}{arrived}\n    "
        f"{moved.sum()} of {len(moved)} tokens have moved as their advantage says; the others "
        "share weights with them\n\n"
        "[H] train_grpo: fresh answers from the policy as it is now, and again")


def keep_going(stream):
    """Training goes on if a pipe's reader leaves (`| head`), or the stream is full or closed."""
    def unless_it_fails(call):
        def attempt(*given):
            try:
                return call(*given)
            except (OSError, ValueError):
                with suppress(ValueError):  # a reward has closed it
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return attempt

    stream.reconfigure(errors="backslashreplace")  # for a terminal that knows only ASCII
    stream.write = unless_it_fails(stream.write)
    stream.flush = unless_it_fails(stream.flush)


if __name__ == "__main__":
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None after `>&-`
    sys.stderr = sys.stderr or open(os.devnull, "w")
    keep_going(sys.stdout)
    keep_going(sys.stderr)
    warnings.showwarning = lambda message, *_: say(message, sys.stderr)  # above the bars
    sys.exit(main())
