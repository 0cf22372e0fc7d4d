"""[E] [F] loss.py: the clipped objective and the KL penalty.

It promises that `plain_loss` is the formula word for word; that `grpo_loss` is the same loss, and
each of its variants that of its paper, with exact gradients and metrics; that what is masked
changes nothing; and that the losses of micro-batches add up to that of the batch.
"""
import math
from functools import partial
from types import SimpleNamespace
import pytest
import torch
from checks import pairwise, same, seeded, value_error
from loss import (AGGREGATES, KL_ESTIMATORS, OBJECTIVES, RATIOS, clipped_objective,
                  gradient_coefficient, grpo_loss, kl_estimate, next_kl_coef, plain_loss,
                  tis_weight)


def test_by_hand():
    """One answer of two tokens with A = -1.4321, and the reference half a nat away."""
    old = torch.tensor([[-1.00, -1.00]])
    new = torch.tensor([[-0.75, -1.30]])                  # log-ratios +0.25 -0.30
    ref = torch.tensor([[-0.25, -1.80]])                  # d = +0.50 -0.50
    A = torch.tensor([-1.4321])
    J, clipped = clipped_objective(new - old, A, 0.2, 0.2)
    # ratios 1.2840 0.7408, times A -1.8388 -1.0609; clipped to 1.2 and 0.8: -1.7185 -1.1457
    assert J[0].tolist() == pytest.approx([-1.8388, -1.1457], abs=1e-4)       # the smaller ones
    assert clipped.tolist() == [[False, True]]
    KL = kl_estimate(new, ref)                            # e^0.5 - 0.5 - 1 and e^-0.5 + 0.5 - 1
    assert KL[0].tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)
    loss = plain_loss(new, old, ref, A, torch.tensor([[True, True]]))
    assert float(loss) == pytest.approx((1.8388 + 1.1457) / 2 + 0.04 * 0.127626, abs=1e-4)


# --------------------------------------------------------------------------------------------------
# A reader may stop here. What follows: the loss against its formula, estimates, variants, masks.

LIMIT = 11  # max_new_tokens
doubles = partial(torch.tensor, dtype=torch.float64)


def close(found, expected, name="it"):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12,
                               msg=lambda said: f"{name}: {said}")


def agree(what, **sides):
    """Several ways to compute one thing; the message names those with which no other agrees."""
    def is_close(a, b):
        return torch.allclose(a, b, rtol=1e-12, atol=1e-12)

    alone = [name for name, value in sides.items()
             if sum(is_close(value, other) for other in sides.values()) == 1]
    assert not alone, f"{what}: off is {' and '.join(alone)} of {sides}"


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


NAMES = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask")


def batch(seed=0, rows=5, width=7, per_token=False, dtype=torch.float64):
    """What NAMES says: logprobs a leaf, the mask ragged and the second row empty."""
    generator = seeded(seed)
    old = -3 * torch.rand(rows, width, dtype=torch.float64, generator=generator)
    noise = torch.randn(4, rows, width, dtype=torch.float64, generator=generator)
    advantages = noise[2] if per_token else noise[2, :, 0]
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[1] = False
    logprobs, ref = old + 0.3 * noise[0], old + 0.3 * noise[1]
    logprobs, old, ref, advantages = (x.to(dtype) for x in (logprobs, old, ref, advantages))
    return logprobs.requires_grad_(), old, ref, advantages, mask


def sampler_of(old):
    """Log-probabilities that differ from old's: some weights are above a cap of 1.2, some below."""
    noise = torch.randn(old.shape, dtype=torch.float64, generator=seeded(7))
    return old + 0.3 * noise.to(old.dtype)


