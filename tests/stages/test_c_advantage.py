"""[C] advantage.py: an answer is good if it beats its siblings.

It promises that `plain_advantages` is the formula word for word; that `group_advantages` is the
same, exactly 0 where a group's rewards are all equal; that each variant is that of its paper; and
that rewards which are no whole groups of finite numbers are refused.
"""
import itertools
import math
import random
from functools import partial
import pytest
import torch
from checks import same, seeded, value_error
from advantage import (batch_std_advantages, gdpo_advantages, group_advantages, grpo_s_advantages,
                       gtpo_advantages, is_flat, leave_one_out_advantages, max_rl_advantages,
                       plain_advantages, process_advantages, shape_advantages, shapley_shares)


def test_by_hand():
    """Two groups of four; the second is the first with all rewards larger by 2."""
    rewards = torch.tensor([1.5, 1.0, 0.0, 0.0, 3.5, 3.0, 2.0, 2.0])
    # mean 2.5 / 4 = 0.625; centred 0.875 0.375 -0.625 -0.625
    # their squares 0.765625 0.140625 0.390625 0.390625 have the mean 0.421875, and its root is
    # std 0.649519
    expected = 2 * [1.34715, 0.57735, -0.96225, -0.96225]
    for function in (plain_advantages, group_advantages):
        assert function(rewards, 4).tolist() == pytest.approx(expected, abs=1e-5)
    # One right answer of six counts more than one of four: the rarer, the larger
    assert group_advantages(torch.tensor([1.0, 0, 0, 0, 0, 0]), 6)[0] == pytest.approx(2.23607)
    assert group_advantages(torch.tensor([1.0, 0, 0, 0]), 4)[0] == pytest.approx(1.73205)
    assert group_advantages(torch.tensor([0.7, 0.7, 0.7]), 3).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------------------------
# A reader may stop here. What follows: random groups, equal rewards, variants, refusals.

OPTIONS = list(itertools.product((True, False), (False, True)))  # scale_by_std and unbiased


def reference(rewards, group_size, eps=1e-8, scale_by_std=True, unbiased=False):
    advantages = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start:start + group_size]
        mean = math.fsum(group) / group_size
        variance = math.fsum((r - mean) ** 2 for r in group) / (group_size - int(unbiased))
        scale = math.sqrt(variance) + eps if scale_by_std else 1.0
        advantages += [(r - mean) / scale for r in group]
    return advantages


def assert_close(actual, expected, tolerance):
    expected = pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
    assert actual.tolist() == expected


# --- Against the formula --------------------------------------------------------------------------
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_the_definition(rewards, eps):
    rewards = rewards.requires_grad_()
    weights = torch.rand(40, dtype=torch.float64, generator=seeded(1))
    value, general = plain_advantages(rewards, 8, eps), group_advantages(rewards, 8, eps)
    slopes = [torch.autograd.grad(x.double() @ weights, rewards)[0] for x in (general, value)]
    assert_close(value, reference(rewards.tolist(), 8, eps), 1e-12)
    assert_close(general, value.tolist(), 1e-6)
    assert_close(slopes[0], slopes[1].tolist(), 1e-5)
    assert slopes[0].abs().max() > 0.01


@pytest.mark.parametrize("options", [*zip(OPTIONS, (1e-8, 0.5, 0.5, 1e-8))], ids=str)
def test_random_rewards(options):
    options, eps = options
    chance = random.Random(0)
    for _ in range(75):
        group_size = chance.randrange(2, 17)
        count = group_size * chance.randrange(1, 6)
        # Multiples of 1/16 up to 4 are exact in bfloat16; a few values only, now and then
        most = chance.choice((0, 1, 8, 64))
        rewards = [chance.randint(-most, most) / 16 for _ in range(count)]
        expected = reference(rewards, group_size, eps, *options)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            given = torch.tensor(rewards, dtype=dtype)
            advantages = group_advantages(given, group_size, eps, *options)
            assert advantages.dtype == torch.float32
            assert_close(advantages, expected, 1e-5)


