"""[C] The group-relative advantage: siblings instead of a critic.

    A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-8)

DeepSeekMath, arXiv 2402.03300, section 4.1.2. PPO trains a second network, the critic, to predict
the reward a prompt can be expected to earn. GRPO samples G answers to each prompt and uses the
mean of their rewards instead: an answer is good if it beats its siblings. 1e-8, far below any
other std, keeps a std of 0 from dividing by 0.

Departures from the theory's code map:
- std divides by G, as the formula does. The map calls torch.std, which divides by G-1
  (`unbiased=True`).
- Equal rewards give exactly 0. The map's `std < 1e-8` misses that in float32: seven rewards of 0.7
  have a computed std of 6e-8, and each of these answers gets an advantage of 0.86.

    python advantage.py 1.5 1.0 0 0        # one group: its mean, std and advantages
"""

import signal
import sys

import torch


def plain_advantages(rewards, group_size, eps=1e-8):
    """The formula, word for word: (N,) -> (N,); row i is an answer to prompt i // group_size."""
    r = rewards.view(-1, group_size)                                         # (B, G)
    mean = r.mean(dim=1, keepdim=True)                                       # (B, 1)
    std = r.std(dim=1, keepdim=True, correction=0)                           # (B, 1)
    return ((r - mean) / (std + eps)).flatten()                              # (N,)


def group_advantages(rewards, group_size=8, eps=1e-8, scale_by_std=True, unbiased=False, clip=None):
    """The same with options; 0 in a flat group, whose rewards are all equal: (N,) -> (N,).

    `scale_by_std=False` only centres: Dr. GRPO (arXiv 2503.20783). `unbiased=True` divides by G-1.
    `clip=5` clips every advantage to [-5, 5]. Integers become float32. ValueError: see `check`.
    """
    check(rewards, group_size)
    precise = torch.promote_types(rewards.dtype, torch.float32)
    r = rewards.to(precise).view(-1, group_size)                             # (B, G)
    A = r - r.mean(dim=1, keepdim=True)
    if scale_by_std:
        A = A / (r.std(dim=1, keepdim=True, correction=int(unbiased)) + eps)
    A = A.masked_fill(is_flat(rewards, group_size)[:, None], 0.0)
    if clip is not None:
        A = A.clamp(-clip, clip)
    return A.flatten().to(rewards.dtype if rewards.is_floating_point() else precise)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows are variants: other baselines, and
# advantages that differ from token to token. `advantages_for` chooses one.

ADVANTAGES = ("group", "leave-one-out", "gdpo", "gtpo", "grpo-s", "shape")
SMALLEST_ENTROPY = 1e-6  # nats; smaller ones count as this much, so that 1/H stays finite


def is_flat(rewards, group_size):
    """Rewards (N,) -> (B,) bool: is a group flat, all its rewards equal? It teaches nothing."""
    groups = rewards.view(-1, group_size)                                    # (B, G)
    return (groups == groups[:, :1]).all(dim=1)


def check(rewards, group_size):
    """ValueError: a group of one, N that is no multiple of the group size, NaN."""
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a group needs at least two rewards to compare")
    if rewards.ndim != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)}: not whole groups of {group_size}")
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"reward of row {row} is {float(rewards[row])}, not a finite number")