def reference_terms(logprobs, old, ref, advantages, mask, clip_eps=0.2, clip_eps_high=None,
                    kl_estimator="k3", ratio="token", objective="clip", sampler_logprobs=None,
                    sampler_cap=2.0):
    """The formulas, token by token -> {(n, t): its terms}."""
    low = 1 - clip_eps
    high = 1 + (clip_eps if clip_eps_high is None else clip_eps_high)
    terms = {}
    for n in range(len(mask)):
        tokens = [t for t in range(len(mask[n])) if mask[n, t]]
        L = len(tokens)
        for t in tokens:
            A = advantages[n] if advantages.ndim == 1 else advantages[n, t]
            pi, pi_old, pi_ref = (x[n, t].exp() for x in (logprobs, old, ref))
            w = {"token": pi / pi_old, "sequence": torch.exp(
                sum(logprobs[n, u] - old[n, u] for u in tokens) / L)}[ratio]
            above = bool(w > high)
            below = bool(w < low)
            if objective == "clip":
                bounded = low if below else high if above else w
                J = w * A if w * A <= bounded * A else bounded * A
                below, above = bool(below and A < 0), bool(above and A > 0)
            elif objective == "cispo":
                J = min(float(w.detach()), high) * A * torch.log(pi)
                below = False
            if sampler_logprobs is not None:
                J = J * min(float(pi_old / sampler_logprobs[n, t].exp()), sampler_cap)
            k1, k3 = torch.log(pi / pi_ref), pi_ref / pi - torch.log(pi_ref / pi) - 1
            kl = {"k1": k1, "k2": k1**2 / 2, "k3": k3, "k3_corrected": pi / pi_old * k3}
            terms[n, t] = SimpleNamespace(J=J, below=below, above=above, kl=kl[kl_estimator], w=w,
                                          L=L, A=float(A), pull=float((pi_ref / pi).detach()) - 1)
    return terms


# The words that reference_terms and reference know, in whatever option they stand
KNOWN = ("sequence", "token", "constant", "clip", "cispo", "k1", "k2", "k3", "k3_corrected")


def reference(*data, kl_coef=0.04, aggregate="sequence", **options):
    """-> the loss and its metrics, as grpo_loss gives them."""
    for word in (aggregate, *options.values()):
        if isinstance(word, str) and word not in KNOWN:
            pytest.fail(f"no formula here for {word!r}: write it into reference_terms")
    N = len(data[4])
    terms = reference_terms(*data, **options).values()
    below = sum(term.below for term in terms) / len(terms)
    above = sum(term.above for term in terms) / len(terms)

    def average(name):
        if aggregate == "sequence":
            return sum(getattr(term, name) / term.L for term in terms) / N
        total = sum(getattr(term, name) for term in terms)
        return total / len(terms) if aggregate == "token" else total / (N * LIMIT)

    policy_loss, kl = -average("J"), average("kl")
    loss = policy_loss + kl_coef * kl
    return loss, {"loss": float(loss.detach()), "policy_loss": float(policy_loss.detach()),
                  "approx_kl": float(kl.detach()), "clip_fraction": below + above,
                  "clip_fraction_low": below, "clip_fraction_high": above,
                  "ratio_mean": float(sum(term.w for term in terms).detach() / len(terms)),
                  "positive_advantages": sum(term.A > 0 for term in terms) / len(terms),
                  "gradient_coefficient": sum(term.A + kl_coef * term.pull
                                              for term in terms) / len(terms)}


@pytest.mark.parametrize("options", [{}, dict(clip_eps=0.1, kl_coef=0.3), dict(kl_coef=0)])
@pytest.mark.parametrize("seed", range(3))
def test_the_definition(seed, options):
    data = batch(seed)
    data[4][:, seed] = True  # every row has a token
    plain = plain_loss(*data, **options)
    terms, _ = reference(*data, **{"clip_eps": 0.2, **options})
    general, metrics = grpo_loss(*data, **options)
    assert 0 < float(metrics["clip_fraction"]) < 1
    agree("loss", plain_loss=plain, grpo_loss=general, reference=terms)
    agree("gradient", plain_loss=gradient(plain, data[0]), grpo_loss=gradient(general, data[0]),
          reference=gradient(terms, data[0]))


@pytest.mark.parametrize("words", pairwise(
    AGGREGATES, RATIOS, KL_ESTIMATORS, OBJECTIVES,
    [(None, None), (0.28, None), (0.28, 1.2)]), ids=str)
