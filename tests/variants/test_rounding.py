"""Weights with fewer bits than their masters: what is meant arrives, and nothing else does.

Random numbers differ from CPU to CPU, so the margins are four standard errors.
"""
import pytest
import torch
from checks import same, seeded
from models import small_model
import train
from train import MasterAdamW, dither

HALF = (torch.bfloat16, torch.float16)
BITS = {torch.bfloat16: 16, torch.float16: 13}  # of a float32 that these lack


def masters_of(*weights, seed=0, **how):
    masters = {str(i): dither(weight, seed, i) for i, weight in enumerate(weights)}
    return MasterAdamW(masters.items(), list(weights), **how)


def rounded(start, dtype, move=0.0, seed=1):
    """Weights whose masters have made this move, as float32."""
    weight = torch.nn.Parameter(start.to(dtype))
    optimizer = masters_of(weight, seed=seed)
    optimizer.masters[0] += move
    optimizer.round()
    return weight.detach().float()


@pytest.mark.parametrize("dtype", HALF)
def test_no_change_gives_the_start_bit_for_bit(dtype):
    for scale in (1e-30 if dtype == torch.bfloat16 else 1e-6, 0.02, 1000.0):
        start = (torch.randn(10_001, generator=seeded()) * scale).to(dtype).float()
        start[::1000] = 0
        start[1::1000] = -0.0
        start[2::1000] = 2.0 ** start[2::1000].abs().log2().round()  # below one, units are half
        same(rounded(start, dtype), start)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("part", [0.01, 0.4, -0.02, -0.9])
def test_a_part_of_a_unit_arrives_on_average(dtype, part):
    """From masters on the grid, rounded to nearest, all of it or nothing would."""
    start = ((1 + torch.rand(2**20, generator=seeded())) / 64).to(dtype).float()  # of one unit
    start[::2] *= -1
    following = (start.view(torch.int32) + (1 << BITS[dtype])).view(torch.float32)  # away from 0
    unit = (following - start).abs()
    # Not near a power of two, where the unit is another
    size = start.abs().frexp().mantissa
    keep = (0.51 < size) & (size < 0.99)
    start, unit = start[keep], unit[keep].double()
    step = (part * unit * start.sign()).float()
    moved = (rounded(start, dtype, step) - start).double()
    # A weight moves by one unit with this chance, and else not at all.
    chance = step.abs() / unit
    error = (unit.square() * chance * (1 - chance)).sum().sqrt()
    for far in (moved.abs().sum() - step.double().abs().sum(), moved.sum() - step.double().sum()):
        assert far.abs() < 4 * error
    assert set((moved / (unit * step.sign())).unique().tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", HALF)
def test_masters_begin_anywhere_within_half_a_unit(dtype):
    """In float32 numbers from the weight: uniform, and never so far that it would round away."""
    n, half = 2**18, 2**(BITS[dtype] - 1)
    weight = torch.full((n,), -1.5, dtype=dtype)
    far = dither(weight, 0, 0).view(torch.int32) - weight.float().view(torch.int32)
    assert 1 - half <= far.min() < -0.999 * half and 0.999 * half < far.max() <= half - 1
    assert abs(float(far.double().mean())) < 4 * half / (3 * n) ** 0.5
    assert far.double().std() == pytest.approx(half / 3**0.5, rel=0.01)


def test_the_places_never_change():
    weight = torch.randn(99, generator=seeded())
    same(dither(weight, 0, 0), weight, "in float32 none")
    n = 2**20
    start, move = torch.ones(n), 2**-7 * 0.25            # a quarter of a unit above 1
    once = rounded(start, torch.bfloat16, move) > 1
    same(once, rounded(start, torch.bfloat16, move) > 1, "the same in every run")
    others = rounded(start, torch.bfloat16, move, seed=2) > 1
    # No two weights share a place, nor do two seeds. With lags, neighbours are not independent:
    # the variance is 0.23 + 2 * 0.05 in place of 0.23.
    lags = [(once[lag:], once[:-lag]) for lag in (1, 2, 3, 4, 2**16, 2**18)]
    for a, b in [(once, others), *lags]:
        agree = float((a == b).double().mean())
        assert abs(agree - 0.625) < 4 * (0.33 / len(a)) ** 0.5  # 3/4 squared + 1/4 squared


@pytest.mark.parametrize("flags", [[], ["--lora-rank=4"]])
@torch.no_grad()
def test_each_weight_of_a_model_has_its_own_places(flags):
    optimizer = train.make_optimizer(small_model("qwen2").bfloat16(), train.parse(flags))
    pairs = list(zip(optimizer.exact_weights(), optimizer.weights))
    places = {tuple(((master - weight) * weight).flatten()[:16].sign().tolist())
              for master, weight in pairs}
    assert len(places) > 0.9 * len(pairs)


def test_each_shard_of_a_weight_has_its_own_places(monkeypatch):
    class Shard(torch.Tensor):
        full_tensor = to_local = torch.Tensor.detach

    shards = []
    monkeypatch.setattr(train, "WORLD_SIZE", 2)
    for rank in (0, 1):
        monkeypatch.setattr(train, "RANK", rank)
        shards.append(dither(torch.ones(99, dtype=torch.bfloat16).as_subclass(Shard), 0, 0))
    assert not torch.equal(*shards)
