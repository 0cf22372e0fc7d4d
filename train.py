"""[G] One training step and [H] the loop around it: GRPO, online.

    sample G answers to each prompt [A] -> score them [B] -> compare siblings [C]
    -> log-probabilities [D] -> clipped objective [E], KL [F] -> gradient step -> and again

Departures from the theory's code map:
- The ids that were sampled are the ids that are trained on: no text is tokenised again.
- A step may take several updates on one rollout. The old log-probs of all of them are those
  that the first update finds, before anything has moved.
- The batch is cut into micro-batches and divided once, by the size of the whole batch: the
  gradient does not depend on the cut.

    python train.py                                       # the tiny policy learns to reason
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct    # GSM8K, on a GPU
"""

import os
import signal
import sys

if __name__ == "__main__":
    # Importing torch takes seconds. Ctrl-C in them ends quietly, for nothing has begun.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import re
import shlex
import shutil
import time
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.modeling_layers import GradientCheckpointingLayer

import advantage
import logprob
import loss
import reward
import sample
from advantage import advantages_for, is_flat
from logprob import IGNORE, layers_checkpointed, token_logprobs
from loss import grpo_loss
from reward import score_responses
from sample import chat_prompt, sample_groups

# --------------------------------------------------------------------------------------------------
# [G] One step: sample, score, normalise, update


def train_step(policy_model, ref_model, optimizer, tokenizer, prompts, ground_truths, settings,
               generator=None, reward_fn=None, sampler=sample_groups, on_rollout=None, more=None):
    """One GRPO step on B prompts -> its metrics, floats by name. DeepSeekMath, algorithm 1.

    prompts: B strings, chat template applied; ground_truths: their B true answers. ref_model: the
    frozen reference, None for no KL. `reward_fn(prompts, rollout) -> (N,)` replaces the rule's
    reward, `sampler` is called as sample_groups is. `on_rollout(rollout, rewards, advantages)` may
    look at the answers; `more` gives other problems to --max-resample. Each of several GPUs has
    prompts of its own; the metrics are of all.
    """
    s = settings
    clock = [time.perf_counter()]

    # [A] G answers to each prompt, drawn from the policy as it is now.
    with whole_weights(policy_model):
        rollout = sampler(policy_model, tokenizer, prompts, s.group_size, s.max_new_tokens,
                          s.temperature, generator)
    clock.append(time.perf_counter())

    # [B] One number per answer, (N,). The rule's is computed in any case: accuracy comes from it.
    rule_rewards = score_responses(rollout.responses, ground_truths, s.group_size)
    rewards = reward_fn(prompts, rollout) if reward_fn else rule_rewards
    if s.max_resample:
        rollout, rewards, rule_rewards = without_flat_groups(
            policy_model, tokenizer, prompts, ground_truths, rollout, rewards, rule_rewards,
            sampler, more, s)
    rewards = with_length_terms(rewards, rollout, s)
    clock.append(time.perf_counter())

    # [D] The reference's log-probs. The policy's own are found by the first update.
    fill_in_logprobs(policy_model, ref_model, rollout, s)

    # [C] Each answer against its siblings: (N,), or (N, S-1) where tokens differ.
    advantages = advantages_for(s.advantage, rewards, s.group_size, **advantage_inputs(
        rollout, rule_rewards, reward_fn, ground_truths, tokenizer, s))
    if on_rollout:
        on_rollout(rollout, rewards, advantages)

    # [D] [E] [F] One gradient step by default. With more of them the answers come from a policy
    # that has moved on, and that is what the ratio and its clip are for.
    updates = []
    for _ in range(s.updates_per_rollout):
        for batch in mini_batches(rollout, advantages, s):
            updates.append(update(policy_model, optimizer, *batch, s))
    optimizer.zero_grad()  # the next rollout can use the gradients' memory
    return step_metrics(rollout, rewards, rule_rewards, updates, clock, s)


def update(policy_model, optimizer, rollout, advantages, settings):
    """One gradient step on the rollout; advantages: (N,) or (N, S-1) -> metrics of the batch.

    The first update of a rollout keeps its log-probs there: nothing has moved before it, so they
    are the old ones, and all of its ratios are 1.
    """
    s = settings
    mask = loss_mask(rollout, s)                                                       # (N, S-1)
    logprobs = torch.zeros_like(rollout.logprobs)                                      # (N, S-1)
    entropies = torch.zeros_like(rollout.logprobs)                                     # (N, S-1)
    # The loss is divided once, by the rows and tokens of the whole batch. Then micro-batches of n
    # rows, w tokens wide, simply add up: they save memory and change nothing else.
    sizes = summed({"n_rows": len(mask), "n_tokens": mask.sum()})
    sums = {}
    optimizer.zero_grad()
    for rows, width, weight in cut(rollout, s):
        here = (rows, slice(width - 1))
        # [D] of the policy as it is now, with a gradient: (n, w-1)
        logp, entropies[here] = score(policy_model, rollout, rows, width, s)
        logprobs[here] = logp.detach()
        # [E] [F] against the policy that drew the answers, and against the reference
        old = logprobs if rollout.old_logprobs is None else rollout.old_logprobs
        ref = None if rollout.ref_logprobs is None else rollout.ref_logprobs[here]
        A = advantages[rows] if advantages.ndim == 1 else advantages[here]
        value, metrics = grpo_loss(logp, old[here], ref, A, mask[here],
                                   **loss_options(rollout, here, s), **sizes)
        # The weight is 1, but for several GPUs, see cut().
        (value * weight).backward()
        add(sums, metrics, weight)
    if rollout.old_logprobs is None:
        rollout.old_logprobs = logprobs
        rollout.entropies = entropies

    # [G] The gradient step. One that would write NaN into the weights is not taken, and counted.
    grad_norm = clip_grad_norm_(policy_model.parameters(), s.max_grad_norm)
    metrics = update_metrics(sums, grad_norm, logprobs, rollout.old_logprobs)
    if not metrics["skipped_updates"]:
        optimizer.step()
    return metrics


# --------------------------------------------------------------------------------------------------
# [H] The loop: every step draws fresh answers from the policy as it is now


def train_grpo(policy_model, ref_model, optimizer, tokenizer, problems, eval_problems, settings,
               run=None, reward_of=None, reward_model=None, sampler=sample_groups):
    """Steps run.step + 1 .. settings.steps on `problems` (dicts, see load_problems).

    `reward_of(problems, prompts, rollout) -> (N,)` replaces the rule's reward; `reward_model` is
    what stands behind it, if it is trained further with every new reference. Everything random
    follows from (seed, step, prompt): a resumed run needs to know its step and no more, and the
    answers do not depend on how many GPUs share them.
    """
    s = settings
    run = run or Run()
    assert_own_frozen_tensors(ref_model, policy_model)
    judge = partial(evaluate, policy_model, tokenizer, eval_problems, s, reward_of, sampler)
    if not run.before:
        figures, run.before = judge()
        run.log({"step": 0, **figures})
    with progress_bar(s.steps, run.step) as bar:
        for step in range(run.step + 1, s.steps + 1):
            if run.stopped():
                break
            set_learning_rate(optimizer, step, s)
            # Fresh problems, fresh answers: what the policy learned from is not asked again.
            prompts, truths, generators, reward_fn = problems_of_step(
                tokenizer, problems, step, s, reward_of)
            metrics = train_step(
                policy_model, ref_model, optimizer, tokenizer, prompts, truths, s, generators,
                reward_fn, partial(agreed, sampler),
                on_rollout=partial(keep_answers, run, reward_model, s, step, prompts),
                more=partial(more_problems, tokenizer, problems, step, s, reward_of))
            metrics = {"step": step, "lr": optimizer.param_groups[0]["lr"], **metrics}
            # Iterative GRPO: a new reference, and the reward model goes on learning, too.
            if s.renew_reference and step % s.renew_reference == 0:
                metrics |= renew(ref_model, policy_model, reward_model, step, s)
            if step % s.eval_every == 0 or step == s.steps:
                figures, run.after = judge()
                metrics |= figures
                keep_best(policy_model, tokenizer, s, run, figures)
            run.log(metrics)
            # The leash of the next step: another one only with --kl-band.
            run.kl_coef = s.kl_coef = next_beta(metrics["approx_kl"], s)
            show(bar, metrics, run, eval_problems)
            if step % s.save_every == 0 or step == s.steps:
                run.save_checkpoint(policy_model, optimizer)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows, in this order:
#
#     helpers of train_step, dynamic sampling, helpers of train_grpo, known failures
#     settings (every flag), loading, weights and optimizer, a count of the memory
#     several GPUs, the files of a run, the program
#
# From here on `s` is the Settings.
#
# What train_step leaves to helpers: the options of [B], [C] and [E][F], log-probs batch by batch

# The flags that grpo_loss takes, under the same names
OBJECTIVE = ("clip_eps", "clip_eps_high", "kl_coef", "kl_estimator", "aggregate", "ratio",
             "objective", "max_new_tokens")


def loss_options(rollout, here, s):
    """The flags of [E][F]; with --sampler-correction also what the sampler said."""
    options = {name: getattr(s, name) for name in OBJECTIVE}
    if s.sampler_correction:
        # The sampler's own numbers, of other kernels than [D]'s; plain GRPO never reads them.
        options["sampler_logprobs"] = rollout.logprobs[here]
        options["sampler_cap"] = s.sampler_correction
    return options


def advantage_inputs(rollout, rule_rewards, reward_fn, ground_truths, tokenizer, s):
    """What the kinds of [C] read beside the rewards; plain GRPO reads the last two alone."""
    candidates = None
    if s.advantage == "shape":
        ids = [row[row != IGNORE].tolist() for row in rollout.labels]
        candidates = reward.boxed_candidates(rollout.responses, ground_truths, s.group_size, ids,
                                             tokenizer.decode)
    # With a reward of one's own, an answer counts as right if its reward is positive.
    return {"entropies": rollout.entropies, "mask": rollout.labels[:, 1:] != IGNORE,
            "right": None if reward_fn else reward.is_right(rule_rewards),
            "step_rewards": vars(rollout).get("step_rewards"), "candidates": candidates,
            "scale_by_std": s.scale_by_std, "clip": s.clip_advantages}


def with_length_terms(rewards, rollout, s):
    """GR3's rescaling and DAPO's penalty for answers that are almost too long, where asked for."""
    lengths = (rollout.labels != IGNORE).sum(dim=1).cpu()                              # (N,)
    if s.length_rescale:
        with telling("--length-rescale:", RewardFailed):
            rewards = reward.length_rescaled(rewards, lengths, s.group_size, s.length_rescale)
    if s.overlong_buffer:
        penalty = reward.overlong_penalty(lengths, s.answer_tokens, s.overlong_buffer)
        rewards = rewards + penalty.to(rewards.device)
    return rewards


def loss_mask(rollout, s):
    """The tokens that the loss speaks of, (N, S-1): responses, cut off ones left out if asked.

    Not earlier: their rewards belong to the mean that their siblings are compared with.
    """
    mask = rollout.labels[:, 1:] != IGNORE
    return mask & rollout.finished[:, None] if s.mask_truncated else mask


def score(model, rollout, rows, width, s, with_entropy=True):
    """[D] of one micro-batch: log-probs (n, w-1) and, if asked for, their entropies."""
    # A sharded model must be entered through a method that FSDP knows, see shard().
    logprobs_of = getattr(model, "token_logprobs", partial(token_logprobs, model))
    groups = rollout.group_ids[rows] if s.share_prompts else None
    with layers_checkpointed(model, s.gradient_checkpointing and torch.is_grad_enabled()):
        return logprobs_of(rollout.input_ids[rows, :width], rollout.labels[rows, :width],
                           s.temperature, with_entropy, groups)


@torch.no_grad()
def fill_in_logprobs(policy_model, ref_model, rollout, s):
    """[D] before anything moves: the reference's, and the policy's own where they are needed now.

    The first update finds the policy's by the way. But [C] may ask for entropies, and mini-batches
    move the policy before the last of them has been seen.
    """
    if s.offload:
        # Memory is short: the rollout's cache and graphs make room for the update.
        sample.release(policy_model)
    if ref_model is not None:
        rollout.ref_logprobs, _ = logprobs_of_all(ref_model, rollout, s, with_entropy=False)
    if s.minibatches > 1 or s.advantage in ("gtpo", "grpo-s"):
        rollout.old_logprobs, rollout.entropies = logprobs_of_all(policy_model, rollout, s)


def logprobs_of_all(model, rollout, s, with_entropy=True):
    """[D] of the whole rollout, micro-batch by micro-batch: log-probs and entropies, (N, S-1)."""
    logprobs = torch.zeros_like(rollout.logprobs)
    entropies = torch.zeros_like(rollout.logprobs)
    for rows, width, _ in cut(rollout, s):
        here = (rows, slice(width - 1))
        found = score(model, rollout, rows, width, s, with_entropy)
        if with_entropy:
            found, entropies[here] = found
        logprobs[here] = found
    return logprobs, entropies