# --- Equal rewards --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, options", [*zip(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64], OPTIONS)])
def test_equal_rewards_give_exactly_zero(dtype, options):
    others = torch.tensor([1 / 3, 1e-7, 7e-5, 123.4, 1e4, -2e4])
    values = torch.cat((torch.arange(-30, 31) / 10, others)).to(dtype)
    for size in range(2, 65):
        assert not group_advantages(values.repeat_interleave(size), size, 1e-8, *options).any()
    rewards = torch.tensor([1.0] * 512 + [0.0] * 512, dtype=dtype)   # no sum is too large for it
    assert (group_advantages(rewards, 1024, scale_by_std=False).abs() == 0.5).all()


def test_equal_groups_beside_others():
    rewards = torch.tensor([0.7] * 7 + [0, 0, 0, 1.5, 0, 0, 0] + [0.7] * 6 + [0.7 + 1e-7])
    assert float(rewards[:7].std(correction=0)) > 0  # why they are compared exactly
    advantages = group_advantages(rewards, 7)
    assert advantages[:7].tolist() == [0.0] * 7
    assert_close(advantages[7:14], reference(rewards[7:14].tolist(), 7), 1e-6)
    assert advantages[14:].any() and is_flat(rewards, 7).tolist() == [True, False, False]
    assert is_flat(torch.tensor([2, 2, 3, 3]), 2).tolist() == [True, True]


BY_ANSWER = {  # the words of --advantage that compare one reward an answer
    "group": group_advantages, "leave-one-out": leave_one_out_advantages,
    "unbiased": partial(group_advantages, unbiased=True), "max-rl": max_rl_advantages,
    "batch-std": batch_std_advantages, "centred": partial(group_advantages, scale_by_std=False),
    "gdpo": lambda rewards, size: gdpo_advantages({"a": rewards}, None, size)}


@pytest.mark.parametrize("word", BY_ANSWER)
def test_an_answer_without_a_reward_is_as_if_it_were_not_there(word):
    """Groups of five, of which one to four answers are scored, against the scored ones alone."""
    for scored in range(1, 5):
        values = torch.tensor([2.0, 0.5, 0.25, 4.0, math.nan], dtype=torch.float64)
        group = values.where(torch.arange(5) < scored, math.nan)[[4, 0, 1, 3, 2]]
        found = BY_ANSWER[word](group.repeat(2), 5)
        known = ~group.repeat(2).isnan()
        expected = [0.0] * 2
        if scored > 1:                                    # a single one has no sibling
            expected = BY_ANSWER[word](group.repeat(2)[known], scored).tolist()
        assert_close(found[known], expected, 1e-6)
        assert found[~known].isnan().all()
        assert is_flat(group, 5).tolist() == [scored == 1]


@pytest.mark.parametrize("shaped", [gtpo_advantages, grpo_s_advantages])
def test_an_answer_without_a_reward_has_no_token_either(shaped):
    """train.py takes it out of the mask; the entropies of the others are compared without it."""
    entropy = torch.rand(4, 3, generator=seeded())
    rewards, rows = torch.tensor([1.0, math.nan, 0.0, 1.0]), [0, 2, 3]
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]) > 0
    found = shaped(rewards, entropy, mask, 4)
    assert_close(found[rows].flatten(), shaped(rewards[rows], entropy[rows], mask[rows], 3)
                 .flatten().tolist(), 1e-6)
    assert found[0].any() and not found[1].any()


