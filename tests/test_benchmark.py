"""The benchmark and its first run: they run on a CPU, their floors are right, their checks fail."""
import contextlib
import copy
import functools
import math
import sys
from types import SimpleNamespace

import benchmark
import first_run
import pytest
import torch
from conftest import NO_MEMORY, raises, seeded
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import sample
import train


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Small sizes on any machine (they follow from the device), and even smaller checks."""
    for name, size in (("hidden", 64), ("ffn", 128), ("new_tokens", 16)):
        monkeypatch.setitem(first_run.CHECKED, name, size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def place():
    return first_run.Place(torch.device("cpu"), torch.float32, torch.bfloat16, first_run.TINY)


def failures(part, *args, **changes):
    return [words for verdict, words in part(*args, **changes) if verdict is False]


def test_first_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_run, "SECONDS", math.inf)   # a slow machine leaves nothing out
    status = benchmark.main(["--first-run"])
    out = capsys.readouterr().out
    assert status == 0 and "FAIL" not in out, out
    kept = (tmp_path / "first_run.txt").read_text(encoding="utf-8").splitlines()
    assert len(kept) > 80 and set(kept) <= set(out.splitlines())
    assert out.count("NOTHING WAS MEASURED ON A GPU") == 2
    for words in ("TFLOP/s", "grouped rows: scaled_dot_product", "same ids in 16 of 16 rows",
                  "grouped against padded rows", "offload against none", "checkpointing against",
                  "ms per token", "the first rollout took", "per token, 2 layers",
                  "two steps, no offload, no checkpointing", "two steps, offload, checkpointing",
                  "two steps, LoRA, checkpointing", "two steps, LoRA in float16, checkpointing",
                  "--steps=2: exit status 0", "checks passed, 0 failed"):
        assert words in out, words
    for phase in ("sampling", "reference", "forward and backward", "optimizer"):
        assert out.count(f"  {phase:22} ") == 10  # five settings, two steps


def test_a_part_that_breaks_is_a_line(capsys, monkeypatch):
    def breaks():
        yield True, "this much was right"
        raise ZeroDivisionError("1 / 0")

    def falls_back():
        first_run.sample.PLAIN = "failed: no kernel"
        return []

    lines = first_run.Lines()
    parts = {"breaks": breaks, "runs_out": raises(NO_MEMORY[0]), "falls_back": falls_back}
    for name, part in parts.items():
        lines.of(name, part, avoid="--plain")
    lines.of("afterwards", lambda: [(True, "right"), (None, "a figure"), (False, "wrong")])
    place = first_run.Place(torch.device("cuda"), torch.float32, torch.float32, {})
    assert lines.close(place) == 1
    out = capsys.readouterr().out
    for words in ("FAIL  ZeroDivisionError: 1 / 0", "FAIL  out of memory",
                  "FAIL  falls_back: failed: no kernel; it is avoided by --plain",
                  "2 checks passed, 4 failed"):
        assert words in out and "NOTHING" not in out
    # After a fault that kills the context nothing else is begun.
    lines = first_run.Lines()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", raises(RuntimeError("CUDA error: dead")))
    lines.of("kills", breaks)
    lines.of("next", lambda: pytest.fail("it began"))
    for words in ("The first fault was in: kills: ZeroDivisionError", "CUDA_LAUNCH_BLOCKING=1"):
        assert words in lines.failed[-1]
    monkeypatch.undo()
    late = first_run.Lines()
    late.start -= 421
    late.of("late", lambda: pytest.fail("it began"))
    assert late.failed == ["late: left out: 420 s are over"]


def test_what_the_profiler_does_not_see_fails(place, monkeypatch):
    zeros = torch.zeros(1, 2, dtype=torch.long)
    monkeypatch.setattr(first_run, "small_rollout", lambda *_: sample.Rollout(
        zeros, zeros, torch.zeros(1, 1), [""], torch.ones(1) > 0, zeros[0]))
    monkeypatch.setattr(first_run, "attention_in", lambda *args, **kwargs: [])
    assert len(failures(first_run.attention_kernels, place)) == 8
    # Eight per token: those outside of the graphs.
    kernel = SimpleNamespace(name="a", time_range=SimpleNamespace(elapsed_us=lambda: 1.0))
    monkeypatch.setattr(first_run, "kernels_in", lambda place, work, *args: [kernel] * 8 * args[-1])
    assert failures(first_run.kernels, place) == ["8 operations of the CPU per token, 2 layers"]


def test_drawing_sees_other_ids(place, monkeypatch):
    def shifted(*args, write_answers=sample.write_answers):
        (ids, logprobs), *others = write_answers(*args)
        return [([ids[-1], *ids[:-1]], logprobs), *others]

    monkeypatch.setattr(sample, "write_answers", shifted)
    found = "\n".join(failures(first_run.drawing, place, torch.float32))
    assert "same ids in 15 of 16 rows" in found and "against the definition, first rollout" in found
    found = "\n".join(failures(first_run.drawing, place, torch.bfloat16))
    assert "against the definition, weights have moved" in found


def test_drawing_sees_weights_of_before(place, monkeypatch):
    """As a graph would draw that reads weights where they lay when it was captured."""
    copied = functools.cache(copy.deepcopy)

    def from_a_copy(model, *args, write_answers=sample.write_answers):
        return write_answers(copied(model), *args)

    with monkeypatch.context() as patch:
        patch.setattr(sample, "write_answers", from_a_copy)
        found = failures(first_run.drawing, place, torch.float32)
    assert found and all("weights have moved" in words for words in found), found
    monkeypatch.setattr(sample, "why_refused", lambda model, stepper:
                        None if stepper is sample.PlainStep else "off by 3 nats")
    assert failures(first_run.drawing, place, torch.float32) == ["own decode step: off by 3 nats"]
    assert failures(first_run.decoding, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_see_a_hundredth(place, monkeypatch, dtype):
    def scaled(*args, group_ids=None, token_logprobs=first_run.token_logprobs):
        logprobs = token_logprobs(*args, group_ids=group_ids)
        off = 0.01 * (group_ids is not None)
        return logprobs + off * (logprobs - logprobs.detach())

    monkeypatch.setattr(first_run, "token_logprobs", scaled)
    found = failures(first_run.gradients, place, dtype)
    assert len(found) == 1 and "grouped against padded rows" in found[0], found


@pytest.mark.parametrize("when, fault, words", [
    ("pre", lambda weights: [weight.grad.mul_(1.01) for weight in weights], "first moments"),
    ("pre", lambda weights: [weights[3].grad.zero_()], "of each"),
    ("post", lambda weights: [weights[0].data.mul_(1.5)],
     "offload: 1 weights are not their masters' copies"),
])
def test_updates_see_what_is_handed_over_wrongly(place, monkeypatch, when, fault, words):
    def faulty(model, settings, make_optimizer=train.make_optimizer):
        optimizer = make_optimizer(model, settings)
        if settings.offload:
            register = getattr(optimizer, f"register_step_{when}_hook")
            register(lambda *_: fault(list(model.parameters())) and None)
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", faulty)
    found = failures(first_run.updates, place)
    assert words in "\n".join(found) and all("offload" in line for line in found), found


def test_updates_see_layers_that_are_computed_otherwise(place, monkeypatch):
    @contextlib.contextmanager
    def faulty(model, on):
        weight = model.model.layers[0].mlp.down_proj.weight
        right = weight.data
        weight.data = right * (1.1 if on else 1.0)
        yield
        weight.data = right

    monkeypatch.setattr(train, "layers_checkpointed", faulty)
    found = failures(first_run.updates, place)
    assert any("gradient checkpointing against none" in line for line in found), found


def test_steps_see_memory_that_the_count_did_not(place, monkeypatch):
    def halves(*args, update=train.update):
        args[-1].micro_batch_tokens //= 2
        return update(*args)

    steps = functools.partial(first_run.whole_steps, place, offload=False,
                              gradient_checkpointing=False)
    monkeypatch.setattr(train, "update", halves)
    assert failures(steps) == ["micro-batches of 256 tokens, 1024 planned"]
    monkeypatch.setattr(train, "update", raises(NO_MEMORY[0]))
    with pytest.raises(torch.OutOfMemoryError):
        list(steps())
    place.free = 1000
    assert list(steps())[-1] == (None, "out of memory, as the count says")


# --------------------------------------------------------------------------------------------------
# The benchmark: what it makes, and what it holds it against

def test_the_shape_of_qwen():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(benchmark.config_of(benchmark.QWEN))
    assert sum(p.numel() for p in model.parameters()) == 1_543_714_304
    assert [benchmark.QWEN[x] for x in ("prompts", "group_size", "new_tokens")] == [8, 8, 512]
    assert (benchmark.REPEAT["qwen1.5b"], benchmark.PAIRS["qwen1.5b"]) == (2, 1)


def random_tiny(**changes):
    return benchmark.random_model(first_run.TINY | changes, torch.device("cpu"), torch.float32)


def test_flops_of_a_forward_pass_and_bytes_of_a_rollout():
    model, P, n = random_tiny(), 10, 30
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


def test_end_chance():
    tokenizer = benchmark.word_tokenizer(4000)
    questions = benchmark.random_questions(first_run.TINY)
    lengths = {}
    for chance in (1 / 8, 1e-12):
        rollout = sample.sample_groups(random_tiny(end_chance=chance), tokenizer, questions, 32, 64,
                                       generator=seeded())
        lengths[chance] = (rollout.labels != train.IGNORE).sum(dim=1).float()
    assert 6 < lengths[1 / 8].mean() < 10.5
    assert lengths[1e-12].unique().tolist() == [64]


def test_a_measurement(tmp_path):
    """The folder opens with train.py's own loader, `auto` is settled, every figure is there."""
    benchmark.make_folder(first_run.TINY, tmp_path)
    settings = benchmark.settings_of(tmp_path, ["--lr=0.5"])
    assert (settings.lr, settings.group_size) == (0.5, first_run.TINY["group_size"])
    for side in ("ours", "update"):
        result = benchmark.measure({"folder": str(tmp_path), "side": side, "repeat": 1,
                                    "flags": ["--no-share-prompts"]})
        assert {"seconds", "cpu", "sampling", "update", "length", "sampling_rate", "update_rate",
                "of_bandwidth", "of_matrix_rate", "peak"} <= result.keys()
        assert result["length"] == [first_run.TINY["new_tokens"]]
        assert len(result["rewards"]) == 2  # the warm-up's, too
        assert result["seconds"][0] == pytest.approx(result["sampling"][0] + result["update"][0])
        assert all(math.isfinite(value) for values in result.values() for value in values)