def mini_batches(rollout, advantages, s):
    """--minibatches: the groups dealt out, in order -> a list of (rollout, advantages)."""
    advantages = advantages.to(rollout.labels.device)
    n = s.minibatches
    if n == 1:
        return [(rollout, advantages)]
    G = s.group_size
    B = len(rollout.labels) // G
    parts = []
    for k in range(n):
        rows = slice(B * k // n * G, B * (k + 1) // n * G)  # whole groups, as equal as can be
        part = copy.copy(rollout)
        for field in dataclasses.fields(rollout):
            value = getattr(rollout, field.name)
            setattr(part, field.name, None if value is None else value[rows])
        parts.append((part, advantages[rows]))
    return parts


def cut(rollout, s):
    """Micro-batches -> a list of (rows, width, weight of its loss).

    On one GPU every weight is 1. Several GPUs must run equally many passes, or FSDP's gathers wait
    for ever: whoever has fewer runs its last one again, with weight 0. And FSDP averages the
    gradients of the GPUs where we want their sum: so a real pass weighs as much as there are GPUs.
    """
    cuts = list(logprob.micro_batches(rollout.labels, rollout.group_ids, s.micro_batch_tokens,
                                      s.share_prompts))
    # Answers differ in length, so ranks may have different numbers of micro-batches.
    most = max(gathered_objects(len(cuts)))
    passes = [(rows, width, world()) for rows, width in cuts]
    rows, width = cuts[-1]
    return passes + [(rows, width, 0)] * (most - len(cuts))


def add(sums, metrics, weight):
    """Metrics of a micro-batch onto those before it; a pass of weight 0 is not counted."""
    for name, value in metrics.items():
        sums[name] = sums.get(name, 0) + value * (weight > 0)


def update_metrics(sums, grad_norm, logprobs, old_logprobs):
    """The metrics of all micro-batches, on all GPUs; whether the step must be skipped."""
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


def step_metrics(rollout, rewards, rule_rewards, updates, clock, s):
    """What a step was like: the answers, the mean of its updates, the time.

    `accuracy` and `format_rate` are the rule's, whoever gave the rewards; they are NaN where no
    true answer is known.
    """
    lengths = (rollout.labels != IGNORE).sum(dim=1).float()                            # (N,)
    lengths = gathered(lengths)
    rewards = gathered(rewards)
    rule_rewards = gathered(rule_rewards)
    finished = gathered(rollout.finished)
    entropy = summed({"entropy": rollout.entropies.sum()})["entropy"]
    metrics = {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(correction=0),
        "accuracy": share(reward.is_right(rule_rewards), rule_rewards),
        "format_rate": share(reward.has_format(rule_rewards), rule_rewards),
        # Groups whose rewards are all equal teach nothing: all of their advantages are 0.
        "zero_variance_groups": is_flat(rewards, s.group_size).float().mean(),
        "groups_all_right": all_are(rule_rewards, True, s.group_size),
        "groups_all_wrong": all_are(rule_rewards, False, s.group_size),
        "response_length_mean": lengths.mean(),
        "response_length_p95": lengths.quantile(0.95),
        "truncated_fraction": (~finished).float().mean(),
        "tokens": lengths.sum(),
        # per token, of the policy that drew the answers
        "entropy": entropy / lengths.sum(),
        "kl_coef": s.kl_coef,
        # trainer against sampler, before anything has moved: rounding, and no more
        "sampler_ratio_error": largest_ratio_error(rollout.old_logprobs, rollout.logprobs),
    }
    # Several updates: their mean, but the largest ratio error and the number of skipped ones.
    for name in updates[0]:
        metrics[name] = sum(u[name] for u in updates) / len(updates)
    metrics["ratio_max_error"] = max(u["ratio_max_error"] for u in updates)
    metrics["skipped_updates"] = sum(u["skipped_updates"] for u in updates)
    if s.max_resample:
        metrics["resampled_groups"] = summed({"n": rollout.resampled})["n"]
    for name, values in (rollout.reward_parts or {}).items():
        values = gathered(values)  # NaN where this reward does not apply
        metrics[f"reward/{name}"] = values.nanmean()
        metrics[f"reward_std/{name}"] = (values - values.nanmean()).square().nanmean().sqrt()
    started, sampled, scored = clock
    trained = time.perf_counter()
    metrics["seconds_sampling"] = sampled - started
    metrics["seconds_scoring"] = scored - sampled
    metrics["seconds_training"] = trained - scored
    metrics["peak_memory_gb"] = peak_memory() / 1e9
    metrics["tokens_per_second"] = metrics["tokens"] / (trained - started)
    return {name: float(value) for name, value in metrics.items()}


def all_are(rule_rewards, right, group_size):
    """The share of groups that are all right, or all wrong, among those whose truth is known."""
    same = (reward.is_right(rule_rewards) == right).view(-1, group_size).all(dim=1)
    return share(same, rule_rewards[::group_size])


def peak_memory():
    """Bytes: of the allocator on CUDA, else the process's resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    # macOS counts bytes, Linux kilobytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def share(right, rewards):
    """The share of True among the rows whose reward is known, else NaN."""
    return right[~rewards.isnan()].float().mean()


# --------------------------------------------------------------------------------------------------
# Dynamic sampling (DAPO, arXiv 2503.14476): a group whose rewards are all equal teaches nothing,
# and makes room for a group of another problem


def without_flat_groups(model, tokenizer, prompts, ground_truths, rollout, rewards, rule_rewards,
                        sampler, more, s):
    """Groups without variance are replaced, in --max-resample rounds at most.

    `prompts` and `ground_truths` are changed in place. What stays flat after the last round stays:
    its advantages are 0. `rollout.resampled` counts the groups that were thrown away.
    """
    G = s.group_size
    resampled = 0
    for attempt in range(1, s.max_resample + 1):
        flat = is_flat(rewards, G).nonzero()[:, 0].tolist()
        if not any(gathered_objects(len(flat))):
            break  # every group of every rank teaches something
        # A rank that needs nothing draws one group all the same: the others wait for it in FSDP.
        new_prompts, truths, generators, reward_fn = more(attempt, max(len(flat), 1))
        with whole_weights(model):
            new = sampler(model, tokenizer, new_prompts, G, s.max_new_tokens, s.temperature,
                          generators)
        new_rule = score_responses(new.responses, truths, G)
        new_rewards = reward_fn(new_prompts, new) if reward_fn else new_rule
        # A new group takes the place of a flat one, unless it is flat itself.
        useful = (~is_flat(new_rewards, G)).nonzero()[:, 0].tolist()
        for j, k in zip(flat, useful):
            prompts[j] = new_prompts[k]
            ground_truths[j] = truths[k]
            rows = slice(j * G, (j + 1) * G)
            others = slice(k * G, (k + 1) * G)
            rewards[rows] = new_rewards[others]
            rule_rewards[rows] = new_rule[others]
            rollout = with_rows(rollout, rows, new, others)
        resampled += len(flat)
    rollout.resampled = resampled
    return rollout, rewards, rule_rewards


def with_rows(rollout, rows, other, others):
    """The rollout with these rows taken from another; both are widened to the longer of the two.

    What the rewards have left beside the answers goes along.
    """
    def taken(mine, theirs, blank):
        if isinstance(mine, dict):
            return {name: taken(mine[name], theirs[name], blank) for name in mine}
        if isinstance(mine, torch.Tensor) and mine.ndim == 2:
            width = max(mine.shape[1], theirs.shape[1])
            mine = torch.nn.functional.pad(mine, (0, width - mine.shape[1]), value=blank)
            theirs = torch.nn.functional.pad(theirs, (0, width - theirs.shape[1]), value=blank)
        mine = copy.deepcopy(mine)
        mine[rows] = theirs[others]
        return mine

    rollout = copy.copy(rollout)
    for name, value in list(vars(rollout).items()):
        # What [D] has not computed yet is None, and the rows of a group keep its number.
        if value is not None and name != "group_ids":
            blank = IGNORE if name == "labels" else 0
            setattr(rollout, name, taken(value, getattr(other, name), blank))
    return rollout


# --------------------------------------------------------------------------------------------------
# What train_grpo leaves to helpers: problems and random numbers of a step, prompts, evaluation, bar


def problems_of_step(tokenizer, problems, step, s, reward_of):
    """This GPU's share of the step's B problems, as train_step takes them, see asked().

    Every epoch has a new order, drawn from (seed, epoch); the few problems that do not fill a
    step are left out. All answers to a prompt are drawn on one GPU: a group that is split has
    two means and two baselines.
    """
    order = order_of_step(len(problems), step, s)
    mine = share_of_rank(s.prompts_per_step)
    whose = sum(gathered_objects([order[j] for j in mine]), [])
    assert whose == order, "every prompt, with its whole group, must live on one rank"
    return asked(tokenizer, [problems[order[j]] for j in mine],
                 [seeded(s.seed, step, j) for j in mine], s, reward_of)


def order_of_step(n, step, s):
    """The numbers of the step's B problems among n.

    Epoch and place in it follow from the step: nothing has to be kept for a resumed run.
    """
    B = s.prompts_per_step
    epoch, k = divmod(step - 1, n // B)  # steps count from 1
    order = torch.randperm(n, generator=seeded(s.seed, 0, epoch))
    return order[k * B:(k + 1) * B].tolist()


def more_problems(tokenizer, problems, step, s, reward_of, attempt, n):
    """n other problems for this GPU, see asked()."""
    order = torch.randperm(len(problems), generator=seeded(s.seed, "resample", step, attempt))
    # Those of the step itself come last.
    order = sorted(order.tolist(), key=set(order_of_step(len(problems), step, s)).__contains__)
    mine = share_of_rank(s.prompts_per_step)[:n]
    return asked(tokenizer, [problems[order[j]] for j in mine],
                 [seeded(s.seed, "resample", step, attempt, j) for j in mine], s, reward_of)


def asked(tokenizer, batch, generators, s, reward_of):
    """Problems -> their prompts, their truths, their generators, and the reward of answers."""
    prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in batch]
    # A fault in one rank's rewards ends the step on all of them.
    reward_fn = partial(agreed, reward_of, batch) if reward_of else None
    return prompts, reward.truths_of(batch), generators, reward_fn


def keep_answers(run, reward_model, s, step, prompts, rollout, rewards, advantages):
    """Samples for the reader; for a reward model that learns, pairs of the answers of all ranks."""
    run.log_samples(step, prompts, rollout, rewards, advantages)
    if reward_model:
        # Every rank trains the reward model on all pairs, so that its copies stay equal.
        rows = sum(gathered_objects(rollout.judged), [])
        reward.collect_pairs(reward_model, rows, s.group_size, seeded(s.seed, "pairs", step))


def renew(ref_model, policy_model, reward_model, step, s):
    """DeepSeekMath's iterative GRPO: the reference becomes what the policy is now -> figures.

    A reward model that learns takes the same steps on the same pairs on every rank.
    """
    for part in [*ref_model.modules(), *policy_model.modules()]:
        if hasattr(part, "reshard"):
            part.reshard()  # FSDP may still hold gathered weights: what is written there is lost
    with torch.no_grad():
        for ref, p in zip(ref_model.parameters(), policy_model.parameters()):
            ref.copy_(p)
    if reward_model is None:
        return {"reference_renewed": 1.0}
    figures = reward.end_iteration(reward_model, seeded(s.seed, "reward model", step))
    for p in reward_model.model.parameters() if world() > 1 else ():
        dist.broadcast(p.data, 0)  # a GPU's sums may differ in their last digit
    return {"reference_renewed": 1.0, **figures}


def keep_best(model, tokenizer, s, run, figures):
    """--keep-best: best/ beside final/, of the highest held-out accuracy so far.

    Where no answers are known it is the mean of the user's own reward.
    """
    figure = figures["eval_accuracy"]
    if math.isnan(figure):  # no answer is known
        figure = figures.get("eval_reward", figure)
    if s.keep_best and (run.best is None or figure > run.best):
        run.best = figure
        save_final(model, tokenizer, s, run, "best")


def seeded(*numbers):
    """A random generator that follows from these numbers alone."""
    # A hash, for sums like seed + step would give step 2 of seed 0 and step 1 of seed 1 the same.
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    # manual_seed takes a signed 64-bit number: one bit fewer than eight bytes have.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def set_learning_rate(optimizer, step, s):
    """A linear warm-up; then constant, or down to 0 behind the last step, in a line or a cosine."""
    # Adam's second moment is a mean of few gradients at first: small steps until it is reliable.
    rate = min(1.0, step / max(s.warmup_steps, 1))
    # 1 at the end of the warm-up; the last step still has a little, so that it is not wasted.
    left = (s.steps - step + 1) / max(s.steps - s.warmup_steps, 1)
    if step > s.warmup_steps and s.lr_schedule == "linear":
        rate = left
    elif step > s.warmup_steps and s.lr_schedule == "cosine":
        rate = (1 - math.cos(math.pi * left)) / 2
    for group in optimizer.param_groups:
        group["lr"] = s.lr * rate


def next_beta(approx_kl, s):
    """The KL coefficient of the next step: another one only with --kl-band."""
    if not s.kl_band or not math.isfinite(approx_kl):
        return s.kl_coef  # a step that was skipped says nothing
    return loss.next_kl_coef(s.kl_coef, approx_kl, *s.kl_band)


def evaluate(model, tokenizer, problems, s, reward_of=None, sampler=sample_groups,
             group_size=1, temperature=0.0, seed=0):
    """Greedy answers (or group_size sampled ones) to all problems -> (figures, responses).

    Figures: eval_accuracy by the rule, NaN where no true answer is known; with a reward of the
    user's own also its mean, eval_reward.
    """
    if s.around_best:
        sampler = sample_groups  # to choose among answers by their rewards is no evaluation
    prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
    # as many rows at a time as a training step has
    B = max(s.prompts_per_step * s.group_size // group_size, 1)
    mine = share_of_rank(len(prompts))

    def answers():
        responses = []
        rewards = []
        for start in tqdm(range(0, len(mine), B), desc="evaluation", unit="batch", leave=False,
                          dynamic_ncols=True, disable=rank() > 0):
            part = mine[start:start + B]
            questions = [prompts[j] for j in part]
            generators = [seeded(seed, "evaluation", j) for j in part]
            rollout = sampler(model, tokenizer, questions, group_size, s.max_new_tokens,
                              temperature, generators)
            responses += rollout.responses
            if reward_of:
                rewards += reward_of([problems[j] for j in part], questions, rollout).tolist()
        return responses, rewards

    try:
        with whole_weights(model):
            found = gathered_objects(agreed(answers))
    except RewardFailed as error:
        # The policy has moved, and must not be saved as that of the step before.
        raise BadInput(error) from None
    responses = sum((responses for responses, _ in found), [])
    rewards = sum((rewards for _, rewards in found), [])
    rule_rewards = score_responses(responses, reward.truths_of(problems), group_size)
    figures = {"eval_accuracy": float(share(reward.is_right(rule_rewards), rule_rewards))}
    if reward_of:
        figures["eval_reward"] = sum(rewards) / len(rewards)
    return figures, responses


def progress_bar(steps, done):
    layout = "{desc} {n_fmt}/{total_fmt} {bar:10} {elapsed}<{remaining}{postfix}"
    return tqdm(total=steps, initial=done, desc="GRPO", bar_format=layout, disable=rank() > 0)


def show(bar, metrics, run, eval_problems):
    """The bar, in 80 columns, trouble first; after an evaluation one answer, to watch it change."""
    trouble = f"{run.skipped} SKIPPED, " if run.skipped else ""
    bar.set_postfix_str(trouble + "reward {reward_mean:.2f}, acc {accuracy:.2f}, "
                        "len {response_length_mean:.0f}, KL {approx_kl:.3f}".format(**metrics))
    bar.update()
    if "eval_accuracy" in metrics and rank() == 0:
        question = one_line(eval_problems[0]["question"])[-60:]
        answer = one_line(run.after[0])[-100:]
        bar.write(f"step {metrics['step']}, held out: {question} -> {answer}")


def assert_own_frozen_tensors(ref_model, policy_model):
    """A reference that shares a tensor with the policy moves with it, and its KL stays 0."""
    def addresses(model):
        return {local(p).data_ptr() for p in model.parameters() if local(p).numel()}

    if ref_model is not None:
        shared = addresses(ref_model) & addresses(policy_model)
        assert not shared, "the reference shares tensors with the policy"
        assert not any(p.requires_grad for p in ref_model.parameters()), "it is not frozen"


# --------------------------------------------------------------------------------------------------
# The known failures of GRPO runs, as they show in the metrics, and the flag that is the remedy


def symptoms(history):
    """Metrics of the steps so far -> {what: one line with the number and the remedy}. Pure.

    Numbers are means over the last ten steps, so that an episode is told once.
    """
    recent = history[-20:]
    before = history[-40:-20]
    found = {}

    # A metric that is null counts as NaN, and no comparison with NaN is true.
    def mean(name, rows):
        return sum(math.nan if row[name] is None else row[name] for row in rows) / len(rows)

    grad_norm = mean("grad_norm", history[-1:])
    now = {name: mean(name, history[-10:]) for name in (
        "approx_kl", "zero_variance_groups", "sampler_ratio_error", "entropy", "grad_norm")}
    if len(before) == 20:
        # Twenty steps against the twenty before them: lengths and accuracies of single steps jump.
        growth = mean("response_length_mean", recent) / mean("response_length_mean", before) - 1
        gain = mean("accuracy", recent) - mean("accuracy", before)
        if growth > 0.2 and gain < 0.01:
            found["length"] = (f"answers grew by {growth:.0%} in 20 steps, accuracy by {gain:.3f}: "
                               "--length-rescale 0.33, or --aggregate constant")
    # A jump shows in one step, so this is no mean of ten.
    if len(before) > 5 and grad_norm > 10 * mean("grad_norm", before):
        found["gradient"] = (f"gradient norm {grad_norm:.3g}, it was "
                             f"{mean('grad_norm', before):.3g}: a lower --lr, a higher --kl-coef")
    if now["approx_kl"] > 0.05:
        found["kl"] = (f"KL {now['approx_kl']:.3f} nats per token, above 0.05: "
                       "a higher --kl-coef, or --kl-band 0.02 0.05")
    # Right after a renewal it has to be 0, with --renew-reference 1 in every step.
    renewed = "reference_renewed" in history[-1]
    if now["approx_kl"] == 0 and now["grad_norm"] > 0 and len(history) > 3 and not renewed:
        found["reference"] = ("KL is exactly 0 while the policy has gradients: does the reference "
                              "share its weights, or is --lr too small to move it?")
    if now["zero_variance_groups"] > 0.5:
        found["flat"] = (f"{now['zero_variance_groups']:.0%} of the groups have no variance and "
                         "teach nothing: --max-resample 3, harder problems, more --temperature")
    if now["sampler_ratio_error"] > 0.1:
        found["ratio"] = (f"before the first update a ratio is off 1 by "
                          f"{now['sampler_ratio_error']:.2f}: sampler and trainer differ; "
                          "--sampler-correction 2.0, --dtype float32")
    if now["entropy"] < 0.1 * mean("entropy", history[:5]):
        found["entropy"] = (f"entropy {now['entropy']:.4f} nats per token, a tenth of what it was: "
                            "--clip-eps-high 0.28, a higher --kl-coef or --temperature")
    return found


# --------------------------------------------------------------------------------------------------
# Settings: every flag, one per line, with its default and its reason

TINY = Path(__file__).resolve().parent / "tests" / "tiny"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


class BadInput(Exception):
    """What the user gave cannot be used: one line on standard error, exit status 2."""


class RewardFailed(BadInput):
    """A user's function raised, or gave no number: the step before stands and can be resumed."""


@contextlib.contextmanager
def telling(flags, kind=BadInput, of=ValueError):
    """What a stage refuses with a ValueError becomes one line that begins with these flags.

    of=Exception where something foreign is read, which can be wrong in any way.
    """
    try:
        yield
    except of as error:
        fault = error if of is ValueError else one_line(error)
        raise kind(f"{flags} {fault}".strip()) from None


def switch(text):
    """The type of a flag that is on, off, or left to the program."""
    known = {"auto": "auto", "true": True, "yes": True, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def number_or_auto(text):
    return "auto" if text == "auto" else int(text)


def flag(default, help, **how):
    """A field of Settings; `how` goes to argparse's add_argument."""
    return dataclasses.field(default=default, metadata={"help": help, **how})


@dataclasses.dataclass
class Settings:
    # what is trained, on what
    model: str = flag(str(TINY), "hub name or folder of the policy")
    data: str = flag("gsm8k", "training problems: a JSONL file, `gsm8k` or `gsm8k:test`")
    eval_data: str = flag("", "held-out problems; default: gsm8k:test, or a tenth of your --data")
    question_field: str = flag("question", "the column of the JSONL that holds the question")
    answer_field: str = flag("answer", "the column that ends in `#### ` and the final answer")
    system_prompt: str = flag(BOXED, "system message before every question; empty for none")
    reward: list[str] = flag(None, "your own rewards, path/to/file.py:function, called as TRL "
                             "calls its reward_funcs; several are added; ours: `rule`, `think`",
                             action="extend")
    reward_weights: list[float] = flag(None, "a weight for each --reward; default: 1 each")
    step_reward: str = flag(None, "path/to/file.py:function, rewards of the steps in an answer: "
                            "process supervision")
    reward_model: str = flag("", "folder of a sequence-classification model, the rewards are its "
                             "scores; each --renew-reference trains it further")
    reward_model_lr: float = flag(2e-5, "AdamW's learning rate for it")
    reply: str = flag(None, "path/to/file.py:function, the user's next message after an answer: "
                      "a tool, a checker, a second player")
    max_turns: int = flag(4, "answers in a conversation with --reply, at most")
    output: str = flag("", "folder of the run; default: runs/MODEL-TIME")
    # the rollout
    steps: int = flag(500, "rollouts in all")
    prompts_per_step: int = flag(8, "B, questions per step")
    group_size: int = flag(8, "G, answers per question: their mean is the baseline")
    max_new_tokens: int = flag(512, "an answer is cut here")
    max_prompt_tokens: int = flag(0, "longer prompts are left out; 0: refused, if they do not fit")
    temperature: float = flag(1.0, "of the sampler, and of the log-probs")
    max_resample: int = flag(0, "DAPO: rounds in which groups without variance are drawn anew")
    around_best: int = flag(0, "half of a group goes on from the middle of so many of the other "
                            "half's best answers")
    # the objective
    clip_eps: float = flag(0.2, "the ratio is clipped below 1 - this and above 1 + this")
    clip_eps_high: float = flag(None, "above 1 + this instead: DAPO's clip-higher, 0.28")
    kl_coef: float = flag(0.04, "beta; 0: no KL, and no reference in memory")
    kl_estimator: str = flag("k3", "estimator of the KL", choices=loss.KL_ESTIMATORS)
    aggregate: str = flag("sequence", "mean over tokens: sequence for GRPO, token for DAPO, "
                          "constant for Dr. GRPO", choices=loss.AGGREGATES)
    ratio: str = flag("token", "ratio per token, or per sequence: GSPO", choices=loss.RATIOS)
    objective: str = flag("clip", "clip, or CISPO's weighted log-probs", choices=loss.OBJECTIVES)
    sampler_correction: float = flag(0.0, "weigh tokens by min(trainer / sampler, this): 2.0")
    mask_truncated: bool = flag(False, "keep answers that were cut off out of the loss")
    renew_reference: int = flag(0, "steps after which the reference becomes the policy; 0: never")
    kl_band: list[float] = flag(None, "LOW HIGH: beta follows, to keep the KL per token there: "
                                "0.02 0.05", nargs=2)
    # the advantage
    advantage: str = flag("group", "how siblings are compared", choices=advantage.ADVANTAGES)
    scale_by_std: bool = flag(True, "divide the advantages by the group's std; off: Dr. GRPO")
    clip_advantages: float = flag(None, "advantages stay within -this and this: 5")
    length_rescale: float = flag(0.0, "GR3's alpha: rewards shrink with length, 0.33")
    overlong_buffer: int = flag(0, "DAPO: the last tokens before the limit, where answers lose up "
                                "to 1")
    # the update
    lr: float = flag(1e-6, "AdamW's learning rate, after the warm-up")
    lr_schedule: str = flag("constant", "after the warm-up; linear and cosine end at 0",
                            choices=("constant", "linear", "cosine"))
    weight_decay: float = flag(0.0, "AdamW's")
    warmup_steps: int = flag(10, "the learning rate rises linearly over these")
    updates_per_rollout: int = flag(1, "times that the same answers are gone through")
    minibatches: int = flag(1, "gradient steps each time, on the groups dealt out to them")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    # memory: these change nothing but memory and time
    share_prompts: bool = flag(True, "run a prompt once for its whole group in the update")
    micro_batch_tokens: number_or_auto = flag("auto", "tokens in a forward and backward pass")
    gradient_checkpointing: switch = flag(
        "auto", "keep a layer's input, compute the rest again: less memory, slower",
        nargs="?", const=True)
    offload: switch = flag("auto", "bfloat16 on CUDA: float32 masters and moments in host memory",
                           nargs="?", const=True)
    # measuring and keeping
    eval_every: int = flag(50, "steps between evaluations")
    eval_limit: int = flag(200, "held-out problems that are asked; 0: all")
    save_every: int = flag(50, "steps between checkpoints")
    keep_best: bool = flag(False, "keep best/ too, by held-out accuracy")
    seed: int = flag(0, "of the problems' order and of the sampling")
    device: str = flag("auto", "cuda, mps or cpu; auto: the first of them that is there")
    dtype: str = flag("auto", "of the weights that compute; auto: bfloat16 on CUDA, else float32",
                      choices=("auto", "float32", "bfloat16"))
    threads: int = flag(0, "CPU threads; 0: torch's choice. Small models are fastest on one")
    resume: bool = flag(False, "continue the run in --output")
    eval_only: bool = flag(False, "evaluate --model, greedy and sampled, and stop")
    trace: bool = flag(False, "tell one step stage by stage, and stop")
    dry_run: bool = flag(False, "count the memory of these flags and stop; nothing is loaded")

    @property
    def answer_tokens(self):
        """Tokens that the policy writes in a row, at most: with --reply it has several turns."""
        return self.max_new_tokens * (self.max_turns if self.reply else 1)


# No number may be negative. Of some more is asked; a few have another limit than 2^31 - 1.
POSITIVE = ("temperature", "lr", "max_grad_norm", "clip_advantages", "reward_model_lr")
AT_LEAST = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_new_tokens": 1,
            "updates_per_rollout": 1, "minibatches": 1, "micro_batch_tokens": 1, "max_turns": 1,
            "eval_every": 1, "save_every": 1}
AT_MOST = {"clip_eps": 1, "threads": 1024, "seed": 2**32}

# A model folder's recipe.json may set these and nothing else. It is foreign input: it may say how
# to train, never what to run or where to write. final/recipe.json says as much of a run.
RECIPE = ("data", "eval_data", "question_field", "answer_field", "system_prompt", "steps",
          "prompts_per_step", "group_size", "max_new_tokens", "max_prompt_tokens", "temperature",
          "max_resample", "around_best", "renew_reference", "keep_best",
          *OBJECTIVE, "sampler_correction", "mask_truncated", "kl_band", "advantage",
          "scale_by_std", "clip_advantages", "length_rescale", "overlong_buffer", "lr",
          "lr_schedule", "weight_decay", "warmup_steps", "updates_per_rollout", "minibatches",
          "max_grad_norm",
          "share_prompts", "micro_batch_tokens", "gradient_checkpointing", "offload", "eval_every",
          "eval_limit", "save_every", "threads")
# A run that is resumed may change these: none of them changes what is learned.
FREE = ("resume", "output", "steps", "micro_batch_tokens", "gradient_checkpointing", "offload",
        "eval_every", "save_every", "threads")


class Parser(HfArgumentParser):
    def error(self, message):
        # Every flag has two spellings, --kl_coef and --kl-coef; one is enough in a message.
        raise BadInput(re.sub(r"--\w+_\w+/", "", message))


def make_parser():
    parser = Parser(Settings, prog="train.py", usage="train.py [--FLAG VALUE ...]",
                    allow_abbrev=False,
                    description="Group Relative Policy Optimization. See README.md.")
    for name in ("gradient-checkpointing", "offload"):
        parser.add_argument(f"--no-{name}", dest=name.replace("-", "_"), action="store_false")
    return parser


def given_flags(argv):
    """The flags that stand in argv, {name: value}, each of them within its bounds."""
    # No default is filled in where None stands already: so what was given can be told apart.
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(Settings))
    values = vars(make_parser().parse_args(argv, SimpleNamespace(**nothing)))
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if type(value) in (int, float):
            check_bounds(name, value)
        elif name in ("model", "data", "eval_data", "reward_model", "step_reward", "reply"):
            given[name] = absolute(value)
        elif name == "reward":
            given[name] = [absolute(spec) for spec in value]
    return given


