"""[E] The clipped objective and [F] the KL penalty: tensors in, one scalar out.

    w_t  = exp(logp_t - logp_old_t)                                   the ratio pi / pi_old
    J_t  = min(w_t A, clip(w_t, 1 - clip_eps, 1 + clip_eps) A)        [E]
    KL_t = exp(d_t) - d_t - 1,   d_t = logp_ref_t - logp_t            [F], estimator k3
    L    = -mean over rows of mean over the row's tokens of (J_t - beta KL_t)

DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; beta is `kl_coef`. The answers were drawn from pi_old
and say little about a policy that has moved far from it, so the ratio is clipped. The minimum makes
sure that clipping never hides a change that makes the objective worse.

Common mistakes that this avoids:
- Taking the ratio over the whole answer, exp(sum of differences): at 256 tokens a drift of 0.01
  nats per token is already a ratio of 13. Here it is taken token by token.
- Computing k3 as exp(d) - d - 1, which is 0.0 in float32 for d = 1e-4. expm1(d) - d is exact.

    python loss.py        # one answer's clip table, k1 k2 k3 side by side, gradient coefficients
"""

import sys

import torch

MAX_LOG_RATIO = 20  # a ratio of 5e8 is beyond every clip; exp overflows above 88


def plain_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2, kl_coef=0.04):
    """The loss of plain GRPO, word for word -> a scalar. `grpo_loss` below is checked against it.

    For N rows of S tokens, the log-probs and the mask are (N, S-1), because nothing predicts a
    row's first token. Log-probs are in nats, the mask is true for the answer's tokens, and every
    row has one. advantages: (N,), one for all tokens of a row.
    """
    A = advantages[:, None]                                                  # (N, 1)
    w = (logprobs - old_logprobs).exp()                                      # (N, S-1)
    J = torch.minimum(w * A, w.clamp(1 - clip_eps, 1 + clip_eps) * A)        # [E]
    d = ref_logprobs - logprobs
    KL = d.expm1() - d                                                       # [F]
    objective = (J - kl_coef * KL) * mask                                    # (N, S-1)
    row_means = objective.sum(dim=1) / mask.sum(dim=1)                       # (N,)
    return -row_means.mean()


def clipped_objective(log_ratio, advantages, clip_eps, clip_eps_high, logprobs=None):
    """[E] min(w A, clip(w, 1 - clip_eps, 1 + clip_eps_high) A), and where the clip is active.

    log_ratio = logp - logp_old, any shape; advantages broadcast against it. Where the clip is
    active, a token has no gradient: it has moved far enough. PPO, arXiv 1707.06347, eq. 7.
    """
    w = log_ratio.exp()
    unclipped = w * advantages
    clipped = w.clamp(1 - clip_eps, 1 + clip_eps_high) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def kl_estimate(logprobs, ref_logprobs, estimator="k3", old_logprobs=None):
    """[F] An estimate of KL(pi || ref) at each token that was drawn from pi: a KL_ESTIMATORS word.

    "k3_corrected" is for tokens drawn from pi_old.
    """
    d = ref_logprobs - logprobs
    w = 1
    if old_logprobs is not None:
        w = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    return KL_ESTIMATORS[estimator](d, w)


# Schulman's estimators, of d = log ref - log pi and of the ratio w = pi / pi_old.
KL_ESTIMATORS = {
    # Unbiased, but it can be negative, and inside the loss its expected gradient is 0.
    "k1": lambda d, w: -d,
    # Biased, and its gradient is that of KL(pi || ref).
    "k2": lambda d, w: d.square() / 2,
    # Unbiased and never negative, and its gradient is that of KL(ref || pi).
    "k3": lambda d, w: d.expm1() - d,
    # The same off-policy: through w its gradient is that of KL(pi || ref), arXiv 2512.02556.
    "k3_corrected": lambda d, w: w * (d.expm1() - d),
}


def gradient_coefficient(advantages, logprobs, ref_logprobs, kl_coef=0.04):
    """The factor of grad log pi while pi = pi_old: A + beta (ref / pi - 1). DeepSeekMath, A.1.6.

    advantages: (N,) or (N, S-1); logprobs, ref_logprobs: (N, S-1) -> (N, S-1). Where the reference
    is above the policy, the penalty raises the probability.
    """
    A = advantages.view(len(logprobs), -1)                                   # (N, 1) or (N, S-1)
    return A + kl_coef * (ref_logprobs - logprobs).expm1()


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows: the loss with its variants, adaptive beta.

