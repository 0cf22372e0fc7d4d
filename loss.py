"""[E] The clipped objective and [F] the KL penalty: tensors in, one scalar out. There is no model here.

    w_t  = exp(logp_t - logp_old_t)                                           the ratio pi / pi_old
    J_t  = min(w_t A, clip(w_t, 1 - eps, 1 + eps) A)                          [E]
    KL_t = exp(d_t) - d_t - 1,   d_t = logp_ref_t - logp_t                    [F], Schulman's k3
    L    = -mean over rows of mean over the row's tokens of (J_t - beta KL_t)

DeepSeekMath, arXiv 2402.03300, eq. 3 and 4. Why the clip: the answers were drawn from pi_old, and say little
about a policy that has moved far from it. Why a minimum: a move for the worse is never hidden by the clip.

Departures from the theory's code map:
- The ratio is taken token by token. The map takes it over the whole answer, exp(sum of differences): at
  256 tokens a drift of 0.01 nats a token is already a ratio of 13.
- k3 is computed as expm1(d) - d. Written exp(d) - d - 1 it is 0.0 in float32 for d = 1e-4.

    python loss.py        # one answer's clip table, and k1, k2, k3 side by side
"""

import torch

KL_ESTIMATORS = ("k1", "k2", "k3")
AGGREGATES = ("sequence", "token", "constant")
RATIOS = ("token", "sequence")


