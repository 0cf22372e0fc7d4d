"""[E] [F] loss.py: the loss against its formula, the clip, the KL, variants, masks, cutting."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import loss
from loss import (
    AGGREGATES,
    KL_ESTIMATORS,
    OBJECTIVES,
    RATIOS,
    cispo_objective,
    clipped_objective,
    gradient_coefficient,
    grpo_loss,
    kl_estimate,
    next_kl_coef,
    token_terms,
)

ROOT = Path(loss.__file__).resolve().parent
ESTIMATORS = ("k1", "k2", "k3")
LIMIT = 11  # max_new_tokens


def batch(seed=0, rows=5, width=7, per_token=False, dtype=torch.float64):
    """logprobs (a leaf), old_logprobs, ref_logprobs, advantages, mask: ragged, an empty row."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, dtype=torch.float64, generator=generator)
    noise = torch.randn(4, rows, width, dtype=torch.float64, generator=generator)
    advantages = noise[2] if per_token else noise[2, :, 0]
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[1] = False
    logprobs, ref = old + 0.3 * noise[0], old + 0.3 * noise[1]
    logprobs, old, ref, advantages = (x.to(dtype) for x in (logprobs, old, ref, advantages))
    return logprobs.requires_grad_(), old, ref, advantages, mask


def sampler_of(old, seed=7):
    """Log-probabilities that differ from old's: some weights are above a cap of 1.2, some below."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(old.shape, dtype=torch.float64, generator=generator)
    return old + 0.3 * noise.to(old.dtype)


def reference_terms(
    logprobs,
    old,
    ref,
    advantages,
    mask,
    clip_eps=0.2,
    clip_eps_high=None,
    kl_estimator="k3",
    ratio="token",
    objective="clip",
    sampler=None,
    sampler_cap=2.0,
):
    """The formulas, token by token, on scalars -> {(n, t): its terms}."""
    low = 1 - clip_eps
    high = 1 + (clip_eps if clip_eps_high is None else clip_eps_high)
    terms = {}
    for n in range(len(mask)):
        tokens = [t for t in range(len(mask[n])) if mask[n, t]]
        L = len(tokens)
        for t in tokens:
            A = advantages[n] if advantages.ndim == 1 else advantages[n, t]
            pi, pi_old, pi_ref = (x[n, t].exp() for x in (logprobs, old, ref))
            w = pi / pi_old
            if ratio == "sequence":
                w = torch.exp(sum(logprobs[n, u] - old[n, u] for u in tokens) / L)
            bounded = low if w < low else high if w > high else w
            if objective == "clip":
                J = w * A if w * A <= bounded * A else bounded * A
                below = bool(w < low and A < 0)
                above = bool(w > high and A > 0)
            else:
                J = min(float(w.detach()), high) * A * torch.log(pi)
                below = False
                above = bool(w > high)
            if sampler is not None:
                J = J * min(float(pi_old / sampler[n, t].exp()), sampler_cap)
            k3 = pi_ref / pi - torch.log(pi_ref / pi) - 1
            kl = {
                "k1": torch.log(pi / pi_ref),
                "k2": torch.log(pi / pi_ref) ** 2 / 2,
                "k3": k3,
                "k3_corrected": pi / pi_old * k3,
            }[kl_estimator]
            terms[n, t] = SimpleNamespace(J=J, below=below, above=above, kl=kl, w=w, L=L)
    return terms


def reference(*data, kl_coef=0.04, aggregate="sequence", **options):
    """The loss and the metrics, from the terms of every token."""
    N = len(data[4])
    terms = reference_terms(*data, **options).values()
    below = [term.below for term in terms]
    above = [term.above for term in terms]
    ratios = [term.w for term in terms]

    def average(name):
        if aggregate == "sequence":
            return sum(getattr(term, name) / term.L for term in terms) / N
        total = sum(getattr(term, name) for term in terms)
        return total / len(terms) if aggregate == "token" else total / (N * LIMIT)

    policy_loss, kl = -average("J"), average("kl")
    return policy_loss + kl_coef * kl, {
        "loss": float(policy_loss.detach() + kl_coef * kl.detach()),
        "policy_loss": float(policy_loss.detach()),
        "approx_kl": float(kl.detach()),
        "clip_fraction": (sum(below) + sum(above)) / len(below),
        "clip_fraction_low": sum(below) / len(below),
        "clip_fraction_high": sum(above) / len(above),
        "ratio_mean": float(sum(ratios).detach() / len(ratios)),
    }


def every(*options):
    return list(itertools.product(*options))


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf)[0]


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ----- against the formula -----


@pytest.mark.parametrize(
    "aggregate, ratio, kl_estimator, objective, clip_eps_high",
    every(AGGREGATES, RATIOS, KL_ESTIMATORS, OBJECTIVES, (None, 0.28)),
)
def test_the_formula(aggregate, ratio, kl_estimator, objective, clip_eps_high):
    options = dict(
        clip_eps=0.1,
        kl_coef=0.3,
        clip_eps_high=clip_eps_high,
        aggregate=aggregate,
        kl_estimator=kl_estimator,
        ratio=ratio,
        objective=objective,
    )
    fractions = []
    for seed, per_token in ((0, False), (1, True)):
        data = batch(seed, rows=8, per_token=per_token)
        expected, expected_metrics = reference(*data, **options)
        value, metrics = grpo_loss(*data, max_new_tokens=LIMIT, **options)
        assert value.shape == () and value.dtype == torch.float64
        close(value, expected)
        close(gradient(value, data[0]), gradient(expected, data[0]))
        for name, number in expected_metrics.items():
            assert float(metrics[name]) == pytest.approx(number, rel=1e-12, abs=1e-12), name
        fractions.append(float(metrics["clip_fraction"]))
    assert any(
        0 < fraction < 1 for fraction in fractions
    )  # both branches of the minimum were taken


@pytest.mark.parametrize(
    "ratio, kl_estimator, objective, corrected",
    every(RATIOS, KL_ESTIMATORS, OBJECTIVES, (False, True)),
)
def test_the_terms_of_every_token(ratio, kl_estimator, objective, corrected):
    """What grpo_loss averages: each token's J, whether the clip bit, its KL, its log-ratio."""
    logprobs, old, ref, advantages, mask = batch(8, rows=8, per_token=corrected)
    options = dict(
        clip_eps=0.1,
        clip_eps_high=0.08,
        ratio=ratio,
        kl_estimator=kl_estimator,
        objective=objective,
        sampler_cap=1.2,
    )
    sampler = sampler_of(old) if corrected else None
    expected = reference_terms(
        logprobs.detach(), old, ref, advantages, mask, sampler=sampler, **options
    )
    garbage = (x.masked_fill(~mask, math.nan) for x in (logprobs, old, ref))
    terms = token_terms(*garbage, advantages, mask, sampler_logprobs=sampler, **options)
    J, clipped, kl, log_ratio = terms
    assert all(term.shape == mask.shape and term.isfinite().all() for term in terms)
    assert clipped.dtype == torch.bool and set(expected) == {
        tuple(place) for place in mask.nonzero().tolist()
    }
    for place, term in expected.items():
        close(J[place].detach(), term.J)
        close(kl[place].detach(), term.kl)
        close(log_ratio[place].detach(), term.w.log())
        assert bool(clipped[place]) == (term.below or term.above)
    assert 0 < sum(term.below or term.above for term in expected.values()) < len(expected)