def check_bounds(name, value):
    least = AT_LEAST.get(name, 0)
    most = AT_MOST.get(name, 2**31 - 1)
    fault = None
    if not math.isfinite(value):
        fault = "not a finite number"
    elif value <= 0 and name in POSITIVE:
        fault = "must be above 0"
    elif value < least:
        fault = f"must be at least {least}"
    elif value > most:
        fault = f"must be at most {most}"
    if fault:
        raise BadInput(f"{flag_of(name)} {value}: {fault}")


def absolute(text):
    """A file, or file.py:function, from the root: a resumed run may start somewhere else."""
    path, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    return os.path.abspath(path) + colon + function if os.path.exists(path) else text


def flag_of(name):
    return "--" + name.replace("_", "-")


def as_flags(values):
    """{"kl_coef": 0.02, "reward": ["a.py:f"]} -> ["--kl-coef=0.02", "--reward", "a.py:f"]."""
    argv = []
    for name, value in values.items():
        if isinstance(value, list):
            argv += [flag_of(name), *map(str, value)]
        elif value is not None:
            argv.append(f"{flag_of(name)}={value}")
    return argv


def parse(argv):
    """Command line -> (Settings, what the model's recipe.json brought). The command line wins."""
    given = given_flags(argv)
    if given.get("resume"):
        return resumed_settings(given)
    if given.get("eval_only") and os.path.isdir(os.path.join(given.get("model", ""), "final")):
        given["model"] = os.path.join(given["model"], "final")  # a run's folder
    recipe, rewards = read_recipe(Path(given.get("model", TINY)))
    if rewards and not given.get("reward") and not given.get("eval_only"):
        raise BadInput(f"--model {given['model']}: was trained with --reward {' '.join(rewards)}; "
                       "name it again, or another (--reward rule for the rule's)")
    if "data" in given:
        # Held-out problems of another data set would measure something else.
        recipe.pop("eval_data", None)
    return Settings(**{**recipe, **given}), recipe