SMALLEST_KL_COEF = 1e-8  # an adaptive beta falls no further: no factor could lift it from 0 again


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2, kl_coef=0.04, *,
              clip_eps_high=None, objective="clip", ratio="token", kl_estimator="k3",
              aggregate="sequence", max_new_tokens=None, sampler_logprobs=None, sampler_cap=2.0,
              n_rows=None, n_tokens=None):
    """The loss with its variants, and its metrics: `(loss, {name: detached scalar})`.

    The first arguments are those of `plain_loss`, but `advantages` may be (N, S-1), `ref_logprobs`
    None if `kl_coef` is 0, and what stands outside the mask may be inf or NaN. A row without an
    answer adds 0.

    clip_eps_high  the upper clip if it differs from the lower: DAPO's clip-higher, 2503.14476
    objective, ratio, kl_estimator, aggregate   words from the tables in this file
    sampler_logprobs, sampler_cap   the sampler's own log-probs (N, S-1), for `tis_weight`
    n_rows, n_tokens   sizes of the whole batch if these rows are only a micro-batch of it: then
                   the losses, gradients and metrics of all micro-batches add up to the batch's

    Metrics: `clip_fraction`, its parts `_low` and `_high`, `ratio_mean`, `gradient_coefficient` and
    `positive_advantages`, a share, are means over tokens; `approx_kl` is averaged like the loss. It
    and `gradient_coefficient` are NaN without a reference. KeyError: a word that is in no table;
    ValueError: a KL penalty without a reference.
    """
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs")

    # Masked entries become 0 before anything is computed, so no inf or NaN reaches a gradient.
    logprobs = logprobs.where(mask, 0)
    old_logprobs = old_logprobs.where(mask, 0)
    A = advantages.view(len(mask), -1).where(mask, 0)                        # (N, S-1)
    counted = mask.to(logprobs)                                              # 1 or 0
    n_rows = n_rows or len(counted)
    n_tokens = n_tokens or counted.sum()
    weights = AGGREGATES[aggregate](counted, n_rows, n_tokens, max_new_tokens)   # (N, S-1)

    # The ratio w_t = pi / pi_old, kept as its logarithm
    log_ratio = RATIOS[ratio](logprobs - old_logprobs, mask)                 # (N, S-1) or (N, 1)
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)

    # [E] J_t, the clipped objective
    if clip_eps_high is None:
        clip_eps_high = clip_eps
    J, is_clipped = OBJECTIVES[objective](log_ratio, A, clip_eps, clip_eps_high, logprobs)
    if sampler_logprobs is not None:
        J = J * tis_weight(old_logprobs, sampler_logprobs.where(mask, 0), sampler_cap)
    loss = policy_loss = -(J * weights).sum()

    # [F] KL_t, the penalty
    approx_kl = factors = torch.full_like(loss, torch.nan)
    if ref_logprobs is not None:
        ref_logprobs = ref_logprobs.where(mask, 0)
        KL = kl_estimate(logprobs, ref_logprobs, kl_estimator, old_logprobs)
        approx_kl = (KL * weights).sum()
        loss = policy_loss + kl_coef * approx_kl
        factors = gradient_coefficient(A, logprobs, ref_logprobs, kl_coef)   # (N, S-1)

    metrics = {"loss": loss, "policy_loss": policy_loss, "approx_kl": approx_kl}
    of_tokens = {
        "clip_fraction": is_clipped,
        "clip_fraction_low": is_clipped & (log_ratio < 0),
        "clip_fraction_high": is_clipped & (log_ratio > 0),
        "ratio_mean": log_ratio.exp(),
        "gradient_coefficient": factors,
        "positive_advantages": A > 0,
    }
    for name, values in of_tokens.items():
        metrics[name] = (values * counted).sum() / max(n_tokens, 1)
    return loss, {name: value.detach() for name, value in metrics.items()}


def lengths_of(mask):
    """How many tokens each row has, at least 1: (N, S-1) -> (N, 1)."""
    lengths = mask.sum(dim=1, keepdim=True)
    return lengths.clamp(min=1)


