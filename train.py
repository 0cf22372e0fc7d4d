"""[G] One training step and [H] the loop around it: GRPO, online.

    sample G answers to each prompt [A] -> score them [B] -> compare siblings [C]
    -> log-probabilities [D] -> clipped objective [E], KL [F] -> gradient step -> and again

Common mistakes that this avoids:
- Tokenising the answers' text again. The ids that were sampled are the ids that are trained on.
- Renewing the old log-probs at every update of a rollout: every ratio would be 1.
- Averaging the means of micro-batches: here the gradient does not depend on how a batch is cut.

    python train.py                                       # the tiny policy learns to reason
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct    # GSM8K, on a GPU
"""

import sys
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("train.py: needs Python 3.11 or newer")

import argparse, copy, hashlib, json, math, os, platform, re, shlex, shutil, signal
import threading, time, traceback, warnings
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

SOURCE = Path(__file__).resolve()  # the comments of its Settings are the help of its flags
sys.path.insert(0, str(SOURCE.parent))  # `python -P` leaves it out

# What torchrun tells, read once: a user's reward may set these to start a server of its own.
RANK = int(os.environ.get("RANK") or 0)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)

# What torch and tqdm read when they are imported
DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait sleep
    "THP_MEM_ALLOC_ENABLE": "1",  # large blocks on a CPU in huge pages
    "LRU_CACHE_CAPACITY": "64",  # shapes of bfloat16 products, half a MB each
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # likewise
    # CUDA's blocks may grow, but not on WSL 2 (pytorch 192330).
    "PYTORCH_ALLOC_CONF": f"expandable_segments:{'microsoft' not in platform.release()}",
    "TQDM_MININTERVAL": "0.1" if os.isatty(2) else "60",  # seconds, in a file
}
os.environ.update(DEFAULTS | os.environ)  # what is set already stays
if RANK > 0:
    os.environ["TQDM_DISABLE"] = "1"  # one rank's bars are enough
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, until a run listens

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import reward
import sample
from advantage import ADVANTAGES, BY_ENTROPY, centred, is_flat, std_of
from advantage import plain_advantages, process_advantages
from logprob import checkpoint_layers, cut_rows, has_long_rows, plain_logprobs, token_logprobs
from loss import AGGREGATES, KL_ESTIMATORS, OBJECTIVES, RATIOS
from loss import grpo_loss, next_kl_coef, plain_loss
from reward import HERE, BadInput, blame, column, compared, finite, is_right, reward_names, row_of
from reward import score_responses, truth_in_words, truths_of
from sample import chat_prompt, length_limit, one_line, sample_groups, take
from sample import with_progress, words_of

# --------------------------------------------------------------------------------------------------
# [G] One step: sample, score, normalise, update

def plain_step(policy, reference, optimizer, tokenizer, prompts, truths, G=8, T=256,
               generators=None, updates=1, clip_eps=0.2, kl_coef=0.04):
    """DeepSeekMath's algorithm 1 for one batch, by the definitions alone -> rewards (N,)."""
    rollout = sample_groups(policy, tokenizer, prompts, G, T, 1.0, generators, plain=True)  # [A]
    rewards = score_responses(rollout.responses, truths, G, prompts)               # [B] (N,)
    A = plain_advantages(rewards, G)                                               # [C] (N,)
    with torch.no_grad():
        old = plain_logprobs(policy, rollout.input_ids, rollout.labels)            # [D] (N, S-1)
        ref = plain_logprobs(reference, rollout.input_ids, rollout.labels)         # [D] (N, S-1)
    for _ in range(updates):
        logp = plain_logprobs(policy, rollout.input_ids, rollout.labels)           # [D] (N, S-1)
        loss = plain_loss(logp, old, ref, A, rollout.mask, clip_eps, kl_coef)      # [E] [F]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rewards


@dataclass
class Parts:
    """What a run is made of; load() makes it."""

    policy_model: object                # pi
    ref_model: object                   # the reference of the KL; None if beta is 0
    tokenizer: object                   # of both
    optimizer: object                   # moves the policy's weights; None in an evaluation
    problems: list                      # to train on: dicts, see reward.load_problems
    eval_problems: list                 # held out
    sampler: object = sample_groups     # [A] draws answers, called like sample_groups
    reward_of: object = None            # [B] Rollout -> N rewards; None: the rule's
    reward_model: object = None         # behind reward_of, with --reward-model
    twin: object = None                 # of a sharded policy: see twin_of
    is_whole: bool = True               # False from a step's first update until the step is done


@dataclass
class Batch:
    """What this GPU samples in a step: G answers to each of B prompts."""

    problems: list             # B dicts, see reward.load_problems
    prompts: list              # their B prompts, chat template applied
    generators: list = None    # of random numbers, one per prompt
    others: object = None      # for --max-resample: see other_problems
    is_first: bool = False     # of the run: its first group is printed


def train_step(parts, batch, s):
    """One GRPO step on a Batch -> (its metrics {name: float}, its Rollout).

    DeepSeekMath, algorithm 1. `s` are the Settings. With several GPUs each has its own batch; the
    metrics and the rollout are those of all.
    """
    # [A] G answers to each prompt, drawn from the policy as it is now, [B] a reward for each.
    rollout, metrics = scored_groups(parts, batch, s)
    start = time.perf_counter()

    # [C] Each answer is compared with its siblings: (N,), or (N, S-1) if every token has its own.
    rollout.advantages = advantages_of(parts, rollout, s)

    # Every GPU has seen the rows of all, for metrics and for [C]. It trains its share of groups.
    mine = split_groups(rollout, WORLD_SIZE, s)[RANK]
    if s.mask_truncated:  # the reward of a cut answer has counted in its group's mean
        mine.labels[~mine.finished] = sample.IGNORE

    # [D] Log-probs of the answers' tokens under the reference: (N, S-1).
    if parts.ref_model:
        mine.ref_logprobs, _ = rollout_logprobs(parts.ref_model, mine, s)

    # [D] And under pi_old, the policy that drew them. A single update finds them by itself: before
    # it the policy still is pi_old.
    if s.updates_per_rollout * s.minibatches > 1:
        mine.old_logprobs, _ = rollout_logprobs(parts.policy_model, mine, s)

    # [D] [E] [F] [G] One gradient step, or several. From the second on the answers are those of an
    # older policy: the ratio and its clip correct for that.
    updates = []
    for _ in range(s.updates_per_rollout):
        for minibatch in split_groups(mine, s.minibatches, s):
            updates.append(gradient_step(parts, minibatch, s, measure=not updates))
    metrics["seconds_training"] = time.perf_counter() - start
    return step_metrics(rollout, metrics, updates, s), rollout


def gradient_step(parts, rollout, s, measure=True):
    """One gradient step on these rows -> its metrics.

    The first one of a rollout, with the policy that drew it, also measures entropy and the sampler
    (on its rows: with --minibatches on those of the first).
    """
    metrics = backward(parts, rollout, s, measure)
    grad_norm = torch.nn.utils.clip_grad_norm_(finished_gradients(parts.optimizer), s.max_grad_norm)
    metrics = mean_of_ranks({**metrics, "grad_norm": whole_of(grad_norm)})
    if measure:
        check_sampler(parts, metrics["sampler_difference"], s)  # or the run ends here
    # [G] The gradient step. One that is not finite is skipped and counted.
    skipped = not math.isfinite(metrics["grad_norm"] + metrics["loss"])
    if not skipped:
        parts.is_whole = False
        parts.optimizer.step()
    parts.optimizer.zero_grad()  # the next rollout can use the gradients' memory
    return metrics | {"skipped_updates": skipped}


def backward(parts, rollout, s, measure):
    """[D] [E] [F] The gradient of the loss -> its metrics."""
    # The loss is divided by the rows or tokens of the whole batch, so the gradients of its
    # micro-batches simply add up. Several GPUs divide by the mean of their sizes, because FSDP
    # averages gradients.
    n_rows = rollout.mask.any(dim=1).sum()  # that have a token in the loss
    sizes = mean_of_ranks({"n_rows": n_rows, "n_tokens": rollout.mask.sum()})
    shares = []  # of each metric, what a micro-batch adds to it
    for rows, width in micro_batches(parts.policy_model, rollout, s):
        # [D] of the policy as it is now, with a gradient: (n, width-1)
        logp, entropy = micro_batch_logprobs(parts.policy_model, rollout, rows, width, s, measure)
        micro = take(rollout, rows, width, logp.device)
        if micro.old_logprobs is None:  # the policy as it is now is pi_old
            micro.old_logprobs = logp.detach()
        # [E] [F] against the policy that drew the answers, and against the reference
        loss, metrics = grpo_loss(
            logp, micro.old_logprobs, micro.ref_logprobs, micro.advantages, micro.mask,
            clip_eps=s.clip_eps,
            kl_coef=s.kl_coef,
            clip_eps_high=s.clip_eps_high,
            objective=s.objective,
            ratio=s.ratio,
            kl_estimator=s.kl_estimator,
            aggregate=s.aggregate,
            max_new_tokens=s.max_new_tokens,
            # Plain GRPO ignores the sampler's own numbers.
            sampler_logprobs=micro.sampler_logprobs if s.sampler_correction else None,
            sampler_cap=s.sampler_correction,
            **sizes)
        loss.backward()
        if measure:
            metrics |= sampling_metrics(micro, entropy, sizes["n_tokens"])
        shares.append(metrics)
    return {name: sum(share[name] for share in shares) for name in shares[0]}


# --------------------------------------------------------------------------------------------------
# [H] The loop: every step draws fresh answers from the policy as it is now

def plain_grpo(parts, s):
    """`python train.py --plain`: by the definitions alone, with train_grpo's random numbers.

    Gradients are not clipped. Where their norm stays below 1, the rewards are those of train_grpo.
    """
    reference = parts.ref_model or parts.policy_model  # there is none if beta is 0
    for step in range(1, s.steps + 1):
        set_learning_rate(parts.optimizer, step, s)
        batch = batch_of_step(parts, step, s)
        rewards = plain_step(
            parts.policy_model, reference, parts.optimizer, parts.tokenizer, batch.prompts,
            truths_of(batch.problems), s.group_size, s.max_new_tokens, batch.generators,
            s.updates_per_rollout, s.clip_eps, s.kl_coef)
        accuracy = is_right(rewards).float().mean()
        print0(f"step {step:3}   reward {rewards.mean():.4f}   accuracy {accuracy:.4f}")


def train_grpo(parts, settings, run=None):
    """Train: steps run.step + 1 to settings.steps. `parts` are what load() returns.

    Everything random follows from (seed, step, prompt): a resumed run draws the same, and the
    answers do not depend on the number of GPUs, of which with --max-resample each draws a group.
    """
    run = run or Run()
    s = replace(settings)  # --kl-band changes it
    with suppress(Stopped), tqdm(total=s.steps, initial=run.step, desc="GRPO") as bar:
        for done in range(run.step, s.steps + 1):  # so many steps are done
            evaluate_if_due(run, parts, s)
            if stopped() or done == s.steps:
                break
            step = done + 1
            lr = set_learning_rate(parts.optimizer, step, s)
            if s.kl_band and run.history:
                last = run.history[-1]
                s.kl_coef = next_kl_coef(last["kl_coef"], last["approx_kl"], *s.kl_band)
            # Fresh problems and fresh answers: no step reuses the answers of an earlier step.
            batch = batch_of_step(parts, step, s)
            metrics, rollout = train_step(parts, batch, s)
            if s.renew_reference:  # iterative GRPO
                metrics |= update_reference(parts, rollout, step, s)
            run.log_step({"step": step, "lr": lr, **metrics}, rollout, s.group_size)
            run.step = step
            parts.is_whole = True
            # Before the evaluation, which takes its time: a kill in it costs no step.
            if step == s.steps or step % s.save_every == 0:
                save_checkpoint(run, parts, s)
            update_bar(bar, run)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. `s` are the Settings. What follows, each to be read alone:
