"""[E] The clipped objective and [F] the KL penalty: tensors in, one scalar out. No model here.

    w_t  = exp(logp_t - logp_old_t)                                   the ratio pi / pi_old
    J_t  = min(w_t A, clip(w_t, 1 - eps, 1 + eps) A)                  [E]
    KL_t = exp(d_t) - d_t - 1,   d_t = logp_ref_t - logp_t            [F], Schulman's k3
    L    = -mean over rows of mean over the row's tokens of (J_t - beta KL_t)

DeepSeekMath, arXiv 2402.03300, eq. 3 and 4. The answers were drawn from pi_old and say little about
a policy that has moved far from it, so the ratio is clipped. The minimum makes sure that the clip
never hides a move for the worse.

Departures from the theory's code map:
- The ratio is taken token by token. The map takes it over the whole answer, exp(sum of
  differences): at 256 tokens a drift of 0.01 nats per token is already a ratio of 13.
- k3 is computed as expm1(d) - d, because exp(d) - d - 1 is 0.0 in float32 for d = 1e-4.

    python loss.py        # one answer's clip table, k1 k2 k3 side by side
"""

import math
from functools import partial

import torch


def clipped_objective(log_ratio, advantages, clip_low=0.2, clip_high=0.2):
    """[E] min(w A, clip(w, 1 - low, 1 + high) A), and where it is clipped (no gradient).

    log_ratio = logp - logp_old, any shape; advantages broadcast against it. PPO, arXiv 1707.06347,
    eq. 7.
    """
    w = log_ratio.exp()
    unclipped = w * advantages
    clipped = w.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def kl_estimate(logprobs, ref_logprobs, estimator="k3"):
    """[F] Schulman's estimates of KL(pi || ref), for tokens drawn from pi; d = log ref - log pi.

    k3 = e^d - d - 1 is unbiased and never negative, and has the gradient of KL(ref || pi), see
    `gradient_coefficient`. k1 = -d is unbiased but can be negative, and inside the loss its
    expected gradient on-policy is zero; k2 = d^2 / 2 has the gradient of KL(pi || ref).
    "k3_corrected" is k3 until `grpo_loss` multiplies it by pi / pi_old: for tokens drawn from
    pi_old it is then exact for KL(pi || ref), in value and, through the ratio, in gradient.
    """
    d = ref_logprobs - logprobs
    if estimator in ("k3", "k3_corrected"):
        return d.expm1() - d
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    raise ValueError(f"kl_estimator {estimator!r}: not one of {', '.join(KL_ESTIMATORS)}")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2, kl_coef=0.04, *,
              clip_eps_high=None, objective="clip", ratio="token", kl_estimator="k3",
              aggregate="sequence", max_new_tokens=None, sampler_logprobs=None, sampler_cap=2.0,
              n_rows=None, n_tokens=None):
    """The GRPO loss of a batch and its metrics: `(loss, {name: detached scalar})`.

    logprobs, old_logprobs, ref_logprobs, mask: (N, S-1), nats; advantages: (N,) or (N, S-1). Where
    the mask is false the values do not matter and may be inf or NaN. `ref_logprobs` may be None
    when `kl_coef` is 0. A row whose mask is all false adds 0 and still counts as a row.

    The variants, each off by default and each a function below:
    clip_eps_high  the upper clip if it differs from the lower: DAPO's clip-higher, 2503.14476
    objective      "cispo": `cispo_objective`, 2506.13585
    ratio          "sequence": `sequence_log_ratio`, GSPO, 2507.18071
    kl_estimator   "k1", "k2", "k3": `kl_estimate`;  "k3_corrected": (pi / pi_old) k3, 2512.02556
    aggregate      "token" (DAPO), "constant" (Dr. GRPO, needs max_new_tokens): `mean_of`
    sampler_logprobs   (N, S-1), the sampler's own log-probs, if they differ from [D]'s: J_t is
                   multiplied by `sampler_weight`, at most sampler_cap

    n_rows, n_tokens   sizes of the whole batch, if these rows are only a micro-batch of it: then
                   losses, gradients and metrics of the micro-batches add up to those of the batch.

    `clip_fraction`, its `_low` and `_high` side and `ratio_mean` are means over tokens; `approx_kl`
    is averaged like the loss, so loss = policy_loss + kl_coef * approx_kl; it is NaN without a
    reference. ValueError: an option that does not exist, "constant" without max_new_tokens, a KL
    penalty without a reference, a sampler_cap that is not above 0.
    """
    check_tensors(logprobs, old_logprobs, advantages, mask)
    check_options(aggregate, ratio, objective, max_new_tokens, sampler_cap)
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs")
    sizes = {"n_rows": len(mask) if n_rows is None else n_rows,
             "n_tokens": int(mask.sum()) if n_tokens is None else n_tokens}
    mean = partial(mean_of, mask=mask, **sizes, aggregate=aggregate, max_new_tokens=max_new_tokens)
    token_mean = partial(mean_of, mask=mask, **sizes, aggregate="token")
    # Masked entries become 0 before anything is computed, so no inf or NaN reaches a gradient.
    logprobs = logprobs.where(mask, 0)
    old_logprobs = old_logprobs.where(mask, 0)
    A = advantages.view(len(mask), -1).where(mask, 0)                        # (N, S-1)

    # The ratio w_t = pi / pi_old, kept as its logarithm
    log_ratio = logprobs - old_logprobs                                      # (N, S-1)
    if ratio == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, mask)
    # It is bounded, because exp overflows at 88 and inf * 0 would be NaN.
    log_ratio = log_ratio.clamp(max=20)

    # [E] J_t, the clipped objective
    clip_high = clip_eps if clip_eps_high is None else clip_eps_high
    J, clipped = clipped_objective(log_ratio, A, clip_eps, clip_high)        # (N, S-1) each
    if objective == "cispo":
        J, clipped = cispo_objective(logprobs, log_ratio, A, clip_high)
    if sampler_logprobs is not None:
        J = J * sampler_weight(old_logprobs, sampler_logprobs.where(mask, 0), sampler_cap)
    loss = policy_loss = -mean(J)

    # [F] KL_t, the penalty
    approx_kl = torch.full_like(loss, torch.nan)
    if ref_logprobs is not None:
        KL = kl_estimate(logprobs, ref_logprobs.where(mask, 0), kl_estimator)
        if kl_estimator == "k3_corrected":
            KL = KL * (logprobs - old_logprobs).clamp(max=20).exp()
        approx_kl = mean(KL)
        loss = policy_loss + kl_coef * approx_kl

    low = token_mean((clipped & (log_ratio < 0)).to(loss.dtype))
    high = token_mean((clipped & (log_ratio > 0)).to(loss.dtype))
    metrics = {"loss": loss, "policy_loss": policy_loss, "approx_kl": approx_kl,
               "clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high,
               "ratio_mean": token_mean(log_ratio.exp())}
    return loss, {name: value.detach() for name, value in metrics.items()}