def clipped_objective(log_ratio, advantages, clip_low=0.2, clip_high=0.2):
    """[E] min(w A, clip(w, 1 - low, 1 + high) A) and where the clip was chosen (no gradient flows there).

    log_ratio = logp - logp_old, any shape; advantages broadcast against it. PPO, arXiv 1707.06347, eq. 7.
    """
    w = log_ratio.exp()
    unclipped = w * advantages
    clipped = w.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def kl_estimate(logprobs, ref_logprobs, estimator="k3"):
    """[F] Schulman's estimates of KL(pi || ref) for tokens drawn from pi, from d = log ref - log pi.

    k1 = -d is unbiased but can be negative, and differentiated inside the loss it has zero expected
    gradient on-policy; k2 = d^2 / 2 has the gradient of KL(pi || ref); k3 = e^d - d - 1 is unbiased and
    never negative, and has the gradient of KL(ref || pi): it adds beta (ref/pi - 1) to the advantage.
    """
    d = ref_logprobs - logprobs
    return {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.expm1() - d}[estimator]()


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2, kl_coef=0.04, *,
              clip_eps_high=None, kl_estimator="k3", aggregate="sequence", ratio="token",
              max_new_tokens=None, n_rows=None, n_tokens=None):
    """The GRPO loss of a batch and its metrics: `(loss, {name: detached scalar})`.

    logprobs, old_logprobs, ref_logprobs, mask: (N, S-1), nats; advantages: (N,) or (N, S-1). Where the mask
    is false anything may stand, inf and NaN included. `ref_logprobs` may be None when `kl_coef` is 0.

    clip_eps_high  the upper clip where it differs from the lower one: DAPO's clip-higher, 2503.14476
    ratio          "token": w_t as above;  "sequence": exp(mean of the row's log-ratios), GSPO, 2507.18071
    aggregate      "sequence": mean over each row, then over rows (GRPO);  "token": mean over all tokens
                   (DAPO);  "constant": sum / (rows * max_new_tokens), Dr. GRPO, 2503.20783
    n_rows, n_tokens   sizes of the whole batch, where these rows are only a micro-batch of it: then losses,
                   gradients and metrics of the micro-batches simply add up to those of the batch.

    `clip_fraction` and `ratio_mean` are means over tokens; `approx_kl` is averaged as the loss is, so that
    loss = policy_loss + kl_coef * approx_kl; it is NaN without a reference. ValueError: an option that does
    not exist, "constant" without max_new_tokens, a KL penalty without a reference.
    """
    check(ref_logprobs, kl_coef, kl_estimator, aggregate, ratio, max_new_tokens)
    logprobs, old_logprobs = logprobs.where(mask, 0), old_logprobs.where(mask, 0)
    A = (advantages.unsqueeze(1) if advantages.ndim == 1 else advantages).where(mask, 0)     # (N, S-1)

    def average(values, how):                                                            # (N, S-1) -> ()
        return masked_average(values, mask, how, max_new_tokens, n_rows, n_tokens)

    # [E] ratio and clip
    log_ratio = logprobs - old_logprobs
    if ratio == "sequence":
        log_ratio = row_mean(log_ratio, mask).unsqueeze(1).expand_as(mask)
    log_ratio = log_ratio.clamp(max=20)                  # exp overflows at 88, and inf * 0 would be NaN
    objective, clipped = clipped_objective(
        log_ratio, A, clip_eps, clip_eps if clip_eps_high is None else clip_eps_high)
    policy_loss = -average(objective, aggregate)

    # [F] KL penalty
    if ref_logprobs is None:
        approx_kl, loss = torch.full_like(policy_loss, torch.nan), policy_loss
    else:
        approx_kl = average(kl_estimate(logprobs, ref_logprobs.where(mask, 0), kl_estimator), aggregate)
        loss = policy_loss + kl_coef * approx_kl

    metrics = {"loss": loss, "policy_loss": policy_loss, "approx_kl": approx_kl,
               "clip_fraction": average(clipped.to(loss.dtype), "token"),
               "ratio_mean": average(log_ratio.exp(), "token")}
    return loss, {name: value.detach() for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------
# Averages over tokens. A row without a response token adds 0, and still counts as a row.

def masked_average(values, mask, aggregate, max_new_tokens=None, n_rows=None, n_tokens=None):
    n_rows = len(mask) if n_rows is None else n_rows
    if aggregate == "sequence":
        return row_mean(values, mask).sum() / n_rows
    if aggregate == "constant":
        return (values * mask).sum() / (n_rows * max_new_tokens)
    return (values * mask).sum() / max(int(mask.sum()) if n_tokens is None else n_tokens, 1)


def row_mean(values, mask):                                                              # (N, S-1) -> (N,)
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def check(ref_logprobs, kl_coef, kl_estimator, aggregate, ratio, max_new_tokens):
    for name, value, known in (("kl_estimator", kl_estimator, ("k1", "k2", "k3")),
                               ("aggregate", aggregate, ("sequence", "token", "constant")),
                               ("ratio", ratio, ("token", "sequence"))):
        if value not in known:
            raise ValueError(f"{name} {value!r}: not one of {', '.join(known)}")
    if aggregate == "constant" and not max_new_tokens:
        raise ValueError("aggregate 'constant' divides by max_new_tokens, which is not given")
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs")


if __name__ == "__main__":
    A, eps, log_ratios = -1.4321, 0.2, torch.tensor([0.25, -0.30])
    objective, clipped = clipped_objective(log_ratios, A, eps, eps)
    print(f"one answer of two tokens, A = {A}, clip_eps = {eps}\n")
    print("token  log-ratio   ratio       w A  clip(w) A   minimum")
    for t, w in enumerate(log_ratios.exp()):
        print(f"{t + 1:5}  {log_ratios[t]:+9.2f}  {w:6.4f}  {w * A:+8.4f}   {w.clamp(1 - eps, 1 + eps) * A:+8.4f}"
              f"  {objective[t]:+8.4f}" + ("   clipped: no gradient" if clipped[t] else ""))
    print(f"mean objective {objective.mean():+.4f}\n")
    print("d = log ref - log pi          k1          k2          k3")
    for d in (0.5, -0.5, 0.05, 1e-4):
        estimates = (kl_estimate(torch.zeros(()), torch.tensor(d), name) for name in ("k1", "k2", "k3"))
        print(f"{d:20g}" + "".join(f"  {value:10.6g}" for value in estimates))