def read_recipe(folder):
    """A model folder's recipe.json -> (its flags, the rewards that it was trained with).

    The rewards are told to the user, never loaded: they would be a program from a foreign folder.
    """
    path = folder / "recipe.json"
    if not os.path.isfile(path):
        return {}, []
    with telling(f"{path}:", of=Exception):
        recipe = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(recipe, dict):
            raise BadInput("not an object of flags and values")
        recipe = {name.replace("-", "_"): value for name, value in recipe.items()}
        rewards = recipe.pop("reward", [])
        rewards = [str(spec) for spec in (rewards if isinstance(rewards, list) else [rewards])]
        for name, value in recipe.items():
            if name not in RECIPE:
                raise BadInput(f"{flag_of(name)} is not for a recipe to set")
            # The items of a list would be read as flags of their own. Numbers would not.
            numbers = name == "kl_band" and all(type(bound) in (int, float) for bound in value)
            if isinstance(value, list | dict) and not numbers:
                raise BadInput(f"{flag_of(name)}: not a single value")
        for name in recipe.keys() & {"data", "eval_data"}:
            # A path is meant from the folder that the recipe stands in.
            beside = folder / str(recipe[name])
            recipe[name] = str(beside) if os.path.isfile(beside) else recipe[name]
        return given_flags(as_flags(recipe)), rewards


def resumed_settings(given):
    """The saved flags of the run in --output, with those of FREE that are given now."""
    if not given.get("output"):
        raise BadInput("--resume: needs --output, the folder of the run to continue")
    path = Path(given["output"]) / "config.json"
    refusal = f"--output {given['output']}: no run to resume, config.json is missing or not ours:"
    with telling(refusal, of=Exception):
        config = json.loads(path.read_text(encoding="utf-8"))
        recipe = config["recipe"]
        saved = {name: value for name, value in config["settings"].items()
                 if name not in ("resume", "output")}
        for name, value in saved.items():
            # as_flags leaves out what is None, and the default would take its place
            if value is None and getattr(Settings, name, None) is not None:
                raise BadInput(f"{flag_of(name)}: has no value")
        # Through the parser, as if they had been typed: types, choices and bounds are checked.
        saved = given_flags(as_flags(saved))
    old = Settings(**saved)
    for name, value in given.items():
        if name not in FREE and value != getattr(old, name):
            raise BadInput(f"{flag_of(name)} {value}: the run in {given['output']} has "
                           f"{getattr(old, name)}; a resumed run may change only "
                           + ", ".join(flag_of(name) for name in FREE[2:]))
    if given.get("steps", old.steps) != old.steps and old.lr_schedule != "constant":
        raise BadInput(f"--steps {given['steps']}: the run has {old.steps}, and its --lr-schedule "
                       f"{old.lr_schedule} depends on them")
    if given.get("threads", old.threads) != old.threads:
        say(f"--threads {given['threads']}: the run had {old.threads}; sums differ in their last "
            "digit, and so will the metrics")
    return Settings(**{**saved, **given}), recipe


# --------------------------------------------------------------------------------------------------
# Loading: device, model, tokenizer, problems, reward. Whatever is wrong is found here, before a
# folder is made.


def choose_device(s):
    """-> (torch.device, dtype of the weights that compute)."""
    # in order of preference
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
               "cpu": True}
    best = next(name for name in present if present[name])
    try:
        device = torch.device(best if s.device == "auto" else s.device)
    except RuntimeError:
        raise BadInput(f"--device {s.device}: not a device torch knows") from None
    if not present.get(device.type):
        raise BadInput(f"--device {s.device}: not on this machine")
    on_cuda = device.type == "cuda"
    # Older cards emulate bfloat16, which is slower than their float32.
    has_bf16 = not on_cuda or torch.cuda.is_bf16_supported(including_emulation=False)
    if s.dtype == "bfloat16" and not has_bf16:
        raise BadInput(f"--dtype bfloat16: {device} has no bfloat16")
    if s.dtype != "auto":
        return device, getattr(torch, s.dtype)
    return device, torch.bfloat16 if on_cuda and has_bf16 else torch.float32


def load_policy(s):
    """The policy and its tokenizer: safetensors only, and no code of the checkpoint's own."""
    device, dtype = choose_device(s)
    with telling(f"--model {s.model}: cannot be loaded:", of=Exception):
        tokenizer = load_tokenizer(s)
        # Weights of another shape are reported, so that check_weights can name them.
        model, report = AutoModelForCausalLM.from_pretrained(
            s.model, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True)
        check_weights(model, report)
        check_words(tokenizer, model)
        if not tokenizer.chat_template:
            raise ValueError("its tokenizer has no chat template")
        if model.generation_config.eos_token_id in (None, []) and tokenizer.eos_token_id is None:
            raise ValueError("neither generation config nor tokenizer names an end token")
    switch_off_dropout(model)
    # Several ranks take their shards of it from host memory.
    return model.to(device if world() == 1 else "cpu").eval(), tokenizer


def load_tokenizer(s):
    quiet_transformers()
    return AutoTokenizer.from_pretrained(s.model, trust_remote_code=False)


def quiet_transformers():
    """No warnings, no bar for reading weights; the bar of a download stays."""
    from huggingface_hub.utils import enable_progress_bars

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    enable_progress_bars()


def check_weights(model, report):
    """transformers fills what a file lacks with random numbers and drops what it has too much."""
    def first(names):
        names = sorted(map(str, names))
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    # layers.3.mlp and layers.4.mlp are of the same form.
    def form(name):
        return re.sub(r"\.\d+\.", ".N.", name)

    if report["missing_keys"]:
        raise ValueError(f"its files lack weights: {first(report['missing_keys'])}")
    if report["mismatched_keys"]:
        raise ValueError(f"weights of another shape: {first(report['mismatched_keys'])}")
    # Something unknown may be left over, a vision tower say. A layer that is left over may not.
    known = {form(name) for name, _ in model.named_parameters()}
    layers = [name for name in report["unexpected_keys"] if form(name) in known]
    if layers:
        raise ValueError(f"its files hold layers that its config.json does not know: "
                         f"{first(layers)}")
    # One NaN in the weights makes every answer noise, and no metric would name it.
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f"{name} is not finite")


def check_words(tokenizer, model):
    """A tokenizer of another model: its ids would be out of range in the middle of a step."""
    words = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest < 0:
        raise ValueError("its tokenizer has no words")
    if highest >= words:
        raise ValueError(f"its tokenizer has ids up to {highest}, its embeddings only {words} rows")
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= words:
        raise ValueError(f"the padding id {tokenizer.pad_token_id} lies outside its {words} "
                         "embeddings")


def load_reward_model(s):
    """--reward-model, loaded as carefully as the policy: a RewardModel, the same on every rank."""
    quiet_transformers()
    with telling(f"--reward-model {s.reward_model}: cannot be loaded:", of=Exception):
        found, report = reward.open_reward_model(s.reward_model, s.reward_model_lr,
                                                 choose_device(s)[0])
        check_weights(found.model, report)
        check_words(found.tokenizer, found.model)
        if found.tokenizer.chat_template:  # tried here, for a template is foreign code
            chat_prompt(found.tokenizer, {"question": "1 + 1"}, s.system_prompt)
    return found


def switch_off_dropout(model):
    """For good: with dropout no ratio is 1, and checkpointing puts layers into training mode."""
    for owner in (model.config, model.config.get_text_config(), *model.modules()):
        for name, value in list(vars(owner).items()):
            # Layers keep rates of their own: self.dropout, self.hidden_dropout, self.resid_pdrop.
            named = "dropout" in name or "pdrop" in name
            if isinstance(value, float) and (named or isinstance(owner, torch.nn.Dropout)):
                setattr(owner, name, 0.0)


def check_forms(model, s):
    """One line: which fast forms of [A] and [D] this model takes, which it was refused and why."""
    with telling(f"--model {s.model}:"):
        forms = {**sample.forms_of(model), **logprob.forms_of(model)}
    taken = ", ".join(name for name, refused in forms.items() if refused is None)
    others = "; ".join(f"{name} refused: {refused}" for name, refused in forms.items() if refused)
    say(f"fast forms: {taken or 'none'}" + (f"; {others}" if others else ""))
    text = model.config.get_text_config()
    if any(getattr(text, name, 0) for name in ("num_experts", "num_local_experts",
                                               "n_routed_experts")):
        say("a mixture of experts: no balance or z-loss is added for its routers")
    return forms