def test_the_formula(words):
    """The loss, its gradient and its metrics against the formulas, token by token on scalars."""
    aggregate, ratio, kl_estimator, objective, (clip_eps_high, sampler_cap) = words
    options = dict(clip_eps=0.1, kl_coef=0.3, clip_eps_high=clip_eps_high, aggregate=aggregate,
                   kl_estimator=kl_estimator, ratio=ratio, objective=objective)
    for seed, per_token in ((0, False), (1, True)):
        data = batch(seed, rows=7, width=5, per_token=per_token)
        logprobs, old, _, advantages, mask = data
        with torch.no_grad():
            logprobs[0] = old[0] + 0.5                    # above the clip
            logprobs[2] = old[2]                          # inside
            logprobs[5] = old[5] - 0.5                    # below
            logprobs[6] = old[6] + 0.3
        advantages[0].abs_()
        advantages[4] = 0                                 # never clipped
        mask[[0, 2, 5]] = True
        mask[6] = torch.arange(5) == 3                    # an answer of one token
        if sampler_cap:
            sampler = sampler_of(old)
            capped = (old - sampler).exp()[mask] > sampler_cap
            assert capped.any() and not capped.all()
            options |= dict(sampler_logprobs=sampler, sampler_cap=sampler_cap)
        expected, expected_metrics = reference(*data, **options)
        value, metrics = grpo_loss(*data, max_new_tokens=LIMIT, **options)
        assert metrics.keys() == expected_metrics.keys() and metrics["loss"] == value
        for metric in metrics.values():
            assert metric.shape == () and metric.dtype == torch.float64 and not metric.requires_grad
        close(value, expected, "grpo_loss against the reference")
        close(gradient(value, logprobs), gradient(expected, logprobs), "the gradient of grpo_loss")
        for name, number in expected_metrics.items():
            assert float(metrics[name]) == pytest.approx(number, rel=1e-12, abs=1e-12), name
        assert 0 < metrics["clip_fraction"] < 1           # both branches were taken


# --- [F] near zero; the script below shows the theory's walkthrough -------------------------------
def test_k3_near_zero_and_never_negative():
    d = torch.tensor([1e-4, -1e-4, 1e-3, -1e-3])
    assert float(d[0].exp() - d[0] - 1) == 0.0  # the form that rounds away
    expected = [x * x / 2 + x**3 / 6 for x in d.double().tolist()]
    assert kl_estimate(torch.zeros(4), d, "k3").tolist() == pytest.approx(expected, rel=2e-3)
    small = torch.logspace(-12, 0, 500)
    d = torch.cat((torch.linspace(-20, 20, 2001), small, -small))
    assert float(kl_estimate(torch.zeros(3001), d, "k3").min()) >= 0


@pytest.mark.parametrize("per_token, beta", [(False, {}), (True, {"kl_coef": 0.3})])
def test_the_gradient_coefficient(per_token, beta):
    """On-policy the gradient is (A + beta (ref/pi - 1)) grad log pi; beta is 0.04 by default."""
    logprobs, _, ref, A, mask = batch(6, per_token=per_token)
    old = logprobs.detach()
    weights = mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)
    value, _ = grpo_loss(logprobs, old, ref, A, mask, **beta)
    close(gradient(value, logprobs), -gradient_coefficient(A, old, ref, **beta) * weights)


# --- [F] What each estimate of the KL is an estimate of -------------------------------------------
@pytest.mark.parametrize("estimator, off_policy, is_the_kl, has_gradient_of", [
    ("k1", False, True, "nothing"), ("k2", False, False, "KL(pi|ref)"),
    ("k3", False, True, "KL(ref|pi)"), ("k3_corrected", False, True, "KL(pi|ref)"),
    ("k3_corrected", True, True, "KL(pi|ref)"), ("k3", True, False, "none of them")])
