"""[C] advantage.py: worked groups, equal rewards, the options, what must not matter, refusals, the script."""
import math
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import advantage
from advantage import group_advantages

ROOT = Path(advantage.__file__).resolve().parent
OPTIONS = [(scale_by_std, unbiased) for scale_by_std in (True, False) for unbiased in (False, True)]


def reference(rewards, group_size, eps=1e-8, scale_by_std=True, unbiased=False):
    """The formula, in Python's float64."""
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start:start + group_size]
        mean = math.fsum(group) / group_size
        variance = math.fsum((r - mean) ** 2 for r in group) / (group_size - 1 if unbiased else group_size)
        scale = math.sqrt(variance) + eps if scale_by_std else 1.0
        advantages += [(r - mean) / scale for r in group]
    return advantages


def assert_close(actual, expected, tolerance):
    assert actual.tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance)


# ----- worked groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, expected", [
    ([1.5, 1.0, 0, 0], [1.34715, 0.57735, -0.96225, -0.96225]),  # the apple
    ([0.9, 0.3, -0.1, 0.7], [1.1717, -0.3906, -1.4321, 0.6509]),  # the walkthrough
    ([1.5, 0, 1.5, 0, 1, 1.5, 0.5, 1.5],
     [0.8868, -1.4780, 0.8868, -1.4780, 0.0985, 0.8868, -0.6897, 0.8868]),
    ([1.5] * 7 + [0], [0.37796] * 7 + [-2.64575]),  # seven right and one wrong
    ([0, 0, 1, 0, 0, 0], [-0.44721, -0.44721, 2.23607, -0.44721, -0.44721, -0.44721]),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_groups(rewards, expected, dtype):
    advantages = group_advantages(torch.tensor(rewards, dtype=dtype), len(rewards))
    assert advantages.tolist() == pytest.approx(expected, abs=6e-5)


def test_the_rarer_the_success_the_larger_its_advantage():
    largest = [float(group_advantages(torch.eye(size)[0], size).max()) for size in range(2, 33)]
    assert largest == pytest.approx([math.sqrt(size - 1) for size in range(2, 33)], rel=1e-5)


# ----- against the formula ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(2, 16), st.integers(1, 5), st.sampled_from(OPTIONS), st.sampled_from([1e-8, 0.5]))
def test_random_rewards(data, group_size, groups, options, eps):
    count = group_size * groups
    rewards = [r / 16 for r in data.draw(st.lists(st.integers(-64, 64), min_size=count, max_size=count))]
    expected = reference(rewards, group_size, eps, *options)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        advantages = group_advantages(torch.tensor(rewards, dtype=dtype), group_size, eps, *options)
        assert advantages.shape == (count,) and advantages.dtype == dtype
        assert_close(advantages, expected, tolerance)  # multiples of 1/16 up to 4 are exact in bfloat16


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_unbiased_is_torch_std(size):
    rewards = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    unbiased = group_advantages(rewards, size, unbiased=True)
    assert_close(unbiased, ((rewards - rewards.mean()) / (torch.std(rewards) + 1e-8)).tolist(), 1e-12)
    biased = group_advantages(rewards, size)
    assert_close(biased / unbiased, [math.sqrt(size / (size - 1))] * size, 1e-6)  # 6.9% for size 8


def test_the_defaults():
    rewards = torch.tensor([0.0, 1, 1.5, 0, 0.5, 0, 0, 1.5] * 2)
    assert torch.equal(group_advantages(rewards),
                       group_advantages(rewards, group_size=8, eps=1e-8, scale_by_std=True, unbiased=False))


def test_small_floats_are_summed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        rewards = torch.tensor([1.0] * 512 + [0.0] * 512, dtype=dtype)
        for scale_by_std in (True, False):
            advantages = group_advantages(rewards, 1024, scale_by_std=scale_by_std)
            assert advantages.abs().tolist() == [1.0 if scale_by_std else 0.5] * 1024


# ----- equal rewards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS)
def test_equal_rewards_give_exactly_zero(dtype, options):
    values = torch.cat((torch.arange(-30, 31) / 10, torch.tensor([1 / 3, 1e-7, 7e-5, 123.4, 1e4, -2e4]))).to(dtype)
    for size in range(2, 65):
        advantages = group_advantages(values.repeat_interleave(size), size, 1e-8, *options)
        assert advantages.tolist() == [0.0] * len(advantages)


def test_the_zero_is_needed():
    """Without an exact comparison, seven rewards of 0.7 are told apart."""
    rewards = torch.full((7,), 0.7)
    assert 0 < float(rewards.std(correction=0)) and float((rewards - rewards.mean()).abs().max()) > 0
    assert group_advantages(rewards, 7).tolist() == [0.0] * 7


def test_nearly_equal_rewards_are_told_apart():
    advantages = group_advantages(torch.tensor([0.5, 0.5, 0.5, 0.5 + 2**-10]), 4)
    assert_close(advantages, reference([0.5, 0.5, 0.5, 0.5 + 2**-10], 4), 1e-4)


