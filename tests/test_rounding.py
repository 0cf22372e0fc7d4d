"""Weights with fewer bits than their masters: what is meant arrives, and nothing else does."""
import pytest
import torch
from conftest import FEW, TINY, small_model
from safetensors.torch import load_file
from transformers import Qwen2Config

import train
from logprob import forms_of
from train import DROPPED_BITS, MasterAdamW, pinned_like, round_into, with_moments

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


def projection(written, meant):
    """The share of a meant change that a written one has in its direction."""
    return float(written @ meant / (meant @ meant))


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
    n = 2**22 if abs(part) < 0.1 else 2**20
    start = ((1 + torch.rand(n)) / 64).to(dtype).float()           # of one unit, nearly all
    start[::2] *= -1
    step = part * unit_of(start, dtype) * start.sign()
    # Not across a power of two, where the unit is another
    keep = (start + step).abs().log2().floor() == start.abs().log2().floor()
    start, step = start[keep], step[keep]
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
    for seed in ((2, "thresholds", 0, 0), (1, "thresholds", 0, 1)):     # or another rank
        others = rounded(masters, torch.bfloat16, seed)
        assert 0.3 < float((once != others).float().mean()) < 0.4, seed
    assert "resumed on another number gets others" in " ".join(MasterAdamW.__doc__.split())
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


def test_the_loss_scale_of_float16():
    """Halved after an update that is not finite, doubled after 200 that are; 1 in bfloat16."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = MasterAdamW([weight], torch.device("cpu"), True, 0)
    assert optimizer.loss_scale == 2**16
    for skipped, count, scale in ((True, 2, 2**14), (False, 199, 2**14), (False, 1, 2**15),
                                  (True, 40, 1)):        # below 1 gradients would only be smaller
        for _ in range(count):
            train.adapt_loss_scale(optimizer, skipped)
        assert optimizer.loss_scale == scale
    other = torch.nn.Parameter(weight.detach().bfloat16())
    other = MasterAdamW([other], torch.device("cpu"), True, 0)
    train.adapt_loss_scale(other, True)
    assert other.loss_scale == 1


def test_what_is_too_small_for_float16_arrives_and_what_is_too_large_is_told():
    """A loss of 1e-6 per weight: without the scale its gradients in float16 are 0."""
    weight = torch.nn.Parameter(torch.full((64, 64), 0.02, dtype=torch.float16))
    optimizer = MasterAdamW([weight], torch.device("cpu"), True, 0, lr=1e-4, weight_decay=0.0)
    for scale, moves in ((1.0, False), (optimizer.loss_scale, True)):
        optimizer.loss_scale = scale
        optimizer.zero_grad()
        before = weight.detach().clone()
        value = (torch.eye(64, dtype=torch.float16) @ weight).float().sum() * 1e-8
        (value * scale).backward()
        train.unscaled(optimizer)
        optimizer.step()
        assert torch.equal(before, weight) != moves
    model = small_model("llama").half()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e5)
    with pytest.raises(ValueError, match="not finite in torch.float16.*--dtype bfloat16"):
        forms_of(model)


def test_moments_are_there_before_the_first_step():
    """Running out of memory in the first step leaves a state that the next try can use."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], torch.device("cpu"), True, 0, fused=True)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    plain = torch.nn.Parameter(torch.ones(3))
    optimizer = with_moments(torch.optim.AdamW([plain], fused=True))
    assert optimizer.state[plain].keys() == state.keys()
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], fused=True)
    for adamw in (optimizer, other):
        for p in adamw.param_groups[0]["params"]:
            p.grad = torch.tensor([1.0, -2.0, 3.0])
        adamw.step()
    assert torch.equal(plain, other.param_groups[0]["params"][0]), "and the step is the same"


def test_pinned_memory_comes_in_slabs():
    """One block per tensor would be rounded up to a power of two, each."""
    tensors = [torch.empty(5, 7), torch.empty(300), torch.empty(64), torch.empty(2)]
    found = pinned_like(tensors, torch.bfloat16, slab=1024)
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in tensors]
    blocks = [tensor.untyped_storage() for tensor in found]
    assert len({block.data_ptr() for block in blocks}) == 1 and blocks[0].nbytes() == 1024
    for i, tensor in enumerate(found):
        tensor.fill_(i)
    assert [int(tensor.sum()) for tensor in found] == [0, 300, 128, 6], "no two overlap"
    assert len(pinned_like([torch.empty(600)], torch.float32, slab=1024)[0]) == 600


def test_masters_start_from_the_files_own_digits(tmp_path):
    """The tiny policy's file holds float32; a bfloat16 policy must not begin from less."""
    weights = load_file(TINY / "model.safetensors")
    flags = [*FEW, "--dtype=bfloat16", "--steps=1", "--threads=1"]
    parts = train.load(train.plan_memory(train.parse(flags)))
    names = [name for name, _ in parts.policy_model.named_parameters()]
    for name, master in zip(names, parts.optimizer.param_groups[0]["params"]):
        assert torch.equal(master, weights[name]), name
    for p, ref in zip(parts.policy_model.parameters(), parts.ref_model.parameters()):
        assert p.dtype == torch.bfloat16 and torch.equal(p, ref), "the reference is the start"


def test_auto_takes_bfloat16_where_a_cpu_multiplies_it(monkeypatch, tmp_path):
    for hidden, amx, expected in ((512, True, torch.bfloat16), (508, True, torch.float32),
                                  (512, False, torch.float32)):
        Qwen2Config(hidden_size=hidden, num_attention_heads=4).save_pretrained(tmp_path)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda amx=amx: {"amx_bf16": amx})
        assert train.dtype_of_cpu(str(tmp_path)) == expected
    assert train.dtype_of_cpu(str(tmp_path / "nothing")) == torch.float32