def test_the_expected_penalty_and_its_gradient(estimator, off_policy, is_the_kl, has_gradient_of):
    """Exactly, over every outcome that pi, or another policy, may have drawn."""
    theta = doubles([0.3, -1.0, 0.8, 0.1, -0.4]).requires_grad_()
    log_ref = doubles([-0.5, 0.2, 1.0, -1.2, 0.6]).log_softmax(0)
    log_pi = theta.log_softmax(0)
    log_old = doubles([0.9, 0.1, -0.6, 0.0, 0.5]).log_softmax(0) if off_policy else log_pi.detach()
    kl = (log_pi.exp() * (log_pi - log_ref)).sum()
    reverse_kl = (log_ref.exp() * (log_ref - log_pi)).sum()
    gradients = {"nothing": torch.zeros(5).double(), "KL(pi|ref)": gradient(kl, theta),
                 "KL(ref|pi)": gradient(reverse_kl, theta)}
    mean = (log_old.exp() * kl_estimate(log_pi, log_ref, estimator, log_old)).sum()
    distances = [(name == has_gradient_of, (gradient(mean, theta) - exact).abs().max())
                 for name, exact in gradients.items()]
    for is_it, distance in (*distances, (is_the_kl, (mean - kl).abs())):
        assert distance < 1e-12 if is_it else distance > 0.01


def test_no_penalty_needs_no_reference():
    logprobs, old, ref, advantages, mask = batch()
    value, metrics = grpo_loss(logprobs, old, None, advantages, mask, kl_coef=0)
    assert math.isnan(metrics["approx_kl"]) and metrics["approx_kl"].shape == ()
    assert metrics["loss"] == metrics["policy_loss"] == value
    with_ref, metrics = grpo_loss(logprobs, old, ref, advantages, mask, kl_coef=0)
    assert with_ref == value and float(metrics["approx_kl"]) > 0


OTHER = dict(low=0.1, high=0.2, rate=0.3)  # another band, another rate


@pytest.mark.parametrize("approx_kl, factor, options", [
    (0.02, 1, {}), (0.03, 1, {}), (0.05, 1, {}),  # inside the band, its ends included
    (0.0525, 1.05, {}), (0.055, 1.1, {}), (math.inf, 1.1, {}),  # above it
    (0.019, 0.95, {}), (0.018, 0.9, {}), (0.0, 0.9, {}), (-0.5, 0.9, {}),  # below it
    (0.3, 1.3, OTHER), (0.25, 1.25, OTHER), (0.01, 0.7, OTHER), (0.15, 1, OTHER)])
def test_next_kl_coef(approx_kl, factor, options):
    following = next_kl_coef(0.04, approx_kl, **options)
    assert following == pytest.approx(0.04 * factor, rel=1e-12) and isinstance(following, float)
    # never negative, and never stuck
    assert next_kl_coef(1e-8, 0.0) == 1e-8 and next_kl_coef(0.0, 0.03) == 0.0
    assert next_kl_coef(0.0, 1.0) > 0


# --- [E] Variants ---------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio, objective", pairwise(RATIOS, OBJECTIVES))
def test_a_ratio_beyond_float32_stays_finite(ratio, objective):
    """exp(200) is inf, and inf * 0 would be NaN in a row whose advantage is 0."""
    logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    data = (logprobs, torch.full((2, 1), -201.0), None, torch.tensor([0.0, -1.0]), logprobs < 0)
    value, metrics = grpo_loss(*data, kl_coef=0, ratio=ratio, objective=objective)
    assert value.isfinite() and gradient(value, logprobs).isfinite().all()
    assert metrics["ratio_mean"].isfinite()
    # Beside the reference the KL is 0, and its corrected estimate is 0 times the ratio
    near = torch.tensor([[-1.0], [-3.0]])
    value, metrics = grpo_loss(*data[:2], near, *data[3:], kl_estimator="k3_corrected",
                               ratio=ratio, objective=objective)
    assert metrics["approx_kl"].isfinite() and gradient(value, logprobs).isfinite().all()


def test_truncated_importance_sampling():
    """No gradient flows through it; `test_the_formula` has the loss with it."""
    old = torch.zeros(1, 5, requires_grad=True)
    sampler = -torch.tensor([[3.0, 2.0, 0.5, 1.0, math.inf]]).log()
    for cap, weights in ((2.0, [2, 2, 0.5, 1, 2]), (2.5, [2.5, 2, 0.5, 1, 2.5])):
        found = tis_weight(old, sampler, cap)
        assert found[0].tolist() == pytest.approx(weights) and not found.requires_grad
    logprobs, old, _, advantages, mask = batch()
    loss_of = partial(grpo_loss, logprobs, old, None, advantages, mask, kl_coef=0)
    trebled, _ = loss_of(sampler_logprobs=old - math.log(3))   # above the default cap of 2
    close(trebled, 2 * loss_of()[0])


