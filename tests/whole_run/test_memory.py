"""What a step needs is known before a run begins, and the first way that fits is taken."""
import os
import re
import subprocess
import sys
import pytest
from transformers import MambaConfig, Qwen2Config
from files import LIMIT
from runs import well_ended
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


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The shape of Qwen2.5-1.5B, without weights or a tokenizer -> the flag that names it."""
    folder = tmp_path_factory.mktemp("big")
    Qwen2Config(num_hidden_layers=28, hidden_size=1536, num_attention_heads=12,
                num_key_value_heads=2, intermediate_size=8960, vocab_size=151936,
                tie_word_embeddings=True, max_position_embeddings=32768).save_pretrained(folder)
    return f"--model={folder}"


def terms_of(capsys, *flags, status=0):
    """What --dry-run prints -> {term: GB}, and its last line, on stderr if nothing fits."""
    assert train.main([*flags]) == status
    told = capsys.readouterr()
    _, line, *_ = told.out.splitlines()
    total, parts = re.fullmatch("memory +a step needs some (.+) GB: (.*)", line).groups()
    terms = dict(re.findall(r"([a-z ]+?) ([\d.]+)", parts), **{"in all": total})
    last = (told.out + told.err).splitlines()[-1]
    return {name.strip(): float(size) for name, size in terms.items()}, last


@pytest.mark.parametrize("flags, measured", [
    ((), 61.8), (("--gradient-checkpointing",), 36.0),
    (("--gradient-checkpointing", "--offload"), 17.5)])
def test_the_rule_finds_what_a_card_has_measured(capsys, machine, big, flags, measured):
    """Qwen2.5-1.5B on an H200: the peak in GB, tests/MACHINES.md."""
    machine("cuda", 130)
    terms, last = terms_of(capsys, big, "--dry-run", *flags)
    assert 0.98 * measured < terms["in all"] < 1.08 * measured
    assert f"some {terms['in all']:.3g} GB" in last
    assert sum(terms.values()) == pytest.approx(2 * terms["in all"], abs=0.3)


def test_shards_need_less(capsys, machine, big, monkeypatch):
    """Of four GPUs each has a whole policy, and a quarter of the rest."""
    machine("cuda", 130)
    one, _ = terms_of(capsys, big, "--dry-run")
    monkeypatch.setattr(train, "WORLD_SIZE", 4)
    four, _ = terms_of(capsys, big, "--dry-run")
    for term, share in (("training", 1 / 4), ("policy and reference", 5 / 8)):
        assert four[term] == pytest.approx(share * one[term], abs=0.1)


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
    assert (bool(s.offload), bool(s.gradient_checkpointing)) == way
    assert s.micro_batch_tokens == (1024 if device == "cpu" else 8704)  # two groups
    out = capsys.readouterr().out
    assert ("--offload" in out, "--gradient-checkpointing" in out) == way
    given = train.plan_memory(train.parse([*flags, "--lora-rank=16", "--gradient-checkpointing",
                                           "--micro-batch-tokens=99"]))
    assert given.gradient_checkpointing and not given.offload and given.micro_batch_tokens == 99


def test_dry_run_needs_the_configuration_alone(capsys, machine, big):
    """Qwen2.5-1.5B on cards of so many GB, which lie in no machine; and on this one."""
    machine("cuda", 43)
    assert "with --gradient-checkpointing" in terms_of(capsys, big, "--dry-run")[1]
    machine("cpu", 100, 100)
    for size, flags, way in (
            (141, "", (False, False)), (80, "", (False, False)), (48, "", (False, True)),
            (40, "", (False, True)), (24, "", (True, True)),
            (24, "--lora-rank=16", (False, True)), (16, "--lora-rank=16", (False, True)),
            (12, "--lora-rank=16 --kl-coef=0", (True, True))):
        _, last = terms_of(capsys, big, f"--dry-run={size}", *flags.split())
        assert ("--offload" in last, "--gradient-checkpointing" in last) == way
    for flags in (["--dry-run=19"], ["--dry-run=12", "--lora-rank=16"]):
        _, last = terms_of(capsys, big, *flags, status=2)
        assert "a tenth more" in last and "--kl-coef 0" in last


def test_nothing_is_counted_on_a_cpu(capsys, machine, tmp_path):
    """A model without attention is refused when it is loaded, not by an error in the count."""
    machine("cpu", 100, 100)
    MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    assert train.main([f"--model={tmp_path}", "--dry-run"]) == 0
    assert "in all" not in capsys.readouterr().out
    assert train.main([f"--model={tmp_path}"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


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