def test_the_terms_of_plain_grpo():
    """Without options they are the two plain formulas, and without a reference there is no KL."""
    logprobs, old, ref, advantages, mask = batch(9)
    J, clipped, kl, log_ratio = token_terms(logprobs, old, ref, advantages, mask)
    plain_J, plain_clipped = clipped_objective(logprobs - old, advantages[:, None])
    assert torch.equal(J[mask], plain_J[mask]) and torch.equal(clipped[mask], plain_clipped[mask])
    assert torch.equal(kl[mask], kl_estimate(logprobs, ref)[mask])
    assert torch.equal(log_ratio[mask], (logprobs - old)[mask])
    without = token_terms(logprobs, old, None, advantages, mask)
    assert without[2] is None and torch.equal(without[0], J)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(kl_estimator="k4"), "kl_estimator 'k4'"),
        (dict(ratio="row"), "ratio 'row'"),
        (dict(objective="ppo"), "objective 'ppo'"),
        (dict(sampler_cap=0.0), "sampler_cap 0.0"),
    ],
)
def test_the_terms_refuse(options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        token_terms(*batch(), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("aggregate, ratio, objective", every(AGGREGATES, RATIOS, OBJECTIVES))
def test_the_sampler_correction(aggregate, ratio, objective):
    data = batch(3, rows=8)
    sampler = sampler_of(data[1])
    for cap in (1.2, 2.0):
        options = dict(aggregate=aggregate, ratio=ratio, objective=objective, sampler_cap=cap)
        expected, expected_metrics = reference(*data, sampler=sampler, **options)
        value, metrics = grpo_loss(*data, sampler_logprobs=sampler, max_new_tokens=LIMIT, **options)
        close(value, expected)
        close(gradient(value, data[0]), gradient(expected, data[0]))
        for name, number in expected_metrics.items():
            assert float(metrics[name]) == pytest.approx(number, rel=1e-12, abs=1e-12), name
    capped = (data[1] - sampler).exp()[data[4]] > 1.2
    assert capped.any() and not capped.all()


@pytest.mark.parametrize(
    "aggregate, ratio, kl_estimator", every(AGGREGATES, RATIOS, ("k3", "k3_corrected"))
)
def test_the_gradient_is_that_of_the_loss(aggregate, ratio, kl_estimator):
    """By finite differences. CISPO is left out: its loss's gradient is not its value's slope."""
    logprobs, *rest = batch(2)
    options = dict(
        aggregate=aggregate,
        ratio=ratio,
        kl_estimator=kl_estimator,
        sampler_logprobs=sampler_of(rest[0]),
        max_new_tokens=LIMIT,
    )
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, *rest, **options)[0], logprobs)