def load_data(s, tokenizer):
    """Training and held-out problems -> two lists of dicts."""
    fields = {"question_field": s.question_field, "answer_field": s.answer_field,
              "need_answer": not (s.reward or s.reward_model)}

    def load(flag_name, source):
        with telling(f"{flag_name}:"):
            return reward.load_problems(source, **fields)

    held_out = s.eval_data or ("gsm8k:test" if s.data == "gsm8k" else None)
    # --eval-only needs --data only to hold some of it out.
    problems = [] if s.eval_only and held_out else load("--data", s.data)
    if held_out:
        eval_problems = load("--eval-data", held_out)
    else:
        problems, eval_problems = reward.hold_out(problems)
        if not eval_problems:
            raise BadInput(f"--data {s.data}: one question alone, and none to hold out; give "
                           "--eval-data")
        say(f"--eval-data is not given: {len(eval_problems)} of {s.data} are held out")
    eval_problems = eval_problems[:s.eval_limit or None]
    eval_problems = fitting("--eval-data", eval_problems, tokenizer, s)
    problems = fitting("--data", problems, tokenizer, s)
    if not s.eval_only and len(problems) < s.prompts_per_step:
        raise BadInput(f"--prompts-per-step {s.prompts_per_step}: --data {s.data} has "
                       f"{len(problems)} problems")
    return problems, eval_problems


def fitting(flag_name, problems, tokenizer, s):
    """The problems whose prompt and answer fit into the positions that the model was made for."""
    if not problems:
        return problems
    with telling(f"--model {s.model}:"):
        prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False).input_ids]
    most = s.max_prompt_tokens or math.inf  # 0: none is left out for its length alone
    kept = [(problem, length) for problem, length in zip(problems, lengths) if length <= most]
    if not kept:
        raise BadInput(f"{flag_name}: no prompt has --max-prompt-tokens {most} or fewer")
    if len(kept) < len(problems):
        say(f"{flag_name}: {len(problems) - len(kept)} of {len(problems)} prompts are longer than "
            f"--max-prompt-tokens {most}, and left out")
    # The longest one decides, now, and not in the step that happens to draw it.
    limit = logprob.length_limit(AutoConfig.from_pretrained(s.model))
    problem, longest = max(kept, key=lambda pair: pair[1])
    if longest + s.answer_tokens > limit:
        turns = f", --max-turns {s.max_turns}" if s.reply else ""
        raise BadInput(f"{flag_name}: the prompt of {problem['question'][:40]!r} has {longest} "
                       f"tokens; with --max-new-tokens {s.max_new_tokens}{turns} that is more than "
                       f"the model's {limit} positions; --max-prompt-tokens leaves such prompts "
                       "out")
    return [problem for problem, _ in kept]


def check_combinations(s):
    """What the stages would refuse in the middle of a step: tried on two answers of one token."""
    # Every flag of [C] and [E][F] goes through the function that takes it, which knows best.
    two = torch.zeros(2, 1)
    mask = torch.ones(2, 1, dtype=torch.bool)
    with telling("flags that do not go together:"):
        steps = [[(0, 0.0)], [(0, 1.0)]] if s.step_reward else None
        candidates = ([[0.0], [1.0]], [[(0, 0)], [(0, 0)]])
        advantages = advantages_for(s.advantage, torch.tensor([0.0, 1.0]), 2, two, mask,
                                    step_rewards=steps, candidates=candidates,
                                    scale_by_std=s.scale_by_std, clip=s.clip_advantages)
        options = {name: getattr(s, name) for name in OBJECTIVE}
        grpo_loss(two, two, two, advantages, mask, **options)
        if s.kl_band:
            loss.next_kl_coef(s.kl_coef, 0.0, *s.kl_band)
    share = s.prompts_per_step // world()  # of a process
    half = s.group_size // 2
    refused = {
        "--kl-band: needs a --kl-coef above 0": s.kl_band and not s.kl_coef,
        "--renew-reference: needs a --kl-coef above 0": s.renew_reference and not s.kl_coef,
        f"--minibatches {s.minibatches}: more than the {share} prompts that a process has in a "
        "step": s.minibatches > share,
        f"--overlong-buffer {s.overlong_buffer}: longer than --max-new-tokens":
            s.overlong_buffer > s.max_new_tokens,
        "--around-best: goes by the rule's reward of single answers; it does not go together with "
        "--reply, --reward or --reward-model":
            s.around_best and (s.reply or s.reward or s.reward_model),
        f"--around-best {s.around_best}: does not divide half of --group-size {s.group_size}":
            s.around_best and (s.group_size % 2 or half % s.around_best),
        "--advantage shape: reads single answers; it does not go together with --reply":
            s.reply and s.advantage == "shape",
        "--reward-model and --reward: one of them gives the rewards": s.reward_model and s.reward,
    }
    # Rewards of steps take the place of rewards of answers, and of what these do to them.
    for name in ("reward_model", "length_rescale", "overlong_buffer", "max_resample"):
        line = f"{flag_of(name)}: does not go together with --step-reward"
        refused[line] = s.step_reward and getattr(s, name)
    for line, holds in refused.items():
        if holds:
            raise BadInput(line)


def load_reward_of(s, reward_model=None):
    """The flags of the reward -> reward_of(problems, prompts, rollout) -> (N,); None: the rule's.

    What else it finds stands beside the answers: `rollout.reward_parts`, of several rewards;
    `rollout.step_rewards`; `rollout.judged`, the rows that a reward model has read.
    """
    if reward_model:
        prompt_of = partial(chat_prompt, reward_model.tokenizer, system_prompt=s.system_prompt)
        reward_of = partial(reward.model_rewards, reward_model, prompt_of)
        return telling("--reward-model:", RewardFailed)(reward_of)
    with telling(""):
        reward_of = reward.reward_fn_of(s.reward, s.reward_weights, s.step_reward)
    return reward_of and telling("", RewardFailed)(reward_of)


def load_reply(s):
    with telling("--reply"):
        return reward.load_function(s.reply) if s.reply else None