def advantages_for(kind, rewards, group_size=8, entropies=None, mask=None, right=None, *,
                   step_rewards=None, candidates=None, reward_parts=None, scale_by_std=True,
                   clip=None):
    """The advantages of this kind: (N,) for "group", "leave-one-out", "gdpo"; otherwise (N, S-1).

    "group" with `step_rewards` and `mask` is process supervision: steps are rewarded instead of
    answers. "shape" needs `mask` and `candidates`, the pair (candidate_rewards, candidate_spans).
    "gdpo" reads only `reward_parts`, its (parts, weights, gathered).
    "gtpo" and "grpo-s" need `entropies` and `mask` (N, S-1), and read `right` (N,). `clip` bounds
    every kind, `scale_by_std` is for "group". ValueError: an unknown kind, and see `check`.
    """
    check(rewards, group_size)
    if step_rewards is not None:
        advantages = process_advantages(step_rewards, mask, group_size)
    elif kind == "group":
        advantages = group_advantages(rewards, group_size, scale_by_std=scale_by_std)
    elif kind == "leave-one-out":
        advantages = leave_one_out_advantages(rewards, group_size)
    elif kind == "gdpo":
        parts, weights, gathered = reward_parts
        advantages = gdpo_advantages(parts, weights, group_size, gathered)
    elif kind == "shape":
        advantages = shape_advantages(*candidates, mask, group_size)
    elif kind == "gtpo":
        advantages = gtpo_advantages(rewards, entropies, mask, group_size, right)
    elif kind == "grpo-s":
        advantages = grpo_s_advantages(rewards, entropies, mask, group_size, right)
    else:
        raise ValueError(f"advantage {kind!r}: not one of {', '.join(ADVANTAGES)}")
    return advantages if clip is None else advantages.clamp(-clip, clip)


def leave_one_out_advantages(rewards, group_size=8):
    """A_i = r_i - mean of the other rewards of its group: (N,) -> (N,). RLOO, arXiv 2402.14740.

    An answer is not part of its own baseline, so the gradient is unbiased. In terms of the mean of
    all G, r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1).
    """
    centred = group_advantages(rewards, group_size, scale_by_std=False)
    return centred * (group_size / (group_size - 1))


def gdpo_advantages(parts, weights, group_size=8, gathered=None):
    """GDPO, arXiv 2601.05242: every reward is normalised in its group on its own -> (N,).

    parts (K, N): K rewards of each answer, NaN where one does not apply; there it adds nothing, and
    its z-scores are those of the group's other answers. Their sum, by the K weights, is divided by
    the std of the batch. Of several GPUs' batch: `gathered` turns the sums of one into those of
    all. ValueError: fewer than two rewards.
    """
    if len(parts) < 2:
        raise ValueError("--advantage gdpo needs two rewards, or more")
    sums = torch.zeros(parts.shape[1], dtype=torch.float64)
    for rewards, weight in zip(parts.cpu().double(), weights):
        for rows in torch.arange(len(rewards)).split(group_size):
            rows = rows[~rewards[rows].isnan()]
            sums[rows] += weight * z_scores(rewards[rows])
    batch = gathered(sums) if gathered else sums
    # The mean of the batch needs no subtraction: it is 0, like that of each group.
    return (sums / (batch.std(correction=0) + 1e-8)).to(parts)


def pooled_advantages(parts, mask, group_size):
    """Rewards of parts, which process_advantages and shape_advantages make -> (N, S-1).

    `parts`: N lists of (first, last, reward) for an answer's tokens first to last, counted from 0.
    The rewards of all parts of a group are normalised together, so answers may have different
    numbers of parts, and each part's z-score is added to its tokens.
    """
    position = mask.cpu().cumsum(dim=1) - 1               # (N, S-1), index in the answer
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for rows in torch.arange(len(parts)).split(group_size):
        group = [(row, *part) for row in rows.tolist() for part in parts[row]]
        scores = z_scores(torch.tensor([reward for *_, reward in group], dtype=torch.float64))
        for (row, first, last, _), score in zip(group, scores):
            advantages[row] += score * ((first <= position[row]) & (position[row] <= last))
    return advantages.where(mask.cpu(), 0).float().to(mask.device)


def z_scores(values):
    """(M,) float64 -> (M,): `group_advantages` of one group; a single value gives 0."""
    # In float64, on the CPU, once per rollout. Values that differ only by rounding must count as
    # equal: a difference of 1e-16 vanishes beside eps, but float32's 1e-7 would not.
    return group_advantages(values, len(values)) if len(values) > 1 else torch.zeros_like(values)


