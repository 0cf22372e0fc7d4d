"""The memory of a step is counted before a run begins, and the first way that fits is taken."""
import json
import math
import os
import subprocess
import sys
import pytest
import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          Qwen2Config)
from files import LIMIT
from runs import trains, well_ended
from steps import parts, rollout_of, updated
import sample
import train


# --- Memory ---------------------------------------------------------------------------------------
def test_checkpointed_layers_run_again():
    p, calls = parts("--micro-batch-tokens=10000", "--kl-coef=0", "--sampler-correction=2"), []
    rollout = rollout_of(p)
    p.policy_model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(on))
    for on in (False, True):
        updated(p, p.policy_model, p.optimizer, rollout, gradient_checkpointing=on)
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


def counted(tmp_path, *flags, dtype=torch.bfloat16, device="cuda"):
    """The count of a small Qwen3: 4 x 3 answers of 44 tokens, micro-batches of 500."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    s = train.parse([f"--model={tmp_path}", "--prompts-per-step=4", "--group-size=3",
                     "--max-new-tokens=44", "--micro-batch-tokens=500", *flags])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    count = train.memory(s, model, torch.device(device))
    return count, sum(p.numel() for p in model.parameters()), model


def test_count_of_the_memory(monkeypatch, tmp_path):
    with monkeypatch.context() as ranks:                  # shards, and a whole copy that samples
        ranks.setenv("WORLD_SIZE", "2")
        count, n, _ = counted(tmp_path)
    assert count["policy"] == 2 * n and count["policy's shard"] == count["reference"] == n
    count, n, model = counted(tmp_path)
    assert count["policy"] == count["reference"] == 2 * n
    assert count["float32 masters"] == count["gradients, float32"] == 4 * n
    assert count["AdamW's two moments"] == 8 * n
    assert count["policy's shard"] == count["reward model"] == 0
    assert count[train.HOST] == 12 * n                    # a checkpoint on its way to the disk
    # keys and values of 12 rows, 300 positions, 3 layers, 2 heads of 16, in bfloat16
    assert count["key/value cache"] == 2 * 12 * 300 * 3 * 2 * 16 * 2
    assert count["logits of the draw"] == 12 * 12 * 1000  # of 12 rows, 3 numbers for each word
    count, n, model = counted(tmp_path, "--offload", "--kl-coef=0")
    assert count["float32 masters"] == count["AdamW's two moments"] == count["reference"] == 0
    pinned = sum(2**math.ceil(math.log2(4 * W.numel())) for W in model.parameters())
    assert count["gradients, float32"] == 4 * n
    assert count[train.HOST] == 8 * n + 2 * pinned     # masters and gradients are pinned
    count, n, _ = counted(tmp_path, dtype=torch.float32)  # the weights are their own masters
    assert count["float32 masters"] == 0 and count["policy"] == 4 * n
    # On a CPU one backward pass frees what it kept while gradients grow; several hold a 7th more
    for dtype in (torch.float32, torch.bfloat16):
        for flags in ([], ["--micro-batch-tokens=1000000"]):
            count, n, _ = counted(tmp_path, *flags, dtype=dtype, device="cpu")
            kept = counted(tmp_path, *flags, dtype=dtype)[0]["kept for the backward pass"]
            kept = kept - dtype.itemsize * n if flags else 1.15 * kept
            assert count["kept for the backward pass"] == kept
            assert count["the program"] == 5e8 + 4 * 1000 * 64
    # LoRA's factors; the first weights are a copy where no reference keeps them
    linears = [W for name, W in model.named_parameters() if "proj" in name]
    factors = sum(4 * sum(W.shape) for W in linears)
    widest = 4 * max(W.numel() for W in linears)          # of one of them: a master
    copied = 2 * sum(W.numel() for W in linears)
    for flags, first in ((), 0), (["--kl-coef=0"], copied), (["--renew-reference=1"], copied):
        count, n, _ = counted(tmp_path, "--lora-rank=4", *flags)
        assert count["float32 masters"] == 4 * factors and count["LoRA's first weights"] == first
        assert count["gradients, float32"] == 4 * factors + widest
    # A reward model has float32 weights; if it is trained, also a gradient and moments
    scorer = Qwen2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
                         intermediate_size=48, vocab_size=64)
    scorer.save_pretrained(tmp_path / "scorer")
    weights = AutoModelForSequenceClassification.from_config(scorer).num_parameters()
    for flags, each in (((), 4), (("--renew-reference=1",), 16)):
        count, _, _ = counted(tmp_path, f"--reward-model={tmp_path / 'scorer'}", *flags)
        assert count["reward model"] == each * weights


@pytest.mark.parametrize("changes", [
    {}, {"model_type": "qwen2", "num_attention_heads": 4},
    {"model_type": "llama", "hidden_size": 128, "intermediate_size": 384}])
def test_count_of_what_is_kept_is_what_autograd_saves(monkeypatch, tmp_path, changes):
    """Of a micro-batch of rows without padding, in bfloat16; heads wider than the hidden states."""
    monkeypatch.setattr(sys.modules[__name__], "QWEN", QWEN | changes)
    count, _, model = counted(tmp_path)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.untyped_storage()) or tensor, lambda tensor: tensor):
        model.model(torch.zeros(1, 500, dtype=torch.long), use_cache=False)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in kept}
    saved = sum(size for at, size in sizes.items() if at not in weights)
    assert count["kept for the backward pass"] == pytest.approx(saved, rel=0.15)


# Cards that people own: GB free there and on the host -> --offload, --gradient-checkpointing
@pytest.mark.parametrize("device, free, host, capability, way", [
    ("cuda", 84, 64, (9, 0), (False, False)), ("cuda", 69, 64, (9, 0), (False, True)),
    ("cuda", 41.3, 64, (8, 0), (False, True)), ("cuda", 41.1, 64, (8, 0), (True, True)),
    ("cuda", 25, 31.1, (8, 9), (True, True)), ("cuda", 25, 30.9, (8, 9), None),
    ("cuda", 20, 64, (8, 9), None), ("cuda", 15.6, 64, (7, 5), None),
    ("cpu", 60, 60, (0, 0), (False, False)), ("cpu", 42, 42, (0, 0), (False, True)),
    ("cpu", 30, 30, (0, 0), None), ("mps", 30, 64, (0, 0), None)])
def test_the_first_way_that_fits_is_taken(capsys, machine, big, device, free, host, capability,
                                          way):
    """Nine tenths of what is free; what is given stands; what does not fit is refused."""
    machine(device, free, host, capability)
    flags = (big, "--data=gsm8k")
    if not way:
        with pytest.raises(train.BadInput, match="--model .* GB .* host memory.*--lora-rank 16"):
            train.plan_memory(train.parse([*flags]))
        return
    s = train.plan_memory(train.parse([*flags]))
    assert (s.offload, s.gradient_checkpointing) == way
    assert s.micro_batch_tokens == (8704 if device == "cuda" else 1024)  # two groups
    told = capsys.readouterr().out
    assert ("--offload" in told, "--gradient-checkpointing" in told) == way
    given = train.plan_memory(train.parse([*flags, "--lora-rank=16", "--gradient-checkpointing",
                                           "--micro-batch-tokens=99"]))
    assert given.gradient_checkpointing and not given.offload and given.micro_batch_tokens == 99


def test_dry_run_counts_from_the_configuration_alone(capsys, machine, big):
    """Qwen2.5-1.5B; a star stands over the first way that fits."""
    def rows_of(*flags):
        trains(big, *flags)
        lines = capsys.readouterr().out.splitlines()
        return {line[:30].strip(): line[30:] for line in lines[1:]}, lines[-1]

    machine("cuda", 43)
    rows, _ = rows_of("--dry-run")
    assert rows["--offload"] == "                     yes     yes"
    assert rows["--gradient-checkpointing"] == "             yes             yes"
    assert rows["*: a run takes this way"].index("*") == 15   # of the second column
    assert rows["device memory"].split() == ["62.64", "37.04", "44.12", "18.52"]
    # A card of so many GB, which lie in no machine; a run of 1.5B keeps 37 GB while it saves
    machine("cpu", 100, 100)
    for size, star in ((80, 7), (40, 15), (24, 31)):
        rows, _ = rows_of(f"--dry-run={size}")
        assert rows["*: a run takes this way"].index("*") == star
    rows, last = rows_of("--dry-run", "20")
    assert not any("*" in cells for cells in rows.values()) and "--lora-rank 16" in last


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
    ((7, 5), "float16"), ((6, 1), "float32"), ((8, 0), "bfloat16")])
def test_the_dtype_of_a_card(machine, capability, dtype):
    machine("cuda", 80, capability=capability)
    assert train.choose_device(train.parse(["--device=cuda"]))[1] == dtype


@pytest.mark.parametrize("dtype, has_products, is_told", [
    ("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, False)])
def test_a_cpu_without_fast_bfloat16(capsys, monkeypatch, dtype, has_products, is_told):
    """Float32 may be faster there, but bfloat16 may be all that fits."""
    monkeypatch.setattr(sample, "has_products", lambda dtype: has_products)
    chosen = train.choose_device(train.parse(["--device=cpu", f"--dtype={dtype}"]))
    assert chosen == (torch.device("cpu"), dtype)
    assert ("--dtype float32" in capsys.readouterr().out) == is_told
