"""[C] The group-relative advantage: siblings instead of a critic.

    A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-8)

DeepSeekMath, arXiv 2402.03300, section 4.1.2. PPO trains a second network, the critic, to predict
the reward a prompt can be expected to earn. GRPO samples G answers to each prompt and uses the
mean of their rewards instead: an answer is good if it beats its siblings. 1e-8, far below any
other std, keeps a std of 0 from dividing by 0.

Common mistakes that this avoids:
- Dividing by G-1: torch.std does so by default, the formula's std divides by G.
- Taking rounding for a difference. In float32 seven rewards of 0.7 have a computed std of 6e-8, and
  each of these answers would get an advantage of 0.86; `std < 1e-8` does not find them. In float64
  the mean of equal float32 rewards is exact, and they get 0.
- Taking None for 0: where siblings earned -1, an answer without a reward would be the best one.

    python advantage.py 1.5 1.0 0 0        # one group: its mean, std and advantages
"""

import sys

import torch


def plain_advantages(rewards, group_size, eps=1e-8):
    """The formula, word for word: (N,) -> (N,); row i is an answer to prompt i // group_size."""
    r = rewards.double().view(-1, group_size)                                # (B, G)
    mean = r.mean(dim=1, keepdim=True)                                       # (B, 1)
    std = r.std(dim=1, keepdim=True, correction=0)                           # (B, 1)
    A = (r - mean) / (std + eps)                                             # (B, G)
    return A.flatten().to(rewards.dtype)                                     # (N,)


def group_advantages(rewards, group_size=8, eps=1e-8, scale_by_std=True, unbiased=False):
    """The same with options: (N,) -> (N,) float32; 0 in a flat group, whose rewards are all equal.

    A reward of NaN does not apply: it has an advantage of NaN, and its siblings are compared as if
    it were not there. `scale_by_std=False` only centres: Dr. GRPO (arXiv 2503.20783).
    `unbiased=True` divides by one less than there are rewards. ValueError: see `check`.
    """
    A = centred(rewards, group_size)                                         # (B, G) float64
    std = std_of(A)                                                          # (B, 1)
    if unbiased:
        std = std * bessel(A).sqrt()
    A = A.float()
    if scale_by_std:
        A = A / (std.float() + eps)
    return A.flatten()


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows are variants: other baselines, and
# advantages that differ from token to token.

SMALLEST_ENTROPY = 1e-6  # nats; smaller ones count as this much, so that 1/H stays finite


def centred(rewards, group_size):
    """Rewards (N,) -> what each is above the mean of its group, (B, G) float64; NaN of NaN."""
    check(rewards, group_size)
    r = rewards.double().view(-1, group_size)                                # (B, G)
    A = r - r.nanmean(dim=1, keepdim=True)
    # A difference that is nothing beside the reward is rounding: 0.1 + 0.2 is not 0.3.
    is_nothing = A.abs() <= 1e-12 * r.abs()
    return A.masked_fill(is_nothing, 0.0)


def std_of(A):
    """The std of each group, (B, G) -> (B, 1), of what is `centred`."""
    return A.square().nanmean(dim=1, keepdim=True).sqrt()


def bessel(A):
    """(B, G) -> (B, 1): n / (n - 1) for the n numbers of each group that are not NaN."""
    n = A.isfinite().double().sum(dim=1, keepdim=True)
    return n / (n - 1).clamp(min=1)


def is_flat(rewards, group_size):
    """Rewards (N,) -> (B,) bool: is a group flat? Its rewards are all equal and teach nothing."""
    A = centred(rewards, group_size).nan_to_num()                            # (B, G)
    return ~A.any(dim=1)


def check(rewards, group_size):
    """ValueError: a group of one, N that is no multiple of the group size, 1e15 or more."""
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a group needs at least two rewards to compare")
    N = rewards.numel()
    if rewards.ndim != 1 or N == 0 or N % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)}: not whole groups of {group_size}")
    too_large = rewards.abs() >= 1e15
    if too_large.any():
        raise ValueError(f"rewards {rewards[too_large].tolist()} of rows "
                         f"{too_large.nonzero().flatten().tolist()}: not numbers below 1e15")


def leave_one_out_advantages(rewards, group_size=8):
    """A_i = r_i - mean of the other rewards of its group: (N,) -> (N,). RLOO, arXiv 2402.14740.

    An answer is not part of its own baseline, so the gradient is unbiased. In terms of the mean of
    all G, r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1).
    """
    A = centred(rewards, group_size)                                         # (B, G)
    return (A * bessel(A)).flatten()


