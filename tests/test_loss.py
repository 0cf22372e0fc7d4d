"""[E] [F] loss.py: the loss against its formula, the clip, k1 k2 k3, masks, micro-batches, refusals, the script."""
import itertools
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

import loss
from loss import clipped_objective, grpo_loss, kl_estimate

ROOT = Path(loss.__file__).resolve().parent
AGGREGATES, RATIOS, ESTIMATORS = ("sequence", "token", "constant"), ("token", "sequence"), ("k1", "k2", "k3")
LIMIT = 11  # max_new_tokens


def batch(seed=0, rows=5, width=7, per_token=False, dtype=torch.float64):
    """logprobs (a leaf), old_logprobs, ref_logprobs, advantages, mask: ragged, with holes and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, dtype=torch.float64, generator=generator)
    noise = torch.randn(4, rows, width, dtype=torch.float64, generator=generator)
    advantages = noise[2] if per_token else noise[2, :, 0]
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[1] = False
    logprobs, ref = old + 0.3 * noise[0], old + 0.3 * noise[1]
    logprobs, old, ref, advantages = (x.to(dtype) for x in (logprobs, old, ref, advantages))
    return logprobs.requires_grad_(), old, ref, advantages, mask


def reference(logprobs, old, ref, advantages, mask, clip_eps, kl_coef, clip_eps_high, kl_estimator, aggregate,
              ratio):
    """The formulas, token by token, on scalars -> loss, metrics."""
    N, low, high = len(mask), 1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high)
    objectives, kls, clipped, ratios = [], [], [], []  # of the tokens: (value, length of its row)
    for n in range(N):
        tokens = [t for t in range(len(mask[n])) if mask[n, t]]
        L = len(tokens)
        for t in tokens:
            A = advantages[n] if advantages.ndim == 1 else advantages[n, t]
            drift = logprobs[n, t] - old[n, t]
            if ratio == "sequence":
                drift = sum(logprobs[n, u] - old[n, u] for u in tokens) / L
            w = torch.exp(drift)
            bounded = low if w < low else high if w > high else w
            objectives.append((w * A if w * A <= bounded * A else bounded * A, L))
            clipped.append(bounded * A < w * A)
            ratios.append(w)
            pi, pi_ref = torch.exp(logprobs[n, t]), torch.exp(ref[n, t])
            kls.append(({"k1": torch.log(pi / pi_ref), "k2": torch.log(pi / pi_ref) ** 2 / 2,
                         "k3": pi_ref / pi - torch.log(pi_ref / pi) - 1}[kl_estimator], L))

    def average(values):
        if aggregate == "sequence":
            return sum(value / L for value, L in values) / N
        total = sum(value for value, _ in values)
        return total / len(values) if aggregate == "token" else total / (N * LIMIT)

    policy_loss, kl = -average(objectives), average(kls)
    return policy_loss + kl_coef * kl, {
        "loss": float(policy_loss.detach() + kl_coef * kl.detach()), "policy_loss": float(policy_loss.detach()),
        "approx_kl": float(kl.detach()), "clip_fraction": sum(map(bool, clipped)) / len(clipped),
        "ratio_mean": float(sum(ratios).detach() / len(ratios))}


def every(*options):
    return list(itertools.product(*options))


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf)[0]


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ----- against the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate, ratio, kl_estimator, clip_eps_high, per_token", every(
    AGGREGATES, RATIOS, ESTIMATORS, (None, 0.28), (False, True)))
def test_the_formula(aggregate, ratio, kl_estimator, clip_eps_high, per_token):
    options = dict(clip_eps_high=clip_eps_high, kl_estimator=kl_estimator, aggregate=aggregate, ratio=ratio)
    fractions = []
    for seed in (0, 1):
        data = batch(seed, rows=8, per_token=per_token)
        expected, expected_metrics = reference(*data, clip_eps=0.1, kl_coef=0.3, **options)
        value, metrics = grpo_loss(*data, clip_eps=0.1, kl_coef=0.3, max_new_tokens=LIMIT, **options)
        assert value.shape == () and value.dtype == torch.float64
        close(value, expected)
        close(gradient(value, data[0]), gradient(expected, data[0]))
        for name, number in expected_metrics.items():
            assert float(metrics[name]) == pytest.approx(number, rel=1e-12, abs=1e-12), name
        fractions.append(float(metrics["clip_fraction"]))
    assert any(0 < fraction < 1 for fraction in fractions)  # both branches of the minimum were taken


@pytest.mark.parametrize("aggregate, ratio", every(AGGREGATES, RATIOS))
def test_the_gradient_is_that_of_the_loss(aggregate, ratio):
    logprobs, *rest = batch(2)
    assert torch.autograd.gradcheck(
        lambda x: grpo_loss(x, *rest, aggregate=aggregate, ratio=ratio, max_new_tokens=LIMIT)[0], logprobs)


def test_float32():
    exact, _ = grpo_loss(*batch())
    value, metrics = grpo_loss(*batch(dtype=torch.float32))
    assert value.dtype == torch.float32 and all(metric.dtype == torch.float32 for metric in metrics.values())
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)


def test_the_defaults():
    data = batch()
    expected, _ = reference(*data, 0.2, 0.04, None, "k3", "sequence", "token")
    close(grpo_loss(*data)[0], expected)


def test_on_policy_the_loss_is_minus_the_mean_advantage():
    logprobs, _, _, advantages, mask = batch()
    mask[1, 3] = True  # no empty row
    for ratio in RATIOS:
        value, metrics = grpo_loss(logprobs, logprobs.detach(), None, advantages, mask, kl_coef=0, ratio=ratio)
        close(value.detach(), -advantages.mean())
        assert metrics["clip_fraction"] == 0 and float(metrics["ratio_mean"]) == pytest.approx(1)
        weights = -advantages[:, None] / mask.sum(dim=1, keepdim=True) / len(mask) * mask
        close(gradient(value, logprobs), weights)  # REINFORCE, with the advantage for a reward


# ----- [E] the clip -----------------------------------------------------------------------------------------

WALKTHROUGH = torch.tensor([[0.25, -0.30]], dtype=torch.float64)  # the log-ratios of response 3


def test_walkthrough():
    objective, clipped = clipped_objective(WALKTHROUGH[0], -1.4321)
    assert WALKTHROUGH[0].exp().tolist() == pytest.approx([1.2840, 0.7408], abs=5e-5)
    assert objective.tolist() == pytest.approx([-1.8388, -1.1457], abs=1e-4)
    assert clipped.tolist() == [False, True]


def test_walkthrough_loss():
    old, A = torch.tensor([[-1.0, -2.0]], dtype=torch.float64), torch.tensor([-1.4321], dtype=torch.float64)
    logprobs, mask = (old + WALKTHROUGH).requires_grad_(), torch.tensor([[True, True]])
    value, metrics = grpo_loss(logprobs, old, None, A, mask, kl_coef=0)
    assert value.item() == pytest.approx(1.4923, abs=5e-5)
    assert metrics["clip_fraction"] == 0.5
    assert float(metrics["ratio_mean"]) == pytest.approx((1.2840 + 0.7408) / 2, abs=5e-5)
    flows, stopped = gradient(value, logprobs)[0].tolist()
    assert flows == pytest.approx(1.8388 / 2, abs=5e-5)
    assert stopped == 0.0


@pytest.mark.parametrize("A, log_ratio, expected, clipped", [
    (1.0, 0.5, 1.3, True), (1.0, 0.25, math.exp(0.25), False), (1.0, -0.5, math.exp(-0.5), False),
    (-1.0, 0.5, -math.exp(0.5), False), (-1.0, -0.2, -math.exp(-0.2), False), (-1.0, -0.5, -0.8, True),
    (0.0, 0.5, 0.0, False), (0.0, -0.5, 0.0, False),
])
def test_only_moves_for_the_better_are_clipped(A, log_ratio, expected, clipped):
    leaf = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    objective, was_clipped = clipped_objective(leaf, A, 0.2, 0.3)
    assert objective.item() == pytest.approx(expected, abs=1e-12) and bool(was_clipped) == clipped
    assert float(gradient(objective, leaf)) == pytest.approx(0 if clipped else A * math.exp(log_ratio), abs=1e-12)


def test_the_sequence_ratio_has_one_value_a_row():
    """GSPO: the geometric mean of a row's ratios; all of its tokens are clipped, or none."""
    old = torch.zeros(2, 4, dtype=torch.float64)
    logprobs = torch.tensor([[0.4, 0.2, 0.0, 9.0], [0.9, -0.9, 0.1, -0.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    A = torch.tensor([2.0, 2.0], dtype=torch.float64)
    value, metrics = grpo_loss(logprobs, old, None, A, mask, kl_coef=0, ratio="sequence", clip_eps=0.1)
    assert value.item() == pytest.approx(-(1.1 * 2 + 1.0 * 2) / 2)  # exp(0.2) is above 1.1
    assert float(metrics["clip_fraction"]) == pytest.approx(3 / 7)
    assert float(metrics["ratio_mean"]) == pytest.approx((3 * math.exp(0.2) + 4) / 7)
    close(gradient(value, logprobs), torch.tensor([[0.0] * 4, [-2 / 4 / 2] * 4], dtype=torch.float64))


# ----- [F] the penalty --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d, k1, k2, k3", [(0.5, -0.5, 0.125, 0.148721), (-0.5, 0.5, 0.125, 0.106531),
                                           (0.0, 0.0, 0.0, 0.0)])
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
    d = torch.cat((torch.linspace(-20, 20, 2001), torch.logspace(-12, 0, 500), -torch.logspace(-12, 0, 500)))
    assert float(kl_estimate(torch.zeros(3001), d, "k3").min()) >= 0


@pytest.mark.parametrize("ref_over_pi, coefficient", [(2.0, 1.04), (1.0, 1.0), (0.5, 0.98)])
def test_the_gradient_coefficient(ref_over_pi, coefficient):
    """On-policy the gradient is (A + beta (ref/pi - 1)) grad log pi: above A where the reference is above."""
    logprobs = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    ref = logprobs.detach() + math.log(ref_over_pi)
    value, _ = grpo_loss(logprobs, logprobs.detach(), ref, torch.ones(1).double(), torch.ones(1, 1) > 0)
    assert -float(gradient(value, logprobs)) == pytest.approx(coefficient)


@pytest.mark.parametrize("kl_estimator", ESTIMATORS)
def test_the_expected_gradient_of_the_penalty(kl_estimator):
    """Exactly, over every outcome of a categorical: k1 gives 0, k2 grad KL(pi|ref), k3 grad KL(ref|pi)."""
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
        value, _ = grpo_loss(logprob, logprob.detach(), log_ref[outcome].view(1, 1), torch.zeros(1).double(),
                             torch.ones(1, 1) > 0, kl_coef=1.0, kl_estimator=kl_estimator)
        total += theta.detach().softmax(0)[outcome] * gradient(value, theta)
    close(total, expected)


@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
def test_the_expected_penalty_is_the_kl(kl_estimator):
    log_pi, log_ref = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).double().log_softmax(1)
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