def test_float32():
    exact, _ = grpo_loss(*batch())
    value, metrics = grpo_loss(*batch(dtype=torch.float32))
    assert value.dtype == torch.float32 and all(
        metric.dtype == torch.float32 for metric in metrics.values()
    )
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)


def test_the_defaults():
    data = batch()
    expected, _ = reference(
        *data,
        clip_eps=0.2,
        kl_coef=0.04,
        kl_estimator="k3",
        aggregate="sequence",
        ratio="token",
        objective="clip",
    )
    close(grpo_loss(*data)[0], expected)
    sampler = data[1] - math.log(3)  # every weight is 3, above the default cap of 2
    doubled, _ = grpo_loss(*data[:2], None, *data[3:], kl_coef=0, sampler_logprobs=sampler)
    close(doubled, 2 * grpo_loss(*data[:2], None, *data[3:], kl_coef=0)[0])


def test_on_policy_the_loss_is_minus_the_mean_advantage():
    logprobs, _, _, advantages, mask = batch()
    mask[1, 3] = True  # no empty row
    for ratio in RATIOS:
        value, metrics = grpo_loss(
            logprobs, logprobs.detach(), None, advantages, mask, kl_coef=0, ratio=ratio
        )
        close(value.detach(), -advantages.mean())
        assert metrics["clip_fraction"] == 0 and float(metrics["ratio_mean"]) == pytest.approx(1)
        weights = -advantages[:, None] / mask.sum(dim=1, keepdim=True) / len(mask) * mask
        close(gradient(value, logprobs), weights)  # REINFORCE, with the advantage for a reward


# ----- [E] the clip -----

WALKTHROUGH = torch.tensor([[0.25, -0.30]], dtype=torch.float64)  # the log-ratios of response 3


def test_walkthrough():
    objective, clipped = clipped_objective(WALKTHROUGH[0], -1.4321)
    assert WALKTHROUGH[0].exp().tolist() == pytest.approx([1.2840, 0.7408], abs=5e-5)
    assert objective.tolist() == pytest.approx([-1.8388, -1.1457], abs=1e-4)
    assert clipped.tolist() == [False, True]


def test_the_clip_is_symmetric_by_default():
    objective, clipped = clipped_objective(torch.tensor([0.5, 0.5]), torch.tensor([1.0, -1.0]))
    assert objective.tolist() == pytest.approx([1.2, -math.exp(0.5)])
    assert clipped.tolist() == [True, False]


@pytest.mark.parametrize("ratio, objective", every(RATIOS, OBJECTIVES))
def test_a_ratio_beyond_float32_stays_finite(ratio, objective):
    """exp(200) is inf, and inf * 0 would be NaN in a row whose advantage is 0."""
    logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    old = torch.full((2, 1), -201.0)
    value, metrics = grpo_loss(
        logprobs, old, None, torch.tensor([0.0, -1.0]), torch.ones(2, 1) > 0, kl_coef=0,
        ratio=ratio, objective=objective,
    )
    assert value.isfinite() and gradient(value, logprobs).isfinite().all()
    assert metrics["ratio_mean"].isfinite()


def test_walkthrough_loss():
    old, A = (
        torch.tensor([[-1.0, -2.0]], dtype=torch.float64),
        torch.tensor([-1.4321], dtype=torch.float64),
    )
    logprobs, mask = (old + WALKTHROUGH).requires_grad_(), torch.tensor([[True, True]])
    value, metrics = grpo_loss(logprobs, old, None, A, mask, kl_coef=0)
    assert value.item() == pytest.approx(1.4923, abs=5e-5)
    assert metrics["clip_fraction"] == 0.5
    assert float(metrics["ratio_mean"]) == pytest.approx((1.2840 + 0.7408) / 2, abs=5e-5)
    flows, stopped = gradient(value, logprobs)[0].tolist()
    assert flows == pytest.approx(1.8388 / 2, abs=5e-5)
    assert stopped == 0.0