def test_turns_and_tables(capsys, monkeypatch):
    """What `run` returns ends in the tables, with TRL's columns where it is there."""
    def run(folder, side, repeat, rows=0, flags=()):
        seconds = {"trl": 6.0, "ours": 4.0 if flags else 2.0}[side]
        keys = ("seconds", "cpu", "sampling", "update", "length", "sampling_rate", "update_rate",
                "of_bandwidth", "of_matrix_rate", "peak", "whole", "bandwidth", "matrix_rate")
        return dict.fromkeys(keys, [seconds]) | {"rewards": [0.25] * repeat + [seconds]}

    monkeypatch.setattr(benchmark, "run", run)
    assert benchmark.main(["tiny", "--against=--no-share-prompts", "--threads=1"]) == 0
    assert "| tiny | 2.00 (2.00-2.00) |" in capsys.readouterr().out
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: True)
    benchmark.compare("tiny", train.TINY, 1, 2, [8, 16])
    out = capsys.readouterr().out
    assert "| tiny TRL, 8 rows | 6 |" in out and "| tiny ours, default | 2 |" in out
    assert "| tiny same micro-batch | **1.50 (1.50-1.50)** |" in out
    assert "| tiny our default | **3.00 (3.00-3.00)** |" in out
    benchmark.train_both(train.TINY, 6, 8, ["--dtype=float32"])
    out = capsys.readouterr().out
    assert "| ours | 0.25 | 4.00 | 4.0 | 4 |\n| TRL | 0.25 | 6.00 | 6.0 | 6 |" in out
    assert "over ours: 1.50 (1.50-1.50)" in out and "over TRL's: 0.67" in out