def test_equal_groups_beside_others():
    rewards = torch.tensor([0.7] * 7 + [0, 0, 0, 1.5, 0, 0, 0] + [0.1] * 7)
    advantages = group_advantages(rewards, 7)
    assert advantages[:7].tolist() == [0.0] * 7 == advantages[14:].tolist()
    assert_close(advantages[7:14], reference(rewards[7:14].tolist(), 7), 1e-6)


# ----- what must not matter ---------------------------------------------------------------------------------


@pytest.fixture
def rewards():
    return torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_shift_and_a_scale_do_not_matter(rewards, unbiased):
    advantages = group_advantages(rewards, 8, unbiased=unbiased).tolist()
    assert_close(group_advantages(rewards + 3, 8, unbiased=unbiased), advantages, 1e-7)
    assert_close(group_advantages(rewards * 3, 8, unbiased=unbiased), advantages, 1e-6)
    assert_close(-group_advantages(rewards * -3, 8, unbiased=unbiased), advantages, 1e-6)


def test_dr_grpo_keeps_the_scale(rewards):
    centred = group_advantages(rewards, 8, scale_by_std=False)
    assert_close(group_advantages(rewards * 3 + 1, 8, scale_by_std=False), (centred * 3).tolist(), 1e-12)
    for group in range(5):
        rows = slice(group * 8, group * 8 + 8)
        assert_close(centred[rows], (rewards[rows] - rewards[rows].mean()).tolist(), 1e-12)


def test_each_group_has_mean_zero_and_std_one(rewards):
    groups = group_advantages(rewards, 8).view(5, 8)
    assert_close(groups.mean(dim=1), [0.0] * 5, 1e-12)
    assert_close(groups.square().mean(dim=1), [1.0] * 5, 1e-6)


def test_groups_are_independent_and_rows_prompt_major(rewards):
    advantages = group_advantages(rewards, 8)
    for group in range(5):
        rows = slice(group * 8, group * 8 + 8)
        assert_close(group_advantages(rewards[rows], 8), advantages[rows].tolist(), 1e-12)
        changed = rewards.clone()
        changed[rows] = 100 * rewards[rows].square()
        others = torch.arange(40) // 8 != group
        assert torch.equal(group_advantages(changed, 8)[others], advantages[others])
        assert not torch.equal(group_advantages(changed, 8)[rows], advantages[rows])


def test_rows_of_a_group_may_stand_in_any_order(rewards):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    mixed = rewards.view(5, 8)[:, order].flatten()
    expected = group_advantages(rewards, 8).view(5, 8)[:, order].flatten()
    assert_close(group_advantages(mixed, 8), expected.tolist(), 1e-12)


def test_the_rewards_are_left_as_they_are(rewards):
    for strided in (rewards.clone(), rewards.repeat_interleave(2)[::2]):
        advantages = group_advantages(strided, 8)
        assert torch.equal(strided, rewards)
        assert advantages.data_ptr() != strided.data_ptr() and advantages.is_contiguous()
        assert torch.equal(advantages, group_advantages(rewards, 8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_is_kept(rewards):
    advantages = group_advantages(rewards.cuda(), 8)
    assert advantages.device.type == "cuda"
    assert_close(advantages.cpu(), group_advantages(rewards, 8).tolist(), 1e-12)


# ----- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, group_size, reason", [
    ([1.0] * 7, 8, "not whole groups of 8"),
    ([1.0] * 9, 8, "not whole groups of 8"),
    ([], 8, "not whole groups of 8"),
    ([[1.0, 0.0], [0.0, 1.0]], 2, "not whole groups of 2"),
    ([1.0], 1, "at least two"),
    ([1.0, 2.0], 1, "at least two"),
    ([1.0, 2.0], 0, "at least two"),
    ([1.0, 2.0], -2, "at least two"),
    ([1.0, 0.0, math.nan, 0.0], 2, "row 2 is nan"),
    ([1.0, math.inf, 0.0, 0.0], 4, "row 1 is inf"),
    ([-math.inf] * 4, 4, "row 0 is -inf"),
])
def test_refusals(rewards, group_size, reason):
    with pytest.raises(ValueError, match=reason) as error:
        group_advantages(torch.tensor(rewards), group_size)
    assert "\n" not in str(error.value)


# ----- script -----------------------------------------------------------------------------------------------


def run_script(*arguments):
    return subprocess.run([sys.executable, "advantage.py", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_script_shows_a_group():
    done = run_script("1.5", "1.0", "0", "0")
    assert done.returncode == 0 and done.stderr == ""
    mean_and_std, rewards, advantages = (line.split() for line in done.stdout.splitlines())
    assert mean_and_std == ["mean", "0.625", "std", "0.649519"]
    assert rewards == ["reward", "+1.50000", "+1.00000", "+0.00000", "+0.00000"]
    assert advantages == ["advantage", "+1.34715", "+0.57735", "-0.96225", "-0.96225"]


@pytest.mark.parametrize("arguments, reason", [(["1", "apple"], "apple"), (["1", "nan"], "nan"),
                                               (["1"], "at least two")])
def test_script_refuses(arguments, reason):
    done = run_script(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and reason in done.stderr