#
#   the step        scored_groups … step_metrics           what train_step calls, in its order
#   the loop        batch_of_step … evaluate_if_due        what train_grpo calls
#   weights         make_optimizer                         AdamW on float32 masters, or on factors
#   several GPUs    shard, from_all_ranks                  with one they do nothing
#   signals         together, listening_to_signals         Ctrl-C costs no step, and spoils none
#   a run           Run, save_checkpoint                   its folder; how it goes on after a kill
#   what it shows   curves_of, print_story                 the bar, the last lines
#   warnings        symptoms                               when a run warns
#   settings        Settings, parse                        every flag, its default and its help
#   the machine     plan_memory                            device, dtype, memory before any is taken
#   loading         load                                   settings -> parts, or one line of refusal
#   the program     main, train                            from the command line to the exit status

# --------------------------------------------------------------------------------------------------
# Helpers of train_step: groups, advantages, log-probs by micro-batches, checks, metrics

def scored_groups(parts, batch, s):
    """[A] [B] -> the Rollout of all GPUs, the metrics of the answers that were drawn first."""
    renew_twin(parts)
    rollout, seconds = draw_groups(parts, batch, s)
    if batch.is_first:
        print_group(take(rollout, range(s.group_size)))
    metrics = answer_metrics(rollout, s) | seconds
    if s.max_resample:
        rollout = without_flat_groups(parts, batch, rollout, metrics, s)
    lengths = rollout.mask.sum(dim=1)                                                  # (N,)
    if s.length_rescale:
        rollout.rewards = reward.length_rescaled(rollout.rewards, lengths, s.group_size,
                                                 s.length_rescale)
    if s.overlong_buffer:
        rollout.rewards = rollout.rewards + reward.overlong_penalty(lengths, s.answer_tokens,
                                                                    s.overlong_buffer)
    return rollout, metrics


def draw_groups(parts, batch, s):
    """[A] [B] by every GPU for its own prompts -> the Rollout of all, seconds of this one."""
    sampler = parts.sampler
    if s.around_best:  # the rule decides which answers of a half-group the other half continues
        half = s.group_size // 2

        def score(answers):
            return score_responses(answers, truths_of(batch.problems), half, batch.prompts)

        sampler = partial(sample.sample_around, best=s.around_best, score=score)
    of_ranks = together(answers_and_rewards, parts, batch, s, sampler)
    rollouts, seconds = zip(*of_ranks)
    return reduce(sample.joined, rollouts), seconds[RANK]


def answers_and_rewards(parts, batch, s, sampler):
    """[A] G answers to each prompt of this GPU, [B] one reward for each -> Rollout, seconds."""
    start = time.perf_counter()
    G = s.group_size
    policy = parts.twin or parts.policy_model
    rollout = sampler(policy, parts.tokenizer, batch.prompts, G, s.max_new_tokens, s.temperature,
                      batch.generators)
    middle = time.perf_counter()
    rollout.problems = reward.repeat_each(batch.problems, G)                           # N
    rollout.prompts = reward.repeat_each(batch.prompts, G)                             # N
    rollout.rule_rewards = score_responses(rollout.responses, truths_of(batch.problems), G,
                                           batch.prompts)                              # (N,)
    rollout.rewards = rollout.rule_rewards.double()                                    # (N,)
    if parts.reward_of:  # a function from Python may return any list of numbers
        values = parts.reward_of(rollout)
        values = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
        rollout.rewards = values.reshape_as(rollout.rewards)

    # None (NaN here) is no 0: such an answer has no token in the loss, and is in no metric.
    unscored = rollout.rewards.isnan()
    rollout.labels[unscored] = sample.IGNORE
    rollout.rule_rewards[unscored] = math.nan
    return rollout, {"seconds_sampling": middle - start,
                     "seconds_scoring": time.perf_counter() - middle}


def without_flat_groups(parts, batch, rollout, metrics, s):
    """--max-resample: flat groups give way to groups of other problems -> Rollout.

    DAPO, 2503.14476. A group that is still flat after the last attempt stays, with advantages of 0.
    The metrics count the groups, and the seconds that the new ones take.
    """
    G = s.group_size
    N = len(rollout.responses)
    metrics["resampled_groups"] = 0
    for _ in range(s.max_resample):
        flat = is_flat(rollout.rewards, G)                          # of all groups drawn so far
        lacking = N // G - int((~flat).sum())
        if lacking <= 0:
            break  # there are enough groups that teach something
        metrics["resampled_groups"] += lacking
        drawn_before = len(flat) - N // G
        others = batch.others(drawn_before, max(lacking, WORLD_SIZE))  # every GPU draws a group
        more, seconds = draw_groups(parts, others, s)
        rollout = sample.joined(rollout, more)
        for name, value in seconds.items():
            metrics[name] += value
    # N answers stay: first those of groups that teach, in the order they were drawn, then others.
    flat = is_flat(rollout.rewards, G).repeat_interleave(G)
    return take(rollout, flat.argsort(stable=True)[:N])


def advantages_of(parts, rollout, s):
    """[C] by --advantage: (N,), or (N, S-1) if every token has its own.

    Its function gets what its parameters name.
    """
    function = process_advantages if s.step_reward else ADVANTAGES[s.advantage]
    given = {
        "rewards": rollout.rewards,
        "group_size": s.group_size,
        "scale_by_std": s.scale_by_std,
        "mask": rollout.mask,
        "reward_parts": rollout.reward_parts,
        "reward_weights": s.reward_weights,
        "step_rewards": rollout.step_rewards,
    }
    if not parts.reward_of or s.reward == ["rule"]:  # elsewhere a positive reward means right
        given["right"] = is_right(rollout.rule_rewards)
    if s.advantage in BY_ENTROPY:
        mine = split_groups(rollout, WORLD_SIZE, s)[RANK]
        _, entropy = rollout_logprobs(parts.policy_model, mine, s, measure=True)
        given["entropy"] = torch.cat(from_all_ranks(entropy))
    if s.advantage == "shape":  # the boxes of each answer
        words = [words_of(parts.tokenizer, ids) for ids in rollout.answer_ids]
        given["candidates"] = reward.boxed_candidates(words, truths_of(rollout.problems))
    with blame(f"--advantage {s.advantage}:"):  # MaxRL, say, refuses negative rewards
        advantages = function(**reward.select_kwargs(function, given)).float()
    advantages[rollout.rewards.isnan()] = 0
    limit = s.clip_advantages or math.inf
    return advantages.clamp(-limit, limit)


def split_groups(rollout, n, s):
    """Its groups in order, split as evenly as possible -> n Rollouts."""
    groups = torch.arange(len(rollout.responses)).view(-1, s.group_size)               # (B, G)
    return [take(rollout, rows.flatten()) for rows in groups.tensor_split(n)]


@torch.no_grad()
def rollout_logprobs(model, rollout, s, measure=False):
    """[D] of the whole rollout: log-probs and entropies, (N, S-1) each."""
    both = torch.zeros(2, *rollout.mask.shape)                                      # (2, N, S-1)
    for rows, width in micro_batches(model, rollout, s):
        logprobs = micro_batch_logprobs(model, rollout, rows, width, s, measure)
        both[:, rows, :width - 1] = torch.stack(logprobs).cpu()                 # (2, n, width-1)
    return both


def micro_batches(model, rollout, s):
    """The rows (n,) of each micro-batch and the width of the longest of them, on a bar."""
    cuts = cut_rows(rollout.input_ids, rollout.labels, s.micro_batch_tokens, has_long_rows(model))
    # Answers differ in length, so GPUs may have different numbers of micro-batches. All must run
    # the same number, or FSDP's gathers wait for ever: a GPU with fewer also runs the first two
    # tokens of a prompt. They are not in the mask, so they count for nothing.
    missing = max(from_all_ranks(len(cuts))) - len(cuts)
    cuts += [(torch.tensor([0]), 2)] * missing
    return with_progress(cuts, desc="micro-batches")


def micro_batch_logprobs(model, rollout, rows, width, s, measure):
    """[D] of one micro-batch: log-probs and entropies, (n, width-1) each."""
    micro = take(rollout, rows, width)
    # A sharded model must be entered through a method that FSDP knows: see shard().
    score = getattr(model, "token_logprobs", partial(token_logprobs, model))
    return score(micro.input_ids, micro.labels, s.temperature, measure)


def sampling_metrics(micro, entropy, n_tokens):
    """Of the policy that drew these rows, their share of means over all n_tokens in the loss."""
    apart = (micro.sampler_logprobs - micro.old_logprobs).abs()                        # (n, S-1)
    known = micro.mask & micro.old_logprobs.isfinite()  # else the update is skipped
    return {"entropy": entropy.where(micro.mask, 0).sum() / max(n_tokens, 1),
            "sampler_difference": apart.where(known, 0).sum() / max(n_tokens, 1)}


def check_sampler(parts, nats, s):
    """Sampler and trainer are two implementations of one policy: their log-probs must agree."""
    # Nats per token, for rounding: 1e-6 were measured in float32, 0.02 in bfloat16.
    allowed = 0.1 if parts.policy_model.dtype.itemsize == 2 else 1e-4
    if not nats <= allowed and not s.sampler_correction:  # which corrects for any difference
        raise BadInput(f"--model {s.model}: sampler and trainer differ by {nats:.2g} nats per "
                       "token: try --no-fast, or --sampler-correction 2.0, which corrects for "
                       "that; a sampler of one's own must draw as [D] scores")


def answer_metrics(rollout, s):
    """The metrics of drawn answers and of their rewards, before their length counts."""
    G = s.group_size
    if s.around_best and G > 2:  # the second half of a group continues the best of the first
        rows = torch.arange(len(rollout.responses)).view(-1, G)                        # (B, G)
        G //= 2
        rollout = take(rollout, rows[:, :G].flatten())
    rewards = rollout.rewards                                                          # (N,)
    scored = ~rewards.isnan()  # the other answers are in no metric
    lengths = rollout.mask.sum(dim=1).double().where(scored, math.nan)                 # (N,)
    # Accuracy and format always come from the rule; they are NaN if no true answer is known.
    known = rollout.rule_rewards[~rollout.rule_rewards.isnan()]
    of_answers = {
        "reward_mean": rewards,
        "reward_std_in_groups": std_of(centred(rewards, G)),
        "accuracy": is_right(known),
        "format_rate": known > 0,
        "flat_groups": is_flat(rewards, G),
        "response_length_mean": lengths,
        "truncated_fraction": ~rollout.finished[scored],
        **rollout.reward_parts,  # NaN where one does not apply
    }
    metrics = {name: values.double().nanmean() for name, values in of_answers.items()}
    metrics["reward_std"] = std_of(centred(rewards, len(rewards)))
    metrics["response_length_p95"] = lengths.nanquantile(0.95)
    return metrics


def means_of(dicts):
    """Dicts of numbers -> {name: its mean over those that have it}, for the names of the first."""
    means = {}
    for name in dicts[0]:
        values = [numbers[name] for numbers in dicts if name in numbers]
        means[name] = sum(values) / len(values)
    return means


def step_metrics(rollout, metrics, updates, s):
    """All metrics of a step: those of its answers, of what it trained on, the mean of updates."""
    tokens = rollout.mask.sum()
    seconds = (metrics["seconds_sampling"] + metrics["seconds_scoring"]
               + metrics["seconds_training"])
    metrics = metrics | {
        "tokens": tokens,
        "kl_coef": s.kl_coef,
        "tokens_per_second": tokens / seconds,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,  # 0 on a CPU
    }
    if s.step_reward:  # equal sums of an answer's steps may still teach
        teaches = rollout.advantages.any(dim=1).view(-1, s.group_size)                 # (B, G)
        flat = ~teaches.any(dim=1)
        metrics["flat_groups"] = flat.double().mean()
    metrics |= means_of(updates)
    metrics["skipped_updates"] = sum(update["skipped_updates"] for update in updates)
    return {name: float(value) for name, value in metrics.items()}


# --------------------------------------------------------------------------------------------------
# Helpers of train_grpo: problems and random numbers of a step, evaluation