@pytest.mark.parametrize(
    "A, log_ratio, expected, clipped",
    [
        (1.0, 0.5, 1.3, True),
        (1.0, 0.25, math.exp(0.25), False),
        (1.0, -0.5, math.exp(-0.5), False),
        (-1.0, 0.5, -math.exp(0.5), False),
        (-1.0, -0.2, -math.exp(-0.2), False),
        (-1.0, -0.5, -0.8, True),
        (0.0, 0.5, 0.0, False),
        (0.0, -0.5, 0.0, False),
    ],
)
def test_only_moves_for_the_better_are_clipped(A, log_ratio, expected, clipped):
    leaf = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    objective, was_clipped = clipped_objective(leaf, A, 0.2, 0.3)
    assert objective.item() == pytest.approx(expected, abs=1e-12) and bool(was_clipped) == clipped
    assert float(gradient(objective, leaf)) == pytest.approx(
        0 if clipped else A * math.exp(log_ratio), abs=1e-12
    )


def test_the_sequence_ratio_has_one_value_a_row():
    """GSPO: the geometric mean of a row's ratios; all of its tokens are clipped, or none."""
    old = torch.zeros(2, 4, dtype=torch.float64)
    logprobs = torch.tensor(
        [[0.4, 0.2, 0.0, 9.0], [0.9, -0.9, 0.1, -0.1]], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    A = torch.tensor([2.0, 2.0], dtype=torch.float64)
    value, metrics = grpo_loss(
        logprobs, old, None, A, mask, kl_coef=0, ratio="sequence", clip_eps=0.1
    )
    assert value.item() == pytest.approx(-(1.1 * 2 + 1.0 * 2) / 2)  # exp(0.2) is above 1.1
    assert float(metrics["clip_fraction"]) == pytest.approx(3 / 7)
    assert float(metrics["ratio_mean"]) == pytest.approx((3 * math.exp(0.2) + 4) / 7)
    close(
        gradient(value, logprobs), torch.tensor([[0.0] * 4, [-2 / 4 / 2] * 4], dtype=torch.float64)
    )


# ----- [F] the penalty -----


@pytest.mark.parametrize(
    "d, k1, k2, k3",
    [(0.5, -0.5, 0.125, 0.148721), (-0.5, 0.5, 0.125, 0.106531), (0.0, 0.0, 0.0, 0.0)],
)
def test_worked_estimates(d, k1, k2, k3):
    logprobs = torch.tensor(-1.25)
    estimates = [float(kl_estimate(logprobs, logprobs + d, name)) for name in ESTIMATORS]
    assert estimates == pytest.approx([k1, k2, k3], abs=5e-7)


def test_k3_near_zero():
    d = torch.tensor([1e-4, -1e-4, 1e-3, -1e-3])
    assert float(d[0].exp() - d[0] - 1) == 0.0  # the form that rounds away
    expected = [x * x / 2 + x**3 / 6 for x in d.double().tolist()]
    assert kl_estimate(torch.zeros(4), d, "k3").tolist() == pytest.approx(expected, rel=2e-3)


def test_k3_is_never_negative():
    d = torch.cat(
        (torch.linspace(-20, 20, 2001), torch.logspace(-12, 0, 500), -torch.logspace(-12, 0, 500))
    )
    assert float(kl_estimate(torch.zeros(3001), d, "k3").min()) >= 0


@pytest.mark.parametrize("ref_over_pi, coefficient", [(2.0, 1.04), (1.0, 1.0), (0.5, 0.98)])
def test_the_gradient_coefficient(ref_over_pi, coefficient):
    """On-policy the gradient is (A + beta (ref/pi - 1)) grad log pi: above A where ref is above."""
    logprobs = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    ref = logprobs.detach() + math.log(ref_over_pi)
    value, _ = grpo_loss(
        logprobs, logprobs.detach(), ref, torch.ones(1).double(), torch.ones(1, 1) > 0
    )
    assert -float(gradient(value, logprobs)) == pytest.approx(coefficient)


@pytest.mark.parametrize("kl_estimator", ESTIMATORS)
def test_the_expected_gradient_of_the_penalty(kl_estimator):
    """Exactly, over every outcome: k1 gives 0, k2 grad KL(pi|ref), k3 grad KL(ref|pi)."""
    theta = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    log_ref = torch.tensor([-0.5, 0.2, 1.0, -1.2, 0.6], dtype=torch.float64).log_softmax(0)
    log_pi = theta.log_softmax(0)
    forward_kl = gradient((log_pi.exp() * (log_pi - log_ref)).sum(), theta)
    log_pi = theta.log_softmax(0)
    reverse_kl = gradient((log_ref.exp() * (log_ref - log_pi)).sum(), theta)
    expected = {"k1": torch.zeros(5).double(), "k2": forward_kl, "k3": reverse_kl}[kl_estimator]
    assert float((forward_kl - reverse_kl).abs().max()) > 0.01

    total = torch.zeros(5, dtype=torch.float64)
    for outcome in range(5):
        logprob = theta.log_softmax(0)[outcome].view(1, 1)
        value, _ = grpo_loss(
            logprob,
            logprob.detach(),
            log_ref[outcome].view(1, 1),
            torch.zeros(1).double(),
            torch.ones(1, 1) > 0,
            kl_coef=1.0,
            kl_estimator=kl_estimator,
        )
        total += theta.detach().softmax(0)[outcome] * gradient(value, theta)
    close(total, expected)


@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
def test_the_expected_penalty_is_the_kl(kl_estimator):
    log_pi, log_ref = (
        torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).double().log_softmax(1)
    )
    mean = (log_pi.exp() * kl_estimate(log_pi, log_ref, kl_estimator)).sum()
    close(mean, (log_pi.exp() * (log_pi - log_ref)).sum())