def load_sampler(s, tokenizer, problems, reply):
    """[A] as the flags ask for it: sample_groups, or a form that is called in the same way."""
    if reply:
        talk = partial(sample.sample_conversations, reply=reply, max_turns=s.max_turns)
        return telling("--reply", RewardFailed)(talk)
    if s.around_best:
        prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
        # A sampler knows prompts alone; to find the best answers it needs their truths.
        truth_of = dict(zip(prompts, reward.truths_of(problems)))

        def rewards_of(prompts, responses):
            truths = [truth_of[prompt] for prompt in prompts]
            return score_responses(responses, truths, s.group_size // 2)

        return partial(sample.sample_around, rewards_of=rewards_of, best=s.around_best)
    return sample_groups


def one_line(text):
    """Text in one line; of an exception its beginning, for some are pages long."""
    line = " ".join(str(text).split())
    return line[:300] if isinstance(text, Exception) else line


# --------------------------------------------------------------------------------------------------
# Weights. AdamW at 1e-6 moves a weight by about 1e-6; a bfloat16 weight of 0.02 knows no step below
# 6e-5 and would stay where it is. So the optimizer works on float32 masters, and bfloat16 copies
# of them compute.


def make_optimizer(model, s):
    """AdamW over float32 masters of the model's weights; over the weights where they are float32.

    Per weight, moments take 8 bytes, a master 4, its gradient 4. With --offload masters and
    moments live in host memory: gradients are added up on the GPU, go over once per update, and
    new weights come back.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    how = {"lr": s.lr, "weight_decay": s.weight_decay, "fused": True}
    if all(w.dtype == torch.float32 for w in weights):
        return torch.optim.AdamW(weights, **how)
    home = torch.device("cpu") if s.offload else model.device
    # Detached: nothing flows back through them, the optimizer is told their gradients.
    masters = [w.detach().to(home, torch.float32, copy=True) for w in weights]
    away = home != model.device
    for weight in weights:
        weight.grad_dtype = torch.float32  # micro-batches are added up in float32
    # Buffers in pinned memory are copied without waiting; plain host memory is copied ten times
    # slower. They are kept for the whole run.
    pinned = away and model.device.type == "cuda"
    grads = [torch.empty(m.shape, pin_memory=pinned) for m in masters] if away else None
    copies = [torch.empty(w.shape, dtype=w.dtype, pin_memory=pinned)
              for w in weights] if away else None

    def hand_over(*_):
        for i, (master, weight) in enumerate(zip(masters, weights)):
            if weight.grad is not None:
                grad = weight.grad
                master.grad = grads[i].copy_(grad, non_blocking=True) if away else grad
        if pinned:
            torch.cuda.synchronize()  # the CPU must not read gradients that are still on their way

    @torch.no_grad()
    def copy_back(*_):
        for i, (master, weight) in enumerate(zip(masters, weights)):
            # Rounded to bfloat16 on the CPU: half as much goes over.
            weight.copy_(copies[i].copy_(master) if away else master, non_blocking=True)
            master.grad = None

    optimizer = torch.optim.AdamW(masters, **how)
    optimizer.register_step_pre_hook(hand_over)
    optimizer.register_step_post_hook(copy_back)
    # The gradients are the weights' own.
    optimizer.zero_grad = model.zero_grad
    return optimizer


def with_smaller_micro_batches(function):
    """Out of memory: half the micro-batch, and the same once more. Not with several ranks, for the
    others would wait.
    """
    @wraps(function)
    def run(*args):
        settings = args[-1]
        try:
            return function(*args)
        except RuntimeError as error:
            if not out_of_memory(error) or world() > 1:
                raise
        # Outside of `except`, for there the error still holds the activations.
        settings.micro_batch_tokens = max(settings.micro_batch_tokens // 2, 1)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tqdm.write(f"out of memory: --micro-batch-tokens is now {settings.micro_batch_tokens}; "
                   "the update is repeated")
        return function(*args)
    return run


# train_step calls these two by name: from here on, with that second try.
update = with_smaller_micro_batches(update)
fill_in_logprobs = with_smaller_micro_batches(fill_in_logprobs)


def out_of_memory(error):
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)


# --------------------------------------------------------------------------------------------------
# Memory, counted on a model without storage: --dry-run prints it, and every `auto` follows from it

PROMPT = 256  # tokens of a prompt that the count assumes


def plan_memory(s):
    """Replace every `auto` by the fastest setting whose count fits into the memory that is free."""
    device, dtype = choose_device(s)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    planned, why = fastest_that_fits(s, device.type, dtype, free)
    if why:
        say(why)
    return planned


def fastest_that_fits(s, device, dtype, free):
    """-> (settings without `auto`, one line that says why). `free`: bytes, on CUDA alone."""
    names = ("offload", "gradient_checkpointing", "micro_batch_tokens")
    fixed = {name: getattr(s, name) for name in names if getattr(s, name) != "auto"}
    if device != "cuda":
        # A CPU has memory enough and is fastest on what fits its cache.
        usual = {"offload": False, "gradient_checkpointing": device == "mps",
                 "micro_batch_tokens": 1024 if device == "cpu" else 8192}
        return dataclasses.replace(s, **{**usual, **fixed}), None
    group = PROMPT + s.group_size * s.answer_tokens
    # Fastest first. Activations are given up before the masters leave the GPU, and two groups per
    # micro-batch before one.
    tried = [(False, False, 2 * group), (False, False, group),
             (False, True, 2 * group), (False, True, group),
             (True, True, 2 * group), (True, True, group),
             (True, True, group // 2), (True, True, group // 4), (True, True, 1024)]
    model = model_without_storage(s, dtype)
    try:
        for values in tried:
            planned = dataclasses.replace(s, **{**dict(zip(names, values)), **fixed})
            lines = count_memory(planned, model, device, dtype)
            needed = max(held(lines, "rollout"), held(lines, "update"))
            # A tenth is left for what is not counted, see print_memory.
            if needed <= 0.9 * free / 1e9:
                break
    except Exception as error:  # a family whose layers do not run on the meta device
        planned = dataclasses.replace(s, **{**dict(zip(names, (True, True, 8192))), **fixed})
        return planned, f"memory cannot be counted ({one_line(error)}): the leanest settings"
    why = (f"counted {needed:.1f} GB of {free / 1e9:.1f} free: "
           f"masters {'in host memory' if planned.offload else 'on the GPU'}, "
           f"{'checkpointing' if planned.gradient_checkpointing else 'no checkpointing'}, "
           f"{planned.micro_batch_tokens} tokens per micro-batch")
    return planned, why


def model_without_storage(s, dtype):
    with telling(f"--model {s.model}: no configuration of a language model:", of=Exception):
        config = AutoConfig.from_pretrained(s.model, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def count_memory(s, model, device, dtype):
    """What one process holds: a list of (when, what, bytes, whether it is host memory)."""
    W = int(os.environ.get("WORLD_SIZE", 1))
    text = model.config.get_text_config()
    n = sum(p.numel() for p in model.parameters())
    b = dtype.itemsize
    judge = reward.reward_model_size(s.reward_model) if s.reward_model else 0
    rows = max(s.prompts_per_step * s.group_size // W, 1)
    length = PROMPT + s.answer_tokens
    layers = text.num_hidden_layers
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    block = max(sum(p.numel() for p in m.parameters()) for m in blocks)
    # Keys and values of every row, layer and token
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 2 * rows * length * layers * heads * head_dim * b
    # FSDP's float32 shards are weights and masters in one.
    masters = W == 1 and dtype != torch.float32
    host = masters and s.offload and device != "cpu"
    # [D] makes logits chunk by chunk, in float32.
    chunk = logprob.chunks(s.micro_batch_tokens, text.vocab_size, torch.device(device))[0].stop
    logits = min(chunk, s.micro_batch_tokens) * text.vocab_size * 4
    shape = (s.micro_batch_tokens, s.group_size, s.answer_tokens)
    kept = logprob.activation_bytes(model, *shape, s.gradient_checkpointing)
    # Under checkpointing the backward pass holds one layer at a time, computed again.
    again = 0
    if s.gradient_checkpointing:
        again = logprob.activation_bytes(model, *shape, False) // layers
    largest = max(p.numel() for p in model.parameters())
    return [
        ("always", "policy, weights that compute", n * b if W == 1 else 4 * n // W, False),
        ("always", "reference, frozen", n * b // W if s.kl_coef else 0, False),
        ("always", "reward model, float32", 4 * judge, False),
        ("always", "its gradients and moments", 12 * judge if s.renew_reference else 0, False),
        ("always", "float32 masters", 4 * n * masters, host),
        ("always", "AdamW's two moments, float32", 8 * n // W, host),
        ("update", "gradients, float32", 4 * n // W, False),
        ("always", "gradients, handed over", 4 * n * host, host),
        ("rollout", "policy, gathered whole", n * b * (W > 1), False),
        ("rollout" if s.offload else "always", "key/value cache", cache, False),
        ("rollout", "logits of a step, and their exp", (b + 8) * rows * text.vocab_size, False),
        ("update", "layers gathered, two and the head",
         (2 * block + n - layers * block) * b * (W > 1), False),
        ("update", "what a micro-batch keeps for backward", kept, False),
        ("update", "one layer of it, computed again", again, False),
        ("update", "gradient of the largest tensor", 2 * b * largest, False),
        ("update", "a chunk of logits, and its gradient", 3 * logits, False),
    ]


def held(lines, phase):
    """GB on the device while this phase lasts."""
    return sum(size for when, _, size, host in lines
               if when in ("always", phase) and not host) / 1e9


def print_memory(s):
    """--dry-run: the count of these flags, and what `auto` chooses on cards of four sizes."""
    # The card need not be here: choose_device would refuse one that is not.
    known = s.device.split(":")[0]
    if known not in ("auto", "cuda", "mps", "cpu"):
        raise BadInput(f"--device {s.device}: not cuda, mps or cpu")
    device = choose_device(s)[0].type if known == "auto" else known
    auto = torch.bfloat16 if device == "cuda" else torch.float32
    dtype = auto if s.dtype == "auto" else getattr(torch, s.dtype)
    model = model_without_storage(s, dtype)
    # What this card has free; where there is none, four sizes to choose from.
    here = device == "cuda" and torch.cuda.is_available()
    sizes = [torch.cuda.mem_get_info()[0]] if here else [24e9, 48e9, 80e9, 141e9]
    for free in sizes if device == "cuda" else [None]:
        planned, why = fastest_that_fits(s, device, dtype, free)
        if why:
            print(why)
    with telling(f"--dry-run: {s.model} cannot be counted:", of=Exception):
        lines = count_memory(planned, model, device, dtype)
    n = sum(p.numel() for p in model.parameters())
    print(f"{s.model}: {n:,} weights in {dtype}; {s.prompts_per_step} x {s.group_size} answers of "
          f"{s.max_new_tokens} tokens behind prompts of {PROMPT}; one of "
          f"{os.environ.get('WORLD_SIZE', 1)} processes; GB = 1e9 bytes\n")
    for when, what, size, host in lines:
        print(f"{when:8} {what:38} {size / 1e9:9.3f} GB" + ("   host" if host else ""))
    on_host = sum(size for *_, size, host in lines if host)
    print(f"\n{device}: {held(lines, 'rollout'):.2f} GB in the rollout, "
          f"{held(lines, 'update'):.2f} GB in the update; host: {on_host / 1e9:.2f} GB. "
          "Not counted: CUDA's own context, the allocator's fragments, the kernels' work space.")


# --------------------------------------------------------------------------------------------------
# Several GPUs (torchrun): torch's own FSDP2. Every rank holds a shard of the float32 weights,
# gathers a layer when it computes, and takes whole groups of its own. With one process all of this
# is the identity.


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def join_ranks():
    if "RANK" not in os.environ or dist.is_initialized():
        return
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise BadInput(f"RANK is set and {name} is not: start several processes with torchrun")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Tensors meet through NCCL, Python objects and tensors of the CPU through gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def share_of_rank(n):
    """The part of n things that this rank takes: a range."""
    return range(rank() * n // world(), (rank() + 1) * n // world())


def gathered(tensor):
    """Every rank's rows, in the order of the ranks: (n, ...) -> (n * world, ...)."""
    return torch.cat(gathered_objects(tensor.cpu())) if world() > 1 else tensor


def gathered_objects(value):
    """Every rank's value, a list."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def summed(numbers):
    """{name: number} -> the same, summed over the ranks."""
    numbers = {name: float(value) for name, value in numbers.items()}
    everywhere = gathered_objects(numbers)
    return {name: sum(each[name] for each in everywhere) for name in numbers}


def agreed(function, *args):
    """What the function gives on this rank; what one rank refuses is raised on all of them."""
    result = None
    fault = None
    try:
        result = function(*args)
    except BadInput as error:
        fault = error
    # All ranks meet here, whether they failed or not: one that left alone would be waited for.
    for found in gathered_objects(fault):
        if found:
            raise found
    return result


def on_rank_0(function, *args, share=True):
    """What the function returns on rank 0, on every rank if shared; what it refuses, on all."""
    result = agreed(function, *args) if rank() == 0 else agreed(lambda: None)
    return gathered_objects(result)[0] if share else result


def full(tensor):
    """A sharded tensor, gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard(whole, s, dtype):
    """FSDP2 on every decoder layer and on the rest: shards in `dtype`, gathered as they compute.

    `whole` is the model on rank 0, in host memory, and None elsewhere: no other rank ever holds
    more than its shards and one layer, or one tensor on its way.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    device, compute = choose_device(s)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    model = model_without_storage(s, dtype)
    switch_off_dropout(model)
    # Layer by layer: each gets storage and is sharded before the next one gets any.
    for layer in next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer.to_empty(device=device), mp_policy=policy)
    # What stands outside the layers: embeddings, the last norm, the head.
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=device, recurse=False)
    model.tie_weights()
    fully_shard(model, mp_policy=policy)
    fill(model, whole)
    # Which forms of [D] it takes was tried on the whole model.
    forms = gathered_objects(whole and logprob.forms_of(whole))[0]
    logprob.FORMS[model] = forms
    if not forms["grouped rows"]:
        model.set_attn_implementation("grouped")
    # [D] enters below the model's own forward, and FSDP gathers only where it knows the door.
    model.token_logprobs = partial(token_logprobs, model)
    register_fsdp_forward_method(model, "token_logprobs")
    return model


@torch.no_grad()
def fill(model, whole):
    """Rank 0 hands out the weights of `whole`, tensor by tensor."""
    weights = whole.state_dict() if whole else {}
    for name, p in model.named_parameters():
        # The other ranks bring an empty tensor of that shape, and get their shard of rank 0's.
        p.copy_(sharded_like(p, weights[name] if whole else torch.empty(p.shape)))
    for name, buffer in model.named_buffers():
        if whole:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)
    model.generation_config = gathered_objects(whole and whole.generation_config)[0]


def sharded_like(p, tensor):
    """The whole tensor of rank 0 on p's device; this rank's shard of it where p is sharded."""
    tensor = tensor.to(p.device, p.dtype)
    if not hasattr(p, "device_mesh"):
        return tensor
    return dist.tensor.distribute_tensor(tensor, p.device_mesh, p.placements)


@contextlib.contextmanager
def whole_weights(model):
    """For a rollout all weights are gathered at once: no rank waits for another's long answers."""
    if world() == 1:
        yield
        return
    parts = [module for module in model.modules() if hasattr(module, "unshard")]
    for part in parts:
        part.unshard()
        # A layer would drop what was gathered as soon as its first token has passed.
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


# --------------------------------------------------------------------------------------------------
# A run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoint/, final/


class Run:
    """Where a run stands and where it writes. Only rank 0 writes; without a folder nobody does."""

    def __init__(self, folder=None):
        # Every rank knows the name; rank 0 alone has the folder and its lock.
        self.name = str(folder)
        self.folder = Path(folder) if folder and rank() == 0 else None
        self.lock = None
        # the step that was done last, and what error lines say of the last checkpoint
        self.step = 0
        self.last_checkpoint = "none"
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.signal = 0
        # of --kl-band, of --keep-best, and the metrics that symptoms() reads
        self.kl_coef = None
        self.best = None
        self.history = []
        self.tensorboard = None
        # what is trained further beside the policy, and so belongs into the checkpoint
        self.reward_model = None
        self.ref_model = None
        # greedy answers to the held-out problems, before and after training
        self.before = []
        self.after = []

    def claim_folder(self, settings):
        """On rank 0: a folder, made and locked, that holds no run but one to resume -> its name."""
        s = settings
        name = s.output or f"runs/{Path(s.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
        while not s.output and os.path.exists(name):
            name += ".2"  # two runs may start in one second
        self.folder = Path(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Looked at before anything is written: the folder may be somebody else's.
            begun = {path.name for path in self.folder.iterdir() if path.suffix != ".tmp"}
            if begun - {".lock"} and not s.resume:
                raise BadInput(f"--output {name}: holds a run already; continue it (--resume) or "
                               "name another folder")
            self.lock = open(self.folder / ".lock", "w")
            with contextlib.suppress(ImportError):  # Windows has none: there nobody is kept out
                import fcntl
                # This lock is gone with the process, however it ends.
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # What a kill or a full disk left half written may be as large as a checkpoint.
            for path in [*self.folder.glob("*.tmp"), *self.folder.glob("checkpoint/*.tmp*")]:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        except BlockingIOError:
            raise BadInput(f"--output {name}: another run is writing there") from None
        except OSError as error:
            raise BadInput(f"--output {name}: cannot be written ({error.strerror})") from None
        return name

    def stop_on_signals(self):
        """Ctrl-C, SIGTERM and SIGHUP let the step in hand end; the second one does not."""
        def stop(number, _):
            if self.signal:
                os._exit(128 + number)
            self.signal = number
            name = signal.Signals(number).name
            print(f"\nstopping after this step ({name}; once more: at once)", file=sys.stderr)

        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):  # Windows has no SIGHUP
                signal.signal(getattr(signal, name), stop)

    def stopped(self):
        """One rank's signal stops all of them."""
        self.signal = max(gathered_objects(self.signal))
        return self.signal

    def log(self, metrics):
        """A line of metrics, and of warning when a known failure begins to show.

        BadInput after ten updates in a row that changed no weight.
        """
        self.step = metrics["step"]
        if "loss" in metrics:
            # From what the file holds, and from nothing else: a resumed run warns as one never
            # stopped.
            known = symptoms(self.history) if self.history else {}
            self.history.append(as_json(metrics))
            new = [line for what, line in symptoms(self.history).items() if what not in known]
            if new:
                metrics["warning"] = "; ".join(new)
                if rank() == 0:
                    tqdm.write(f"step {self.step}: {metrics['warning']}", file=sys.stderr)
        self.to_tensorboard(metrics)
        self.append("metrics.jsonl", [metrics])
        skipped = metrics.get("skipped_updates", 0)
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + skipped if skipped else 0
        if self.skipped_in_a_row >= 10:
            raise BadInput(
                f"{self.skipped_in_a_row:.0f} updates in a row had a loss or gradient that is not "
                "finite, and were skipped: --lr or a reward may be too large, or --temperature too "
                f"small; last checkpoint: {self.last_checkpoint}")

    def to_tensorboard(self, metrics):
        """Scalars for TensorBoard where it is installed, nothing otherwise."""
        if self.folder and self.tensorboard is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
                # A resumed run takes back what was drawn of the steps that it does again.
                self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=self.step)
            except ImportError:
                self.tensorboard = False  # and is not looked for again
        if self.tensorboard:
            for name, value in metrics.items():
                if isinstance(value, float):
                    self.tensorboard.add_scalar(name, value, self.step)

    def log_samples(self, step, prompts, rollout, rewards, advantages, groups=2):
        """A few whole groups, as they were scored."""
        G = len(rollout.responses) // len(prompts)
        records = []
        for j, prompt in enumerate(prompts[:groups]):
            rows = slice(j * G, (j + 1) * G)
            records.append({
                "step": step, "prompt": prompt, "responses": rollout.responses[rows],
                "rewards": rewards[rows].tolist(), "advantages": advantages[rows].tolist()})
        self.append("samples.jsonl", records)
        if self.tensorboard:
            text = "\n\n".join(record["responses"][0] for record in records)
            self.tensorboard.add_text("answers", text, step)

    def append(self, name, records):
        if self.folder:
            lines = [json.dumps(as_json(record)) + "\n" for record in records]
            with self.writing(name), open(self.folder / name, "a", encoding="utf-8") as file:
                file.write("".join(lines))

    @contextlib.contextmanager
    def writing(self, name):
        """One line for whatever goes wrong with this file; the run can be resumed."""
        try:
            yield
        # The tokenizers' own library raises a bare Exception when the disk is full.
        except Exception as error:
            raise BadInput(f"--output {self.name}: {name} cannot be written ({one_line(error)}); "
                           f"last checkpoint: {self.last_checkpoint}") from None

    @contextlib.contextmanager
    def replacing(self, name):
        """Where to write a file or a folder: beside the old one, whose place it then takes."""
        beside = self.folder / f"{name}.tmp"
        with self.writing(name):
            yield beside
            if beside.is_dir():
                # A folder cannot be replaced by another in one move, as a file can.
                shutil.rmtree(self.folder / name, ignore_errors=True)
            else:
                reach_the_disk(beside)
            os.replace(beside, self.folder / name)

    def training_state(self, model, optimizer, saved=()):
        """All tensors that training moves, {name: tensor}: a checkpoint is these, out and back in.

        AdamW makes its moments when a weight has its first gradient; here those that are in
        `saved` are made before, so that they can be filled.
        """
        learners = [("", model, optimizer)]
        if self.reward_model:
            learners.append(("reward_model/", self.reward_model.model, self.reward_model.optimizer))
        tensors = {}
        for prefix, part, adamw in learners:
            for name, master in named_masters(part, adamw):
                if f"{prefix}exp_avg/{name}" in saved:
                    # The fused kernel reads the step where the weights are, the others on the CPU.
                    where = local(master).device if adamw.defaults["fused"] else "cpu"
                    moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
                    adamw.state[master] = {"step": torch.zeros((), device=where), **moments}
                tensors[f"{prefix}weight/{name}"] = master.detach()
                for key, value in adamw.state.get(master, {}).items():
                    tensors[f"{prefix}{key}/{name}"] = value
        for name, p in self.ref_model.named_parameters() if self.ref_model else ():
            tensors[f"reference/{name}"] = p
        return tensors

    def save_checkpoint(self, model, optimizer):
        """Masters, moments and counters in one safetensors file, moved over the old one.

        Tensors are whole, whatever they were sharded on. What else a step needs (problems, random
        numbers, learning rate) follows from the step and the settings. After a skipped update, or
        with weights that are not finite, the checkpoint before stays.
        """
        tensors = self.training_state(model, optimizer)
        # every rank looks at its own shards
        finite = all(bool(local(tensor).isfinite().all()) for tensor in tensors.values())
        if self.skipped_in_a_row or not all(gathered_objects(finite)):
            return
        tensors = whole_on_rank_0(tensors)
        if self.folder:
            state = {"step": self.step, "skipped": self.skipped, "kl_coef": self.kl_coef,
                     "best": self.best}
            texts = {"before": self.before}
            if self.reward_model:
                r = self.reward_model
                texts["reward_model/pairs"] = {"pairs": r.pairs, "replay": r.replay}
            for name, value in texts.items():
                # Long texts are tensors, too, for the header of the file has a limit.
                text = bytearray(json.dumps(value).encode())
                tensors[name] = torch.frombuffer(text, dtype=torch.uint8)
            with self.replacing("checkpoint/run.safetensors") as beside:
                beside.parent.mkdir(exist_ok=True)
                # The lines of these steps first: a checkpoint ahead of them would leave a gap.
                for name in ("metrics.jsonl", "samples.jsonl"):
                    reach_the_disk(self.folder / name)
                save_file(tensors, beside, metadata={"grpo": json.dumps(state)})
                # safetensors writes for the owner alone, we for whom the umask says.
                shutil.copymode(self.folder / "config.json", beside)
        self.last_checkpoint = f"of step {self.step}, whole"

    @torch.no_grad()
    def load_checkpoint(self, model, optimizer):
        """Restore what the checkpoint holds; a run killed before its first starts from step 0."""
        path = Path(self.name) / "checkpoint" / "run.safetensors"
        if not path.is_file():
            on_rank_0(self.forget_after, -1)  # step 0 is its first evaluation
            return
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["grpo"])
                self.step = int(state["step"])
                self.skipped = int(state["skipped"])
                self.kl_coef = state["kl_coef"]
                self.best = state["best"]
                self.before = json.loads(file.get_tensor("before").numpy().tobytes())
                if self.reward_model:
                    pairs = json.loads(file.get_tensor("reward_model/pairs").numpy().tobytes())
                    self.reward_model.pairs = pairs["pairs"]
                    self.reward_model.replay = pairs["replay"]
                names = set(file.keys()) - {"before", "reward_model/pairs"}
                tensors = self.training_state(model, optimizer, names)
                for name in names - tensors.keys():
                    raise ValueError(f"{name} is unknown")
                for name, tensor in tensors.items():
                    saved = file.get_tensor(name)
                    if saved.shape != tensor.shape:
                        raise ValueError(f"{name} has another shape")
                    tensor.copy_(sharded_like(tensor, saved))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BadInput(f"--resume: {path} is torn, or not of this model "
                           f"({one_line(error)})") from None
        # Where weights are bfloat16 copies of their masters, they still are those of the start.
        weights = dict(model.named_parameters())
        for name, master in named_masters(model, optimizer):
            weights[name].copy_(master)
        self.last_checkpoint = f"of step {self.step}, whole"
        on_rank_0(self.forget_after, self.step)

    def forget_after(self, step):
        """Lines of steps that the checkpoint has not seen will be written again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder / name
            if not path.is_file():
                continue
            # Behind the last end of a line stands nothing, or a line that a kill has cut off.
            lines = path.read_bytes().split(b"\n")[:-1]
            kept = []
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                    if record["step"] > step:
                        continue
                except (ValueError, KeyError, TypeError):
                    raise BadInput(f"--resume: {path}, line {number}: not a line of ours") from None
                kept.append(line + b"\n")
                if "loss" in record:
                    self.history.append(record)
            with self.replacing(name) as beside:
                beside.write_bytes(b"".join(kept))


def named_masters(model, optimizer):
    """[(name of a weight, the float32 tensor that AdamW moves)]; see make_optimizer."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return list(zip(names, optimizer.param_groups[0]["params"]))


