"""[E] The clipped objective and [F] the KL penalty: tensors in, one scalar out. No model here.

    w_t  = exp(logp_t - logp_old_t)                                   the ratio pi / pi_old
    J_t  = min(w_t A, clip(w_t, 1 - eps, 1 + eps) A)                  [E]
    KL_t = exp(d_t) - d_t - 1,   d_t = logp_ref_t - logp_t            [F], Schulman's k3
    L    = -mean over rows of mean over the row's tokens of (J_t - beta KL_t)

DeepSeekMath, arXiv 2402.03300, eq. 3 and 4. Why the clip: the answers were drawn from pi_old, and
say little about a policy that has moved far from it. Why a minimum: a move for the worse is never
hidden by the clip.

Departures from the theory's code map:
- The ratio is taken token by token. The map takes it over the whole answer, exp(sum of
  differences): at 256 tokens a drift of 0.01 nats per token is already a ratio of 13.
- k3 is computed as expm1(d) - d. Written exp(d) - d - 1 it is 0.0 in float32 for d = 1e-4.

    python loss.py        # one answer's clip table, k1 k2 k3 side by side, and the variants
"""

import math

import torch

# What the options of `grpo_loss` may be. Plain GRPO: k3, sequence, token, clip.
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_corrected")
AGGREGATES = ("sequence", "token", "constant")
RATIOS = ("token", "sequence")
OBJECTIVES = ("clip", "cispo")