def test_no_penalty_needs_no_reference():
    logprobs, old, ref, advantages, mask = batch()
    value, metrics = grpo_loss(logprobs, old, None, advantages, mask, kl_coef=0)
    assert math.isnan(metrics["approx_kl"]) and metrics["approx_kl"].shape == ()
    assert metrics["loss"] == metrics["policy_loss"] == value
    with_ref, metrics = grpo_loss(logprobs, old, ref, advantages, mask, kl_coef=0)
    assert with_ref == value and float(metrics["approx_kl"]) > 0
    close(gradient(value, logprobs), gradient(with_ref, logprobs))


# ----- variants -----


@pytest.mark.parametrize(
    "w, A, weight, capped",
    [
        (0.5, 1.0, 0.5, False),
        (1.29, 1.0, 1.29, False),
        (3.0, 1.0, 1.3, True),
        (3.0, -2.0, 1.3, True),
        (0.1, -2.0, 0.1, False),
        (3.0, 0.0, 1.3, True),
    ],
)
def test_cispo(w, A, weight, capped):
    """Below the cap the weight is w, above it the cap, and a gradient flows whatever A's sign."""
    logprob = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
    old = logprob.detach() - math.log(w)
    J, beyond = cispo_objective(logprob, logprob - old, A, 0.3)
    assert J.item() == pytest.approx(weight * A * -1.5) and bool(beyond) == capped
    assert float(gradient(J, logprob)) == pytest.approx(weight * A)  # none flows through w
    assert cispo_objective(logprob, logprob - old, A)[0].item() == pytest.approx(
        min(w, 1.2) * A * -1.5
    )


def test_on_policy_cispo_has_the_gradient_of_grpo():
    logprobs, _, ref, advantages, mask = batch(4)
    old = logprobs.detach()
    clip, cispo = (
        grpo_loss(logprobs, old, ref, advantages, mask, objective=objective)[0]
        for objective in OBJECTIVES
    )
    close(gradient(clip, logprobs), gradient(cispo, logprobs))


def test_the_sampler_weight():
    """On-policy and with A = 1, J is the weight; no gradient flows through it."""
    logprobs = torch.zeros(1, 5, requires_grad=True)
    old = torch.zeros(1, 5, requires_grad=True)
    sampler = -torch.tensor([[3.0, 2.0, 0.5, 1.0, math.inf]]).log()
    data = (logprobs, old, None, torch.ones(1), torch.ones(1, 5) > 0)
    J, *_ = token_terms(*data, sampler_logprobs=sampler)
    assert J[0].tolist() == pytest.approx([2, 2, 0.5, 1, 2])
    assert gradient(J.sum(), logprobs)[0].tolist() == pytest.approx([2, 2, 0.5, 1, 2])
    J, *_ = token_terms(*data, sampler_logprobs=sampler, sampler_cap=2.5)
    assert J[0].tolist() == pytest.approx([2.5, 2, 0.5, 1, 2.5])
    # of the old log-probs only the ratio's gradient, which is minus that of the new ones
    assert gradient(J.sum(), old)[0].tolist() == pytest.approx([-2.5, -2, -0.5, -1, -2.5])


def test_the_penalty_does_not_see_the_sampler():
    logprobs, old, ref, advantages, mask = batch()
    value, metrics = grpo_loss(
        logprobs,
        old,
        ref,
        torch.zeros(5).double(),
        mask,
        sampler_logprobs=sampler_of(old),
        kl_coef=0.7,
    )
    plain, plain_metrics = grpo_loss(logprobs, old, ref, torch.zeros(5).double(), mask, kl_coef=0.7)
    assert value == plain and metrics == plain_metrics and float(value.detach()) > 0