@torch.no_grad()
def whole_on_rank_0(tensors):
    """{name: tensor}, sharded or not -> the same whole, in host memory; elsewhere {}."""
    whole = {}
    for name, tensor in tensors.items():
        tensor = full(tensor)  # every rank takes part in gathering, one keeps it
        if rank() == 0:
            whole[name] = tensor.cpu().contiguous()
    return whole


def as_json(record):
    """NaN and Infinity are no JSON: null."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()}


def reach_the_disk(path):
    if os.path.exists(path):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def inputs_of(run, s, problems, eval_problems):
    """SHA-256 of what the run starts from: a resumed one must find the same."""
    specs = [spec for spec in [*(s.reward or []), s.step_reward, s.reply] if spec and ":" in spec]
    found = {
        "--model": digest_of_files(weight_files(s.model)),
        "--data": digest(json.dumps(problems, sort_keys=True)),
        "--eval-data": digest(json.dumps(eval_problems, sort_keys=True)),
        "--reward": digest_of_files([spec.rpartition(":")[0] for spec in specs]),
        "--reward-model": digest_of_files(weight_files(s.reward_model) if s.reward_model else []),
    }
    config = run.folder / "config.json"
    saved = json.loads(config.read_text(encoding="utf-8")).get("inputs", {}) if s.resume else {}
    changed = [name for name in found if saved.get(name, found[name]) != found[name]]
    for name in changed:
        if name != "--reward":
            raise BadInput(f"--resume: {name} is not what the run in {run.name} started from: its "
                           "content has changed")
        # It may have been mended: a reward that fails ends a run, to be resumed.
        say("--reward, --step-reward or --reply has changed since this run began")
    return found


def weight_files(model):
    """The safetensors files of a folder or of a hub name's snapshot."""
    folder = Path(transformers.utils.cached_file(model, "config.json")).parent
    return sorted(folder.glob("*.safetensors"))


def digest_of_files(paths):
    parts = []
    for path in paths:
        with open(path, "rb") as file:
            parts.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digest(" ".join(parts))


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def save_final(model, tokenizer, s, run, name="final"):
    """A transformers folder, with a recipe.json that brings along how the run was trained."""
    weights = whole_on_rank_0(dict(model.named_parameters())) if world() > 1 else None
    if not run.folder:
        return
    if weights:
        # A model without FSDP's hooks takes them.
        model = AutoModelForCausalLM.from_pretrained(s.model, dtype=choose_device(s)[1],
                                                     use_safetensors=True)
        model.load_state_dict(weights, strict=False)
    recipe = {name.replace("_", "-"): getattr(s, name) for name in RECIPE
              if getattr(s, name) != getattr(Settings, name)}
    if s.reward:
        recipe["reward"] = s.reward
    save_folder(model, tokenizer, run, name, recipe)