def mean_of(values, mask, n_rows, n_tokens, aggregate="sequence", max_new_tokens=None):
    """(N, S-1) -> (): GRPO's mean over each row's tokens, then over the rows of the batch.

    "token": the mean over all tokens of the batch (DAPO, 2503.14476). "constant": the sum divided
    by rows * max_new_tokens (Dr. GRPO, 2503.20783).
    """
    values = values * mask
    if aggregate == "sequence":
        lengths = mask.sum(dim=1).clamp(min=1)                               # (N,)
        return (values.sum(dim=1) / lengths).sum() / n_rows
    if aggregate == "token":
        return values.sum() / max(n_tokens, 1)
    return values.sum() / (n_rows * max_new_tokens)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows: the options of `grpo_loss`, the gradient of
# the penalty, and a beta that adapts.

KL_ESTIMATORS = ("k1", "k2", "k3", "k3_corrected")
AGGREGATES = ("sequence", "token", "constant")
RATIOS = ("token", "sequence")
OBJECTIVES = ("clip", "cispo")


def check_tensors(*tensors):
    if not all(isinstance(x, torch.Tensor) for x in tensors) or tensors[-1].dtype != torch.bool:
        raise ValueError("logprobs, advantages, mask: tensors are expected, the mask of bools")


def check_options(aggregate, ratio, objective, max_new_tokens, sampler_cap):
    for name, value, known in (("aggregate", aggregate, AGGREGATES), ("ratio", ratio, RATIOS),
                               ("objective", objective, OBJECTIVES)):
        if value not in known:
            raise ValueError(f"{name} {value!r}: not one of {', '.join(known)}")
    if aggregate == "constant" and not max_new_tokens:
        raise ValueError("aggregate 'constant' divides by max_new_tokens, which is not given")
    if not sampler_cap > 0:
        raise ValueError(f"sampler_cap {sampler_cap}: not above 0")


