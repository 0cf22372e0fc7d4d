"""The memory of a step is counted before a run begins, and the first way that fits is taken."""
import json
import os
import subprocess
import sys
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from files import LIMIT
from runs import trains, well_ended
from steps import parts, rollout_of, updated
import logprob
import train


# --- Memory ---------------------------------------------------------------------------------------
def test_checkpointed_layers_run_again():
    p, calls = parts("--micro-batch-tokens=10000", "--kl-coef=0", "--sampler-correction=2"), []
    rollout = rollout_of(p)
    p.policy_model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(on))
    for on in (False, True):
        if on:
            logprob.checkpoint_layers(p.policy_model)
        updated(p, p.policy_model, p.optimizer, rollout)
    assert calls == [False, True, True]


QWEN = {"model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The shape of Qwen2.5-1.5B, without weights or a tokenizer -> the flag that names it."""
    folder = tmp_path_factory.mktemp("big")
    Qwen2Config(num_hidden_layers=28, hidden_size=1536, num_attention_heads=12,
                num_key_value_heads=2, intermediate_size=8960, vocab_size=151936,
                tie_word_embeddings=True, max_position_embeddings=32768).save_pretrained(folder)
    return f"--model={folder}"


def counted(tmp_path, *flags, dtype=torch.bfloat16):
    """The count of a small Qwen3: 4 x 3 answers of 44 tokens, micro-batches of 500."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    s = train.parse([f"--model={tmp_path}", "--prompts-per-step=4", "--group-size=3",
                     "--max-new-tokens=44", "--micro-batch-tokens=500", *flags])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    count = train.memory(s, model)
    return count, sum(p.numel() for p in model.parameters()), model


def test_count_of_the_memory(monkeypatch, tmp_path):
    with monkeypatch.context() as ranks:                  # shards, and a whole copy that samples
        ranks.setenv("WORLD_SIZE", "2")
        count, n, _ = counted(tmp_path)
    assert count["policy"] == 3 * n and count["reference"] == n
    count, n, model = counted(tmp_path)
    assert count["policy"] == count["reference"] == 2 * n
    assert count["masters"] == count["gradients"] == 4 * n and count["moments"] == 8 * n
    assert count["in all"] == sum(count.values()) / 2
    # keys and values of 12 rows, 300 positions, 3 layers, 2 heads of 16, in bfloat16
    assert count["key/value cache"] == 2 * 12 * 300 * 3 * 2 * 16 * 2
    count, n, model = counted(tmp_path, "--offload", "--kl-coef=0")
    assert count["masters"] == count["moments"] == count["reference"] == 0
    assert count["gradients"] == 4 * n
    count, n, _ = counted(tmp_path, dtype=torch.float32)  # the weights are their own masters
    assert count["masters"] == 0 and count["policy"] == 4 * n
    # LoRA's factors; the first weights are a copy where no reference keeps them
    factors = sum(4 * sum(W.shape) for name, W in model.named_parameters() if "proj" in name)
    for flags, first in ((), 2 * n), (["--kl-coef=0"], 2 * n), (["--kl-coef=0", "--offload"], 0):
        count, n, _ = counted(tmp_path, "--lora-rank=4", *flags)
        assert count["masters"] == count["gradients"] == 4 * factors
        assert count["reference"] == first


class KernelOfACard(torch.autograd.Function):
    """A norm that keeps its input alone, as on CUDA; a CPU's keeps float32 copies, too."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None


@pytest.mark.parametrize("changes, on_card", [
    ({}, False), ({}, True), ({"model_type": "qwen2", "num_attention_heads": 4}, True),
    ({"model_type": "llama", "hidden_size": 128, "intermediate_size": 384}, True)])
def test_count_of_what_is_kept_is_not_below_what_autograd_saves(monkeypatch, tmp_path, changes,
                                                                on_card):
    """Of a long row, in bfloat16; heads wider than the hidden states, of Qwen3 with norms."""
    monkeypatch.setattr(sys.modules[__name__], "QWEN", QWEN | changes)
    count, _, model = counted(tmp_path)
    logprob.use_fast_paths(model)
    if on_card:
        monkeypatch.setattr(torch, "rms_norm", KernelOfACard.apply)
    monkeypatch.setattr(logprob, "has_flash", lambda model: True)
    monkeypatch.setattr(logprob, "flash_attention", lambda *_: lambda q, k, v, scaling: (
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True)
        [0].transpose(0, 1)))
    storages, ids = [], torch.arange(501)[None]
    with torch.autograd.graph.saved_tensors_hooks(
            lambda x: storages.append(x.untyped_storage()) or x, lambda x: x):
        logprob.hidden_states(model, logprob.prefix_tree(ids, ids))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    saved = sum(size for at, size in sizes.items() if at not in weights)
    assert 0.98 * saved < count["kept for the backward pass"] < 2 * saved


