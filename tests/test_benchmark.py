"""The benchmark's models, floors and tables; the counts of first_run.py, on a CPU."""
import math
import sys
from types import SimpleNamespace
import benchmark
import first_run
import pytest
import torch
from checks import seeded
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
import sample
import train

TINY = benchmark.SMALL | {"layers": 2, "hidden": 64, "ffn": 128, "prompt_length": 16,
                          "new_tokens": 12, "prompts": 4, "group_size": 4}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


# --- The benchmark: what it makes, and what it holds it against -----------------------------------
def test_the_shape_of_qwen():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(benchmark.config_of(benchmark.QWEN))
    assert sum(p.numel() for p in model.parameters()) == 1_543_714_304
    assert [benchmark.QWEN[x] for x in ("prompts", "group_size", "new_tokens")] == [8, 8, 512]
    assert (benchmark.REPEAT["qwen1.5b"], benchmark.PAIRS["qwen1.5b"]) == (2, 1)


def random_tiny(**changes):
    return benchmark.random_model(TINY | changes, torch.device("cpu"), torch.float32)


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
    questions = benchmark.random_questions(TINY)
    lengths = {}
    for chance in (1 / 8, 1e-12):
        rollout = sample.sample_groups(random_tiny(end_chance=chance), tokenizer, questions, 32, 64,
                                       generator=seeded())
        lengths[chance] = (rollout.labels != sample.IGNORE).sum(dim=1).float()
    assert 6 < lengths[1 / 8].mean() < 10.5 and lengths[1e-12].unique().tolist() == [64]


def test_first_run_counts_on_a_card_alone(capsys):
    """What it prints on one, test_cuda.py sees."""
    assert first_run.main([]) == 2 and capsys.readouterr().err.startswith("first_run.py: ")


def test_a_measurement(tmp_path):
    """The folder opens with train.py's own loader, `auto` is settled, every figure is there."""
    benchmark.make_folder(TINY, tmp_path)
    settings = benchmark.settings_of(tmp_path, ["--lr=0.5"])
    assert (settings.lr, settings.group_size) == (0.5, TINY["group_size"])
    for side in ("ours", "update"):
        result = benchmark.measure({"folder": str(tmp_path), "side": side, "repeat": 1,
                                    "flags": ["--plain"]})
        assert {"seconds", "cpu", "sampling", "update", "length", "sampling_rate", "update_rate",
                "of_bandwidth", "of_matrix_rate", "peak"} <= result.keys()
        assert result["length"] == [TINY["new_tokens"]]
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
    assert benchmark.main(["tiny", "--against=--plain", "--threads=1"]) == 0
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
    settings = train.parse(["--prompts-per-step=4"])
    _, same = benchmark.read_batches(settings, 2)
    assert same[0] is same[1]
    settings.reward = ["mine.py:reward"]
    tokenizer, (first, second) = benchmark.read_batches(settings, 2)
    assert not set(first.prompts) & set(second.prompts)
    problems = benchmark.load_problems(settings.data)
    given = SimpleNamespace(tokenizer=tokenizer, problems=problems)
    assert second.prompts == train.batch_of_step(given, 2, settings).prompts
    [reward] = benchmark.reward_functions(train.parse(["--reward=rule"]))  # as TRL calls it
    assert reward(completions=[r"\boxed{3}", "4"], answer=["#### 3"] * 2, prompts=[]) == [1.5, 0]


@pytest.mark.parametrize("argv, words", [
    (["medium"], "no preset medium"),
    (["small", "--against=--nonsense=3"], "--against: unrecognized arguments: --nonsense=3"),
    (["small", "--against=--lr=-1"], "--against: argument --lr: '-1' is no float"),
    (["real", "--task=nowhere"], "--task nowhere: no config.json there")])
def test_bad_input(argv, words, capsys):
    with pytest.raises(SystemExit) as leaving:
        benchmark.main(argv)
    said = str(leaving.value.code) + capsys.readouterr().err.rpartition("\n\n")[2]
    assert leaving.value.code and words in said
    assert "trl" not in sys.modules and "datasets" not in sys.modules   # nothing but requirements
    assert benchmark.main(["qwen1.5b"]) == 0            # that needs a GPU
    assert "NOT MEASURED" in capsys.readouterr().out