@pytest.mark.parametrize("estimator, exact", [("k3_corrected", True), ("k3", False)])
def test_off_policy_the_corrected_k3_has_the_gradient_of_the_kl(estimator, exact):
    """Exactly, over every outcome that the old policy may have drawn: value and gradient."""
    theta = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    log_old = torch.tensor([0.9, 0.1, -0.6, 0.0, 0.5], dtype=torch.float64).log_softmax(0)
    log_ref = torch.tensor([-0.5, 0.2, 1.0, -1.2, 0.6], dtype=torch.float64).log_softmax(0)
    log_pi = theta.log_softmax(0)
    kl = (log_pi.exp() * (log_pi - log_ref)).sum()
    kl_gradient = gradient(kl, theta)
    mean, total = 0, torch.zeros(5, dtype=torch.float64)
    for outcome in range(5):
        value, metrics = grpo_loss(
            theta.log_softmax(0)[outcome].view(1, 1),
            log_old[outcome].view(1, 1),
            log_ref[outcome].view(1, 1),
            torch.zeros(1).double(),
            torch.ones(1, 1) > 0,
            kl_coef=1.0,
            kl_estimator=estimator,
        )
        probability = log_old[outcome].exp()
        mean += probability * metrics["approx_kl"]
        total += probability * gradient(value, theta)
    if exact:
        close(mean, kl.detach())
        close(total, kl_gradient)
    else:
        assert (mean - kl).detach().abs() > 0.01
        assert (total - kl_gradient).abs().max() > 0.01


def test_the_corrected_k3_is_corrected_token_by_token():
    """Whatever `ratio` says: the KL is a sum over tokens, each drawn from the old policy."""
    data = batch(5)
    token, sequence = (
        grpo_loss(*data, ratio=ratio, kl_estimator="k3_corrected")[1]["approx_kl"]
        for ratio in RATIOS
    )
    assert token == sequence
    zero = torch.zeros(1, 1)
    _, _, kl, _ = token_terms(
        zero,
        zero - math.log(2),
        zero + 0.5,
        torch.ones(1),
        zero == 0,
        kl_estimator="k3_corrected",
    )
    assert float(kl) == pytest.approx(2 * 0.148721, abs=2e-6)


@pytest.mark.parametrize("ref_over_pi, coefficient", [(2.0, 1.04), (1.0, 1.0), (0.5, 0.98)])
def test_the_gradient_coefficient_function(ref_over_pi, coefficient):
    logprobs = torch.full((2, 3), -1.5, dtype=torch.float64)
    ref = logprobs + math.log(ref_over_pi)
    for A in (torch.ones(2), torch.ones(2, 3)):
        close(
            gradient_coefficient(A.double(), logprobs, ref, 0.04),
            torch.full((2, 3), coefficient, dtype=torch.float64),
        )


@pytest.mark.parametrize("per_token", [False, True])
def test_the_gradient_is_the_coefficient(per_token):
    """On-policy, k3: the loss's gradient per token, whatever the advantages and references."""
    logprobs, _, ref, advantages, mask = batch(6, per_token=per_token)
    value, _ = grpo_loss(logprobs, logprobs.detach(), ref, advantages, mask, kl_coef=0.3)
    weights = mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)
    coefficient = gradient_coefficient(advantages, logprobs.detach(), ref, 0.3)
    close(gradient(value, logprobs), -coefficient * weights)
    close(
        gradient_coefficient(advantages, logprobs.detach(), ref),
        gradient_coefficient(advantages, logprobs.detach(), ref, 0.04),
    )


@pytest.mark.parametrize(
    "approx_kl, expected",
    [
        (0.02, 0.04),
        (0.03, 0.04),
        (0.05, 0.04),  # inside the band, its ends included
        (0.0525, 0.042),
        (0.055, 0.044),
        (0.5, 0.044),
        (math.inf, 0.044),  # above: larger, at most 10%
        (0.019, 0.038),
        (0.018, 0.036),
        (0.0, 0.036),
        (-0.5, 0.036),  # below: smaller, at most 10%
    ],
)
def test_next_kl_coef(approx_kl, expected):
    assert next_kl_coef(0.04, approx_kl) == pytest.approx(expected, rel=1e-12)
    assert isinstance(next_kl_coef(0.04, approx_kl), float)


def test_next_kl_coef_has_its_own_band_and_rate():
    assert next_kl_coef(1.0, 0.3, low=0.1, high=0.2, rate=0.3) == pytest.approx(1.3)
    assert next_kl_coef(1.0, 0.25, low=0.1, high=0.2, rate=0.3) == pytest.approx(1.25)
    assert next_kl_coef(1.0, 0.01, low=0.1, high=0.2, rate=0.3) == pytest.approx(0.7)
    assert next_kl_coef(1.0, 0.15, low=0.1, high=0.2, rate=0.3) == 1.0


def test_next_kl_coef_is_never_negative_and_never_stuck():
    coefficient = 0.04
    for _ in range(2000):
        following = next_kl_coef(coefficient, 0.0)
        assert 0 < following <= coefficient
        coefficient = following
    assert coefficient == 1e-8
    assert next_kl_coef(0.0, 0.03) == 0.0 == next_kl_coef(0.0, 0.0)
    coefficient = 0.0
    for _ in range(200):
        following = next_kl_coef(coefficient, 1.0)
        assert following > coefficient
        coefficient = following
    assert coefficient > 0.01