# ----- masks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate, ratio, kl_estimator", every(AGGREGATES, RATIOS, ESTIMATORS))
def test_what_is_masked_does_not_matter(aggregate, ratio, kl_estimator):
    options = dict(kl_estimator=kl_estimator, aggregate=aggregate, ratio=ratio, max_new_tokens=LIMIT)
    clean = batch(per_token=True)
    mask = clean[-1]
    expected, expected_metrics = grpo_loss(*clean, **options)
    expected_gradient = gradient(expected, clean[0])
    assert expected.isfinite() and expected_gradient[mask].any() and not expected_gradient[~mask].any()
    places_of = ((0,), (1,), (2,), (3,), (0, 1, 2, 3))  # one tensor, or all four
    for garbage, places in every((math.nan, math.inf, -math.inf, 1e30), places_of):
        data = list(clean)
        for place in places:
            data[place] = data[place].detach().masked_fill(~mask, garbage)
        data[0] = data[0].detach().requires_grad_()
        value, metrics = grpo_loss(*data, **options)
        assert value == expected and metrics == expected_metrics
        assert torch.equal(gradient(value, data[0]), expected_gradient)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("aggregate, share", [("sequence", 5 / 6), ("token", 1), ("constant", 5 / 6)])
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
    value, metrics = grpo_loss(logprobs, old, ref, advantages, mask & False, aggregate=aggregate, ratio=ratio,
                               max_new_tokens=LIMIT)
    assert value == 0 and not gradient(value, logprobs).any()
    assert all(metric == 0 for metric in metrics.values())