def process_advantages(step_rewards, mask, group_size=8):
    """Process supervision, DeepSeekMath section 4.1.3: rewards of steps -> advantages (N, S-1).

    `step_rewards`: N lists of (end, reward), where `end` is the index of the step's last token in
    the answer, from 0. A_t is the sum of the normalised rewards of the steps that end at or after
    t: a token is responsible for its own step and for all later ones. A group's only step gives 0.
    """
    parts = [[(0, end, reward) for end, reward in steps] for steps in step_rewards]
    return pooled_advantages(parts, mask, group_size)


def shape_advantages(candidate_rewards, candidate_spans, mask, group_size=8):
    """ShapE-GRPO, arXiv 2603.29871: each candidate in an answer earns its own share -> (N, S-1).

    `candidate_rewards`: N lists of rewards, one per candidate of the answer; `candidate_spans`: N
    lists of (first, last), a candidate's first and last token, counted from 0 in the answer. A
    token outside every span has advantage 0. A group's shares are pooled; the paper does not say.
    """
    parts = []
    for rewards, spans in zip(candidate_rewards, candidate_spans, strict=True):
        shares = shapley_shares(torch.tensor(rewards, dtype=torch.float64)).tolist()
        parts.append([(*span, share) for span, share in zip(spans, shares, strict=True)])
    return pooled_advantages(parts, mask, group_size)


def shapley_shares(rewards):
    """The Shapley values (K,) of K candidates, if a set is worth its best reward.

    In ascending order, with r_0 = 0: phi_j = sum over k <= j of (r_k - r_(k-1)) / (K - k + 1). All
    candidates at least as good as the k-th share what it adds to the (k-1)-th.
    """
    ordered, order = (rewards if rewards.is_floating_point() else rewards.float()).sort()
    added = ordered.diff(prepend=ordered.new_zeros(1))
    sharers = torch.arange(len(rewards), 0, -1, device=rewards.device)       # K, K-1, .., 1
    return torch.zeros_like(ordered).scatter(0, order, (added / sharers).cumsum(0))


def gtpo_advantages(rewards, entropies, mask, group_size=8, right=None, **shares):
    """GTPO, arXiv 2508.04349: every token's own entropy shapes its reward, (N,) -> (N, S-1).

    `entropies` (N, S-1) in nats, read where `mask` is true. `right` (N,) bool: which answers are
    right, by default those with a positive reward. `shares`: see `shaped_rewards`. A group that is
    all right or all wrong is ranked by entropy alone: dynamic sampling would drop it.
    """
    H, taken = response_entropies(entropies, mask)
    shaped = shaped_rewards(rewards, H, taken, group_size, right, **shares)       # (N, S-1)
    on = mask.cpu()
    return torch.zeros(on.shape).masked_scatter(on, shaped[taken].float()).to(mask.device)


def grpo_s_advantages(rewards, entropies, mask, group_size=8, right=None, **shares):
    """GRPO-S, the same paper: GTPO as if an answer were one token that has its mean entropy."""
    H, taken = response_entropies(entropies, mask)
    lengths = taken.sum(dim=1, keepdim=True)                                      # (N, 1)
    mean = H.sum(dim=1, keepdim=True) / lengths.clamp(min=1)                      # (N, 1)
    shaped = shaped_rewards(rewards, mean, lengths > 0, group_size, right, **shares)
    return shaped.float().where(mask.cpu(), 0).to(mask.device)                    # (N, S-1)