@pytest.mark.parametrize(
    "options",
    [
        dict(kl_coef=-0.1),
        dict(kl_coef=math.nan),
        dict(approx_kl=math.nan),
        dict(low=0.0),
        dict(low=-0.1),
        dict(low=0.06),
        dict(rate=0.0),
        dict(rate=1.0),
    ],
)
def test_next_kl_coef_refuses(options):
    with pytest.raises(ValueError) as error:
        next_kl_coef(**{"kl_coef": 0.04, "approx_kl": 0.1, **options})
    assert "\n" not in str(error.value)


def test_an_estimate_that_does_not_exist():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


# ----- masks -----


@pytest.mark.parametrize(
    "aggregate, ratio, kl_estimator, objective",
    every(AGGREGATES, RATIOS, KL_ESTIMATORS, OBJECTIVES),
)
def test_what_is_masked_does_not_matter(aggregate, ratio, kl_estimator, objective):
    def loss_of(logprobs, old, ref, advantages, mask, sampler):
        return grpo_loss(
            logprobs,
            old,
            ref,
            advantages,
            mask,
            sampler_logprobs=sampler,
            kl_estimator=kl_estimator,
            aggregate=aggregate,
            ratio=ratio,
            objective=objective,
            max_new_tokens=LIMIT,
        )

    clean = batch(per_token=True)
    clean = (*clean, sampler_of(clean[1]))
    mask = clean[4]
    expected, expected_metrics = loss_of(*clean)
    expected_gradient = gradient(expected, clean[0])
    assert (
        expected.isfinite() and expected_gradient[mask].any() and not expected_gradient[~mask].any()
    )
    places_of = ((0,), (1,), (2,), (3,), (5,), (0, 1, 2, 3, 5))  # one tensor, or all five
    for garbage, places in every((math.nan, math.inf, -math.inf, 1e30), places_of):
        data = list(clean)
        for place in places:
            data[place] = data[place].detach().masked_fill(~mask, garbage)
        data[0] = data[0].detach().requires_grad_()
        value, metrics = loss_of(*data)
        assert value == expected and metrics == expected_metrics
        assert torch.equal(gradient(value, data[0]), expected_gradient)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    "aggregate, share", [("sequence", 5 / 6), ("token", 1), ("constant", 5 / 6)]
)
def test_a_row_without_tokens_adds_nothing(aggregate, share, ratio):
    """It counts as a row all the same."""
    data, options = batch(), dict(aggregate=aggregate, ratio=ratio, max_new_tokens=LIMIT)
    value, metrics = grpo_loss(*data, **options)
    more = [torch.cat((x, x[:1])) for x in data]
    more[4][5] = False
    more[0] = more[0].detach().requires_grad_()
    with_empty, with_empty_metrics = grpo_loss(*more, **options)
    assert with_empty.item() == pytest.approx(value.item() * share, rel=1e-12)
    for name in ("clip_fraction", "ratio_mean"):
        assert float(with_empty_metrics[name]) == pytest.approx(float(metrics[name]), rel=1e-12)
    close(gradient(with_empty, more[0])[:5], gradient(value, data[0]) * share)
    assert not gradient(grpo_loss(*more, **options)[0], more[0])[5].any()


@pytest.mark.parametrize("aggregate, ratio", every(AGGREGATES, RATIOS))
def test_a_batch_without_tokens(aggregate, ratio):
    logprobs, old, ref, advantages, mask = batch()
    value, metrics = grpo_loss(
        logprobs,
        old,
        ref,
        advantages,
        mask & False,
        aggregate=aggregate,
        ratio=ratio,
        max_new_tokens=LIMIT,
    )
    assert value == 0 and not gradient(value, logprobs).any()
    assert all(metric == 0 for metric in metrics.values())


# ----- micro-batches -----


@pytest.mark.parametrize(
    "aggregate, ratio, objective, kl_estimator, per_token",
    every(AGGREGATES, RATIOS, OBJECTIVES, ("k3", "k3_corrected"), (False, True)),
)
def test_micro_batches_add_up(aggregate, ratio, objective, kl_estimator, per_token):
    data = batch(rows=9, per_token=per_token)
    data = (*data, sampler_of(data[1]))

    def loss_of(logprobs, old, ref, advantages, mask, sampler, **sizes):
        return grpo_loss(
            logprobs,
            old,
            ref,
            advantages,
            mask,
            sampler_logprobs=sampler,
            aggregate=aggregate,
            ratio=ratio,
            objective=objective,
            kl_estimator=kl_estimator,
            max_new_tokens=LIMIT,
            **sizes,
        )

    value, metrics = loss_of(*data)
    expected = gradient(value, data[0])
    for cut in ([9], [1] * 9, [2, 3, 4], [1, 8]):
        total, total_gradient, totals = 0, 0, dict.fromkeys(metrics, 0)
        for parts in zip(*(x.split(cut) for x in data)):
            part, part_metrics = loss_of(*parts, n_rows=9, n_tokens=int(data[4].sum()))
            total += part.detach()
            total_gradient += gradient(part, data[0])
            totals = {name: totals[name] + metric for name, metric in part_metrics.items()}
        close(total, value.detach())
        close(total_gradient, expected)
        for name, metric in metrics.items():
            close(totals[name], metric)


