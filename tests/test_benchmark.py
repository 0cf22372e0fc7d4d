"""The benchmark: its floors, and one measurement."""
import math
import benchmark
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
import train

TINY = benchmark.SMALL | {"layers": 2, "hidden": 64, "ffn": 128, "prompt_length": 16,
                          "new_tokens": 12, "prompts": 4, "group_size": 4}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_flops_of_a_forward_pass_and_bytes_of_a_rollout():
    model, P, n = benchmark.random_model(TINY, torch.device("cpu"), torch.float32), 10, 30
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(torch.randint(2, 4000, (1, P + n))).last_hidden_state
        model.lm_head(hidden[:, -n:])
    products = sum(flops for operation, flops in counter.get_flop_counts()["Global"].items()
                   if "attention" not in str(operation))
    settings = train.Settings(prompts_per_step=1)
    assert benchmark.forward_flops(model, P, [n], settings) == pytest.approx(products, rel=0.02)
    weights = sum(p.numel() for p in model.parameters())  # tied: the head reads what embeds
    token = 2 * 2 * 2 * 16  # keys and values, layers, heads, head size
    caches = sum(token * (P + t) for length in (7, 3) for t in range(length))
    assert benchmark.rollout_bytes(model, P, [7, 3]) == 4 * (7 * weights + caches)


def test_a_measurement(tmp_path):
    """The folder opens with train.py's own loader, `auto` is settled, every figure is there."""
    benchmark.make_folder(TINY, tmp_path)
    settings = benchmark.settings_of(tmp_path, ["--lr=0.5"])
    assert (settings.lr, settings.group_size) == (0.5, TINY["group_size"])
    result = benchmark.measure({"folder": str(tmp_path), "side": "ours", "repeat": 1,
                                "flags": ["--no-fast"]})
    assert {"seconds", "cpu", "sampling", "update", "length", "sampling_rate", "update_rate",
            "of_bandwidth", "of_matrix_rate", "peak"} <= result.keys()
    assert result["length"] == [TINY["new_tokens"]]
    assert result["seconds"][0] == pytest.approx(result["sampling"][0] + result["update"][0])
    assert all(math.isfinite(value) for values in result.values() for value in values)