def shaped_rewards(rewards, H, taken, group_size, right=None, a1=1.0, a2=0.1, normalize=True):
    """A right answer earns more where the policy hesitated, and a wrong one loses less there.

    rewards (N,); H (N, T) the entropy of the t-th token of each answer under the old policy, in
    nats; taken (N, T): whether there is such a token -> (N, T) float64.
        right answers   a1 r + a2 d_t H / sum of H            d_t right ones have a t-th token
        wrong answers   -(a1 + a2 h_t (1/H) / sum of 1/H)     h_t wrong ones have a t-th token
    The sums run over those d_t or h_t answers. a1 and a2, the weights of reward and entropy, are
    the theory's. A z-score per group follows; `normalize=False` is the reward before it. The paper
    does not say what is normalised together. Here all tokens of a group are (GTPO), or all its
    answers that have a token (GRPO-S).
    """
    right = rewards > 0 if right is None else right
    H = H.clamp(min=SMALLEST_ENTROPY).view(-1, group_size, H.shape[1])            # (B, G, T)
    taken = taken.view(H.shape)
    r = rewards.cpu().double().view(-1, group_size, 1)                            # (B, G, 1)
    right = right.cpu().view(-1, group_size, 1)
    praised = right & taken                                                       # (B, G, T)
    blamed = ~right & taken
    d = praised.sum(dim=1, keepdim=True)                                          # d_t (B, 1, T)
    h = blamed.sum(dim=1, keepdim=True)                                           # h_t (B, 1, T)
    praise = a1 * r + a2 * (d * H / (H * praised).sum(dim=1, keepdim=True))
    blame = -(a1 + a2 * (h / H / (1 / H * blamed).sum(dim=1, keepdim=True)))
    shaped = torch.where(right, praise, blame)                                    # (B, G, T)
    if normalize:
        for group, where in zip(shaped, taken):
            group[where] = z_scores(group[where])
    return shaped.flatten(0, 1)


def response_entropies(entropies, mask):
    """(N, S-1) -> H and taken, (N, S-1) each: the t-th tokens of all answers share column t."""
    on = mask.cpu()
    taken = torch.arange(on.shape[1]) < on.sum(dim=1, keepdim=True)               # (N, S-1)
    H = torch.zeros(on.shape, dtype=torch.float64)
    H[taken] = entropies.detach().cpu().double()[on]
    return H, taken


# --------------------------------------------------------------------------------------------------
# The demonstration: the group of the command line, then each variant on a few small numbers.

def main():
    rewards = torch.tensor([float(word) for word in sys.argv[1:] or (1.5, 1.0, 0, 0)])
    G = len(rewards)
    advantages = group_advantages(rewards, G)
    print(f"mean {rewards.mean():.6g}   std {rewards.std(correction=0):.6g}")
    show("reward", rewards)
    show("advantage", advantages)
    show("centred only (Dr. GRPO)", group_advantages(rewards, G, scale_by_std=False))
    show("clipped to -1 and 1", group_advantages(rewards, G, clip=1.0))
    show("leave-one-out", leave_one_out_advantages(rewards, G))
    parts = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    show("GDPO: 1 1 0 0 and 0 1 2 3", gdpo_advantages(parts, (1, 1), 4))

    print("\ntoken by token, two answers of two tokens each")
    mask = torch.ones(4, 2, dtype=torch.bool)
    steps = [[(0, 1.0), (1, 0.0)], [(1, 1.0)]]
    show("process: steps 1 0 | 1", process_advantages(steps, mask[:2], 2))
    # Two right and two wrong answers, before the z-score, which would hide the formula
    H = torch.tensor([[3.0, 1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 1.0]])
    right = torch.tensor([1.0, 1.0, 0.0, 0.0])
    for name, kind in (("GTPO", gtpo_advantages), ("GRPO-S", grpo_s_advantages)):
        shaped = kind(right, H, mask, 4, normalize=False)
        show(f"{name}: right, H 3 1 | 1 1", shaped[:2])
        show(f"{name}: wrong, H 3 1 | 1 1", shaped[2:])
    show("Shapley: rewards .2 .8 .5", shapley_shares(torch.tensor([0.2, 0.8, 0.5])))


def show(name, values):
    print(f"{name:28}" + " ".join(f"{value:+9.5f}" for value in values.flatten().tolist()))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    try:
        main()
    except ValueError as error:
        print(f"advantage.py: {error}", file=sys.stderr)
        sys.exit(2)