# --- Masks, and a batch cut into micro-batches ----------------------------------------------------
def batch_and_loss(aggregate, ratio, kl_estimator, objective, **shape):
    """A batch with the sampler's log-probs as the last, and the loss as a function of it."""
    def loss_of(*data, **sizes):
        return grpo_loss(*data[:5], sampler_logprobs=data[5], max_new_tokens=LIMIT, ratio=ratio,
                         kl_estimator=kl_estimator, aggregate=aggregate, objective=objective,
                         **sizes)

    data = batch(**shape)
    return (*data, sampler_of(data[1])), loss_of


@pytest.mark.parametrize("options", pairwise(AGGREGATES, RATIOS, KL_ESTIMATORS, OBJECTIVES),
                         ids=" ".join)
def test_what_is_masked_does_not_matter(options):
    clean, loss_of = batch_and_loss(*options, per_token=True)
    mask = clean[4]
    expected, expected_metrics = loss_of(*clean)
    expected_gradient = gradient(expected, clean[0])
    assert expected.isfinite() and not expected_gradient[~mask].any()
    together = (0, 1, 2, 3, 5)  # NaN in one tensor at a time; everything else in all five
    cases = [(math.nan, (place,)) for place in together]
    cases += [(garbage, together) for garbage in (math.nan, math.inf, -math.inf, 1e30)]
    for garbage, places in cases:
        data = list(clean)
        for place in places:
            data[place] = data[place].detach().masked_fill(~mask, garbage)
        data[0] = data[0].detach().requires_grad_()
        value, metrics = loss_of(*data)
        assert value == expected and metrics == expected_metrics
        same(gradient(value, data[0]), expected_gradient, f"the gradient with {garbage}")
    # Of a batch without tokens nothing is left
    nothing, metrics = loss_of(*clean[:4], mask & False, clean[5])
    assert nothing == 0 and not gradient(nothing, clean[0]).any()
    assert all(metric == 0 for metric in metrics.values())


@pytest.mark.parametrize("words", pairwise(
    AGGREGATES, RATIOS, ("k3", "k3_corrected"), OBJECTIVES, [False, True]), ids=str)
def test_micro_batches_add_up(words):
    *options, per_token = words
    data, loss_of = batch_and_loss(*options, rows=9, per_token=per_token)
    value, metrics = loss_of(*data)
    whole = {"value": value.detach(), "gradient": gradient(value, data[0]), **metrics}
    for cut in ([1] * 9, [2, 3, 4]):
        totals = dict.fromkeys(whole, 0)
        for parts in zip(*(x.split(cut) for x in data)):
            part, metrics = loss_of(*parts, n_rows=9, n_tokens=int(data[4].sum()))
            found = {"value": part.detach(), "gradient": gradient(part, data[0]), **metrics}
            totals = {name: totals[name] + number for name, number in found.items()}
        for name, number in whole.items():
            close(totals[name], number, name)


# --- Refusals, and the script ---------------------------------------------------------------------
@pytest.mark.parametrize("option", ["kl_estimator", "aggregate", "ratio", "objective"])
def test_refusals(option):
    given = dict(zip(NAMES, batch()))
    with pytest.raises(KeyError, match="'k4'"):
        grpo_loss(**given, **{option: "k4"})
    with value_error("kl_coef 0.04 needs ref_logprobs"):
        grpo_loss(**{**given, "ref_logprobs": None})


def test_script_shows_the_walkthrough(run_here):
    printed = run_here("loss.py")
    rows = {row[0]: row[1:] for row in map(str.split, printed.splitlines()) if row}
    assert printed.isascii() and rows["2"][5:] == ["clipped:", "no", "gradient"]
    assert float(rows["mean"][1]) == pytest.approx(-1.4923, abs=1.5e-4)
    assert list(map(float, rows["0.0001"])) == pytest.approx([-1e-4, 5e-9, 5e-9], rel=2e-3)
    factors = [row.split()[-2:] for row in printed.splitlines()[-3:]]
    assert factors == [["0.5", "0.98"], ["1", "1"], ["2", "1.04"]]