def clipped_objective(log_ratio, advantages, clip_low=0.2, clip_high=0.2):
    """[E] min(w A, clip(w, 1 - low, 1 + high) A), and where the clip bit: no gradient flows there.

    log_ratio = logp - logp_old, any shape; advantages broadcast against it. PPO, arXiv 1707.06347,
    eq. 7.
    """
    w = log_ratio.exp()
    unclipped = w * advantages
    clipped = w.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def kl_estimate(logprobs, ref_logprobs, estimator="k3"):
    """[F] Schulman's estimates of KL(pi || ref), for tokens drawn from pi; d = log ref - log pi.

    k1 = -d is unbiased but can be negative, and differentiated inside the loss it has zero expected
    gradient on-policy; k2 = d^2 / 2 has the gradient of KL(pi || ref); k3 = e^d - d - 1 is unbiased
    and never negative, and has the gradient of KL(ref || pi): it adds beta (ref/pi - 1) to the
    advantage, see `gradient_coefficient`.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return d.expm1() - d
    raise ValueError(f"KL estimate {estimator!r}: not one of k1, k2, k3")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2, kl_coef=0.04, *,
              clip_eps_high=None, kl_estimator="k3", aggregate="sequence", ratio="token",
              objective="clip", sampler_logprobs=None, sampler_cap=2.0, max_new_tokens=None,
              n_rows=None, n_tokens=None):
    """The GRPO loss of a batch and its metrics: `(loss, {name: detached scalar})`.

    logprobs, old_logprobs, ref_logprobs, mask: (N, S-1), nats; advantages: (N,) or (N, S-1). Where
    the mask is false anything may stand, inf and NaN included. `ref_logprobs` may be None when
    `kl_coef` is 0. To keep an answer that was cut off out of the loss, make its row of the mask
    false, after the advantages: it adds 0, and still counts as a row (as a token it does not).

    clip_eps_high  the upper clip where it differs from the lower: DAPO's clip-higher, 2503.14476
    kl_estimator   "k1", "k2", "k3": `kl_estimate`;  "k3_corrected": `corrected_k3`, 2512.02556
    aggregate      "sequence": mean over each row, then over rows (GRPO);  "token": mean over all
                   tokens (DAPO);  "constant": sum / (rows * max_new_tokens), Dr. GRPO, 2503.20783
    ratio          "token": w_t as above;  "sequence": exp(mean of the row's log-ratios), GSPO,
                   2507.18071
    objective      "clip": `clipped_objective`;  "cispo": `cispo_objective`, 2506.13585
    sampler_logprobs, sampler_cap   (N, S-1): what the sampler says the tokens' log-probabilities
                   were, where it is not [D]. Every J_t is multiplied by `sampler_weight`.
    n_rows, n_tokens   sizes of the whole batch, where these rows are only a micro-batch of it: then
                   losses, gradients and metrics of the micro-batches add up to those of the batch.

    `clip_fraction` and `ratio_mean` are means over tokens, and `clip_fraction_low` and `_high` say
    on which side the clip bit; `approx_kl` is averaged as the loss is, so that
    loss = policy_loss + kl_coef * approx_kl; it is NaN without a reference. ValueError: an option
    that does not exist, "constant" without max_new_tokens, a KL penalty without a reference, a
    sampler_cap that is not above 0.
    """
    check(ref_logprobs, kl_coef, kl_estimator, aggregate, ratio, objective, sampler_cap,
          max_new_tokens)
    logprobs = logprobs.where(mask, 0)
    old_logprobs = old_logprobs.where(mask, 0)
    A = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages      # (N, 1) or (N, S-1)
    A = A.where(mask, 0)                                                     # (N, S-1)
    clip_high = clip_eps if clip_eps_high is None else clip_eps_high

    def average(values, how):                                                # (N, S-1) -> ()
        return masked_average(values, mask, how, max_new_tokens, n_rows, n_tokens)

    # [E] ratio and clip
    token_log_ratio = bounded(logprobs - old_logprobs)
    log_ratio = token_log_ratio
    if ratio == "sequence":
        log_ratio = bounded(row_mean(logprobs - old_logprobs, mask)).unsqueeze(1).expand_as(mask)
    if objective == "clip":
        J, clipped = clipped_objective(log_ratio, A, clip_eps, clip_high)
    else:
        J, clipped = cispo_objective(logprobs, log_ratio, A, clip_high)
    if sampler_logprobs is not None:
        J = J * sampler_weight(old_logprobs, sampler_logprobs.where(mask, 0), sampler_cap)
    policy_loss = -average(J, aggregate)

    # [F] KL penalty
    approx_kl = torch.full_like(policy_loss, torch.nan)
    loss = policy_loss
    if ref_logprobs is not None:
        ref_logprobs = ref_logprobs.where(mask, 0)
        if kl_estimator == "k3_corrected":
            kl = corrected_k3(logprobs, ref_logprobs, token_log_ratio)
        else:
            kl = kl_estimate(logprobs, ref_logprobs, kl_estimator)
        approx_kl = average(kl, aggregate)
        loss = policy_loss + kl_coef * approx_kl

    clip_fraction_low = average((clipped & (log_ratio < 0)).to(loss.dtype), "token")
    clip_fraction_high = average((clipped & (log_ratio > 0)).to(loss.dtype), "token")
    metrics = {"loss": loss, "policy_loss": policy_loss, "approx_kl": approx_kl,
               "clip_fraction": clip_fraction_low + clip_fraction_high,
               "clip_fraction_low": clip_fraction_low, "clip_fraction_high": clip_fraction_high,
               "ratio_mean": average(log_ratio.exp(), "token")}
    return loss, {name: value.detach() for name, value in metrics.items()}


# --------------------------------------------------------------------------------------------------
# Averages over tokens, and refusals. A row without a response token adds 0, and counts as a row.

def masked_average(values, mask, aggregate, max_new_tokens=None, n_rows=None, n_tokens=None):
    """Values (N, S-1) -> (): the three aggregates of `grpo_loss`, where the mask is true."""
    n_rows = len(mask) if n_rows is None else n_rows
    if aggregate == "sequence":
        return row_mean(values, mask).sum() / n_rows
    if aggregate == "constant":
        return (values * mask).sum() / (n_rows * max_new_tokens)
    n_tokens = int(mask.sum()) if n_tokens is None else n_tokens
    return (values * mask).sum() / max(n_tokens, 1)


def row_mean(values, mask):
    """Values (N, S-1) -> (N,): the mean where the mask is true, 0 where it is true nowhere."""
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def bounded(log_ratio):
    return log_ratio.clamp(max=20)          # exp overflows at 88, and inf * 0 would be NaN


def check(ref_logprobs, kl_coef, kl_estimator, aggregate, ratio, objective, sampler_cap,
          max_new_tokens):
    for name, value, known in (("kl_estimator", kl_estimator, KL_ESTIMATORS),
                               ("aggregate", aggregate, AGGREGATES),
                               ("ratio", ratio, RATIOS),
                               ("objective", objective, OBJECTIVES)):
        if value not in known:
            raise ValueError(f"{name} {value!r}: not one of {', '.join(known)}")
    if aggregate == "constant" and not max_new_tokens:
        raise ValueError("aggregate 'constant' divides by max_new_tokens, which is not given")
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs")
    if not sampler_cap > 0:
        raise ValueError(f"sampler_cap {sampler_cap}: not above 0")


# --------------------------------------------------------------------------------------------------
# Variants: what other options of `grpo_loss` put in the place of J_t and KL_t, and beta over time.
# Plain GRPO needs none of them.

def cispo_objective(logprobs, log_ratio, advantages, clip_high=0.2):
    """CISPO, MiniMax-M1, arXiv 2506.13585: min(w, 1 + high) A logp, and where the cap bit.

    No gradient flows through the weight, and so none is lost: a token beyond the cap still learns,
    with the cap for a weight. The value is no estimate of anything; its gradient is. There is no
    lower cap.
    """
    w = log_ratio.exp().detach()
    cap = 1 + clip_high
    return w.clamp(max=cap) * advantages * logprobs, w > cap


def sampler_weight(old_logprobs, sampler_logprobs, cap=2.0):
    """Truncated importance sampling: min(pi_old / pi_sampler, cap), without gradient.

    The sampler's kernels and precision are not the trainer's, so the tokens come from a policy that
    is slightly another. The weight takes that back; the cap bounds what one token may weigh.
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=cap).detach()


