"""[C] The group-relative advantage: siblings instead of a critic.

    A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)

DeepSeekMath, arXiv 2402.03300, section 4.1.2. PPO trains a second network to say what reward a
prompt usually earns. GRPO answers each prompt G times and takes the mean of those G rewards
instead: an answer is good if it beats its siblings.

Departures from the theory's code map:
- std divides by G, as the formula does. The map calls torch.std, which divides by G-1
  (`unbiased=True`).
- Equal rewards give exactly 0. The map's `std < 1e-8` misses that in float32: seven rewards of 0.7
  have a computed std of 6e-8, and answers that do not differ are handed advantages of 0.86.

    python advantage.py 1.5 1.0 0 0        # one group: its mean, std and advantages
"""

import math
import sys

import torch


def group_advantages(rewards, group_size=8, eps=1e-8, scale_by_std=True, unbiased=False, clip=None):
    """Rewards (N,) in prompt-major order, row i of prompt i // group_size -> advantages (N,).

    `scale_by_std=False` only centres: Dr. GRPO (arXiv 2503.20783). `clip=5` keeps every advantage
    within -5 and 5. The result keeps dtype and device (integers become float32); the sums are taken
    in float32 at least. ValueError: a group of one (it has no sibling), N that is not a multiple of
    the group size, a reward that is NaN or infinite, a clip that is not above 0.
    """
    check(rewards, group_size, clip)
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    precise = torch.promote_types(rewards.dtype, torch.float32)
    r = rewards.to(precise).view(-1, group_size)                             # (B, G)
    advantages = r - r.mean(dim=1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (r.std(dim=1, keepdim=True, correction=int(unbiased)) + eps)
    advantages = advantages.masked_fill(is_flat(rewards, group_size)[:, None], 0.0)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.flatten().to(rewards.dtype)


def is_flat(rewards, group_size):
    """Rewards (N,) -> (B,) bool: all rewards of the group are equal, and so it teaches nothing.

    They are compared: the std of equal rewards is not always 0, see above.
    """
    groups = rewards.view(-1, group_size)                                    # (B, G)
    return (groups == groups[:, :1]).all(dim=1)


def check(rewards, group_size, clip=None):
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a group needs at least two answers to compare")
    if rewards.ndim != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)}: not whole groups of {group_size}")
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"reward of row {row} is {float(rewards[row])}, not a finite number")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: not above 0")


# --------------------------------------------------------------------------------------------------
# Variants: other baselines, and advantages that differ from token to token. Plain GRPO is above and
# needs none of them. `advantages_for` is where one is chosen.

ADVANTAGES = ("group", "leave-one-out", "gtpo", "grpo-s", "shape")