@pytest.mark.parametrize("flags, measured", [
    ((), 61.8), (("--gradient-checkpointing",), 36.0),
    (("--gradient-checkpointing", "--offload"), 17.5), (("--lora-rank=16",), 32.2)])
def test_the_count_is_not_below_what_a_card_has_measured(machine, big, flags, measured):
    """Qwen2.5-1.5B on an H200: the peak in GB, tests/MACHINES.md."""
    machine("cuda", 130)
    _, rows, _ = next(train.counted_ways(train.parse([big, *flags])))
    assert 0.98 * measured < rows["in all"] / 1e9 < 1.15 * measured


# Cards that people own: GB free there -> --offload, --gradient-checkpointing
@pytest.mark.parametrize("device, free, capability, way", [
    ("cuda", 84, (9, 0), (False, False)), ("cuda", 67, (9, 0), (False, True)),
    ("cuda", 41.3, (8, 0), (False, True)), ("cuda", 39.5, (8, 0), (True, True)),
    ("cuda", 25, (8, 9), (True, True)), ("cuda", 19, (8, 9), None), ("cuda", 15.6, (7, 5), None),
    ("cpu", 30, (0, 0), (False, False)), ("mps", 30, (0, 0), (False, False))])
def test_the_first_way_that_fits_is_taken(capsys, machine, big, device, free, capability, way):
    """Nine tenths of what is free on a GPU; what is given stands; what does not fit is refused."""
    machine(device, free, 64, capability)
    flags = (big, "--data=gsm8k")
    if not way:
        with pytest.raises(train.BadInput, match="--model .* GB.*--lora-rank 16"):
            train.plan_memory(train.parse([*flags]))
        return
    s = train.plan_memory(train.parse([*flags]))
    assert (s.offload, s.gradient_checkpointing) == way
    assert s.micro_batch_tokens == (1024 if device == "cpu" else 8704)  # two groups
    out = capsys.readouterr().out
    assert ("--offload" in out, "--gradient-checkpointing" in out) == way
    given = train.plan_memory(train.parse([*flags, "--lora-rank=16", "--gradient-checkpointing",
                                           "--micro-batch-tokens=99"]))
    assert given.gradient_checkpointing and not given.offload and given.micro_batch_tokens == 99


def test_dry_run_counts_from_the_configuration_alone(capsys, machine, big):
    """Qwen2.5-1.5B on cards of so many GB, which lie in no machine; and on this one."""
    def rows_of(*flags):
        trains(big, *flags)
        lines = capsys.readouterr().out.splitlines()
        return {line[:28].strip(): line[28:].split() for line in lines[1:]}, lines[-1]

    machine("cuda", 43)
    rows, _ = rows_of("--dry-run")
    assert rows["--offload"] == ["False", "False", "True", "True"]
    assert rows["--gradient-checkpointing"] == ["False", "True", "False", "True"]
    assert rows["in all"] == ["61.05", "35.97", "42.53", "17.45"]
    assert rows["fits"] == ["False", "True", "False", "True"]
    machine("cpu", 100, 100)
    for size, flags, first in ((141, "", 0), (80, "", 0), (48, "", 1), (40, "", 1), (24, "", 3),
                               (24, "--lora-rank=16", 1), (16, "--lora-rank=16", 1),
                               (12, "--lora-rank=16 --kl-coef=0", 3)):
        rows, _ = rows_of(f"--dry-run={size}", *flags.split())
        assert rows["fits"].index("True") == first
    rows, last = rows_of("--dry-run", "19")
    assert "True" not in rows["fits"] and "--lora-rank 16" in last


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_products_of_many_shapes_keep_little_memory():
    """200 new shapes in bfloat16 would keep 125 MB; on a CPU that has no bfloat16 nothing."""
    program = """
import re, train, torch
def held(first, last):
    for n in range(first, last):
        torch.ones(n, 128, dtype=torch.bfloat16) @ torch.ones(128, 128, dtype=torch.bfloat16)
    return int(re.search("VmRSS:(.*) kB", open("/proc/self/status").read())[1]) / 1000
before = held(100, 200)
print(held(200, 400) - before)"""
    unset = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=LIMIT, cwd=train.HERE, env=unset)
    assert float(well_ended(done)) < 60


@pytest.mark.parametrize("capability, dtype", [
    ((7, 5), "float32"), ((6, 1), "float32"), ((8, 0), "bfloat16")])
def test_the_dtype_of_a_card(machine, capability, dtype):
    machine("cuda", 80, capability=capability)
    assert train.choose_device(train.parse(["--device=cuda"]))[1] == dtype