def corrected_k3(logprobs, ref_logprobs, log_ratio):
    """(pi / pi_old) k3, arXiv 2512.02556: the gradient flows through the ratio too.

    Exact for KL(pi || ref), in value and gradient, when the tokens were drawn from pi_old: the
    expectation of (pi / pi_old) k3 over pi_old is that of k3 over pi, which is the KL.
    """
    return log_ratio.exp() * kl_estimate(logprobs, ref_logprobs, "k3")


def gradient_coefficient(advantages, logprobs, ref_logprobs, kl_coef=0.04):
    """What multiplies grad logp on-policy with k3: A + beta (ref/pi - 1). DeepSeekMath, A.1.6.

    advantages: (N,) or (N, S-1); logprobs, ref_logprobs: (N, S-1) -> (N, S-1). Where the reference
    is above the policy the penalty pulls the probability up: A = 1, beta = 0.04, ref/pi = 2 give
    1.04.
    """
    A = advantages.unsqueeze(1) if advantages.ndim == logprobs.ndim - 1 else advantages
    return A + kl_coef * (ref_logprobs - logprobs).expm1()


def next_kl_coef(kl_coef, approx_kl, low=0.02, high=0.05, rate=0.1):
    """Adaptive KL: the coefficient of the next step, from this step's KL in nats per token.

    Inside the band from low to high it is unchanged; above it grows and below it shrinks, in
    proportion to how far outside the KL is, by at most `rate`. Clipped proportional control, as in
    arXiv 1909.08593; the band is theory 001's, in place of the paper's one target.
    It does not fall below 1e-8 and restarts there from 0: a factor alone would be stuck at 0.
    """
    if not (kl_coef >= 0 and 0 < low <= high and 0 < rate < 1) or math.isnan(approx_kl):
        raise ValueError(f"kl_coef {kl_coef}, KL {approx_kl}, band {low} to {high}, rate {rate}: "
                         "not all above 0 and in order")
    smallest = 1e-8
    if approx_kl > high:
        return (kl_coef or smallest) * (1 + min(approx_kl / high - 1, rate))
    if approx_kl < low:
        shrunk = kl_coef * (1 + max(approx_kl / low - 1, -rate))
        return min(kl_coef, max(shrunk, smallest))
    return kl_coef


# --------------------------------------------------------------------------------------------------
# The demonstration: the theory's walkthrough, the estimators, then the variants.

def main():
    A = -1.4321
    eps = 0.2
    log_ratios = torch.tensor([0.25, -0.30])
    ratios = log_ratios.exp()
    J, clipped = clipped_objective(log_ratios, A, eps, eps)
    print(f"one answer of two tokens, A = {A}, clip_eps = {eps}\n")
    print("token  log-ratio   ratio       w A  clip(w) A   minimum")
    for t, w in enumerate(ratios):
        print(f"{t + 1:5}  {log_ratios[t]:+9.2f}  {w:6.4f}  {w * A:+8.4f}"
              f"   {w.clamp(1 - eps, 1 + eps) * A:+8.4f}  {J[t]:+8.4f}"
              + ("   clipped: no gradient" if clipped[t] else ""))
    print(f"mean objective {J.mean():+.4f}\n")

    print("d = log ref - log pi          k1          k2          k3")
    for d in (0.5, -0.5, 0.05, 1e-4):
        estimates = [kl_estimate(torch.zeros(()), torch.tensor(d), k) for k in ("k1", "k2", "k3")]
        print(f"{d:20g}" + "".join(f"  {value:10.6g}" for value in estimates))

    print("\nthe variants")
    logprobs = torch.tensor([-1.0])
    for w in (0.5, 1.0, 2.0):
        J, _ = cispo_objective(logprobs, torch.tensor([w]).log(), 1.0, eps)
        print(f"CISPO, A = 1, w = {w}: grad logp is multiplied by {float(J / logprobs):g}")
    weight = sampler_weight(torch.tensor([3.0, 0.5]).log(), torch.zeros(2))
    print(f"sampler correction, pi_old / pi_sampler = 3, 0.5: {weight.tolist()}")
    corrected = corrected_k3(torch.zeros(()), torch.tensor(0.5), torch.tensor(2.0).log())
    print(f"corrected k3, d = 0.5, pi / pi_old = 2: {corrected:.6f}")
    coefficient = gradient_coefficient(torch.ones(1), torch.zeros(1), torch.tensor([2.0]).log())
    print(f"gradient coefficient, A = 1, beta = 0.04, ref/pi = 2: {float(coefficient):.4g}")
    for kl in (0.01, 0.03, 0.10):
        print(f"adaptive beta, 0.04 at {kl:.2f} nats per token: {next_kl_coef(0.04, kl):.4g}")


if __name__ == "__main__":
    main()