def test_an_answer_that_was_cut_off_is_a_masked_row():
    """It adds 0 and counts as a row; as tokens it does not count."""
    data = batch(rows=6)
    kept = torch.tensor([True, True, True, False, True, True])
    logprobs, old, ref, advantages, mask = data
    for aggregate, size in (("sequence", 6), ("constant", 6 * LIMIT), ("token", None)):
        options = dict(aggregate=aggregate, max_new_tokens=LIMIT)
        value, _ = grpo_loss(logprobs, old, ref, advantages, mask & kept[:, None], **options)
        others = [x[kept] for x in data]
        share, _ = grpo_loss(*others, **options)
        close(value, share * (1 if size is None else 5 / 6))
        assert not gradient(value, logprobs)[3].any()


# ----- metrics and refusals -----


@pytest.mark.parametrize("aggregate, ratio", every(AGGREGATES, RATIOS))
def test_metrics_are_detached_scalars(aggregate, ratio):
    value, metrics = grpo_loss(
        *batch(), aggregate=aggregate, ratio=ratio, max_new_tokens=LIMIT, kl_coef=0.3
    )
    assert value.requires_grad
    assert set(metrics) == {
        "loss",
        "policy_loss",
        "approx_kl",
        "clip_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
        "ratio_mean",
    }
    for metric in metrics.values():
        assert metric.shape == () and not metric.requires_grad and metric.isfinite()
    assert metrics["loss"] == value
    assert float(metrics["loss"]) == pytest.approx(
        float(metrics["policy_loss"] + 0.3 * metrics["approx_kl"])
    )


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(kl_estimator="k4"), "kl_estimator 'k4'"),
        (dict(aggregate="mean"), "aggregate 'mean'"),
        (dict(ratio="row"), "ratio 'row'"),
        (dict(objective="ppo"), "objective 'ppo'"),
        (dict(sampler_cap=0.0), "sampler_cap 0.0"),
        (dict(sampler_cap=-1.0), "sampler_cap -1.0"),
        (dict(sampler_cap=math.nan), "sampler_cap nan"),
        (dict(aggregate="constant"), "max_new_tokens"),
        (dict(aggregate="constant", max_new_tokens=0), "max_new_tokens"),
    ],
)
def test_refusals(options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        grpo_loss(*batch(), **options)
    assert "\n" not in str(error.value)


def test_a_penalty_needs_a_reference():
    logprobs, old, _, advantages, mask = batch()
    with pytest.raises(ValueError, match="kl_coef 0.04 needs ref_logprobs"):
        grpo_loss(logprobs, old, None, advantages, mask)


# ----- script -----


def test_script_shows_the_walkthrough(run_here):
    printed = run_here("loss.py")
    assert printed.isascii()
    rows = [line.split() for line in printed.splitlines()]
    first, second = (
        next(row for row in rows if row[1:2] == [log_ratio]) for log_ratio in ("+0.25", "-0.30")
    )
    mean = next(row for row in rows if row[:2] == ["mean", "objective"])
    assert [float(x) for x in first[2:]] == pytest.approx(
        [1.2840, -1.8388, -1.7185, -1.8388], abs=1.5e-4
    )
    assert [float(x) for x in second[2:6]] == pytest.approx(
        [0.7408, -1.0609, -1.1457, -1.1457], abs=1.5e-4
    )
    assert second[6:] == ["clipped:", "no", "gradient"] and float(mean[2]) == pytest.approx(
        -1.4923, abs=1.5e-4
    )
    assert ["0.5", "-0.5", "0.125", "0.148721"] in rows
    assert ["-0.5", "0.5", "0.125", "0.106531"] in rows
    smallest = next(row for row in rows if row[:1] == ["0.0001"])
    assert [float(x) for x in smallest] == pytest.approx([1e-4, -1e-4, 5e-9, 5e-9], rel=2e-3)
    assert "2.0: grad logp is multiplied by 1.2" in printed and "J = 2.4, 0.6" in printed
    assert "0.297443" in printed and "ref/pi = 2: 1.04" in printed
    for kl, coefficient in (("0.01", 0.036), ("0.03", 0.04), ("0.10", 0.044)):
        assert f"{kl} nats per token: {coefficient}\n" in printed