def batch_of_step(parts, step, s):
    """This GPU's share of the step's B problems -> Batch."""
    B = s.prompts_per_step
    # Every epoch has a new order; the few problems that do not fill a step are left out.
    epoch, k = divmod(step - 1, len(parts.problems) // B)  # steps count from 1
    order = reward.shuffled(parts.problems, seeded(s.seed, 0, epoch))
    problems = reward.groups_of(order, B)[k]
    mine = share_of_rank(B)  # whole groups: a group on two GPUs would have two means
    batch = make_batch(parts.tokenizer, problems, mine, (s.seed, step), s)
    others = partial(other_problems, parts, step, problems, s)
    return replace(batch, others=others, is_first=step == 1)


def other_problems(parts, step, problems, s, drawn, n):
    """This GPU's share of n problems that are not the step's, after `drawn` others -> Batch.

    No problem comes again before all others have come.
    """
    key = (s.seed, "resample", step)
    others = reward.shuffled(parts.problems, seeded(*key))
    others = [problem for problem in others if problem not in problems]
    mine = [drawn + k for k in share_of_rank(n)]
    return make_batch(parts.tokenizer, others + problems, mine, key, s)


def make_batch(tokenizer, problems, places, key, s):
    """The problems at these places -> Batch; their random numbers follow from key and place."""
    chosen = [problems[j % len(problems)] for j in places]  # behind the last comes the first
    prompts = [chat_prompt(tokenizer, problem, s.system_prompt) for problem in chosen]
    return Batch(chosen, prompts, [seeded(*key, j) for j in places])


def seeded(*key, device="cpu"):
    """A random generator that follows from these numbers and words alone."""
    # A hash, because seed + step would be the same for step 2 of seed 0 and step 1 of seed 1.
    return torch.Generator(device).manual_seed(number_of(key))


def number_of(value):
    """A number of 63 bits that follows from what is printed of a value."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def update_reference(parts, rollout, step, s):
    """Every --renew-reference steps a new reference and a better reward model -> metrics."""
    model = parts.reward_model
    if model:  # every rank keeps the same pairs of answers, and takes the same steps on them
        model.collect_pairs(rollout.judged, s.group_size, seeded(s.seed, "pairs", step))
    if step % s.renew_reference:
        return {}
    parts.ref_model.load_state_dict(parts.policy_model.state_dict())
    metrics = {"reference_renewed": 1.0}
    if model:
        metrics |= model.train(seeded(s.seed, "reward model", step))
    return metrics


# Factors of the rate. Of the steps behind the warm-up, `left` is the share that is still to come:
# 1 until the warm-up ends, and above 0 in the last step.
LR_SCHEDULES = {
    "constant": lambda left: 1,
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
}


def set_learning_rate(optimizer, step, s):
    """A linear warm-up, then a schedule, for every group of any optimizer -> the rate."""
    # At first Adam's second moment is a mean of few gradients, so the first steps are small.
    lr = s.learning_rate * min(1.0, step / max(s.warmup_steps, 1))
    decaying = max(s.steps - s.warmup_steps, 1)
    left = min(1.0, (s.steps - step + 1) / decaying)
    lr *= LR_SCHEDULES[s.lr_schedule](left)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def evaluate(parts, settings, group_size=1, temperature=0.0):
    """Greedy answers (or group_size sampled ones) -> metrics, the answers' rows, see `row_of`."""
    at_a_time = max(1, settings.prompts_per_step // WORLD_SIZE * settings.group_size // group_size)
    s = replace(settings, group_size=group_size, temperature=temperature)
    renew_twin(parts)
    rows = sum(together(evaluation_rows, parts, s, at_a_time), [])
    metrics = {"eval_accuracy": float(column(rows, "right").nanmean())}
    if parts.reward_of:
        for name in reward_names(rows):
            metrics[f"eval_{name}"] = float(column(rows, name).nanmean())
    return metrics, rows


def evaluation_rows(parts, s, at_a_time):
    """The rows of this GPU's share of the held-out problems; a signal breaks them off."""
    rows = []
    key = s.seed, "evaluation"
    mine = share_of_rank(len(parts.eval_problems))
    for places in tqdm(reward.groups_of(mine, at_a_time), "evaluation", leave=False):
        if RECEIVED:
            break
        batch = make_batch(parts.tokenizer, parts.eval_problems, places, key, s)
        rollout, _ = answers_and_rewards(parts, batch, s, parts.sampler)
        rows += [row_of(rollout, n) for n in range(len(rollout.responses))]
    return rows


def evaluate_if_due(run, parts, s):
    """Evaluate the last step that is done, if it is its turn and the log has no such evaluation."""
    # Scores of other problems or rewards get another number: best/ does not compare them.
    eval_id = number_of((parts.eval_problems, s.reward, s.reward_weights, s.reward_model))
    steps = [line["step"] for line in run.evaluations if line["eval_id"] == eval_id]
    every = s.eval_every or s.steps
    is_turn = run.step % every == 0 or run.step == s.steps
    if run.step in steps or (steps and not is_turn):
        return
    scores, rows = evaluate(parts, s)
    run.log_evaluation({"step": run.step, "eval_id": eval_id}, scores, rows)
    keep_best(run, parts, s)


# --------------------------------------------------------------------------------------------------
# Weights. AdamW at 1e-6 moves a weight by about 1e-6, but a bfloat16 weight of 0.02 can only move
# by 1.2e-4. So the optimizer moves float32 masters, and the model's weights are rounded from them.
#
# With LoRA (Hu et al., arXiv 2106.09685) it moves factors A (R, in) and B (out, R) of every Linear
# but the head: W = W0 + c B A, c = alpha / R. Usually the factors are a second path beside W0, and
# are merged for a fast sampler. Here the model always has the plain weights W, so every fast path
# works. Only the backward pass and the optimizer know the factors.

def make_optimizer(model, s, ref_model=None):
    """AdamW of the weights, of float32 masters if these have fewer bits, or of LoRA's factors."""
    options = {"lr": s.learning_rate, "weight_decay": s.weight_decay, "fused": True}
    if s.lora_rank:
        return with_moments(LoraAdamW(factored_linears(model, s, ref_model), **options))
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if model.dtype == torch.float32:
        groups = groups_of_decay(weights, s.weight_decay)
        return with_moments(torch.optim.AdamW(groups, **options))
    masters = {}
    for i, (name, weight) in enumerate(weights.items()):
        master = dither(weight, s.seed, i)
        masters[name] = master.cpu().pin_memory() if s.offload else master
    groups = groups_of_decay(masters, s.weight_decay)
    return with_moments(MasterAdamW(groups, list(weights.values()), **options))


def groups_of_decay(named, decay):
    """{name: weight} -> what AdamW takes. Norms and biases, which are vectors, do not decay."""
    if not decay:
        return named.items()
    # A group for each keeps their order, in which the norm of the gradient is summed.
    return [{"params": [(name, p)], "weight_decay": decay * (p.ndim > 1)}
            for name, p in named.items()]


def trained_by(optimizer):
    """All that it moves, a list of tensors."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def with_moments(optimizer):
    """Make AdamW's moments now, so that memory cannot run out in the middle of the first step."""
    for p in trained_by(optimizer):
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),  # where the fused kernel needs it
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


@torch.no_grad()
def dither(weight, seed, i, device=None):
    """A float32 copy of the i-th weight, its numbers moved at random by less than half a unit.

    A unit is the distance between neighbours in bfloat16. Rounded to nearest, the copy is still
    the weight, bit for bit. But if a master began exactly on such a number, its weight
    would not change until it had moved by half a unit, after hundreds of steps at 1e-6. From random
    places a move by a hundredth of a unit takes one weight in a hundred to its next number: on
    average the change arrives. Stochastic rounding (arXiv 2010.06192) would draw at every step.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    master = weight.to(device, dtype, copy=True)
    # How many float32 numbers lie in a unit: 2^16 in one of bfloat16. The eps of float32 is 2^-23.
    eps = torch.finfo(weight.dtype).eps
    unit = round(eps * 2**23)
    if unit > 1:
        shard_number = RANK if is_sharded(weight) else 0
        generator = seeded(seed, "off grid", i, shard_number, device=master.device)
        # The bits of a float32, read as an integer, count the numbers between it and 0.
        bits = shard_of(master).view(torch.int32)
        offset = torch.empty_like(bits).random_(1 - unit // 2, unit // 2, generator=generator)
        bits += offset.masked_fill_(shard_of(master) == 0, 0)  # 0 stays 0
    return master


class RoundedAdamW(torch.optim.AdamW):
    """AdamW on float32 numbers; after each step the model's `weights` are rounded from them."""

    def step(self):
        super().step()
        self.round()

    @torch.no_grad()
    def round(self):
        """Round each weight to the nearest number."""
        for weight, exact in zip(self.weights, self.exact_weights()):
            # With --offload the masters are in pinned memory, and this copy runs by itself. They
            # change next in step(), which first waits for gradients.
            weight.copy_(exact, non_blocking=True)


class MasterAdamW(RoundedAdamW):
    """AdamW on the float32 masters of bfloat16 weights.

    With --offload masters and moments are in host memory: the GPU sends gradients once per update.
    """

    def __init__(self, masters, weights, **options):
        super().__init__(masters, **options)
        self.masters = trained_by(self)
        self.weights = weights
        self.grads = []
        if self.masters[0].device != weights[0].device:
            self.grads = [torch.empty_like(master, pin_memory=True) for master in self.masters]
        for weight in weights:
            # A backward pass writes gradients in the weight's dtype. The hook makes the first one
            # float32, so the others are added to it in float32.
            weight.grad_dtype = None  # or torch would refuse another dtype
            weight.register_post_accumulate_grad_hook(to_float32)

    def exact_weights(self):
        return self.masters

    def step(self):
        for i, weight in enumerate(self.weights):
            grad = weight.grad
            if self.grads and grad is not None:
                grad = self.grads[i].copy_(grad)
            self.masters[i].grad = grad
        super().step()

    def zero_grad(self):
        super().zero_grad()
        for weight in self.weights:
            weight.grad = None


def to_float32(weight):
    """Its gradient, in float32 from now on."""
    weight.grad = weight.grad.float()


class LoraAdamW(RoundedAdamW):
    """AdamW on the factors of FactoredLinears, {name: module}."""

    def __init__(self, linears, **options):
        self.linears = linears
        self.weights = [linear.weight for linear in linears.values()]
        self.factors = {}  # under their names in PEFT
        for name, linear in linears.items():
            self.factors[f"base_model.model.{name}.lora_A.weight"] = linear.A
            self.factors[f"base_model.model.{name}.lora_B.weight"] = linear.B
        super().__init__(self.factors.items(), **options)

    def exact_weights(self):
        """Of each Linear W0 + c B A, (out, in), in float32, one after the other."""
        for linear in self.linears.values():
            W0 = linear.first_weight()
            yield W0.addmm_(linear.B, linear.A, alpha=linear.c)


def factored_linears(model, s, ref_model):
    """Put a FactoredLinear in the place of every Linear but the head -> {name: module}.

    All else is frozen, also other matrices, as those of experts.
    """
    head = model.get_output_embeddings()
    # A class derived from Linear has a forward of its own: a router returns two tensors.
    linears = {name: module for name, module in model.named_modules()
               if type(module) is torch.nn.Linear and module is not head}
    if not linears:
        raise BadInput(f"--lora-rank: {model.config.model_type} models have no Linear but the head")
    model.requires_grad_(False)
    for i, (name, linear) in enumerate(linears.items()):
        device = linear.weight.device
        if ref_model and not s.renew_reference:  # then the reference keeps the first weights
            W0 = ref_model.get_submodule(name).weight
        else:
            W0 = linear.weight.data.to("cpu" if s.offload else device, copy=True)
        first_weight = partial(dither, W0, s.seed, i, device)
        generator = seeded(s.seed, "lora", i)
        linears[name] = FactoredLinear(linear, first_weight, s, generator)
        model.set_submodule(name, linears[name])
    return linears


class FactoredLinear(torch.nn.Module):
    """A Linear that hands the gradient of its weight on to factors.

    first_weight() makes W0 in float32.
    """

    def __init__(self, linear, first_weight, s, generator):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.first_weight = first_weight

        # PEFT begins with the same distribution. B is 0: the first W is W0.
        R = s.lora_rank
        n_out, n_in = linear.weight.shape
        device = linear.weight.device
        A = 2 * torch.rand(R, n_in, generator=generator) - 1
        A /= n_in ** 0.5
        self.A = A.to(device).requires_grad_()                                         # (R, in)
        self.B = torch.zeros(n_out, R, device=device, requires_grad=True)              # (out, R)
        self.c = (s.lora_alpha or 2 * R) / R

    def forward(self, x):
        return FactoredProduct.apply(x, self.weight, self.bias, self.A, self.B, self.c)


class FactoredProduct(torch.autograd.Function):
    """y = x W^T whose gradient goes to W's factors: dA = c B^T dW, dB = c dW A^T, without dW."""

    @staticmethod
    def forward(ctx, x, W, bias, A, B, c):
        # x (..., in), W (out, in), A (R, in), B (out, R)
        ctx.save_for_backward(x, W, A, B)
        ctx.c = c
        return torch.nn.functional.linear(x, W, bias)

    @staticmethod
    def backward(ctx, dy):
        x, W, A, B = ctx.saved_tensors
        dx = dy @ W                                                                    # (..., in)
        x = x.flatten(0, -2)  # (T, in)
        dy = dy.flatten(0, -2)  # (T, out): dW = dy^T x
        dA = (dy @ B.to(dy)).T @ x                                                     # (R, in)
        dB = dy.T @ (x @ A.T.to(x))                                                    # (out, R)
        dA = ctx.c * dA.to(A)
        dB = ctx.c * dB.to(B)
        return dx, None, None, dA, dB, None


def finished_gradients(optimizer):
    """The tensors that may have a gradient, each of them complete: LoRA's averaged over GPUs."""
    trained = trained_by(optimizer)
    if isinstance(optimizer, LoraAdamW) and WORLD_SIZE > 1:
        for p in trained:
            if p.grad is not None:
                dist.all_reduce(p.grad)  # as FSDP does with shards
                p.grad /= WORLD_SIZE
    return trained + getattr(optimizer, "weights", [])


def save_adapter(run, optimizer, s):
    """adapter/ beside final/: the factors alone, as PEFT writes and reads them."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": s.model,
        "r": s.lora_rank,
        "lora_alpha": s.lora_alpha or 2 * s.lora_rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in optimizer.linears})}
    with replacing(run.folder / "adapter") as new:
        new.mkdir()
        save_file(optimizer.factors, new / "adapter_model.safetensors")
        (new / "adapter_config.json").write_text(json.dumps(config, indent=2))


# --------------------------------------------------------------------------------------------------
# Several GPUs (torchrun), by torch's FSDP2: every rank holds a shard of the weights and of their
# masters, gathers a layer when it computes, and works on its own whole groups.

@blame("torchrun's variables RANK, WORLD_SIZE and so on (set all of them, or none):", Exception)
def join_ranks(s):
    if RANK >= WORLD_SIZE:
        raise ValueError(f"rank {RANK} of {WORLD_SIZE}")
    if WORLD_SIZE == 1:
        return
    from datetime import timedelta

    on_gpus = s.device != "cpu" and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Where the processes meet. A restart by torchrun must not find the addresses of the last.
    store, *_ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    # NCCL exchanges CUDA tensors, gloo exchanges Python objects and CPU tensors. Other ranks wait
    # while rank 0 writes a checkpoint, which can take longer than NCCL's usual ten minutes.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", store=store,
                            rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(hours=1))


def leave_ranks(status):
    """End this rank with that status, once all have come here."""
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()
        # FSDP still holds gloo's threads. One that is awake while Python ends aborts the process.
        sys.stdout.flush()
        os._exit(status)


def share_of_rank(n):
    """Which of n things this rank takes, as split_groups shares them: a list of numbers."""
    return torch.arange(n).tensor_split(WORLD_SIZE)[RANK].tolist()


def from_all_ranks(value):
    """Every rank's value, a list."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def mean_of_ranks(numbers):
    """{name: number} -> their means over the ranks."""
    return means_of(from_all_ranks({name: float(value) for name, value in numbers.items()}))


def on_rank_0(function, *args):
    """The function's result on rank 0, given to every rank."""
    return from_all_ranks(function(*args) if RANK == 0 else None)[0]


def is_sharded(tensor):
    return hasattr(tensor, "full_tensor")  # a DTensor, of which each rank has a part


def whole_of(tensor):
    """A sharded tensor, gathered; every rank has to call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_of(tensor):
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard(model, s):
    """FSDP2 on every decoder layer and on the rest: shards, gathered when they compute."""
    if not s.has_shards:
        return model
    from torch.distributed import fsdp

    device = torch.device(s.device)
    wrap = partial(fsdp.fully_shard, mesh=dist.init_device_mesh(device.type, (WORLD_SIZE,)),
                   mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32))
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in next(lists):  # one decoder layer at a time: the others wait in host memory
        wrap(layer)
    wrap(model)  # the rest: embeddings, last norm, head
    # [D] does not call the model's forward, and FSDP gathers only in methods that it knows.
    model.token_logprobs = partial(token_logprobs, model)
    fsdp.register_fsdp_forward_method(model, "token_logprobs")
    return model.to(device)  # its buffers


def twin_of(model, s):
    """A copy to sample from, whole but empty, of a model that will be sharded: FSDP's hooks would
    slow sampling down. None if each GPU holds all weights."""
    if not s.has_shards:
        return None
    empty = {id(p): torch.empty_like(p, device=s.device) for p in model.parameters()}
    return copy.deepcopy(model, empty).to(s.device)  # its buffers


@torch.no_grad()
def renew_twin(parts):
    """Give the twin, if there is one, the weights of all shards."""
    if parts.twin:
        for weight, p in zip(parts.twin.parameters(), parts.policy_model.parameters()):
            weight.copy_(whole_of(p))


# --------------------------------------------------------------------------------------------------
# Signals: Ctrl-C, or a scheduler's, ends a run with whole steps. Its handler only notes the signal.
# While answers are drawn and scored, `together` finds the note: a terminal's Ctrl-C reaches all
# that a reward has started, too, and a sandbox that it kills earns nothing. No step is trained on
# that. A step that is in training is finished; then the loop finds the note by `stopped`. What a
# user's code does to handlers foreign_code of reward.py puts back; what it forks gets its own.

RECEIVED = []  # the signals that have come since a run began to listen
OLD_HANDLERS = {}  # while a run listens to signals: {signal: what handled it before}


class Stopped(Exception):
    """A signal came: what was begun does not count, and is begun anew when the run is resumed."""


def together(function, *given):
    """The function's results on all ranks, a list. Stopped: a signal came to one of them."""
    try:
        result = function(*given)
    except Exception:
        if not RECEIVED:  # which would explain it
            raise
        result = None
    results = from_all_ranks(result)
    if stopped():
        raise Stopped
    return results


def stopped():
    """The signal to any rank, which stops all of them; 0 if there was none."""
    signum = max(from_all_ranks(max(RECEIVED, default=0)))
    if signum:  # now every rank has it; one that comes after this question is found by the next
        RECEIVED[:] = [signum]
    return signum


@contextmanager
def listening_to_signals():
    """Note the signals that come; a second one ends the process at once."""
    def note(signum, _):
        signal.signal(signum, signal.SIG_DFL)
        reward.HANDLERS[signum] = signal.SIG_DFL  # or foreign_code would put this function back
        RECEIVED.append(signum)
        print0("\nstopping (a second signal stops at once)", sys.stderr)

    RECEIVED.clear()
    try:
        for signum in reward.HANDLERS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
                with suppress(ValueError):  # only the main thread may set handlers
                    OLD_HANDLERS[signum] = signal.signal(signum, note)
        yield
    finally:
        while OLD_HANDLERS:
            signal.signal(*OLD_HANDLERS.popitem())


def reset_signals():
    """In a process that a reward forks: a pool may end it by SIGTERM; other signals are the run's.

    A Ctrl-C reaches a pool's workers, too: if they died of it, the step would wait for ever.
    """
    for signum in OLD_HANDLERS:
        is_term = signum == signal.SIGTERM
        signal.signal(signum, signal.SIG_DFL if is_term else signal.SIG_IGN)
    mask_sigterm(signal.SIG_UNBLOCK)


# Registered once, for all runs: a fork hook cannot be taken back. During a fork SIGTERM waits until
# the child has its own handlers; before, it would be lost, or reach the run's.
if hasattr(os, "register_at_fork"):
    mask_sigterm = partial(signal.pthread_sigmask, mask=[signal.SIGTERM])
    os.register_at_fork(before=partial(mask_sigterm, signal.SIG_BLOCK),
                        after_in_parent=partial(mask_sigterm, signal.SIG_UNBLOCK),
                        after_in_child=reset_signals)


# --------------------------------------------------------------------------------------------------
# A run: its state, and its folder

LOGS = "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"
RECENT = 100  # steps that the bar and the warnings look at: a step costs the same in a long run
# Of a group in samples.jsonl; most groups have the first two alone
TENSORS = "finished advantages input_ids labels sampler_logprobs".split()


@contextmanager
def replacing(path):
    """Yields a path beside this file or folder; what is complete there replaces it."""
    new = path.with_name(f"{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # a kill may have left half a folder
    yield new
    if new.is_dir():  # os.replace cannot replace a folder that has files
        shutil.rmtree(path, ignore_errors=True)
    else:
        with open(new, "rb+") as finished:
            os.fsync(finished.fileno())
    os.replace(new, path)


class Run:
    """The state of a run. Only rank 0 writes, and only if the run has a folder."""

    step = 0  # the last step that is done
    saved_step = None  # the step of the checkpoint
    command = ""  # what began the run; empty if Python did
    origin = None  # what it began with, see origin_of
    folder = None  # a Path, see claim_folder

    def __init__(self):
        self.history = []  # the lines of metrics.jsonl: those of steps,
        self.evaluations = []  # and those of evaluations

    def claim_folder(self, s):
        """On rank 0: make the folder and lock it until the process ends -> its Path."""
        begun = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"  # two in one second
        name = s.output or f"runs/{run_of(s.model).name}-{begun}"
        folder = Path(name).absolute()  # a reward may change the directory
        with blame(f"--output {name}: cannot be written:"):
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(folder / ".lock", "w")
        try:
            import fcntl
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"--output {name}: another run writes there") from None
        except (ImportError, OSError):
            pass  # Windows, or a file system without locks
        return folder

    @property
    def writes(self):
        return self.folder and RANK == 0

    @property
    def resume_command(self):
        """What goes on with the run; "" where there is no checkpoint."""
        if self.saved_step is None or not self.folder or not self.folder.exists():
            return ""
        return command("train.py", "--resume", str(self.folder))

    def log_step(self, metrics, rollout, group_size):
        """Write a step's samples and its line, which warns of a known failure.

        BadInput: ten steps in a row have moved no weight.
        """
        for record in samples_of(rollout, metrics["step"], group_size):
            self.append("samples.jsonl", record)
        line = {name: finite(value) for name, value in metrics.items()}
        self.history.append(line)
        recent = self.history[-RECENT:]
        symptom = symptoms(recent, rollout.responses[-1])
        if symptom and not any("warning" in row for row in recent):  # one is enough
            line["warning"] = symptom
            print0(f"step {line['step']}: {symptom}", sys.stderr)
        self.append("metrics.jsonl", line)
        skipped = [row for row in self.history[-10:] if row.get("skipped_updates")]
        if len(skipped) == 10:
            raise BadInput("in 10 steps in a row updates were skipped, for a loss or gradient that "
                           "is not finite: --lr or a reward may be too large, or --temperature "
                           "too small")

    def log_evaluation(self, key, scores, answers):
        """Write an evaluation's answers, then its line: a kill between them leaves no line."""
        line = key | {name: finite(value) for name, value in scores.items()}
        self.append("evaluations.jsonl", key | {"answers": answers})
        self.append("metrics.jsonl", line)
        self.evaluations.append(line)

    def append(self, name, record):
        """Write a line to a log."""
        if self.writes:
            if not self.folder.exists():
                raise BadInput(f"{self.folder} is gone: if it has a new name, --resume that")
            with open(self.folder / name, "a") as log:  # in ASCII, as JSON is written
                log.write(json.dumps(record) + "\n")

    def curve(self, name, n=0):
        """A metric over all steps, or over the last n: (step, value)s, without those of null.

        Of evaluations only those that asked what the last one asked: others cannot be compared.
        """
        rows = self.history[-n:]
        if name.startswith("eval_"):
            rows = [row for row in self.evaluations[-n:]
                    if row["eval_id"] == self.evaluations[-1]["eval_id"]]
        return [(row["step"], row[name]) for row in rows if row.get(name) is not None]

    def read_metrics(self, lines):
        """Know what these lines of metrics.jsonl say."""
        for line in lines:
            (self.evaluations if "eval_id" in line else self.history).append(line)


def records_in(folder, name):
    """The records of a log, a list of dicts."""
    path = Path(folder, name)
    text = path.read_text(errors="replace") if path.exists() else ""
    records = []
    for line in text.splitlines():
        with suppress(ValueError):  # a kill may have left half a line
            records.append(json.loads(line))
    return records


def cut_logs(run):
    """On rank 0: take out of the logs what is later than the checkpoint -> metrics.jsonl's lines.

    What is lacking, be it by a power failure or because somebody deleted it, is told.
    """
    for name in LOGS:
        kept = [record for record in records_in(run.folder, name) if record["step"] <= run.step]
        if run.step and not kept:
            print0(f"{run.folder}/{name} is lacking: it begins anew")
        with replacing(run.folder / name) as new:
            new.write_text("".join(json.dumps(record) + "\n" for record in kept))
    lines = records_in(run.folder, "metrics.jsonl")
    steps = {line["step"] for line in lines if "eval_id" not in line}
    if lacking := run.step - len(steps):
        print0(f"{run.folder}/metrics.jsonl lacks {lacking} of {run.step} steps: no curve has them")
    return lines


def samples_of(rollout, step, group_size):
    """The step's first two groups as they were scored, a record of each for samples.jsonl."""
    for rows in reward.groups_of(range(len(rollout.responses)), group_size)[:2]:
        group = take(rollout, rows)
        problem = group.problems[0]
        record = {"step": step, "question": problem["question"],
                  "truth": truth_in_words(problem),
                  "prompt": group.prompts[0], "responses": group.turns or group.responses}
        # tests/tools/page.py shows groups that teach, of the steps 1, 2, 4, 8, ...
        is_shown = group.advantages.any() and step.bit_count() == 1
        for name, values in {"rewards": group.rewards, **group.reward_parts}.items():
            record[name] = list(map(finite, values.tolist()))
        for name in TENSORS if is_shown else TENSORS[:2]:
            record[name] = getattr(group, name).tolist()
        yield record


def on_host(run, tensors):
    """{name: tensor, sharded or not} -> the whole tensors in host memory, on rank 0 alone."""
    copies = {}
    for name, tensor in tensors.items():
        whole = whole_of(tensor.detach())  # all ranks take part in gathering
        if run.writes:
            copies[name] = whole.cpu()
    return copies


def save_folder(model, tokenizer, run, name):
    """Save a folder that from_pretrained opens, and that knows its step."""
    weights = model.state_dict()
    for tied in model.all_tied_weights_keys:  # a head that is the embedding is written once
        weights.pop(tied, None)
    whole = on_host(run, weights)
    if run.writes:
        with replacing(run.folder / name) as new:
            model.save_pretrained(new, state_dict=whole)
            sample.save_tokenizer(tokenizer, new)
            (new / f"step-{run.step}").touch()


def keep_best(run, parts, s):
    """best/ is the policy of the best evaluation that the log knows, or it is not there."""
    best = best_step(run)
    if os.path.exists(f"{run.folder}/best/step-{best}"):
        return
    if s.best and best == run.step > 0:
        save_folder(parts.policy_model, parts.tokenizer, run, "best")
    elif run.writes:  # after a kill best/ may be of a step that the log has lost
        shutil.rmtree(run.folder / "best", ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# A checkpoint is a moment after a step: all tensors that training moves, and Run's few counters.
# To go on is to load it and to cut off what was logged after that step. All else, as problems,
# random numbers and learning rate, follows from the step and the settings.

CHECKPOINT = "checkpoint.safetensors"


def checkpoint_tensors(parts, s):
    """All that training changes: {name in a checkpoint: tensor, sharded or not}."""
    tensors = {}
    optimizers = {"": parts.optimizer}
    if s.renew_reference:
        for name, p in parts.ref_model.named_parameters():
            tensors[f"weight/reference/{name}"] = p
        if parts.reward_model:
            optimizers["reward_model/"] = parts.reward_model.optimizer
    for prefix, adamw in optimizers.items():
        # What AdamW moves: the weights, float32 masters if they have fewer bits, LoRA's factors
        for group in adamw.param_groups:
            for name, weight in zip(group["param_names"], group["params"]):
                for kind, tensor in {"weight": weight, **adamw.state[weight]}.items():
                    tensors[f"{kind}/{prefix}{name}"] = tensor
    return tensors


@torch.no_grad()
def save_checkpoint(run, parts, s):
    """Write one safetensors file and move it over the old one, unless that is of this step.

    BadInput: a weight is not finite.
    """
    if run.saved_step == run.step:
        return
    weights = map(shard_of, parts.policy_model.parameters())
    if not all(weight.isfinite().all() for weight in weights):
        cause = "--lr or --weight-decay may be too large" if run.step else "so --model has them"
        raise BadInput(f"after step {run.step} weights are not finite: {cause}")
    whole = on_host(run, checkpoint_tensors(parts, s))
    if run.writes:
        counters = {"step": run.step, "command": run.command, "origin": run.origin}
        if parts.reward_model:
            counters["pairs"] = parts.reward_model.pairs, parts.reward_model.replay
        # The counters are a tensor, too: the text may be long, and the file's header has a limit.
        text = bytearray(json.dumps(counters).encode())
        whole["counters"] = torch.frombuffer(text, dtype=torch.uint8)
        with replacing(run.folder / CHECKPOINT) as new:
            save_file(whole, new)
    run.saved_step = run.step


@torch.no_grad()
def load_checkpoint(run, parts, s):
    """Restore what the checkpoint holds."""
    path = run.folder / CHECKPOINT
    with blame(f"--resume: {path} is damaged, or not of this model, or of another version of "
               "train.py:", Exception):
        checkpoint = safe_open(path, framework="pt")
        counters = json.loads(checkpoint.get_tensor("counters").numpy().tobytes())
        tensors = checkpoint_tensors(parts, s)
        # A name that only one of the two has would be lost, or is lacking.
        if odd := {*checkpoint.keys()} ^ {"counters", *tensors}:
            raise ValueError(f"{min(odd)!r} is either not in it, or not read by this run")
        if run.command and not counters["command"]:
            raise ValueError("the run was begun from Python, which alone knows its sampler, reward "
                             "and weights: pass --resume to train.parse() there")
        if parts.reward_model:
            parts.reward_model.pairs, parts.reward_model.replay = counters.pop("pairs")
        vars(run).update(counters)
        for name, tensor in tensors.items():
            saved = checkpoint.get_tensor(name)
            saved = saved.view(tensor.shape)  # copy_ would repeat a smaller one
            if is_sharded(tensor):
                saved = dist.tensor.distribute_tensor(saved, tensor.device_mesh, tensor.placements)
            tensor.copy_(saved)
    if hasattr(parts.optimizer, "round"):
        parts.optimizer.round()  # the model still has the weights of the start
    run.saved_step = run.step


# --------------------------------------------------------------------------------------------------
# What a run shows: the bar, the last lines and the page of tests/tools take the same curves

# Metrics in words, in the order in which these show them. One that step_metrics returns and that
# stands in neither list comes last, under its own name.
TITLES = dict(line.split(maxsplit=1) for line in """\
eval_reward            held-out reward
eval_accuracy          held-out accuracy
skipped_updates        skipped updates
reward_mean            sampled reward
accuracy               sampled accuracy
response_length_mean   answer length (tokens)
response_length_p95    95th percentile of length
approx_kl              KL to the reference (nats/token)
entropy                entropy (nats/token)
flat_groups            flat groups
reward_std_in_groups   std of rewards inside groups
positive_advantages    tokens of positive advantage
gradient_coefficient   mean gradient coefficient
grad_norm              gradient norm
truncated_fraction     answers cut at the limit
clip_fraction          clipped tokens""".splitlines())
NOT_SHOWN = """step lr warning reward_std format_rate tokens kl_coef tokens_per_second
peak_memory_gb seconds_sampling seconds_scoring seconds_training loss policy_loss clip_fraction_low
clip_fraction_high ratio_mean sampler_difference eval_id""".split()


def curves_of(run, n=0):
    """What the metrics of all steps say, or of the last n: (metric, its title, (step, value)s)s.

    Evaluations come first, and then each --reward. Of sampled answers a point is the mean of five
    steps or more, because those of one step are few, and there are at most 40 points.
    """
    lines = run.evaluations[-1:] + run.history[-1:]
    last = [name for line in lines for name in line]
    rewards = [name for name in last if "reward/" in name]
    names = ["eval_reward", "eval_accuracy", *rewards, *TITLES, *last]
    curves = []
    for metric in dict.fromkeys(names):
        points = run.curve(metric, n)
        # A curve that is 0 throughout says nothing beside a score.
        is_shown = not curves or metric in rewards or any(value for _, value in points)
        if points and is_shown and metric not in NOT_SHOWN:
            width = len(points)
            if "eval_" not in metric:
                width, _ = points_and_steps(width)
            rows = torch.tensor(points, dtype=torch.float64).T                         # (2, n)
            means = torch.nn.functional.adaptive_avg_pool1d(rows, width)           # (2, width)
            title = TITLES.get(metric, metric.replace("eval_", "held-out "))
            curves.append((metric, title, means.T.tolist()))
    return curves


def points_and_steps(n):
    """How many points a curve of n sampled steps has, and of how many steps the first is a mean."""
    points = min(n, max(2, n // 5), 40)
    return points, math.ceil(n / points)


def best_step(run):
    """The step of the highest held-out score so far; of equal ones the first; None without any."""
    scores = run.curve("eval_reward") or run.curve("eval_accuracy")
    step, _ = max(scores, key=lambda point: point[1], default=(None, None))
    return step


def update_bar(bar, run):
    """Show where the first six curves have come to."""
    shown = {}
    for _, title, points in curves_of(run, RECENT)[:6]:
        name = title.split(" (")[0]  # without its unit
        shown[name] = points[-1][1]
    bar.set_postfix(shown, refresh=False)
    bar.update()


def print_group(group):
    """A first look, before a weight moves: most wrong tasks are seen in one prompt and answers."""
    lines = ["\nthe first group's prompt, as the policy gets it", group.prompts[0], "\nanswers"]
    for n, answer in enumerate(group.responses):
        row = row_of(group, n)
        facts = [f"{name} {row[name]!s:.7}" for name in reward_names([row])]
        facts += ["cut"] * (not group.finished[n])
        lines.append(f"  {', '.join(facts)}: {one_line(answer)[:100]}")
    print0("\n".join(lines))  # each print0 draws the bar anew


def example_of(first, last):
    """The rows of the held-out problem that gained most between two evaluations."""
    gains = column(last, "reward") - column(first, "reward")
    i = int(gains.nan_to_num().argmax())
    return first[i], last[i]


def first_and_last(run):
    """The answers of the first and last evaluation of the same problems, see row_of; [] if lost."""
    answers = {}  # a kill may have left an evaluation that was then asked again
    for record in records_in(run.folder, "evaluations.jsonl"):
        answers[record["step"], record["eval_id"]] = record["answers"]
    known = [answers[point] for point in run.curve("eval_id") if point in answers]
    return known and [known[0], known[-1]]


def print_story(run):
    """Print a held-out problem's answers before and after, the curves, and what to do next."""
    answers = first_and_last(run)
    if answers:
        before, after = example_of(*answers)
        print0("\nof the held-out problems the one that gained most\n"
               f"question  {before['problem']}\nbefore    {before['answer']}\n"
               f"after     {after['answer']}\ntruth     {before['truth']}\n")
    _, n = points_and_steps(run.step)
    print0(f"held-out: greedy answers; others: means of the first and of the last {n} steps")
    for metric, title, points in curves_of(run):
        print0(f"{title:33}{small_curve(points)}")
        if answers and "eval_" in metric:
            print0(f"{'':33}{change_of(metric, *answers)}")
    for step, warning in run.curve("warning"):
        print0(f"\nwarning of step {step}: {warning}")
    folder = str(run.folder)
    further = command("train.py", "--resume", folder, "--steps", str(2 * run.step))
    print0("")
    if os.path.exists(f"{folder}/best"):
        print0(f"best state           {folder}/best, of step {best_step(run):g}")
    print0(f"see what it learned  {command('tests/tools/page.py', folder)}\n"
           f"talk to the result   {command('sample.py', '--model', folder)} \"YOUR QUESTION\"\n"
           f"train it further     {further}")


def change_of(metric, first, last):
    """What became of a held-out score between two evaluations, in words."""
    name = "right" if metric == "eval_accuracy" else metric.removeprefix("eval_")
    part = (column(last, name) - column(first, name)).nanmean()
    total = (column(last, "reward") - column(first, "reward")).nanmean()
    fell = "; it fell while the sum rose" if part < 0 < total else ""
    return compared(first, last, name) + fell


def small_curve(points):
    """(step, value)s as one line: the first value, blocks that rise from 0, the last value."""
    _, values = zip(*points)
    low = min(0, *values)
    span = max(0, *values) - low or 1
    heights = [int(7 * ((value - low) / span)) for value in values]
    blocks = "".join("▁▂▃▄▅▆▇█"[height] for height in heights)
    return f"{values[0]:9.3g} {blocks} {values[-1]:.3g}"


# --------------------------------------------------------------------------------------------------
# Warnings. A healthy run passes through many odd states, so only a reward in trouble is told.

def symptoms(history, answer=""):
    """Metrics of the steps so far, an answer -> one line with its number, or ""."""
    def mean_of_all(name):
        return float(column(history, name).mean())

    if history[-1].get("reward_mean", 0) is None:
        return "the reward was None (does not apply) for all answers: nothing can be learned"
    n = len(history)
    rewards = column(history, "reward_mean")
    rewards = torch.nn.functional.pad(rewards, (9, 0), value=math.nan)
    rewards = rewards.unfold(0, 10, 1).nanmean(dim=1)    # (n,): means of ten steps
    best, now = rewards.max(), rewards[-1]
    spread = column(history, "reward_std").nan_to_num().max()

    # All rewards were equal from the first step on, and moved nothing.
    if n >= 3 and spread + best - rewards.min() < 1e-6 and mean_of_all("policy_loss") == 0:
        fault = f"all answers of {n} steps earned {now:.3g}, so nothing can be learned"
        own = [name.removeprefix("reward/") for name in history[-1] if "reward/" in name]
        if own:
            return (f"{fault}: {', '.join(own)} may not see what you think; samples.jsonl has what "
                    "was asked, answered and earned")
        return (
            f"{fault}: {mean_of_all('format_rate'):.0%} have a \\boxed{{}}, "
            f"{mean_of_all('truncated_fraction'):.0%} are cut, 95% have at most "
            f"{mean_of_all('response_length_p95'):.0f} tokens; the last ends in {answer[-60:]!r}; "
            "try other --data, solved examples in --system-prompt, a larger --max-new-tokens")

    # The mean of ten steps lies more than half a standard deviation of the rewards below its best.
    if best - now > 0.5 * (spread or 1):
        return (f"the reward has fallen from {best:.3g} to {now:.3g}; first try a lower --lr, or a "
                "higher --kl-band if that has raised beta")
    return ""


# --------------------------------------------------------------------------------------------------
# Settings: every flag with what it takes, its default and its help, which is the comment. A flag
# takes a word of a table or tuple, several values if that stands in [], or what a function reads.
# A config file overrides the defaults, and the command line overrides both.

TINY = HERE / "tests" / "tiny"
TINY_CONFIG = f"{TINY}/grpo.json"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


expanded = os.path.expanduser  # a shell leaves the ~ of --output=~/runs as it is


def file(text):
    """Make a file, or file.py:function, absolute: a resumed run may start in another folder."""
    text = expanded(text)
    name = text.rpartition(":")[0] if ".py:" in text else text
    if os.path.exists(name) and text not in reward.GSM8K | reward.REWARDS_BY_NAME:
        return text.replace(name, os.path.abspath(name), 1)
    return text  # a name: gsm8k, or a model on the hub


def number(kind, low, high=2**31 - 1):
    """The type of a number within these bounds; argparse prints what it raises."""
    def read(text):
        with suppress(ValueError):
            value = kind(text)
            if low <= value <= high:  # this is false for NaN
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__} from {low} to {high}")
    return read


from_0 = number(int, 0)
from_1 = number(int, 1)
amount = number(float, 0)
above_0 = number(float, 1e-12)
arguments = sample.template_arguments
DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class Settings:
    # model, data, rewards
    model: file = str(TINY)  # hub name or folder, also a run's
    data: file = "gsm8k"  # training problems: a JSONL file, `gsm8k` or `gsm8k:test`
    eval_data: file = ""  # held out; default: gsm8k:test, or a tenth of --data, of up to 40 half
    question_field: str = "question"  # the column of the JSONL that holds the question
    answer_field: str = "answer"  # the column that ends in `#### ` and the final answer
    system_prompt: str = None  # system message; default: one that asks for the rule's box, or none
    template_args: arguments = None  # JSON for the chat template: '{"enable_thinking": false}'
    reward: [file] = None  # own file.py:function, called like TRL's, or `rule`, `think`; summed
    reward_weights: [number(float, -1e9)] = None  # of each --reward; default: 1
    step_reward: file = None  # file.py:function that rewards steps: process supervision
    reward_model: file = ""  # folder of a sequence classifier; its scores are the rewards
    reward_model_lr: above_0 = 2e-5  # the learning rate if --renew-reference trains it
    reply: file = None  # file.py:function that gives the user's next message: a tool, say
    max_turns: from_1 = 4  # at most this many answers in a --reply conversation
    # the rollout
    steps: from_1 = 500  # number of rollouts
    prompts_per_step: from_1 = 8  # B, questions per step
    group_size: number(int, 2) = 8  # G, answers per question: their mean is the baseline
    max_new_tokens: from_1 = None  # of an answer; default: 512, or half of the model's positions
    temperature: above_0 = 1.0  # softmax temperature of sampling and log-probs
    max_resample: from_0 = 0  # DAPO: rounds in which flat groups are replaced
    around_best: from_0 = 0  # half of a group continues this many of the other half's best
    # the objective
    clip_eps: number(float, 0, 1) = 0.2  # clips ratios at 1 ± this
    clip_eps_high: amount = None  # upper clip at 1 + this: DAPO's clip-higher, say 0.28
    kl_coef: amount = 0.04  # beta; 0: no KL, and no reference in memory
    kl_estimator: KL_ESTIMATORS = "k3"  # estimator of the KL
    aggregate: AGGREGATES = "sequence"  # how tokens are averaged
    ratio: RATIOS = "token"  # ratio per token, or per sequence: GSPO
    objective: OBJECTIVES = "clip"  # clip, or CISPO's weighted log-probs
    sampler_correction: amount = 0.0  # TIS: weights min(trainer / sampler, this), say 2
    mask_truncated: bool = False  # leave cut answers out of the loss and its mean
    renew_reference: from_0 = 0  # steps until the policy becomes the reference; 0: never
    kl_band: [above_0] = None  # LOW HIGH: adapt beta to keep KL there, say 0.02 0.05
    # the advantage
    advantage: ADVANTAGES = "group"  # how siblings are compared
    scale_by_std: bool = True  # divide the advantages by the group's std; off: Dr. GRPO
    clip_advantages: above_0 = None  # clip advantages to -this and this, say 5
    length_rescale: amount = 0.0  # GR3's alpha: rewards shrink with length, say 0.33
    overlong_buffer: from_0 = 0  # DAPO: the last tokens before the limit cost up to 1
    # the update
    lr: above_0 = None  # learning rate; default: 1e-6, with LoRA 1e-4
    lr_schedule: LR_SCHEDULES = "constant"  # after the warm-up: constant, or falling towards 0
    weight_decay: amount = 0.0  # weight decay of AdamW; norms and biases have none
    lora_rank: from_0 = 0  # LoRA: train factors of this rank for every Linear; 0: all weights
    lora_alpha: above_0 = None  # W = W0 + this / rank * B A; default: 2 * rank
    warmup_steps: from_0 = 10  # the learning rate rises linearly over these
    updates_per_rollout: from_1 = 1  # passes over the answers of a rollout
    minibatches: from_1 = 1  # gradient steps per pass, each on its share of the groups
    max_grad_norm: above_0 = 1.0  # gradients are clipped to this norm
    # only memory and time
    fast: bool = True  # CUDA graphs and kernels of our own; off: works everywhere
    micro_batch_tokens: from_0 = 0  # tokens of one backward pass; 0: chosen for the device
    gradient_checkpointing: bool = None  # recompute layers [if memory is short]
    offload: bool = None  # optimizer state in host memory [if memory is short]
    # measuring
    eval_every: from_0 = 50  # steps between evaluations; 0: before the first and after the last
    eval_limit: from_0 = 200  # held-out problems to evaluate; 0: all
    save_every: from_1 = 50  # steps between checkpoints
    best: bool = True  # keep the policy of the best evaluation in best/
    seed: from_0 = 0  # seed of the problems' order and of the sampling
    device: str = "auto"  # cuda, mps or cpu; auto: the first of them that is available
    dtype: DTYPES = "auto"  # dtype of the weights; auto: bfloat16 where it is fast
    threads: number(int, 0, 1024) = 0  # CPU threads; 0: torch's choice; small models: 1
    # this call only
    config: file = ""  # JSON, like a run's config.json
    output: expanded = ""  # folder of the run; default: runs/MODEL-TIME-CODE
    resume: expanded = ""  # continue the run in this folder; auto: in --output, or begin it there
    plain: bool = False  # train by plain_step alone, and print each step's rewards
    dry_run: amount = None  # print the memory a step needs, and stop; N: on a GPU of N GB

    @property
    def learning_rate(self):
        """Of the optimizer: --lr or its default."""
        return self.lr or (1e-4 if self.lora_rank else 1e-6)

    @property
    def answer_tokens(self):
        """The most tokens that the policy can write in one row, over all turns of --reply."""
        return (self.max_new_tokens or 512) * (self.max_turns if self.reply else 1)

    @property
    def has_shards(self):
        """Whether each of several ranks holds a part of the weights. LoRA's ranks hold all."""
        return WORLD_SIZE > 1 and self.lora_rank == 0


FIELDS = vars(Settings())  # {name: default}
THIS_CALL = "config output resume plain dry_run".split()  # in no config
# The flags that the plain definitions do not know
VARIANTS = """
    reward step_reward reward_model reply temperature max_resample around_best clip_eps_high
    kl_estimator aggregate ratio objective sampler_correction mask_truncated renew_reference kl_band
    advantage scale_by_std clip_advantages length_rescale overlong_buffer minibatches max_grad_norm
""".split()


def final_of(folder):
    """The policy's folder, if this is a run's."""
    return f"{folder}/final" if os.path.isfile(f"{folder}/final/config.json") else folder


def run_of(folder):
    """The Path of the run whose final/ or best/ this is; else that of the folder itself."""
    path = Path(str(folder))
    return path.parent if path.name in ("final", "best") else path


def config_of(folder):
    """The config.json of the run that this is, or whose final/ or best/ this is; else None."""
    run = run_of(folder)
    return f"{run}/config.json" if (run / "metrics.jsonl").is_file() else None


def flag_of(name):
    return "--" + name.replace("_", "-")


def parse_flags(words):
    """The flags in the words of a command line -> {name: value}, without defaults."""
    parser = argparse.ArgumentParser(
        usage="train.py [--FLAG VALUE ...]", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Group Relative Policy Optimization. N is a number, [] holds a flag's default; "
                    "without --model it is that of tests/tiny/grpo.json.")
    parser.error = refuse_flags
    group = parser
    source = SOURCE.read_text(encoding="utf-8")
    fields = source.split("class Settings:")[1].split("@property")[0]
    # Of each line with a comment: its first word and the comment
    for name, comment in re.findall(r" *(\w*).*  # (.+)", fields):
        if name:
            group.add_argument(flag_of(name), **options_of_flag(name, comment))
        else:  # a comment of its own is a heading
            group = parser.add_argument_group(comment)
    return vars(parser.parse_args(map(str, words)))  # from Python also numbers


def refuse_flags(message):
    """In place of argparse's own end, which has two lines: BadInput."""
    raise BadInput(f"{message} (--help lists the flags; in tests/tools evaluate.py evaluates, and "
                   "lesson.py traces a step)")


def options_of_flag(name, comment):
    """A field of Settings and its comment -> what add_argument takes."""
    kind, default = Settings.__annotations__[name], FIELDS[name]
    options = {"help": comment if default in (None, "") else f"{comment} [{default}]"}
    if isinstance(kind, list):
        kind, = kind
        options |= {"nargs": "+", "action": "extend"}
    if name == "dry_run":
        options |= {"nargs": "?", "const": 0.0}
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if isinstance(kind, dict | tuple):
        return options | {"choices": kind}
    if kind not in (str, file, expanded, arguments):
        options["metavar"] = "N"
    return options | {"type": kind}


def parse(words):
    """The words of a command line -> Settings, in layers, of which a later one wins:

    tests/tiny/grpo.json, if no other layer names a model; a config, which is the file --config, or
    that of the run which --resume names; the words.
    """
    flags = parse_flags(words)
    if flags.get("resume") == "auto":
        if "output" not in flags:
            raise BadInput("--resume auto: needs --output, the folder of the run")
        del flags["resume"]
        if os.path.exists(f"{flags['output']}/config.json"):
            flags["resume"] = flags.pop("output")
            flags.pop("config", None)  # the run's config.json says the same
    source = f"{flags['resume']}/config.json" if "resume" in flags else flags.get("config")
    config = read_config(source) if source else {}
    if "resume" not in flags:
        for name in code_in(config, flags):
            print0(f"{flag_of(name)}: {source} names code, {config[name]}")
    layers = [config, flags]
    if "model" not in config | flags:
        layers.insert(0, read_config(TINY_CONFIG))
        source = source or TINY_CONFIG
    s = Settings()
    for layer in layers:
        # Other --data: the held-out problems of the layers below do not belong to it.
        if "data" in layer and "resume" not in layer:
            s.eval_data = ""
        vars(s).update(layer)
    if s.resume:
        if others := flags.keys() & {"config", "output", "plain"}:
            raise BadInput(f"{flag_of(min(others))}: does not go with --resume")
        s.output = s.resume
    if s.system_prompt is None:  # rewards of one's own may ask for no box
        rewards = s.reward or ([] if s.reward_model or s.step_reward else ["rule"])
        s.system_prompt = "" if {"rule", "think"}.isdisjoint(rewards) else BOXED
    s.model = final_of(s.model)
    s.config = source or ""
    return s


def code_in(config, flags):
    """The flags of a config, which is anybody's, that name code which the command does not name."""
    return [name for name in ("reward", "step_reward", "reply")
            if ":" in str(config.get(name)) and name not in flags]


def read_config(path):
    """The flags of a JSON file -> {name: value}; its paths are relative to its folder."""
    words = []  # of a command line that says the same
    with blame(f"{path}: no JSON object of flags, spelt like kl_coef:", Exception):
        config = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        for name, value in config.items():
            if name not in FIELDS or name in THIS_CALL:
                raise ValueError(f"{flag_of(name)} is no flag for a config file")
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, bool):
                    words.append(flag_of(name if item else f"no_{name}"))
                elif item is not None:  # None is the default
                    text = item if isinstance(item, str) else json.dumps(item)
                    words.append(f"{flag_of(name)}={text}")
        with chdir(Path(path).parent):
            return parse_flags(words)


def check_settings(s):
    """BadInput: flags that would train something else in silence, a folder in use, odd values."""
    rewards = s.reward or []
    weights = s.reward_weights or []
    band = s.kl_band or []
    variants = [flag_of(name) for name in VARIANTS if getattr(s, name) != FIELDS[name]]
    has_own = rewards or s.reward_model or s.reply
    is_shape, is_gdpo = s.advantage == "shape", s.advantage == "gdpo"
    of_answers = s.reward_model or s.length_rescale or s.overlong_buffer or s.max_resample
    advantages = [s.advantage != "group", bool(s.step_reward), not s.scale_by_std]
    of_runs = "config.json", *LOGS, "best", "final", "adapter"
    in_use = s.output and any(os.path.exists(f"{s.output}/{name}") for name in of_runs)
    refusals = [
        (s.plain and (WORLD_SIZE > 1 or variants),
         f"--plain: the definitions know one process, and no {' '.join(variants)}"),
        (band and s.aggregate == "constant",
         "--kl-band: needs a KL per token, not --aggregate constant"),
        (has_own and (s.around_best or is_shape),
         "--around-best, --advantage shape: work with the rule's reward alone"),
        ((s.step_reward or is_shape or is_gdpo) and of_answers,
         "--step-reward, --advantage shape, gdpo: read no rewards of whole answers, as those of "
         "--reward-model, --length-rescale, --overlong-buffer, --max-resample"),
        (sum(advantages) > 1,
         "--no-scale-by-std, --step-reward, --advantage: only one of them works"),
        (is_gdpo and not rewards, "--advantage gdpo: needs --reward, each of which is normalised"),
        (in_use and not s.resume,
         f"--output {s.output}: is in use; name another, or continue its run with --resume"),
        (len(set(rewards)) < len(rewards),
         f"--reward {' '.join(rewards)}: names one of them twice"),
        (len(weights) not in (0, len(rewards)), "--reward-weights: one for each --reward"),
        (s.reward_model and rewards,
         "--reward-model and --reward: only one can give the rewards"),
        (s.around_best and s.group_size % (2 * s.around_best),
         f"--around-best {s.around_best}: must divide half of --group-size"),
        (s.overlong_buffer > s.answer_tokens,
         f"--overlong-buffer {s.overlong_buffer}: answers have at most {s.answer_tokens} tokens"),
        (len(band) not in (0, 2) or band != sorted(band),
         f"--kl-band {s.kl_band}: must be two numbers, the lower one first"),
        (not s.kl_coef and (band or s.renew_reference),
         "--kl-band, --renew-reference: need a --kl-coef above 0"),
        (s.prompts_per_step < WORLD_SIZE,
         f"--prompts-per-step {s.prompts_per_step}: there are {WORLD_SIZE} processes"),
        (s.minibatches > s.prompts_per_step // WORLD_SIZE,
         f"--minibatches {s.minibatches}: more than the --prompts-per-step of a process"),
    ]
    for is_so, line in refusals:
        if is_so:
            raise BadInput(line)
    with blame("--system-prompt:"):
        reward.check_escapes(json.dumps(s.system_prompt))


# --------------------------------------------------------------------------------------------------
# The machine: device, dtype, and memory by a rule of thumb, before anything is loaded.
# Checkpointing and offload save memory and cost time: on a GPU each is turned on if a step would
# not fit without it.

PROMPT = 256  # tokens of a prompt that the rule assumes
REST = 3  # GB for logits, keys and values
ADVICE = ("to need less: a lower --micro-batch-tokens or --max-new-tokens, --offload, "
          "--gradient-checkpointing, --lora-rank 16, --kl-coef 0, a smaller --model")


def choose_device(s):
    """-> (torch.device, the name of the dtype of weights that is fast there)."""
    if s.dry_run:  # the GPU of another machine
        return torch.device("cuda"), "bfloat16"
    best = ("cuda" if torch.cuda.is_available() else
            "mps" if torch.backends.mps.is_available() else "cpu")
    with blame(f"--device {s.device}: torch {torch.__version__} cannot use it:", Exception):
        device = torch.device(best if s.device == "auto" else s.device)
        torch.ones(1, device=device) + 1  # fails on a GPU that this torch has no kernels for
        if device.index:
            torch.cuda.set_device(device)  # the default GPU for calls that name none
    if s.device == "auto" and best == "cpu" and shutil.which("nvidia-smi"):
        raise BadInput("--device auto: torch cannot use this machine's GPU: install a newer driver"
                       " or a torch for an older CUDA (pytorch.org), or use --device cpu")
    # Older GPUs emulate bfloat16, which is slow.
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return device, "bfloat16"
    return device, "float32"


def plan_memory(s, to_train=True):
    """Settings -> the same with all that the device decides. BadInput: a clash, or no memory."""
    check_settings(s)  # cheap checks first: flags, the device, the model's config
    s = settings_of_device(s)
    print0(f"loading   {s.model} in {s.dtype} on {s.device}")
    if to_train and s.device.startswith("cuda"):  # an evaluation has no step
        fit_gpu(s)
    elif s.dry_run is not None:
        print0("--dry-run: only a GPU's memory is counted; --dry-run 24 asks for one of 24 GB")
    return s


def settings_of_device(s):
    """Settings -> the same with what the device and the model's config decide."""
    device, fast_dtype = choose_device(s)
    dtype = fast_dtype if s.dtype == "auto" else s.dtype
    with blame(f"--model {s.model}:"):
        positions = length_limit(sample.checked_config(s.model))
    s = replace(s, device=str(device), dtype=dtype,
                # Half of the positions are for the question.
                max_new_tokens=s.max_new_tokens or int(min(512, positions / 2)),
                # The last digit of a sum depends on the number of threads.
                threads=s.threads or torch.get_num_threads())
    tokens = min(2 * (PROMPT + s.group_size * s.answer_tokens), 16384)  # two groups
    if device.type == "cpu":  # a CPU is fastest with what fits its cache
        tokens = 2048 if dtype == "bfloat16" else 1024
    s.micro_batch_tokens = s.micro_batch_tokens or tokens
    # Offload moves whole masters out of a GPU's memory; float32 weights are their own masters.
    if device.type != "cuda" or s.has_shards or dtype == "float32" and not s.lora_rank:
        s.offload = False
    return s


def fit_gpu(s):
    """Decide on checkpointing and offload by what a step needs, in GB. BadInput: it cannot fit."""
    with blame(f"--model {s.model}:"), torch.device("meta"):  # without storage
        model = AutoModelForCausalLM.from_config(sample.checked_config(s.model), dtype=s.dtype)
    if s.dry_run:  # the GPU of another machine, where CUDA itself takes about a GB
        free = (s.dry_run - 1) * 2**30
    else:
        free, _ = torch.cuda.mem_get_info()
    room = 0.9 * free / 1e9 - REST  # a tenth is for the allocator's fragments
    n = model.num_parameters() / 1e9
    size = model.dtype.itemsize
    part = n / WORLD_SIZE if s.has_shards else n
    weights = size * (n + part * (s.kl_coef > 0))  # of policy and reference
    # Gradients, masters and two moments are float32. LoRA's factors are few, but it needs the first
    # weights, which a reference has.
    training = 16 * part
    if s.lora_rank:
        training = 0 if s.kl_coef else weights
    # Each row of a matrix keeps 1.6 numbers of a token; most layers can keep their input alone.
    kept = 1.6 * n / model.config.get_text_config().hidden_size * s.micro_batch_tokens * size
    if s.offload is None:
        s.offload = weights + training + kept / 10 > room
    if s.offload:
        training /= 4  # the gradients stay
    if s.gradient_checkpointing is None:
        s.gradient_checkpointing = weights + training + kept > room
    if s.gradient_checkpointing:
        kept /= 10
    need = weights + training + kept
    print0(f"memory    a step needs some {need + REST:.3g} GB: policy and reference {weights:.3g}, "
           f"training {training:.3g}, backward pass {kept:.3g}, the rest {REST}"
           f"{', with --offload' * s.offload}"
           f"{', with --gradient-checkpointing' * s.gradient_checkpointing}")
    if need > room:
        raise BadInput(f"--model {s.model}: a step needs some {need + REST:.3g} GB, and a tenth "
                       f"more should be free; {ADVICE}")


# --------------------------------------------------------------------------------------------------
# Loading: model, tokenizer, problems, reward. Nearly all bad input is found before a folder is
# made.

def load(s, to_train=True):
    """Settings that plan_memory has completed -> the Parts of a run, or of an evaluation alone."""
    torch.set_num_threads(s.threads)
    reward_of = reward.load_rewards(s.reward, s.reward_weights, s.step_reward)
    ref_model = optimizer = reward_model = None
    sampler = sample_groups
    if s.reply:
        reply = reward.load_function("--reply", s.reply)
        sampler = partial(sample.sample_conversations, max_turns=s.max_turns,
                          reply=partial(reward.text_or_none, f"--reply {s.reply}", reply))
    policy_model, tokenizer = load_policy(s)
    problems, eval_problems = load_data(s, tokenizer, to_train)
    tell_differences("--model", s.model, s)
    if s.reward_model:  # after the policy: from then on transformers prints nothing
        reward_model, reward_of = load_reward_model(s, problems)
    twin = twin_of(policy_model, s)
    policy_model = shard(policy_model, s)
    if to_train:
        if s.kl_coef:  # the initial policy, frozen
            # A sharded model cannot be copied, and host memory should hold one model at a time.
            initial = load_policy(s)[0] if s.has_shards else copy.deepcopy(policy_model)
            ref_model = shard(initial.requires_grad_(False), s)
        optimizer = make_optimizer(policy_model, s, ref_model)
    return Parts(policy_model, ref_model, tokenizer, optimizer, problems, eval_problems, sampler,
                 reward_of, reward_model, twin)


def load_reward_model(s, problems):
    """-> the RewardModel of --reward-model and its reward_of."""
    with blame(f"--reward-model {s.reward_model}: cannot be loaded:", Exception):
        sample.checked_config(s.reward_model)
        model, report = reward.open_reward_model(s.reward_model, s.reward_model_lr, s.device)
        sample.check_loaded(report)
    if s.renew_reference:  # else it is never trained
        with_moments(model.optimizer)
        if not any(truths_of(problems)):
            print0("--renew-reference: no true answer is known, so --reward-model is not trained: "
                   "the rule orders its pairs")
    chat_of = partial(chat_prompt, model.tokenizer, system_prompt=s.system_prompt)
    chat_of = blame(f"--reward-model {s.reward_model}:")(chat_of)
    return model, partial(reward.model_rewards, model, chat_of)


def load_policy(s):
    """The policy and its tokenizer; a model that will be sharded is in host memory."""
    device = "cpu" if s.has_shards else s.device
    with blame(f"--model {s.model}:"):
        model, tokenizer = sample.open_policy(s.model, device, s.dtype, s.fast and not s.plain,
                                              s.template_args)
    if s.gradient_checkpointing:
        checkpoint_layers(model)
    return model, tokenizer


def tell_differences(flag, folder, s):
    """Of a run's policy: tell what is asked otherwise than in its run."""
    if source := config_of(folder):
        with blame(f"{flag} {folder}: {source}:"):
            trained = json.loads(Path(source).read_bytes())
        for name in "system_prompt template_args max_new_tokens reply max_turns".split():
            if trained.get(name, FIELDS[name]) != getattr(s, name):
                print0(f"{flag} {folder}: asked with {flag_of(name)} {getattr(s, name)!r}, its run "
                       f"had {trained.get(name)!r}")


def load_data(s, tokenizer, to_train):
    """Problems to train on and held-out ones -> two lists of dicts."""
    held_out = s.eval_data or ("gsm8k:test" if s.data == "gsm8k" else "")
    problems = []
    if to_train or not held_out:
        problems = checked_problems("--data", s.data, tokenizer, s)
    if held_out:
        eval_problems = checked_problems("--eval-data", held_out, tokenizer, s)
    else:
        problems, eval_problems = reward.hold_out(problems)
    # Each once, for equal ones would be answered alike
    eval_problems = reward.distinct(eval_problems, s.eval_limit or None)
    if not eval_problems:
        raise BadInput(f"--eval-data {s.eval_data or s.data}: no problem is left to hold out")
    if to_train and len(problems) < s.prompts_per_step:
        raise BadInput(f"--prompts-per-step {s.prompts_per_step}: --data {s.data} has only "
                       f"{len(problems)} to train on, beside those that are held out (--eval-data "
                       "names others, or the same file)")
    return problems, eval_problems


def checked_problems(flag, source, tokenizer, s):
    """The problems of a file, a list of dicts. BadInput: one is too long for the model."""
    # The built-in rewards need a true answer to compare with.
    need_answer = not s.reward_model and set(s.reward or []) <= {"rule", "think"}
    with blame(f"{flag}:"):
        problems = reward.load_problems(source, s.question_field, s.answer_field, need_answer)
    check_prompts(f"{flag} {source}", problems, tokenizer, s)
    return problems


def check_prompts(source, problems, tokenizer, s):
    """Check every prompt now, not in the step that happens to draw it; tell what is odd in them.

    BadInput: one is too long for the model.
    """
    config = sample.checked_config(s.model)
    limit = length_limit(config)
    T = s.answer_tokens
    if s.around_best:  # behind its stem, half an answer, a branch is drawn in full
        T += T // 2
    unknown = 0  # words that the tokenizer does not know
    marked = []  # one special token of each problem that holds some
    for n, problem in enumerate(with_progress(problems, desc="prompts"), start=1):
        with blame(f"{source}, problem {n}:"):
            ids = sample.ids_of(tokenizer, chat_prompt(tokenizer, problem, s.system_prompt))
            if max(ids) >= config.get_text_config().vocab_size:
                raise ValueError(f"a word has the id {max(ids)}, which the model lacks: its "
                                 "tokenizer has more words")
            if len(ids) + T > limit:
                raise ValueError(f"a prompt of {len(ids)} tokens and {T} of an answer are more "
                                 f"than the model's {limit} positions: lower --max-new-tokens or "
                                 "--max-turns, or take out such problems")
        unknown += ids.count(tokenizer.unk_token_id)
        marked += sample.marks_in(tokenizer, problem)[:1]
    if unknown:
        print0(f"{source}: {unknown} words of the prompts are unknown to the tokenizer of "
               f"{s.model}, and are all one word to the policy; choose a --model that knows them")
    if marked:
        print0(f"{source}: {len(marked)} problems hold {marked[0]} or the like, which only the "
               "chat template may write, and a space breaks it up: give the bare question, or "
               "messages")


# --------------------------------------------------------------------------------------------------
# The program: parse, load, open the folder, train, save, report

def main(words):
    """The words of a command line -> exit status: 0 done; 2 bad input, one line on standard error;
    128 + signal if stopped."""
    run = Run()
    run.command = shlex.join(["train.py", *map(str, words)])
    with in_one_line("train.py", run):
        settings = parse(words)
        if settings.dry_run is not None:
            plan_memory(settings)
            return 0
        join_ranks(settings)
        settings = on_rank_0(plan_memory, settings)  # ranks must not differ in it
        parts = load(settings)
        if settings.plain:
            plain_grpo(parts, settings)
            return 0
        status = train(parts, settings, run)
        leave_ranks(status)
        return status
    return 2  # in_one_line has told the error


@contextmanager
def in_one_line(program, run):
    """Around a main: what line_of knows ends in its line, all else with its traceback.

    A rank of several ends at once, without waiting for others.
    """
    try:
        yield
    except Exception as error:
        fault = line_of(error)
        if run.resume_command:
            advice = f"continue with: {run.resume_command}"
            fault = fault and f"{fault}; {advice}"
            if re.search("logprob.py|in write_answers|loss.backward", traceback.format_exc()):
                advice += " (--no-fast takes no fast paths)"
            error.add_note(advice)
        if WORLD_SIZE > 1:
            fault = f"rank {RANK}: {fault or traceback.format_exc()}"
        if not fault:
            raise
        print(f"{program}: {sample.printable(fault)}", file=sys.stderr)
        if WORLD_SIZE > 1:
            os._exit(2)  # sys.exit() would wait for collectives


def line_of(error):
    """The line for an error that its user can mend, or that no program can; "" for others."""
    text = str(error)
    if "gloo/transport" in text:  # the other rank tells its own fault, or was killed
        return "lost its connection to another rank"
    if isinstance(error, BadInput):
        return text
    if reward.out_of_memory(error):
        return f"out of memory; {ADVICE}"
    if re.search("No space left|quota exceeded|File too large", text):
        return f"the disk is full, or a file may not grow: {one_line(error)}"
    return ""


def train(parts, s, run):
    """A run from its folder to its final/ -> exit status."""
    run.folder = on_rank_0(run.claim_folder, s)
    settings = {name: getattr(s, name) for name in FIELDS if name not in THIS_CALL}
    today = run.origin = origin_of(parts, settings)
    if s.resume:
        load_checkpoint(run, parts, s)  # with the run's own origin
        if run.step > s.steps:
            print0(f"already at step {run.step}: nothing to do")
            return 0
        run.read_metrics(on_rank_0(cut_logs, run))
        keep_best(run, parts, s)
    else:
        save_checkpoint(run, parts, s)
    changed = [name for name in today if today[name] != run.origin.get(name)]
    if changed:
        print0(f"not as when the run began: {', '.join(changed)}")
    if run.writes:  # this comes last: where there are settings, there is a checkpoint
        with replacing(run.folder / "config.json") as new:
            new.write_text(json.dumps(settings, indent=2))
    print_start(run, parts, s)

    try:
        # From here on a signal ends the run with whole steps; until here there was none to save.
        with listening_to_signals():
            train_grpo(parts, s, run)
    except Exception:
        # One before the first update of a step, as in a reward, finds a whole step and costs none.
        # With other ranks, which may not come here, it costs those since the last checkpoint.
        if parts.is_whole and WORLD_SIZE == 1 and run.folder.exists():
            save_checkpoint(run, parts, s)
        raise
    if signum := stopped():
        RECEIVED.clear()
        save_checkpoint(run, parts, s)
        print0(f"\nstopped after step {run.step}; continue with: {run.resume_command}")
        return 128 + signum
    save_folder(parts.policy_model, parts.tokenizer, run, "final")
    if s.lora_rank and run.writes:
        save_adapter(run, parts.optimizer, s)
    if s.renew_reference and parts.reward_model:  # it has been trained further
        save_folder(parts.reward_model.model, parts.reward_model.tokenizer, run, "reward_model")
    on_rank_0(print_story, run)
    return 0


def print_start(run, parts, s):
    weights = parts.policy_model.num_parameters()
    trained = sum(p.numel() for p in trained_by(parts.optimizer))
    print0(f"policy    {weights:,} parameters, {trained:,} are trained; processes: {WORLD_SIZE}; "
           f"settings of {s.config or 'the command line'}\n"
           f"data      {len(parts.problems)} problems, {len(parts.eval_problems)} held out\n"
           f"run       {run.folder}, from step {run.step} to {s.steps}; each step samples "
           f"{s.group_size} answers to each of {s.prompts_per_step} problems")


def origin_of(parts, settings):
    """What a run begins with: {flag: value}, a number for the weights and one for the problems."""
    origin = {flag_of(name): value for name, value in settings.items() if name != "steps"}
    bits = 0
    for weight in parts.policy_model.parameters():
        numbers = whole_of(weight.detach()).flatten().view(torch.int16)
        bits += int(numbers.sum())
    origin["the weights of --model"] = bits  # the reference begins with them, too
    origin["the problems of --data"] = number_of(parts.problems)
    return origin


def survive_closing(stream):
    """Let a run go on without the terminal or reader of this stream: then it goes nowhere."""
    def write_now(text):
        if not stream.isatty():  # a bar begins each time on a line of its own
            text = text.replace("\r", "\n").replace("\x1b[A", "")
        try:
            write(text)
            stream.flush()
        except (OSError, RuntimeError):  # RuntimeError: a signal's line while another one waits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    write = stream.write
    stream.write = write_now
    stream.reconfigure(errors="replace")  # a terminal may lack some signs


def print0(line, file=None):
    """Rank 0 prints the line, above the progress bars."""
    if RANK == 0:
        tqdm.write(sample.printable(line), file=file)


def command(program, *flags):
    """The command to type into a shell, in any folder."""
    # sys.executable: outside its virtual environment a bare `python` would not find torch.
    start = [sys.executable]
    if WORLD_SIZE > 1 and program == "train.py":  # on several machines --nnodes is lacking
        start = ["torchrun", f"--nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', WORLD_SIZE)}"]
    return shlex.join([*start, str(HERE / program), *flags])


def as_command(main):
    """Call this main of a script: warnings stand above the bars, and nobody has to read them."""
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):  # a notebook's stream has none
            survive_closing(stream)
    warnings.showwarning = lambda message, *_: print0(message, sys.stderr)
    before = threading.enumerate()
    status = main(sys.argv[1:])
    if any(thread not in before and not thread.daemon for thread in threading.enumerate()):
        end = threading.Timer(5, os._exit, [status])  # a judge's thread may never end
        end.daemon = True
        end.start()
    sys.exit(status)


if __name__ == "__main__":
    as_command(main)