def test_a_training_has_the_problems_of_its_steps():
    """Where rewards are learned from, each step asks what it would ask in train.py."""
    settings = train.parse(["--prompts-per-step=4"])
    _, same = benchmark.read_batches(settings, 2)
    assert same[0] is same[1]
    settings.reward = ["mine.py:reward"]
    tokenizer, (first, second) = benchmark.read_batches(settings, 2)
    assert not set(first.prompts) & set(second.prompts)
    problems = benchmark.load_problems(settings.data)
    assert second.prompts == train.batch_of_step(tokenizer, problems, 2, settings).prompts


@pytest.mark.parametrize("argv, words", [
    (["medium"], "no preset medium"),
    (["small", "--against=--nonsense=3"], "--against: unrecognized arguments: --nonsense=3"),
    (["small", "--against=--lr=-1"], "--against: argument --lr: '-1' is no float"),
    (["real", "--task=nowhere"], "--task nowhere: no config.json there"),
])
def test_bad_input(argv, words, capsys):
    with pytest.raises(SystemExit) as leaving:
        benchmark.main(argv)
    said = str(leaving.value.code) + capsys.readouterr().err.rpartition("\n\n")[2]
    assert leaving.value.code and words in said
    assert "trl" not in sys.modules and "datasets" not in sys.modules   # nothing but requirements
    assert benchmark.main(["qwen1.5b"]) == 0            # that needs a GPU
    assert "NOT MEASURED" in capsys.readouterr().out