# ----- micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate, ratio, per_token", every(AGGREGATES, RATIOS, (False, True)))
def test_micro_batches_add_up(aggregate, ratio, per_token):
    data = batch(rows=9, per_token=per_token)
    options = dict(aggregate=aggregate, ratio=ratio, max_new_tokens=LIMIT)
    value, metrics = grpo_loss(*data, **options)
    expected = gradient(value, data[0])
    for cut in ([9], [1] * 9, [2, 3, 4], [1, 8]):
        total, total_gradient, totals = 0, 0, dict.fromkeys(metrics, 0)
        for parts in zip(*(x.split(cut) for x in data)):
            part, part_metrics = grpo_loss(*parts, **options, n_rows=9, n_tokens=int(data[4].sum()))
            total += part.detach()
            total_gradient += gradient(part, data[0])
            totals = {name: totals[name] + metric for name, metric in part_metrics.items()}
        close(total, value.detach())
        close(total_gradient, expected)
        for name, metric in metrics.items():
            close(totals[name], metric)


# ----- metrics and refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate, ratio", every(AGGREGATES, RATIOS))
def test_metrics_are_detached_scalars(aggregate, ratio):
    value, metrics = grpo_loss(*batch(), aggregate=aggregate, ratio=ratio, max_new_tokens=LIMIT, kl_coef=0.3)
    assert value.requires_grad
    assert {"loss", "policy_loss", "approx_kl", "clip_fraction", "ratio_mean"} <= set(metrics)
    for metric in metrics.values():
        assert metric.shape == () and not metric.requires_grad and metric.isfinite()
    assert metrics["loss"] == value
    assert float(metrics["loss"]) == pytest.approx(float(metrics["policy_loss"] + 0.3 * metrics["approx_kl"]))


