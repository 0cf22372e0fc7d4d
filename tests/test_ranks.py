"""Several processes with gloo on the CPU against one process on the same batch."""
# ruff: noqa: I001 - several names to a line
import os

import pytest
import torch
from conftest import (
    FEW, assert_same_run, begin_ranks, checkpoint_of, faulty_reward, metrics_of, one_line_of,
    run_ranks, same_tensors, snapshot, torchrun, trains)
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

FLAGS = (*FEW, "--steps=3", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=12",
         "--eval-limit=5", "--eval-every=2", "--save-every=1", "--micro-batch-tokens=150",
         "--updates-per-rollout=2")

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return (*FLAGS, faulty_reward(tmp_path_factory.mktemp("reward")))


@pytest.fixture(scope="module")
def one(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    trains(*flags, f"--output={folder}")
    return folder


def test_ranks_compute_what_one_process_does_also_after_one_has_died(flags, one, tmp_path):
    """Rank 1 is killed in step 2; the run is resumed, and ends as if nothing had been."""
    folder = tmp_path / "run"
    done = torchrun(2, *flags, f"--output={folder}", FAULT="SIGKILL", FAULT_AT="3")
    assert done.returncode != 0
    assert "rank 0 lost another rank" in done.stderr
    assert f"--resume {folder}" in done.stderr
    done = run_ranks(4, "train.py", f"--resume={folder}")   # two began, four end it
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, one)
    assert done.stdout.count("question  ") == 1           # only rank 0 speaks
    assert len(metrics_of(folder)) == 4                   # and writes

    # now that there is a run, and where prompts do not divide: one line, no word of a lost rank
    before = snapshot(folder)
    refusals = [((), "holds a run already"),
                (("--prompts-per-step=3",), "3: not a multiple of 2 processes")]
    ends = [begin_ranks(2, "train.py", *flags, *more, f"--output={folder}") for more, _ in refusals]
    for end, (_, line) in zip(ends, refusals):
        done = end()
        assert done.returncode != 0 and line in one_line_of(done.stderr)
    assert snapshot(folder) == before


@pytest.mark.parametrize("fault, last", [("SIGTERM", 2), ("raise", 1)])
def test_what_happens_to_rank_1_ends_both_and_one_goes_on(flags, one, tmp_path, fault, last):
    """A signal waits for the end of step 2, a reward that fails does not."""
    folder = tmp_path / "run"
    done = run_ranks(2, "train.py", *flags, f"--output={folder}", FAULT=fault, FAULT_AT="3")
    if fault == "raise":
        assert done.returncode != 0 and "KeyError: 'no, please'" in one_line_of(done.stderr)
    else:
        assert "stopped after step 2; continue with" in done.stdout, done.stderr
    assert metrics_of(folder)[-1]["step"] == last
    trains(f"--resume={folder}")
    assert_same_run(folder, one)


def test_lora_on_two_ranks_is_that_of_one(flags, tmp_path):
    """Whole weights and equal factors on both; a run of two also goes on as one."""
    flags = (*flags, "--lora-rank=4", "--lr=0.003")
    one, two, parts = (tmp_path / name for name in ("one", "two", "parts"))
    ends = [begin_ranks(2, "train.py", *flags, f"--steps={steps}", f"--output={folder}")
            for steps, folder in ((3, two), (2, parts))]
    trains(*flags, f"--output={one}")
    for end in ends:
        done = end()
        assert done.returncode == 0, done.stderr
    trains(f"--resume={parts}", "--steps=3")
    factors = [load_file(folder / "adapter" / "adapter_model.safetensors")
               for folder in (one, two, parts)]
    for folder, found in ((two, factors[1]), (parts, factors[2])):
        assert_same_run(folder, one)
        assert all((found[name] - factors[0][name]).abs().max() < 1e-5 for name in found)


def test_two_ranks_in_bfloat16_lose_no_step(flags, tmp_path):
    """bfloat16 shards, float32 masters over them: what is meant arrives, and a run is repeated."""
    folders = [tmp_path / "run", tmp_path / "again"]
    flags = (*flags, "--dtype=bfloat16", "--steps=2")
    for end in [begin_ranks(2, "train.py", *flags, f"--output={folder}") for folder in folders]:
        done = end()
        assert done.returncode == 0, done.stderr
    found = [checkpoint_of(folder) for folder in folders]
    for weights, folder in zip(found, folders):
        weights.pop("counters")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        assert all(0.95 < row["arrived"] < 1.05 for row in metrics_of(folder)[1:])
    assert same_tensors(*found)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux tells the peak")
def test_no_rank_holds_the_whole_model_while_it_is_sharded(tmp_path):
    config = Qwen2Config(vocab_size=1000, hidden_size=512, intermediate_size=2048,
                         num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=2,
                         tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    megabytes = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    model.save_pretrained(tmp_path / "model")
    done = run_ranks(4, "tests/helpers/peak.py", tmp_path / "model", tmp_path)
    assert done.returncode == 0, done.stderr
    grew = [float((tmp_path / f"grew_{rank}").read_text()) for rank in range(4)]
    assert max(grew) < 0.5 * megabytes, (grew, megabytes)    # a quarter, a layer and a tensor
