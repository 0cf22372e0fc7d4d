"""[C] The group-relative advantage: siblings instead of a critic.

    A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)        DeepSeekMath, arXiv 2402.03300, sec. 4.1.2

PPO trains a second network to say what reward a prompt usually earns. GRPO answers each prompt G times
and takes the mean of those G rewards instead: an answer is good if it beats its siblings.

Departures from the theory's code map:
- std divides by G, as the formula does. The map calls torch.std, which divides by G-1 (`unbiased=True`).
- Equal rewards give exactly 0. The map's `std < 1e-8` misses that in float32: seven rewards of 0.7 have
  a computed std of 6e-8, and answers that do not differ are handed advantages of 0.86.

    python advantage.py 1.5 1.0 0 0        # one group: its mean, std and advantages
"""

import sys

import torch


def group_advantages(rewards, group_size=8, eps=1e-8, scale_by_std=True, unbiased=False):
    """Rewards (N,) in prompt-major order, row i of prompt i // group_size -> advantages (N,).

    `scale_by_std=False` only centres: Dr. GRPO (arXiv 2503.20783). The result keeps dtype and device
    (integers become float32); the sums are taken in float32 at least. ValueError: a group of one (it has no
    sibling), N that is not a multiple of the group size, a reward that is NaN or infinite.
    """
    check(rewards, group_size)
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    precise = torch.promote_types(rewards.dtype, torch.float32)
    r = rewards.to(precise).view(-1, group_size)                         # (B, G)
    advantages = r - r.mean(dim=1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (r.std(dim=1, keepdim=True, correction=int(unbiased)) + eps)
    all_equal = (r == r[:, :1]).all(dim=1, keepdim=True)                 # (B, 1), exact, no threshold
    return advantages.masked_fill(all_equal, 0.0).flatten().to(rewards.dtype)


def check(rewards, group_size):
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a group needs at least two answers to compare")
    if rewards.ndim != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)}: not whole groups of {group_size}")
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"reward of row {row} is {float(rewards[row])}, not a finite number")


if __name__ == "__main__":
    try:
        rewards = torch.tensor([float(x) for x in sys.argv[1:] or (1.5, 1.0, 0, 0)])
        advantages = group_advantages(rewards, group_size=len(rewards))
    except ValueError as error:
        print(f"advantage.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"mean {rewards.mean():.6g}   std {rewards.std(correction=0):.6g}")
    print("reward     " + " ".join(f"{r:+9.5f}" for r in rewards.tolist()))
    print("advantage  " + " ".join(f"{a:+9.5f}" for a in advantages.tolist()))