def save_folder(model, tokenizer, run, name, recipe=None):
    """A folder that from_pretrained opens, in the place of the old one."""
    with run.replacing(name) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if recipe is not None:
            text = json.dumps(recipe, indent=2) + "\n"
            (beside / "recipe.json").write_text(text, encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# The program: parse, load, open the folder, train, save, tell


def main(argv=None):
    """-> exit status: 0 done; 2 bad input, one line on standard error; 128 + signal if stopped."""
    run = None
    go_on = None
    try:
        settings, recipe = parse(sys.argv[1:] if argv is None else argv)
        if settings.dry_run:
            print_memory(settings)
            return 0
        join_ranks()
        settings = plan_memory(set_threads(settings))
        if recipe:
            taken = {name: getattr(settings, name) for name in recipe}
            say(f"{settings.model}/recipe.json: {' '.join(as_flags(taken))}")
        parts = load(settings)
        if settings.eval_only:
            print_figures(parts, settings)
            return 0
        if settings.trace:
            print_trace(parts, settings)
            return 0
        run = Run()
        run.name = on_rank_0(run.claim_folder, settings)
        # sys.executable: outside its virtual environment a bare `python` would not find torch.
        go_on = shlex.join([sys.executable, sys.argv[0], "--output", run.name, "--resume"])
        begin(run, parts, settings, recipe)
        save = partial(run.save_checkpoint, parts.policy_model, parts.optimizer)
        try:
            train_grpo(**vars(parts), settings=settings, run=run)
        except RewardFailed:  # on every rank, and nothing has moved in this step
            save()
            raise
        if run.step < settings.steps:
            save()
            say(f"\nstopped after step {run.step}; continue with: {go_on}")
            return 128 + run.signal
        if not run.after:  # a run that was done already when it was resumed
            _, run.after = evaluate(parts.policy_model, parts.tokenizer, parts.eval_problems,
                                    settings, sampler=parts.sampler)
        save_final(parts.policy_model, parts.tokenizer, settings, run)
        if run.folder and parts.reward_model:
            save_folder(parts.reward_model.model, parts.reward_model.tokenizer, run, "reward_model")
        print_story(run, parts.eval_problems, settings.reward)
        return 0
    except BadInput as error:
        say(f"train.py: {error}", sys.stderr)
    except KeyboardInterrupt:
        say("train.py: interrupted before the first step", sys.stderr)
        return 130
    except RuntimeError as error:
        if out_of_memory(error):
            fault = ("out of memory: lower --prompts-per-step, --group-size, --max-new-tokens or "
                     "--micro-batch-tokens")
        elif go_on and world() > 1:  # gloo and NCCL raise this when a peer is gone
            fault = f"rank {rank()} lost another rank ({one_line(error)}); continue with: {go_on}"
        else:
            raise
        print(f"train.py: {fault}", file=sys.stderr)  # any rank, for it may be alone with this
    finally:
        if run and run.tensorboard:
            run.tensorboard.close()  # what it still holds back is written
        if run and run.lock:
            run.lock.close()
    return 2


def set_threads(s):
    """The number of CPU threads is kept with the run, for sums depend on it in their last digit."""
    if s.threads:
        torch.set_num_threads(s.threads)
    return dataclasses.replace(s, threads=torch.get_num_threads())


def load(s):
    """Everything that can be refused is looked at here, before a folder is made.

    -> what a run is made of, under the names of train_grpo's arguments.
    """
    # The cheap questions come first: flags, then files, then the model.
    check_combinations(s)
    reward_model = load_reward_model(s) if s.reward_model else None
    reward_of = load_reward_of(s, reward_model)
    reply = load_reply(s)
    policy_model, tokenizer = on_rank_0(load_policy, s, share=False) or (None, load_tokenizer(s))
    forms = on_rank_0(check_forms, policy_model, s)
    if forms["grouped rows"]:
        # Its rows are padded, and their price is that of padded rows.
        s.share_prompts = False
    problems, eval_problems = load_data(s, tokenizer)
    if reward_of:
        # Every batch has the columns of the whole files, also those that few lines have.
        with telling("--data:"):
            columns = reward.column_names(problems + eval_problems)
        reward_of = partial(reward_of, columns=columns)
    if s.prompts_per_step % world():
        raise BadInput(f"--prompts-per-step {s.prompts_per_step}: not a multiple of the {world()} "
                       "processes")
    whole = policy_model
    if world() > 1:
        policy_model = shard(whole, s, torch.float32)
    # The reference is the policy as it starts, frozen.
    ref_model = None
    if s.kl_coef and not s.eval_only:
        ref_model = shard(whole, s, choose_device(s)[1]) if world() > 1 else copy.deepcopy(whole)
        ref_model.requires_grad_(False)
    return SimpleNamespace(
        policy_model=policy_model, ref_model=ref_model, tokenizer=tokenizer, reward_of=reward_of,
        optimizer=None if s.eval_only else make_optimizer(policy_model, s),
        problems=problems, eval_problems=eval_problems,
        reward_model=reward_model if s.renew_reference else None,  # if it is trained further
        sampler=load_sampler(s, tokenizer, problems + eval_problems, reply))


def begin(run, parts, s, recipe):
    """Restore what was saved, write config.json, say what starts."""
    # Only what moves goes into the checkpoint; the first reference is the policy as it started.
    run.reward_model = parts.reward_model
    run.ref_model = parts.ref_model if s.renew_reference else None
    found = on_rank_0(inputs_of, run, s, parts.problems, parts.eval_problems)
    if s.resume:
        run.load_checkpoint(parts.policy_model, parts.optimizer)
        if s.steps < run.step:
            raise BadInput(f"--steps {s.steps}: the run in {run.name} stands at step {run.step}")
    if run.folder:
        saved = dataclasses.asdict(dataclasses.replace(s, resume=False))
        config = {"settings": saved, "recipe": recipe, "inputs": found, "torch": torch.__version__,
                  "transformers": transformers.__version__}
        with run.replacing("config.json") as beside:
            beside.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    n = sum(p.numel() for p in parts.policy_model.parameters())
    say(f"{s.model}: {n / 1e6:.2f}M parameters in {choose_device(s)[1]} on "
        f"{parts.policy_model.device}, {len(parts.problems)} problems, "
        f"{len(parts.eval_problems)} held out, {world()} processes; run in {run.name}, "
        f"from step {run.step}")
    # Only now, for config.json has the coefficient that the run began with.
    s.kl_coef = s.kl_coef if run.kl_coef is None else run.kl_coef
    # From here on a signal lets the step end; what came before had nothing to save.
    run.stop_on_signals()


def say(line, file=None):
    """What every rank has found, rank 0 tells."""
    # From the environment, for some of it is said before the ranks have met.
    if int(os.environ.get("RANK", 0)) == 0:
        print(line, file=file or sys.stdout, flush=True)


def print_story(run, eval_problems, rewards=None):
    """One held-out problem, answered before and after; the accuracy on the way; what comes next."""
    if not run.folder:
        return
    # A problem that was wrong before training and is right after it; if there is none, the first.
    truths = reward.truths_of(eval_problems)
    before = reward.is_right(score_responses(run.before, truths, 1))
    after = reward.is_right(score_responses(run.after, truths, 1))
    i = int((after & ~before).int().argmax())
    print(f"\nquestion  {eval_problems[i]['question']}\nbefore    {run.before[i]}\n"
          f"after     {run.after[i]}\ntruth     {truths[i] or 'not known'}\n")
    for name in ("accuracy", "reward_mean", "approx_kl", "response_length_mean"):
        print(f"{name:22}" + small_curve([m[name] for m in run.history]))
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    curve = [f"{m['step']}:{m['eval_accuracy']:.3f}" for m in map(json.loads, lines)
             if m.get("eval_accuracy") is not None]
    print(f"held-out accuracy, step:greedy  {' '.join(curve)}\n"
          f"{run.name}: config.json metrics.jsonl samples.jsonl checkpoint/ final/\n")
    python = shlex.quote(sys.executable)
    final = shlex.quote(os.path.join(run.name, "final"))
    named = f" --reward {shlex.join(rewards)}" if rewards else ""
    print(f"look at answers      tail -n 2 {shlex.quote(os.path.join(run.name, 'samples.jsonl'))}\n"
          f"talk to the result   {python} sample.py --model {final} \"YOUR QUESTION\"\n"
          f"go on from it        {python} train.py --model {final}{named}")


def small_curve(values, width=50):
    """Numbers as one line of blocks between their extremes: did it learn?"""
    values = [value for value in values if value is not None and math.isfinite(value)]
    if not values:
        return ""
    # adaptive pooling: means of `width` stretches that are as equal as can be
    means = torch.nn.functional.adaptive_avg_pool1d(
        torch.tensor([values], dtype=torch.float64), min(width, len(values)))[0].tolist()
    low = min(means)
    span = max(means) - low or 1
    blocks = "".join("▁▂▃▄▅▆▇█"[int(7 * (mean - low) / span)] for mean in means)
    return f"{means[0]:8.3f} {blocks} {means[-1]:.3f}"


def print_figures(parts, s):
    """--eval-only: greedy accuracy, and from G samples per problem accuracy, pass@k and maj@k."""
    G = s.group_size
    problems = parts.eval_problems
    judge = partial(evaluate, parts.policy_model, parts.tokenizer, problems, s, parts.reward_of,
                    parts.sampler)
    greedy, _ = judge()
    sampled, responses = judge(group_size=G, temperature=s.temperature, seed=s.seed)
    say(f"{len(problems)} problems")
    for name, value in greedy.items():
        say(f"greedy {name.removeprefix('eval_'):17} {value:.4f}\nsampled at temperature "
            f"{s.temperature:g}  {sampled[name]:.4f}   ({G} samples per problem)")
    for name, value in reward.diversity(responses, G).items():
        say(f"{name.replace('_', ' '):24} {value:.4f}")
    truths = reward.truths_of(problems)
    if None in truths:
        return
    correct = reward.is_right(score_responses(responses, truths, G)).view(-1, G)       # (B, G)
    # The most frequent box of a problem is its vote.
    boxes = [reward.extract_boxed(response) for response in responses]
    answers = [boxes[j * G:(j + 1) * G] for j in range(len(problems))]
    for k in sorted({G, *(2**i for i in range(G.bit_length()))}):                      # 1, 2 .. G
        say(f"pass@{k:<3} {reward.pass_at_k(correct, k):.4f}   "
            f"maj@{k:<3} {reward.majority_at_k(answers, truths, k):.4f}")


def print_trace(parts, s):
    """--trace: one step on one group, told stage by stage, as the theory walks through it."""
    s = dataclasses.replace(s, prompts_per_step=1, max_resample=0, updates_per_rollout=1,
                            minibatches=1)
    model = parts.policy_model
    tokenizer = parts.tokenizer
    # Of the first problems, one about which the answers disagree: else all advantages are 0.
    for j, problem in enumerate(parts.problems[:20]):
        prompts, truths, generators, reward_fn = asked(
            tokenizer, [problem], [seeded(s.seed, 1, j)], s, parts.reward_of)
        rollout = parts.sampler(model, tokenizer, prompts, s.group_size, s.max_new_tokens,
                                s.temperature, generators)
        scored = (reward_fn(prompts, rollout) if reward_fn else
                  score_responses(rollout.responses, truths, s.group_size))
        if not is_flat(scored, s.group_size).any():
            break
    # The step itself, on what was drawn and scored; rewards and advantages are seen on the way.
    seen = []
    metrics = train_step(model, parts.ref_model, parts.optimizer, tokenizer, prompts, truths, s,
                         reward_fn=reward_fn and (lambda *_: scored), sampler=lambda *_: rollout,
                         on_rollout=lambda *given: seen.extend(given))
    _, rewards, A = seen
    with torch.no_grad():
        new, _ = logprobs_of_all(model, rollout, s, with_entropy=False)                # (G, S-1)

    mask = rollout.labels[:, 1:] != IGNORE                                             # (G, S-1)
    A = (A[:, None] if A.ndim == 1 else A).to(mask.device).expand(mask.shape)          # (G, S-1)
    N, S = rollout.labels.shape
    lengths = mask.sum(dim=1).tolist()
    print(f"\n[A] sample_groups: {N} answers to one prompt, input_ids ({N}, {S})\n{prompts[0]}")
    for n, response in enumerate(rollout.responses):
        before = int(mask[n].int().argmax()) + 1
        print(f"  y_{n + 1}  mask: prompt {before} off, response {lengths[n]} on, "
              f"padding {S - before - lengths[n]} off\n       {shortened(response)}")
    print(f"\n[B] score_responses: truth {problem['answer']}, rewards ({N},)  "
          + " ".join(f"{r:g}" for r in rewards.tolist()))
    print(f"\n[C] advantages_for {s.advantage!r}: mean {rewards.mean():.4f}, std "
          f"{rewards.std(correction=0):.4f}; per answer, of its first token:\n  "
          + " ".join(f"{A[n][mask[n]][0]:+.4f}" for n in range(N)))
    moved = (new - rollout.old_logprobs).sign() * A.sign()  # 1: as the advantage says
    print_tokens(tokenizer, rollout, new, A, mask, moved, s)
    print(f"\n[G] grpo_loss before the update {metrics['loss']:+.6f} (policy "
          f"{metrics['policy_loss']:+.6f}, KL {metrics['approx_kl']:.6f}); clip_grad_norm_: norm "
          f"{metrics['grad_norm']:.4f}; optimizer.step at --lr {s.lr:g}\n    "
          f"{int((moved[mask] > 0).sum())} of {int(mask.sum())} tokens moved as their advantage "
          "says; the others share weights with them, or are certain already\n"
          "\n[H] train_grpo: fresh answers from the policy as it is now, and again")


def print_tokens(tokenizer, rollout, new, A, mask, moved, s):
    """[D] [E] [F] of single tokens after the update, by the objective that is in use."""
    old = rollout.old_logprobs
    ref = old if rollout.ref_logprobs is None else rollout.ref_logprobs
    options = loss_options(rollout, slice(None), s)
    for name in ("kl_coef", "aggregate", "max_new_tokens"):
        del options[name]  # of the average
    J, clipped, kl, log_ratio = loss.token_terms(new, old, ref, A, mask, **options)
    ratio = log_ratio.exp()
    high = s.clip_eps if s.clip_eps_high is None else s.clip_eps_high
    objective = "clipped_objective" if s.objective == "clip" else "cispo_objective"
    print(f"\n[D] token_logprobs, [E] {objective} with a ratio per {s.ratio}, [F] kl_estimate "
          f"{s.kl_estimator}: {tuple(mask.shape)}\n"
          f"    after the update; the clip is to [{1 - s.clip_eps:g}, {1 + high:g}]\n"
          "  answer token       "
          "log old  log ref  log new   ratio      w A     term        KL  moved")
    table = torch.stack([old, ref, new, ratio, ratio * A, J, kl], dim=-1)           # (G, S-1, 7)
    row = "{:8.4f} {:8.4f} {:8.4f} {:7.4f} {:+8.4f} {:+8.4f} {:9.5f}"
    for n in range(len(mask)):
        tokens = mask[n].nonzero()[:, 0].tolist()
        for t in tokens[:4] + tokens[-2:] if len(tokens) > 6 else tokens:
            word = tokenizer.decode(rollout.input_ids[n, t + 1:t + 2])
            verdict = {1: "as A says", -1: "against A"}.get(float(moved[n, t]), "not")
            verdict = "A = 0" if A[n, t] == 0 else verdict
            print(f"  y_{n + 1:<4} {word[:10]!r:12} {row.format(*table[n, t].tolist())}  {verdict}"
                  + (", clipped" if clipped[n, t] else ""))
    means = [f"{float(J[n][mask[n]].mean()):+.4f}" for n in range(len(mask))]
    print(f"  mean objective of each answer after the update: {' '.join(means)}")


def shortened(text, limit=100):
    """Long answers lose their middle."""
    text = " ".join(text.split())
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def patient(function):
    """A stream's write or flush: no reader who goes away and no full disk stops the run."""
    def call(*given):
        with contextlib.suppress(OSError, ValueError):
            function(*given)
    return call


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows ASCII only gets the rest as \u escapes.
        stream.reconfigure(errors="backslashreplace")
        stream.write = patient(stream.write)
        stream.flush = patient(stream.flush)
    try:
        status = main()
    except SystemExit as leaving:  # --help
        status = leaving.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    # An orderly exit now and then aborts in gloo's threads, and complains of a closed pipe.
    os._exit(status)