def sequence_log_ratio(log_ratio, mask):
    """GSPO, arXiv 2507.18071: every token of a row gets the mean of the row's log-ratios."""
    mean = log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)               # (N,)
    return mean[:, None].expand_as(mask)                                     # (N, S-1)


def sampler_weight(old_logprobs, sampler_logprobs, cap=2.0):
    """Truncated importance sampling: min(pi_old / pi_sampler, cap), without a gradient.

    The sampler's kernels and precision are not the trainer's, so its tokens come from a slightly
    different policy. The weight corrects for that.
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=cap).detach()


def cispo_objective(logprobs, log_ratio, advantages, clip_high=0.2):
    """CISPO, MiniMax-M1, arXiv 2506.13585: min(w, 1 + high) A logp, and where w is capped.

    The weight w is detached, so the cap stops no gradient: a token beyond the cap still learns,
    with the cap as its weight. There is no lower cap. Only the gradient of J is an estimate.
    """
    w = log_ratio.exp().detach()
    cap = 1 + clip_high
    return w.clamp(max=cap) * advantages * logprobs, w > cap


def gradient_coefficient(advantages, logprobs, ref_logprobs, kl_coef=0.04):
    """The factor of grad logp on-policy with k3: A + beta (ref/pi - 1). DeepSeekMath, A.1.6.

    advantages: (N,) or (N, S-1); logprobs, ref_logprobs: (N, S-1) -> (N, S-1). Where the reference
    is above the policy, the penalty raises the probability.
    """
    A = advantages.view(len(logprobs), -1)                                   # (N, 1) or (N, S-1)
    return A + kl_coef * (ref_logprobs - logprobs).expm1()


def next_kl_coef(kl_coef, approx_kl, low=0.02, high=0.05, rate=0.1):
    """Adaptive KL: the coefficient of the next step, from this step's KL in nats per token.

    It stays if the KL is in the band from low to high. Above the band it grows and below it
    shrinks, in proportion to the distance, by at most `rate`. Clipped proportional control, as in
    arXiv 1909.08593; theory 001's band replaces the paper's target. ValueError
    unless kl_coef >= 0, 0 < low <= high, 0 < rate < 1 and the KL is a number, inf included.
    """
    if not (kl_coef >= 0 and 0 < low <= high and 0 < rate < 1) or math.isnan(approx_kl):
        raise ValueError(f"kl_coef {kl_coef}, KL {approx_kl}, band {low} to {high}, rate {rate}: "
                         "not all above 0 and in order")
    # It never falls below this and restarts here from 0, where a factor alone would be stuck.
    smallest = 1e-8
    if approx_kl > high:
        return (kl_coef or smallest) * min(approx_kl / high, 1 + rate)
    if approx_kl < low:
        return min(kl_coef, max(kl_coef * max(approx_kl / low, 1 - rate), smallest))
    return kl_coef


# --------------------------------------------------------------------------------------------------
# The demonstration: the theory's walkthrough, and the estimators

def main():
    A = -1.4321
    log_ratios = torch.tensor([0.25, -0.30])
    J, clipped = clipped_objective(log_ratios, A)
    print(f"one answer of two tokens, A = {A}, clip_eps = 0.2\n")
    print("token  log-ratio   ratio       w A  clip(w) A   minimum")
    for t, w in enumerate(log_ratios.exp()):
        print(f"{t + 1:5}  {log_ratios[t]:+9.2f}  {w:6.4f}  {w * A:+8.4f}"
              f"   {w.clamp(0.8, 1.2) * A:+8.4f}  {J[t]:+8.4f}"
              + ("   clipped: no gradient" if clipped[t] else ""))
    print(f"mean objective {J.mean():+.4f}\n")

    print("d = log ref - log pi          k1          k2          k3")
    for d in (0.5, -0.5, 0.05, 1e-4):
        k1, k2, k3 = (kl_estimate(torch.tensor(0.0), torch.tensor(d), k) for k in KL_ESTIMATORS[:3])
        print(f"{d:20g}  {k1:10.6g}  {k2:10.6g}  {k3:10.6g}")


if __name__ == "__main__":
    main()