def max_rl_advantages(rewards, group_size=8):
    """MaxRL, arXiv 2602.02710: A_i = (r_i - m) / m, m the mean of its group: (N,) -> (N,).

    0 where m is 0. The rarer a right answer is, the more it counts. ValueError: a negative reward.
    """
    if (rewards < 0).any():
        raise ValueError("MaxRL needs rewards that are not negative")
    A = centred(rewards, group_size).flatten()                               # (N,)
    m = rewards - A
    return A / m.where(m > 0, 1)


def batch_std_advantages(rewards, group_size=8):
    """A_i = (r_i - mean of its group) / (std of these differences in the batch + 1e-8) -> (N,).

    REINFORCE++-baseline, arXiv 2501.03262. TRL's scale_rewards="batch" (arXiv 2508.08221) takes the
    std of the rewards themselves.
    """
    return over_std(centred(rewards, group_size).flatten())


def over_std(values):
    """Values (N,), of which every group has mean 0, divided by their std: (N,)."""
    return values / (values.square().nanmean().sqrt() + 1e-8)


def gdpo_advantages(reward_parts, reward_weights=None, group_size=8):
    """GDPO, arXiv 2601.05242: each of K rewards is normalised in its group on its own -> (N,).

    A_i = s_i / std of all s in the batch, s_i = sum_k w_k z_k,i, where z_k,i is the k-th reward of
    answer i minus its group's mean, divided by its group's std. reward_parts {name: (N,)}: the K
    rewards. A NaN does not apply to its answer, and adds 0 there; of NaNs alone it has no advantage
    (NaN). reward_weights: K numbers, by default 1.
    """
    z = [z_scores(rewards, group_size) for rewards in reward_parts.values()]
    z = torch.stack(z)                                                       # (K, N)
    weights = z.new_tensor(reward_weights or [1.0] * len(z))                 # (K,)
    sums = weights @ z.nan_to_num()                                          # (N,)
    # Scores that cancel leave rounding and eps, which a std as small would make advantages of 1.
    sums[sums.abs() < 1e-6] = 0
    sums[z.isnan().all(dim=0)] = torch.nan
    return over_std(sums)


def pooled_advantages(spans, mask, group_size):
    """Rewards of spans of answers, from the next two functions -> advantages (N, S-1).

    `spans`: N lists of (first, last, reward) for an answer's tokens first to last, counted from 0.
    The rewards of all spans of a group are normalised together, so answers may have different
    numbers of spans, and each span's z-score is added to its tokens.
    """
    advantages = torch.zeros_like(mask, dtype=torch.float64)
    for rows in torch.arange(len(spans)).split(group_size):
        group = [(row, *span) for row in rows for span in spans[row]]
        scores = z_scores([reward for *_, reward in group])
        for (row, first, last, _), score in zip(group, scores):
            tokens = mask[row].nonzero()[first:last + 1]  # the columns of its tokens
            advantages[row, tokens] += score
    return advantages.float()


def z_scores(values, group_size=None):
    """M numbers -> (M,): `group_advantages` in float64; they are one group if no size is given."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if len(values) < 2:
        return torch.zeros_like(values)
    A = centred(values, group_size or len(values))                           # (B, G)
    return (A / (std_of(A) + 1e-8)).flatten()


def process_advantages(step_rewards, mask, group_size=8):
    """Process supervision, DeepSeekMath section 4.1.3: rewards of steps -> advantages (N, S-1).

    `step_rewards`: N lists of (end, reward), where `end` is the index of the step's last token in
    the answer, from 0. A_t is the sum of the normalised rewards of the steps that end at or after
    t: a token is responsible for its own step and for all later ones. A group's only step gives 0.
    """
    # (0, end, reward): a step's reward is for all tokens up to its end.
    spans = [[(0, *step) for step in steps] for steps in step_rewards]
    return pooled_advantages(spans, mask, group_size)


def shape_advantages(candidates, mask, group_size=8):
    """ShapE-GRPO, arXiv 2603.29871: each candidate in an answer earns its own share -> (N, S-1).

    `candidates`: N lists of (first, last, reward) for an answer's tokens first to last, from 0. Its
    other tokens have advantage 0. The shares of a group are pooled; the paper does not say.
    """
    spans = []
    for of_answer in candidates:
        shares = shapley_shares([reward for *_, reward in of_answer])
        spans.append([(first, last, share)
                      for (first, last, _), share in zip(of_answer, shares)])
    return pooled_advantages(spans, mask, group_size)


def shapley_shares(rewards):
    """The Shapley values (K,), float64, of K candidates, if a set is worth its best reward.

    In ascending order, with r_0 = 0: phi_j = sum over k <= j of (r_k - r_(k-1)) / (K - k + 1). All
    candidates at least as good as the k-th share what it adds to the (k-1)-th.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    ordered, order = rewards.sort()
    added = ordered.diff(prepend=torch.zeros(1))
    sharers = torch.arange(len(ordered), 0, -1)                              # K, K-1, .., 1
    shares = (added / sharers).cumsum(dim=0)
    return shares[order.argsort()]                                           # in their old order


