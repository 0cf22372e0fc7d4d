"""LoRA inside the optimizer: an ordinary LoRA module's steps, on a model of plain weights."""
import copy
import json
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from checks import is_same, same, seeded
from files import FEW, TINY
from models import small_model
from runs import evaluates, trains
from steps import parts, raises, rollout_of, run_in, updated
import train

FLAGS = (*FEW, "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=16", "--eval-limit=4",
         "--threads=1", "--lora-rank=4", "--lr=0.003")


class OrdinaryLoRA(torch.nn.Module):
    """A second path beside a frozen Linear, as everybody else builds it."""

    def __init__(self, linear, A, B, scale):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.A = torch.nn.Parameter(A.clone())
        self.B = torch.nn.Parameter(B.clone())
        self.scale = scale

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.A.T) @ self.B.T


def with_modules(model, optimizer):
    """A copy of the model, its Linears OrdinaryLoRA with the same factors; AdamW over these."""
    model = copy.deepcopy(model)
    adapted = []
    factors = iter(optimizer.factors.items())
    for (name, A), (_, B) in zip(factors, factors):
        name = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        place, _, last = name.rpartition(".")
        adapted.append(OrdinaryLoRA(model.get_submodule(name), A, B, scale_of(optimizer)))
        setattr(model.get_submodule(place), last, adapted[-1])
    how = {name: optimizer.defaults[name] for name in ("lr", "weight_decay", "fused")}
    return model, torch.optim.AdamW([p for lora in adapted for p in (lora.A, lora.B)], **how)


def scale_of(optimizer):
    scale, = {linear.c for linear in optimizer.linears.values()}
    return scale


def moved(optimizer):
    return torch.cat([p.detach().flatten() for p in optimizer.param_groups[0]["params"]])


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_factors_are_those_of_an_ordinary_module(in_float64, tied):
    """Six steps of two micro-batches, clipped, with decay: to 1e-11 of float64."""
    s = train.parse(["--lora-rank=4", "--lora-alpha=12", "--lr=0.01", "--weight-decay=0.1",
                     "--no-offload"])
    model = small_model("qwen2", tie_word_embeddings=tied)
    start = copy.deepcopy(model)
    optimizer = train.make_optimizer(model, s)
    assert moved(optimizer).dtype == torch.float64 and scale_of(optimizer) == 3
    ordinary = with_modules(start, optimizer)
    ids = torch.randint(2, 64, (6, 4, 12), generator=seeded())
    for step in ids:
        for each, adamw in ((model, optimizer), ordinary):
            adamw.zero_grad()
            for rows in step.split(2):
                cross_entropy(each(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(),
                              reduction="sum").backward()
            assert all(weight.grad is None for weight in model.parameters())  # the factors' alone
            clip_grad_norm_(train.finished_gradients(adamw), 0.5)
            adamw.step()
        assert (moved(optimizer) - moved(ordinary[1])).abs().max() < 1e-11
    logits = [each(ids[0]).logits for each in (model, ordinary[0])]
    assert torch.allclose(*logits, rtol=0, atol=1e-10)
    assert not torch.allclose(logits[0], start(ids[0]).logits, atol=1e-2)
    # Everything else is what it was.
    before = weights_of(start)
    for name, weight in model.named_parameters():
        learns = "_proj.weight" in name
        assert is_same(weight, before[name]) != learns, name


def test_the_first_factors_are_as_pefts():
    """A uniform within 1 / sqrt(in), by the run's seed; B = 0, so that the first W is W0."""
    model = small_model("qwen2", hidden_size=64, intermediate_size=256)
    start = weights_of(model)
    s = train.parse(["--lora-rank=16", "--no-offload"])
    optimizer = train.make_optimizer(model, s)
    assert scale_of(optimizer) == 2
    factors = optimizer.factors
    for name, factor in factors.items():
        bound = factor.shape[1] ** -0.5
        assert not factor.any() if "lora_B" in name else (
            0.9 * bound < factor.abs().max() <= bound
            and abs(factor.mean()) < 4 * bound / (3 * factor.numel()) ** 0.5)
    same(weights_of(model), start)
    A = [factor for name, factor in factors.items() if "q_proj.lora_A" in name]
    assert not torch.equal(*A), "every weight has its own"
    for seed, alike in ((0, True), (1, False)):
        s.seed = seed
        again = train.make_optimizer(small_model("qwen2", hidden_size=64, intermediate_size=256), s)
        assert is_same(again.factors, factors) == alike


def test_half_precision():
    p, whole = (parts("--lora-rank=4", "--lr=1e-5", "--kl-coef=0", dtype=dtype)
                for dtype in (torch.bfloat16, torch.float32))
    rollout = rollout_of(p)
    for _ in range(3):
        metrics, plain = (updated(x, x.policy_model, x.optimizer, rollout, measure=False)
                          for x in (p, whole))
        assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.05)
    assert all(p.dtype == torch.float32 for p in p.optimizer.factors.values())


def test_final_is_the_model_with_its_adapter(tmp_path, capsys, run_here):
    out = tmp_path / "run"
    trains(*FLAGS, "--lora-alpha=6", "--steps=4", f"--output={out}")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 6
    final, base = map(AutoModelForCausalLM.from_pretrained, (out / "final", TINY))
    factors = load_file(out / "adapter" / "adapter_model.safetensors")
    for name, A in factors.items():
        if ".lora_A." in name:                            # by PEFT's names
            B = factors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
            expected = base.get_parameter(weight) + 6 / 4 * B @ A
            assert (B @ A).norm() > 0
            torch.testing.assert_close(final.get_parameter(weight), expected, rtol=1e-4, atol=1e-6)
    evaluates(out, *FEW, "--eval-limit=4", "--max-new-tokens=16")
    assert "greedy" in capsys.readouterr().out
    assert run_here("sample.py", "--model", out, "2 + 3 = ?")


def test_an_adapter_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    p = parts("--lora-rank=4")
    run = run_in(tmp_path)
    train.save_adapter(run, p.optimizer, p.settings)
    before = {file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()}
    for factor in p.optimizer.factors.values():
        factor.data += 1
    for _ in range(2):                                    # what is left of a failure is no trouble
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(json, "dumps", raises(OSError("No space left")))
            train.save_adapter(run, p.optimizer, p.settings)
        found = {file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()}
        assert found == before
    train.save_adapter(run, p.optimizer, p.settings)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    same(saved, p.optimizer.factors)
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"]
    (tmp_path / "adapter.new").mkdir()                    # what a kill has left of another step
    (tmp_path / "adapter.new" / "step-1").touch()
    train.save_adapter(run, p.optimizer, p.settings)
    assert len(list((tmp_path / "adapter").iterdir())) == 2


def test_a_linear_with_a_forward_of_its_own_is_no_linear():
    """As the routers of Llama 4 and PhiMoE: they return two tensors."""
    model = small_model("qwen2")
    model.model.router = type("Router", (torch.nn.Linear,), {})(32, 4)
    optimizer = train.make_optimizer(model, train.parse(["--lora-rank=4"]))
    assert type(model.model.router).__name__ == "Router" and not any(
        "router" in name for name in optimizer.factors)



def test_a_model_without_linears_is_refused():
    model = small_model("gpt2")
    with pytest.raises(train.BadInput, match="--lora-rank: gpt2 models have no Linear"):
        train.make_optimizer(model, train.parse(["--lora-rank=4", "--no-offload"]))