@pytest.mark.parametrize("word", [word for word in BY_ANSWER if word != "max-rl"])
@pytest.mark.parametrize("constant", [-3e7, 1e6, 1e10])
def test_a_constant_added_to_all_rewards_changes_nothing(word, constant):
    """In float32 -3e7 and -3e7 + 1 are one number. And rounding alone is no difference."""
    rewards = torch.tensor([0.0, 1.0, 0.0625, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found, expected = (BY_ANSWER[word](values, 4) for values in (rewards + constant, rewards))
    assert_close(found, expected.tolist(), 1e-6)
    assert found[0] != found[1] and not found[4:].any()
    equal = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert equal[0] != equal[1] and not BY_ANSWER[word](equal, 4).any()


@pytest.fixture
def rewards():
    return torch.rand(40, dtype=torch.float64, generator=seeded())


def test_the_rewards_are_left_as_they_are_and_groups_are_of_8(rewards):
    plain = group_advantages(rewards, 8, 1e-8, scale_by_std=True, unbiased=False)
    same(group_advantages(rewards), plain, "groups of 8")
    strided = rewards.repeat_interleave(2)[::2]
    advantages = group_advantages(strided, 8)
    same(strided, rewards, "the rewards")
    same(advantages, plain, "advantages")


# --- Variants: one value per answer ---------------------------------------------------------------
def test_leave_one_out(rewards):
    groups = rewards.view(5, 8).tolist()
    expected = [r - (math.fsum(group) - r) / 7 for group in groups for r in group]
    assert_close(leave_one_out_advantages(rewards, 8), expected, 1e-12)
    assert leave_one_out_advantages(torch.full((7,), 0.7), 7).tolist() == [0.0] * 7


MEANS = [[1, 0, 0, 0], [0.7] * 4, [0] * 4, [0.5, 1.5, 1.5, 0]]


def test_max_rl():
    """Half the right answers, half the advantage: r / m - 1."""
    expected = [r / (math.fsum(group) / 4) - 1 if len(set(group)) > 1 else 0.0
                for group in MEANS for r in group]
    found = max_rl_advantages(torch.tensor(MEANS, dtype=torch.float64).flatten(), 4)
    assert_close(found, expected, 1e-12)
    assert max_rl_advantages(torch.tensor([1] + [0] * 7)).tolist() == [7.0] + [-1.0] * 7
    with value_error("negative"):
        max_rl_advantages(torch.tensor([1.0, -0.1]), 2)


def test_batch_std():
    """The std of all centred rewards."""
    centred = [r - math.fsum(group) / 4 for group in MEANS for r in group]
    rewards = torch.tensor(MEANS, dtype=torch.float64).flatten()
    found = batch_std_advantages(rewards, 4)
    assert_close(found, reference(centred, 16), 1e-7)
    assert batch_std_advantages(rewards.float()[4:8], 4).tolist() == [0.0] * 4


def gdpo_reference(parts, weights, group_size):
    sums = [0.0] * len(parts[0])
    for part, weight in zip(parts, weights):
        for start in range(0, len(part), group_size):
            known = [i for i in range(start, start + group_size) if part[i] == part[i]]
            values = [part[i] for i in known]
            scores = reference(values, len(values)) if len(set(values)) > 1 else [0.0] * len(known)
            for i, score in zip(known, scores):
                sums[i] += weight * score
    scored = [i for i in range(len(sums)) if any(part[i] == part[i] for part in parts)]
    advantages = dict(zip(scored, reference([sums[i] for i in scored], len(scored))))
    return [advantages.get(i, math.nan) for i in range(len(sums))]


@pytest.mark.parametrize("parts, weights", [  # in groups of four
    ([[1, 1, 0, 0], [0, 100, 200, 300]], (2.0, -0.5)),
    ([[1, math.nan, 0, 0, 1, 2, 3, 4], [5, *[math.nan] * 4, 1, 1, 9]], (1, 1)),
    ([[math.nan] * 8, [0.3, 0.1, 0.2, 0.2, 1, 0, 0, 0], [0.7] * 8], (1, 2, 3)),
    ([[1, 0, 0, 0], [0, 1, 1, 1]], (1, 1)),  # they cancel: all advantages are 0
])
def test_gdpo_is_its_formula(parts, weights):
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-6)):
        advantages = gdpo_advantages(dict(enumerate(torch.tensor(parts, dtype=dtype))), weights, 4)
        assert advantages.dtype == torch.float64
        assert_close(advantages, gdpo_reference(parts, weights, 4), tolerance)
    equal = dict.fromkeys("ab", torch.full((7,), 0.7))
    assert gdpo_advantages(equal, None, 7).tolist() == [0.0] * 7


def shapley_by_definition(rewards):
    """The mean over every order of arrival of what a candidate adds to the best so far."""
    shares = [0.0] * len(rewards)
    orders = list(itertools.permutations(range(len(rewards))))
    for order in orders:
        worth = 0.0  # of nobody
        for position, j in enumerate(order):
            grown = max(rewards[i] for i in order[:position + 1])
            shares[j] += (grown - worth) / len(orders)
            worth = grown
    return shares