def gtpo_advantages(rewards, entropy, mask, group_size=8, right=None):
    """GTPO, arXiv 2508.04349: every token's own entropy shapes its reward, (N,) -> (N, S-1).

    A right answer earns more where the policy hesitated, and a wrong one loses less there:
        right answers   r + 0.1 n_t H / sum of H
        wrong answers   -(1 + 0.1 n_t (1/H) / sum of 1/H)
    The weights 1 and 0.1 are the theory's. n_t answers of the same kind, right or wrong, have a
    token t, and the sums run over these. The answers of a group begin in one column, so column t
    holds the same token of each. A z-score of all tokens of a group follows (the paper does not say
    what is normalised together). A group that is all right or all wrong is ranked by entropy alone:
    dynamic sampling would drop it.

    `entropy` H (N, S-1) of the old policy in nats, read where `mask` is true. `right` (N,) bool:
    which answers are right, by default those with a positive reward.
    """
    check(rewards, group_size)
    if right is None:
        right = rewards > 0
    on = mask.unflatten(0, (-1, group_size))                                      # (B, G, S-1)
    H = entropy.detach().double().view(on.shape)                                  # (B, G, S-1)
    H = H.clamp(min=SMALLEST_ENTROPY)
    r = rewards.view(-1, group_size, 1)                                           # (B, G, 1)
    right = right.view(r.shape)
    same = (right == right.mT).double()            # (B, G, G): are two answers of the same kind?
    n = same @ on.double()                                                        # (B, G, S-1)
    weights = torch.where(right, H, 1 / H)
    weights = weights.where(on, 0)
    share = 0.1 * n * weights / (same @ weights)   # NaN where no answer of the kind has a token
    shaped = torch.where(right, r + share, -(1 + share)).where(on, 0)
    for b, tokens in enumerate(on):
        shaped[b, tokens] = z_scores(shaped[b, tokens])
    return shaped.flatten(0, 1).float()                                           # (N, S-1)


def grpo_s_advantages(rewards, entropy, mask, group_size=8, right=None):
    """GRPO-S, the same paper: GTPO as if an answer were one token that has its mean entropy."""
    # In float64, else rounding would rank equal answers
    H = entropy.double().where(mask, torch.nan)                                   # (N, S-1)
    mean = H.nanmean(dim=1, keepdim=True)            # NaN without a token, which is not read
    answered = mask.any(dim=1, keepdim=True)                                      # (N, 1)
    return mask * gtpo_advantages(rewards, mean, answered, group_size, right)


# The words of --advantage. A function gets what its parameters name: rewards, group_size,
# scale_by_std, mask, reward_parts, reward_weights, step_rewards, right, entropy or candidates, as
# train.py's advantages_of spells them out.
ADVANTAGES = {
    "group": group_advantages,
    "leave-one-out": leave_one_out_advantages,
    "max-rl": max_rl_advantages,
    "batch-std": batch_std_advantages,
    "gdpo": gdpo_advantages,
    "gtpo": gtpo_advantages,
    "grpo-s": grpo_s_advantages,
    "shape": shape_advantages,
}
BY_ENTROPY = ("gtpo", "grpo-s")  # the words that get `entropy`: it takes a forward pass more


# --------------------------------------------------------------------------------------------------
# The group of the command line

def main():
    words = sys.argv[1:] or ["1.5", "1", "0", "0"]
    if "--help" in words:
        print(__doc__)
        return
    rewards = torch.tensor(list(map(float, words)))
    advantages = group_advantages(rewards, len(rewards))
    print(f"mean {rewards.mean():.6g}   std {rewards.std(correction=0):.6g}")
    print("reward     advantage")
    for r, A in zip(rewards, advantages):
        print(f"{r:+.5f}   {A:+.5f}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"advantage.py: {error}; usage: python advantage.py REWARD REWARD ...",
              file=sys.stderr)
        sys.exit(2)