def advantages_for(kind, rewards, group_size=8, entropies=None, mask=None, right=None, *,
                   step_rewards=None, candidates=None, scale_by_std=True, clip=None):
    """The advantages of this kind: (N,) for "group" and "leave-one-out", otherwise (N, S-1).

    `entropies` and `mask` (N, S-1) are needed by "gtpo" and "grpo-s", and `right` (N,) is read by
    them alone; "shape" needs `mask` and `candidates`, the pair (candidate_rewards, candidate_spans)
    of `shape_advantages`. With `step_rewards` and `mask`, kind "group" is process supervision: the
    rewards of steps take the place of the rewards of answers. `clip` bounds every kind. ValueError:
    a kind that does not exist, an input that is missing or that this kind cannot use.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage {kind!r}: not one of {', '.join(ADVANTAGES)}")
    check(rewards, group_size, clip)
    if step_rewards is not None and kind != "group":
        raise ValueError(f"advantage {kind!r}: only 'group' can use rewards of steps")
    if not scale_by_std and (step_rewards is not None or kind in ("gtpo", "grpo-s", "shape")):
        raise ValueError("scale_by_std off: rewards of steps, gtpo, grpo-s and shape"
                         " divide by the std")
    if kind == "shape" and (mask is None or candidates is None):
        raise ValueError("advantage 'shape': the mask and the candidates are needed")

    if step_rewards is not None:
        advantages = process_advantages(step_rewards, mask, group_size)
    elif kind == "group":
        advantages = group_advantages(rewards, group_size, scale_by_std=scale_by_std)
    elif kind == "leave-one-out":
        advantages = leave_one_out_advantages(rewards, group_size)
    elif kind == "shape":
        advantages = shape_advantages(*candidates, mask, group_size)
    elif kind == "gtpo":
        advantages = entropy_advantages(rewards, entropies, mask, group_size, "token", right=right)
    else:
        advantages = entropy_advantages(rewards, entropies, mask, group_size, "sequence",
                                        right=right)
    return advantages if clip is None else advantages.clamp(-clip, clip)


def leave_one_out_advantages(rewards, group_size=8):
    """A_i = r_i - mean of the other rewards of its group: (N,) -> (N,). RLOO, arXiv 2402.14740.

    An answer is not part of its own baseline, so the gradient is unbiased. It is the centred reward
    times G / (G - 1): r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1).
    """
    centred = group_advantages(rewards, group_size, scale_by_std=False)
    return centred * (group_size / (group_size - 1))


def process_advantages(step_rewards, mask, group_size=8):
    """Process supervision, DeepSeekMath section 4.1.3: rewards of steps -> advantages (N, S-1).

    `step_rewards`: N lists of (end, reward), where `end` is the index of the step's last token
    among the row's response tokens, from 0. The step rewards of all answers of a group are pooled
    and normalised together, so the answers may have different numbers of steps. A_t is the sum of
    the normalised rewards of the steps that end at or after t: a token answers for its own step and
    for all that follow. It is 0 after the last step, and in a group with a single step.
    """
    pieces = [[(0, end, reward) for end, reward in steps] for steps in step_rewards]
    return pooled_advantages(pieces, mask, group_size)


def shape_advantages(candidate_rewards, candidate_spans, mask, group_size=8):
    """ShapE-GRPO, arXiv 2603.29871: every candidate in an answer earns its own share -> (N, S-1).

    `candidate_rewards`: N lists of rewards, one per candidate of the answer; `candidate_spans`: N
    lists of (first, last), the indices of a candidate's first and last token among the row's
    response tokens, from 0. The Shapley shares of all candidates of a group are pooled and
    normalised. A token outside every span, and so an answer without candidates, has advantage 0.
    Unconfirmed: that the shares are pooled like the rewards of steps was not read in the paper.
    """
    counts = [len(rewards) for rewards in candidate_rewards]
    if counts != [len(spans) for spans in candidate_spans]:
        raise ValueError("candidate rewards and spans: not one of each for every candidate")
    pieces = []
    for rewards, spans in zip(candidate_rewards, candidate_spans):
        shares = shapley_shares(torch.tensor(rewards, dtype=torch.float64)) if rewards else []
        pieces.append([(first, last, float(phi)) for (first, last), phi in zip(spans, shares)])
    return pooled_advantages(pieces, mask, group_size)


def shapley_shares(rewards):
    """The Shapley values (K,) of K candidates whose set is worth its best one: max(rewards).

    In ascending order, with r_0 = 0: phi_j = sum over k <= j of (r_k - r_(k-1)) / (K - k + 1). What
    the k-th adds to the (k-1)-th is shared by all that are at least as good. The shares sum to the
    best reward. ValueError: no candidate, or a reward that is not a finite number.
    """
    if rewards.ndim != 1 or len(rewards) == 0 or not rewards.isfinite().all():
        raise ValueError(f"candidate rewards {rewards.tolist()}: not one or more finite numbers")
    ordered, order = (rewards if rewards.is_floating_point() else rewards.float()).sort()
    added = ordered.diff(prepend=ordered.new_zeros(1))
    sharers = torch.arange(len(rewards), 0, -1, device=rewards.device)       # K, K-1, .., 1
    return torch.zeros_like(ordered).scatter(0, order, (added / sharers).cumsum(0))


def entropy_advantages(rewards, entropies, mask, group_size=8, level="token", a1=1.0, a2=0.1,
                       right=None, normalize=True):
    """GTPO ("token") and GRPO-S ("sequence"), arXiv 2508.04349: rewards (N,) -> (N, S-1).

    Where the policy hesitated, a right answer is praised more and a wrong one is blamed less. With
    H the entropy of a token under the old policy, at the t-th token of the response:
        right answers   a1 r + a2 d_t H / sum of H          d_t right answers have a t-th token
        wrong answers   -(a1 + a2 h_t (1/H) / sum of 1/H)   h_t wrong answers have one
    where the sums run over those d_t or h_t answers, then one z-score per group. GRPO-S does the
    same with the mean entropy of each answer, and gives all tokens of an answer one value.

    `entropies` (N, S-1) in nats, read where `mask` is true; below 1e-6 it counts as 1e-6. `right`
    (N,) bool: which answers are right, by default those with a positive reward. `normalize=False`
    gives the shaped rewards before the z-score. A group that is all right or all wrong is ranked by
    entropy alone; the remedy is to drop it (dynamic sampling). Unconfirmed: which set the paper
    normalises over; here all tokens of the group (GTPO) or all answers with a token (GRPO-S).
    """
    check(rewards, group_size)
    check_entropies(rewards, entropies, mask, level, right)
    device = mask.device
    mask = mask.cpu()                                                        # (N, S-1)
    entropies = entropies.detach().cpu().double()
    rewards = rewards.cpu().double()
    right = rewards > 0 if right is None else right.cpu()

    # Left-aligned, so that the t-th tokens of all answers stand in one column whatever the prompt.
    lengths = mask.sum(dim=1, keepdim=True)                                  # (N, 1)
    taken = torch.arange(mask.shape[1]) < lengths                            # (N, S-1)
    H = torch.zeros_like(entropies)
    H[taken] = entropies[mask]
    if level == "sequence":
        H = H.sum(dim=1, keepdim=True) / lengths.clamp(min=1)                # (N, 1)
        taken = lengths > 0
    H = H.clamp(min=1e-6)                                                    # 1/H stays finite

    shaped = torch.zeros_like(H)
    for rows in torch.arange(len(rewards)).split(group_size):
        r, is_right = rewards[rows, None], right[rows, None]                 # (G, 1)
        praise = a1 * r + a2 * over_mean(H[rows], is_right & taken[rows])
        blame = -(a1 + a2 * over_mean(1 / H[rows], ~is_right & taken[rows]))
        group = torch.where(is_right, praise, blame)                         # (G, S-1) or (G, 1)
        if normalize:
            group[taken[rows]] = z_scores(group[taken[rows]])
        shaped[rows] = group

    advantages = torch.zeros_like(entropies)
    advantages[mask] = shaped[taken] if level == "token" else shaped.expand_as(mask)[mask]
    return advantages.float().to(device)


def over_mean(values, members):
    """Values (G, T) over the mean of the members in their column: d_t H / sum of H."""
    totals = (values * members).sum(dim=0) / members.sum(dim=0).clamp(min=1)
    return values / totals.where(totals > 0, 1)                              # no member: not used


def pooled_advantages(pieces, mask, group_size):
    """N lists of (first, last, reward): z-scores over the group, added to tokens first..last."""
    check_pieces(pieces, mask, group_size)
    position = mask.cpu().cumsum(dim=1) - 1               # (N, S-1), index among response tokens
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for start in range(0, len(pieces), group_size):
        group = [(row, piece) for row in range(start, start + group_size) for piece in pieces[row]]
        rewards = [reward for _, (_, _, reward) in group]
        scores = z_scores(torch.tensor(rewards, dtype=torch.float64))
        for (row, (first, last, _)), score in zip(group, scores):
            advantages[row, (first <= position[row]) & (position[row] <= last)] += score
    return advantages.where(mask.cpu(), 0).float().to(mask.device)


def z_scores(values):
    """(M,) float64 -> (M,): what `group_advantages` does to one group; a single value gives 0.

    Float64 on the CPU, once per rollout: values that are equal but for rounding must not be told
    apart, and 1e-16 disappears beside eps where the 1e-7 of float32 would not.
    """
    return group_advantages(values, len(values)) if len(values) > 1 else torch.zeros_like(values)


def check_entropies(rewards, entropies, mask, level, right):
    if level not in ("token", "sequence"):
        raise ValueError(f"level {level!r}: not one of token, sequence")
    if entropies is None or mask is None:
        raise ValueError("advantages from entropies: entropies and mask are needed")
    if mask.shape != entropies.shape or mask.ndim != 2 or len(mask) != len(rewards):
        raise ValueError(f"entropies {tuple(entropies.shape)} and mask {tuple(mask.shape)}: "
                         f"not both of {len(rewards)} rows")
    if not entropies[mask].isfinite().all():
        raise ValueError("entropies: not a finite number for every response token")
    if right is not None and (right.dtype != torch.bool or right.shape != rewards.shape):
        raise ValueError(f"right: {right.dtype} {tuple(right.shape)}, not one bool per answer")


def check_pieces(pieces, mask, group_size):
    if mask is None:
        raise ValueError("rewards of parts of an answer: the mask is needed")
    if group_size < 2 or len(pieces) == 0 or len(pieces) != len(mask) or len(pieces) % group_size:
        raise ValueError(f"rewards of parts for {len(pieces)} answers, mask {tuple(mask.shape)}: "
                         f"not whole groups of {group_size}, two answers or more")
    lengths = mask.sum(dim=1).tolist()
    for row, (length, parts) in enumerate(zip(lengths, pieces)):
        for first, last, reward in parts:
            if not 0 <= first <= last < length:
                raise ValueError(f"row {row}: a part from token {first} to {last}, of {length}")
            if not math.isfinite(reward):
                raise ValueError(f"row {row}: a part has reward {reward}, not a finite number")


# --------------------------------------------------------------------------------------------------
# The demonstration: the group of the command line, then each variant on a few small numbers.

def main():
    try:
        rewards = torch.tensor([float(word) for word in sys.argv[1:] or (1.5, 1.0, 0, 0)])
        advantages = group_advantages(rewards, group_size=len(rewards))
    except ValueError as error:
        print(f"advantage.py: {error}", file=sys.stderr)
        sys.exit(2)

    print(f"mean {rewards.mean():.6g}   std {rewards.std(correction=0):.6g}")
    show("reward", rewards)
    show("advantage", advantages)

    print("\nthe variants, on the same group")
    show("centred only (Dr. GRPO)", group_advantages(rewards, len(rewards), scale_by_std=False))
    show("clipped to -1 and 1", group_advantages(rewards, len(rewards), clip=1.0))
    show("leave-one-out", leave_one_out_advantages(rewards, len(rewards)))

    print("\ntwo answers of two tokens, token by token")
    mask = torch.ones(2, 2, dtype=torch.bool)
    steps = [[(0, 1.0), (1, 0.0)], [(1, 1.0)]]
    show("process: steps 1 0 | 1", process_advantages(steps, mask, 2))
    spans = [[(0, 0), (1, 1)], [(0, 1)]]
    show("ShapE: candidates 1 0 | 1", shape_advantages([[1.0, 0.0], [1.0]], spans, mask, 2))
    right = torch.tensor([1.0, 1.0])
    wrong = torch.tensor([0.0, 0.0])
    for level, first, second in (("token", [3, 1], [1, 3]), ("sequence", [3, 1], [1, 1])):
        entropies = torch.tensor([first, second]).float()
        praise = entropy_advantages(right, entropies, mask, 2, level, normalize=False)
        blame = entropy_advantages(wrong, entropies, mask, 2, level, normalize=False)
        name = "GTPO" if level == "token" else "GRPO-S"
        numbers = f"H {first[0]} {first[1]} | {second[0]} {second[1]}"
        show(f"{name}: right, {numbers}", praise)
        show(f"{name}: wrong, {numbers}", blame)

    print("\nthree candidates in one answer: 0.2 0.8 0.5")
    show("Shapley shares", shapley_shares(torch.tensor([0.2, 0.8, 0.5])))


def show(name, values):
    print(f"{name:28}" + " ".join(f"{value:+9.5f}" for value in values.flatten().tolist()))


if __name__ == "__main__":
    main()
