"""Weights with fewer bits than their masters: what is meant arrives, and nothing else does."""
import pytest
import torch
from conftest import small_model
from train import DROPPED_BITS, MasterAdamW, pinned_like, projection, round_into, sum_in_float32

HALF = sorted(DROPPED_BITS, key=str)


def on_the_grid(n, dtype, scale=0.02):
    """n numbers that the dtype holds exactly, signs and sizes mixed, 0 among them."""
    torch.manual_seed(0)
    numbers = (torch.randn(n) * scale).to(dtype).float()
    numbers[::1000] = 0
    return numbers


def unit_of(numbers, dtype):
    """The distance from each number to the next one of its dtype, away from 0."""
    bits = numbers.view(torch.int32) + (1 << DROPPED_BITS[dtype])
    return (bits.view(torch.float32) - numbers).abs()


def rounded(masters, dtype, seed=(1, "thresholds", 0, 0)):
    weights = torch.empty(len(masters), dtype=dtype)
    round_into(weights, masters, seed)
    return weights.float()


@pytest.mark.parametrize("dtype", HALF)
def test_no_change_gives_the_start_bit_for_bit(dtype):
    for scale in (1e-30 if dtype == torch.bfloat16 else 1e-6, 0.02, 1000.0):
        start = on_the_grid(10_001, dtype, scale)
        assert torch.equal(rounded(start, dtype), start)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("part", [0.01, 0.4, -0.02, -0.9])
def test_a_part_of_a_unit_arrives_on_average(dtype, part):
    """To 1%. Rounded to nearest all of it or nothing does."""
    torch.manual_seed(0)
    start = ((1 + torch.rand(2**22)) / 64).to(dtype).float()           # of one unit, nearly all
    start[::2] *= -1
    step = part * unit_of(start, dtype) * start.sign()
    # Not across a power of two, where the unit is another
    keep = (start + step).abs().log2().floor() == start.abs().log2().floor()
    start = start[keep]
    step = step[keep]
    moved = rounded(start + step, dtype) - start
    assert projection(moved, step) == pytest.approx(1, rel=0.01)
    share = moved.abs().double().sum() / step.abs().double().sum()
    assert float(share) == pytest.approx(1, rel=0.01)
    # A weight stays or goes to its neighbour, and nowhere else.
    units = (moved / unit_of(start, dtype)).abs()
    assert set(units.unique().tolist()) <= {0, 1}
    nearest = rounded(start + step, dtype, None) - start
    expected = 1 / abs(part) if abs(part) > 0.5 else 0
    assert projection(nearest, step) == pytest.approx(expected, rel=0.01)


def test_thresholds_belong_to_the_weight_and_never_change():
    masters = torch.rand(3_000_001)
    once = rounded(masters, torch.bfloat16)
    assert torch.equal(once, rounded(masters, torch.bfloat16)), "the same at every step"
    others = rounded(masters, torch.bfloat16, (2, "thresholds", 0, 0))
    assert 0.3 < float((once != others).float().mean()) < 0.4, "another seed, other thresholds"
    # No two weights share a threshold: pieces, and the 64 bits of four weights, are drawn anew.
    same = rounded(torch.full((2**22,), 1 + 2**-8 * 0.5), torch.bfloat16) > 1
    for lag in (1, 2, 3, 4, 2**18, 2**20):
        agree = float((same[lag:] == same[:-lag]).float().mean())
        assert agree == pytest.approx(0.625, abs=0.003), lag      # 3/4 squared + 1/4 squared


def train_briefly(dtype, rounding, updates=60, lr=1e-6):
    """-> log-probs of the tokens that are trained, before and after; `arrived` of every update."""
    model = small_model("qwen2", std=0.02, hidden_size=64, intermediate_size=128)
    model.load_state_dict({name: w.bfloat16() for name, w in model.state_dict().items()})
    weights = list(model.parameters())
    if dtype == torch.float32:
        optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    else:
        for weight in weights:
            weight.data = weight.data.to(dtype)
        optimizer = MasterAdamW(weights, torch.device("cpu"), rounding, 0, lr=lr, weight_decay=0.0)
        optimizer.loss_scale = 1.0
    ids = torch.arange(2, 62).view(4, 15)

    def logprobs():
        """In float64: what the weights say, and not how the products round."""
        wide = small_model("qwen2", std=0.02, hidden_size=64, intermediate_size=128).double()
        wide.load_state_dict(model.state_dict())
        logits = wide(ids).logits[:, :-1].log_softmax(dim=-1)
        return logits.gather(2, ids[:, 1:, None])[..., 0].detach()

    before = logprobs()
    arrived = []
    for _ in range(updates):
        optimizer.zero_grad()
        logits = model(ids).logits[:, :-1].float().log_softmax(dim=-1)
        (-logits.gather(2, ids[:, 1:, None]).mean()).backward()
        optimizer.step()
        arrived.append(getattr(optimizer, "arrived", None))
    return logprobs() - before, arrived


def test_bfloat16_follows_float32_where_rounding_to_nearest_stands_still():
    meant, _ = train_briefly(torch.float32, None)
    followed, arrived = train_briefly(torch.bfloat16, True)
    stood, nearest = train_briefly(torch.bfloat16, False)
    share = float((followed * meant).sum() / meant.square().sum())
    assert share == pytest.approx(1, abs=0.1)
    assert sum(arrived) / len(arrived) == pytest.approx(1, abs=0.1)
    assert float((stood * meant).sum() / meant.square().sum()) < 0.5
    assert sum(nearest) / len(nearest) < 0.6