@pytest.mark.parametrize("options, reason", [
    (dict(kl_estimator="k4"), "kl_estimator 'k4'"),
    (dict(aggregate="mean"), "aggregate 'mean'"),
    (dict(ratio="row"), "ratio 'row'"),
    (dict(aggregate="constant"), "max_new_tokens"),
    (dict(aggregate="constant", max_new_tokens=0), "max_new_tokens"),
])
def test_refusals(options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        grpo_loss(*batch(), **options)
    assert "\n" not in str(error.value)


def test_a_penalty_needs_a_reference():
    logprobs, old, _, advantages, mask = batch()
    with pytest.raises(ValueError, match="kl_coef 0.04 needs ref_logprobs"):
        grpo_loss(logprobs, old, None, advantages, mask)


# ----- script -----------------------------------------------------------------------------------------------


def test_script_shows_the_walkthrough(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loss.py"])
    runpy.run_path(str(ROOT / "loss.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.isascii()
    rows = [line.split() for line in printed.splitlines()]
    first, second = (next(row for row in rows if row[1:2] == [log_ratio]) for log_ratio in ("+0.25", "-0.30"))
    mean = next(row for row in rows if row[:2] == ["mean", "objective"])
    assert [float(x) for x in first[2:]] == pytest.approx([1.2840, -1.8388, -1.7185, -1.8388], abs=1.5e-4)
    assert [float(x) for x in second[2:6]] == pytest.approx([0.7408, -1.0609, -1.1457, -1.1457], abs=1.5e-4)
    assert second[6:] == ["clipped:", "no", "gradient"] and float(mean[2]) == pytest.approx(-1.4923, abs=1.5e-4)
    assert ["0.5", "-0.5", "0.125", "0.148721"] in rows
    assert ["-0.5", "0.5", "0.125", "0.106531"] in rows
    smallest = next(row for row in rows if row[:1] == ["0.0001"])
    assert [float(x) for x in smallest] == pytest.approx([1e-4, -1e-4, 5e-9, 5e-9], rel=2e-3)