# How much each token counts in the loss of the batch: (N, S-1), from 1 or 0 in `counted`.
AGGREGATES = {
    # The mean over a row's tokens, then over rows, so a token of a long answer counts less: GRPO
    "sequence": lambda counted, n_rows, n_tokens, limit:
        counted / (n_rows * lengths_of(counted)),
    # The mean over all tokens of the batch: DAPO, 2503.14476
    "token": lambda counted, n_rows, n_tokens, limit: counted / max(n_tokens, 1),
    # The sum, divided by rows * max_new_tokens: Dr. GRPO, 2503.20783
    "constant": lambda counted, n_rows, n_tokens, limit: counted / (n_rows * limit),
}


# The logarithm of the ratio that is clipped
RATIOS = {
    "token": lambda log_ratio, mask: log_ratio,
    # Of each row the mean of its tokens' log-ratios, (N, 1): GSPO, arXiv 2507.18071
    "sequence": lambda log_ratio, mask:
        log_ratio.sum(dim=1, keepdim=True) / lengths_of(mask),
}


def cispo_objective(log_ratio, advantages, clip_eps, clip_eps_high, logprobs):
    """CISPO, MiniMax-M1, arXiv 2506.13585: min(w, 1 + clip_eps_high) A logp, and where w is capped.

    w is detached: a token beyond the cap still learns, with the cap as its weight.
    """
    w = log_ratio.exp().detach()
    cap = 1 + clip_eps_high
    return w.clamp(max=cap) * advantages * logprobs, w > cap


OBJECTIVES = {"clip": clipped_objective, "cispo": cispo_objective}


def tis_weight(old_logprobs, sampler_logprobs, cap):
    """Truncated importance sampling, TIS: min(pi_old / pi_sampler, cap), without a gradient.

    It corrects for a sampler with other kernels than the trainer's. IMPALA, arXiv 1802.01561; Yao
    et al., "On the Rollout-Training Mismatch in Modern RL Systems", 2025.
    """
    ratio = (old_logprobs - sampler_logprobs).exp()
    return ratio.clamp(max=cap).detach()


def next_kl_coef(kl_coef, approx_kl, low=0.02, high=0.05, rate=0.1):
    """Adaptive KL: the coefficient of the next step, from this step's KL in nats per token.

    Between low and high it stays. Above, it is multiplied by approx_kl / high, below by approx_kl /
    low, within 1 ± `rate`: one step's KL is noisy. As in arXiv 1909.08593, with a band as target.
    """
    if approx_kl is None:  # the step was skipped
        return kl_coef
    if approx_kl > high:
        return max(kl_coef, SMALLEST_KL_COEF) * min(approx_kl / high, 1 + rate)
    if approx_kl < low:
        return max(kl_coef * max(approx_kl / low, 1 - rate), SMALLEST_KL_COEF)
    return kl_coef


# --------------------------------------------------------------------------------------------------
# The demonstration: the theory's walkthrough, the estimators, the gradient coefficient

def main():
    if "--help" in sys.argv:
        print(__doc__)
        return
    A = -1.4321
    log_ratios = torch.tensor([0.25, -0.30])
    J, clipped = clipped_objective(log_ratios, A, 0.2, 0.2)
    print(f"one answer of two tokens, A = {A}, clip_eps = 0.2\n")
    print("token  log-ratio   ratio       w A  clip(w) A   minimum")
    for t, w in enumerate(log_ratios.exp()):
        note = "   clipped: no gradient" if clipped[t] else ""
        print(f"{t + 1:5}  {log_ratios[t]:+9.2f}  {w:6.4f}  {w * A:+8.4f}"
              f"   {w.clamp(0.8, 1.2) * A:+8.4f}  {J[t]:+8.4f}{note}")
    print(f"mean objective {J.mean():+.4f}\n")

    print("d = log ref - log pi          k1          k2          k3")
    log_pi = torch.zeros(1, 1)
    for d in (0.5, -0.5, 0.05, 1e-4):
        row = f"{d:20g}"
        for estimator in ("k1", "k2", "k3"):
            kl = kl_estimate(log_pi, log_pi + d, estimator)
            row += f"  {kl.item():10.6g}"
        print(row)

    print("\ngradient coefficient A + beta (ref / pi - 1), with A = 1 and beta = 0.04")
    for quotient in torch.tensor([0.5, 1.0, 2.0]):
        factor = gradient_coefficient(torch.ones(1), log_pi, quotient.log())
        print(f"ref / pi = {quotient:<4g}{factor.item():10.6g}")


if __name__ == "__main__":
    main()