@pytest.mark.parametrize("rewards", [
    [0.2, 0.8, 0.5], [1.5], [1.0, 1.0, 0.0], [3.0, 1.0, 2.0, 0.0, 5.0], [-1.0, 2.0, 0.5]])
def test_shapley_shares(rewards):
    shares = shapley_shares(torch.tensor(rewards, dtype=torch.float64))
    assert_close(shares, shapley_by_definition(rewards), 1e-12)
    assert shapley_shares(torch.tensor([1, 0])).tolist() == [1.0, 0.0]
    assert shapley_shares(torch.tensor([])).shape == (0,)


# --- Variants: one value per token ----------------------------------------------------------------
LENGTHS = (4, 2, 0, 3, 1, 5, 2, 3)  # response tokens of two groups of four; one answer is empty
GROUPS = (range(4), range(4, 8))


def ragged_mask():
    """Groups of four with prompts of different length, and a hole in row 3 (a tool's tokens)."""
    mask = torch.zeros(8, 9, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        start = 1 + 2 * (row // 4)
        mask[row, start:start + length] = True
    mask[3, 3:6] = torch.tensor([False, False, True])
    return mask


def assert_per_token(actual, rows, mask):
    """`rows`: a list of values for each row's response tokens; elsewhere there is 0."""
    assert actual.shape == mask.shape and actual.dtype == torch.float32
    assert not actual[~mask].any()
    for row, values in enumerate(rows):
        assert_close(actual[row, mask[row]], values, 2e-6)


def pooled_scores(values):
    """Lists of numbers, one per row -> the same lists, as z-scores of all numbers of a group."""
    scored = []
    for group in GROUPS:
        pool = [value for row in group for value in values[row]]
        scores = iter(reference(pool, len(pool)) if pool else [])
        scored += [[next(scores) for _ in values[row]] for row in group]
    return scored


STEPS = [[(0, 1.0), (3, 0.5)], [(1, -2.0)], [], [(0, 0.25), (1, 3.0), (2, 0.0)], [(0, 1.0)],
         [(1, 0.0), (3, 2.0)], [], [(2, 0.5)]]
CANDIDATES = [  # of eight answers: (first token, last token, reward)
    [(0, 0, 0.2), (1, 2, 0.8), (3, 3, 0.5)], [(1, 1, 1.0)], [], [(0, 1, 0.0), (2, 2, 1.0)], [],
    [(0, 1, 1.0), (2, 2, 1.0), (4, 4, 0.0)], [(0, 1, 0.5)], []]


def sums_of_scores(spans, rewards):
    """Each token's sum of the z-scores of those parts of its answer that it lies in."""
    return [[sum(z for (first, last, *_), z in zip(of_row, scores) if first <= t <= last)
             for t in range(length)]
            for of_row, scores, length in zip(spans, pooled_scores(rewards), LENGTHS)]


def test_process_supervision():
    rows = sums_of_scores([[(0, end) for end, _ in steps] for steps in STEPS],
                          [[reward for _, reward in steps] for steps in STEPS])
    assert any(rows[5][:4]) and rows[5][4] == 0  # 0 after the last step
    assert_per_token(process_advantages(STEPS, ragged_mask(), 4), rows, ragged_mask())
    alike = [[(0, 0.7), (1, 0.7)], [(1, 0.7)]]
    assert not process_advantages(alike, torch.ones(2, 2) > 0, 2).any()
    ends = [[(0, 1.0)], *6 * [[]], [(0, 0.0)]]             # groups are of 8
    assert process_advantages(ends, torch.ones(8, 1) > 0)[:, 0].tolist() == [1, *6 * [0], -1]


def test_shape_advantages():
    rewards = [[reward for *_, reward in of_row] for of_row in CANDIDATES]
    rows = sums_of_scores(CANDIDATES, list(map(shapley_by_definition, rewards)))
    assert rows[1][0] == 0 == rows[5][3] and rows[0][0] != rows[0][1]  # outside every span: 0
    assert_per_token(shape_advantages(CANDIDATES, ragged_mask(), 4), rows, ragged_mask())


def entropy_reference(rewards, entropies, mask, level, right):
    """GTPO and GRPO-S by their formulas, for groups of four -> lists of values per token."""
    H = [{t: float(entropies[row, t]) for t in range(9) if mask[row, t]} for row in range(8)]
    if level == "sequence":
        H = [{0: math.fsum(h.values()) / len(h)} if h else {} for h in H]
    shaped = []
    for row in range(8):
        same = [i for i in range(8) if i // 4 == row // 4 and right[i] == right[row]]
        shaped.append([])
        for t in H[row]:                     # the columns of its tokens
            long = [i for i in same if t in H[i]]
            weights = {i: H[i][t] if right[row] else 1 / H[i][t] for i in long}
            share = 0.1 * len(long) * weights[row] / sum(weights.values())
            shaped[row].append(float(rewards[row]) + share if right[row] else -(1 + share))
    shaped = pooled_scores(shaped)
    if level == "sequence":
        shaped = [value * length for value, length in zip(shaped, LENGTHS)]  # for every token
    return shaped


BY_LEVEL = {"token": gtpo_advantages, "sequence": grpo_s_advantages}


@pytest.mark.parametrize("given_right", [False, True])
@pytest.mark.parametrize("level", BY_LEVEL)
def test_entropy_advantages(level, given_right):
    """Whatever is masked; entropies are those of the old policy, so they get no gradient."""
    mask = ragged_mask()
    rewards = torch.tensor([1.5, 0.0, 1.5, 0.5, -1.0, 2.0, 0.0, 1.0])
    right = rewards == 1.5 if given_right else rewards > 0
    H = 0.05 + 3 * torch.rand(mask.shape, dtype=torch.float64, generator=seeded())
    rows = entropy_reference(rewards, H, mask, level, right.tolist())
    H = H.masked_fill(~mask, math.nan if given_right else math.inf).requires_grad_()
    right = right if given_right else None
    advantages = BY_LEVEL[level](rewards, H, mask, 4, right)
    assert_per_token(advantages, rows, mask)
    assert not advantages.requires_grad


@pytest.mark.parametrize("level", BY_LEVEL)
@pytest.mark.parametrize("entropy", [0.0, -1e-9, 1e-7])
def test_entropies_of_zero_or_equal(level, entropy):
    """No token was ever in doubt: every share is the same, and the result is finite."""
    mask, rewards = ragged_mask(), torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0])
    shaped = BY_LEVEL[level](rewards, torch.full(mask.shape, entropy), mask, 4)
    rows = entropy_reference(rewards, torch.ones(mask.shape), mask, level, (rewards > 0).tolist())
    assert_per_token(shaped, rows, mask)
    # In responses that do not differ no token stands out: shares rounded in float32 would differ
    mask = torch.arange(16) < torch.tensor([[16], [15], [11], [9], [7], [5], [3]])
    equal = BY_LEVEL[level](torch.full((7,), 0.7), 0.7 + 0 * mask, mask, 7)
    assert float(equal.abs().max()) < 1e-6


# --- Refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize("rewards, group_size, reason", [
    ([1.0] * 7, 8, "groups of 8"), ([1.0] * 9, 8, "groups of 8"), ([], 8, "groups of 8"),
    ([[1.0, 0.0], [0.0, 1.0]], 2, "groups of 2"), ([1.0], 1, "group_size 1"),
    ([1.0, 2.0], 0, "group_size 0"), ([1.0, 2.0], -2, "group_size -2"),
    ([1.0, 0.0, 1e16, 0.0], 2, r"rows \[2\]"), ([1.0, math.inf, 0, 0], 4, r"\[inf\] .* \[1\]"),
    ([-math.inf] * 4, 4, r"-inf.* rows \[0, 1, 2, 3\]")])
def test_refusals(rewards, group_size, reason):
    mask = torch.ones(len(rewards), 2) > 0
    for refuse in (group_advantages, leave_one_out_advantages, *(
            partial(shaped, entropy=mask + 0.0, mask=mask) for shaped in BY_LEVEL.values())):
        with value_error(reason):
            refuse(torch.tensor(rewards), group_size=group_size)
