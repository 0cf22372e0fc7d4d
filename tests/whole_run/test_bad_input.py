"""Bad input gives exit status 2, one line on standard error, no traceback and no folder."""
import itertools
import json
import os
import runpy
import shutil
import sys
from types import SimpleNamespace
import pytest
import torch
from files import FEW, MINE, ROOT, TINY, edit_json, edit_tensors, json_lines
from runs import refused, trains
from steps import raises
import train

GOOD = {"question": "Anna has 9 books , loses 4 . How many ?", "answer": "9 - 4 = 5\n#### 5"}
FLAGS = (*FEW, "--steps=1", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=8",
         "--eval-limit=2")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Relative names mean nothing, and what is written by default is seen."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def refused_before_a_folder_is_made(capsys, tmp_path, *flags):
    line = refused(capsys, *flags)
    assert list((tmp_path / "here").iterdir()) == []
    return line


# --- Flags ----------------------------------------------------------------------------------------
HUGE = "9" * 30
CHECK = MINE.with_name("checker.py:check")


@pytest.mark.parametrize("flag, value", [
    *(("--lr", value) for value in ("0", "nan", "1e400")), ("--steps", "many"), ("--seed", HUGE),
    ("--kl-coef", "-1e-5"), ("--kl-estimator", "k4"), ("--dtype", "int8"), ("--offload", "perhaps"),
    ("--threads", "2147483648"), ("--group-size", "1"), ("--clip-eps", "1.5"), ("--kl_coef", "1"),
    ("--kl", "1"), ("--device", "abacus"), ("--device", "xpu"), ("--prompts-per-step", "3000"),
    ("--model", "nobody/nothing"), ("--model", "./no/such/folder"), ("--model", 300 * "m"),
    ("--data", 300 * "d"), ("--eval-data", 300 * "d"), ("--reward", 300 * "r" + ".py:f"),
    ("--output", 300 * "o"), ("--template-args", '{"a": '), ("--template-args", "[1]")])
def test_a_bad_value_is_named_with_its_flag(capsys, tmp_path, flag, value):
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"{flag}={value}")
    assert flag in line and value[:200] in line


@pytest.mark.parametrize("flags, words", [
    ("--kl-band 0.1", "--kl-band"), ("--kl-band 0.1 0.2 0.3", "0.3"), ("--resume", "--resume"),
    (f"{FEW[0]} --prompts-per-step=32", "few.jsonl has only 16 "),
    ("--max-new-tokens=1000", "128 positions: lower --max-new-tokens"),
    *((flag, "evaluate.py") for flag in ("--eval-only", "--against=x", "--lr=1 --eval-only")),
    ("--trace", "lesson.py"), ("--resume=nowhere", "nowhere/config.json: "),
    ("--config=nowhere.json", "nowhere.json: "),
    ("--reply=nowhere.py:check", "--reply"), (f"--reply={CHECK} --max-turns=0", "--max-turns"),
    (f"--reply={CHECK} --max-turns=50", "--max-new-tokens or --max-turns"),
    ("--around-best=1 --max-new-tokens=80", "and 120 of an answer"),
    ('--template-args={"enable_thinking":false}', "has no 'enable_thinking' (--template-args")])
def test_bad_flags(capsys, tmp_path, flags, words):
    assert words in refused_before_a_folder_is_made(capsys, tmp_path, *flags.split())


@pytest.mark.parametrize("flags", [
    "--kl-band 0.1 0.2 --kl-coef 0", "--kl-band 0.2 0.1", "--renew-reference 2 --kl-coef 0",
    "--around-best 2 --reward rule", "--around-best 1 --reward-model x",
    "--around-best 1 --reply r.py:f", "--reward-weights 1 2 --reward rule", "--kl-band 0 0.1",
    "--kl-band 0.1 0.2 --aggregate constant",
    "--reward-weights 1 2 3 --reward rule think", "--reward-model m --reward rule",
    "--reward rule rule", "--reward r.py:f rule r.py:f", "--around-best 3",
    *(f"--plain {flags}" for flags in ("--reward rule", "--objective cispo", "--temperature 0.9",
                                    "--max-grad-norm 2")),
    "--no-scale-by-std --advantage gtpo", "--no-scale-by-std --step-reward r.py:f",
    *(f"--step-reward r.py:f --{flags}" for flags in (
        "advantage gtpo", "reward-model m", "overlong-buffer 4", "max-resample 1")),
    *(f"--advantage {flags}" for flags in (
        "shape --reply r.py:f", "shape --reward rule", "shape --length-rescale 0.3",
        "gdpo --reward rule think --overlong-buffer 9", "gdpo")),
    "--minibatches 3 --prompts-per-step 2"])
def test_flags_that_do_not_go_together(capsys, tmp_path, flags):
    """The line names the first of them, before a file is looked for."""
    flags = flags.split()
    line = refused_before_a_folder_is_made(capsys, tmp_path, *flags)
    assert flags[0] in line and "no file" not in line


@pytest.mark.parametrize("fault, words", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "out of memory; to need less: "),
    (torch.AcceleratorError("CUDA error: out of memory"), "out of memory; to need less: "),
    (RuntimeError("no kernel image"), "--device cpu: torch ")])
def test_what_ends_a_run_before_its_plan_is_made(capsys, monkeypatch, fault, words):
    """A card may be full before train.py has put anything there."""
    monkeypatch.setattr(torch, "ones", raises(fault))
    assert refused(capsys, "--device=cpu").startswith(f"train.py: {words}")


def test_mps_computes_in_float32(machine):
    machine("mps", 30)
    assert train.choose_device(train.parse(["--device=mps"]))[1] == "float32"


def test_a_card_that_torch_cannot_use(capsys, monkeypatch, tmp_path):
    """A named model does not train on the CPU unasked."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    named = f"--model={shutil.copytree(TINY, tmp_path / 'named')}"
    assert "--device auto: torch cannot use" in refused(capsys, named)
    assert train.choose_device(train.parse(["--device=cpu"]))[0].type == "cpu"


# --- A config file goes through the same parser ---------------------------------------------------
@pytest.mark.parametrize("config, words", [
    *((text, "") for text in ("", "[1]", '{"lr": ', '{"lr": "\udcff"}')),
    *((f'{{"lr": {value}}}', "--lr") for value in ('"fast"', -1, "NaN")),
    *((f'{{"steps": {value}}}', "--steps") for value in ('{"a": 1}', "true")),
    *((f'{{"group_size": {value}}}', "--group-size") for value in (2.5, 1)),
    *((f'{{"{flag}": "x"}}', f"--{flag}") for flag in ("output", "resume", "help", "nonsense")),
    ('{"kl_estimator": "k4"}', "--kl-estimator"), ('{"kl_band": [-1]}', "--kl-band"),
    ('{"reward_weights": [1, "x"]}', "--reward-weights: 'x'"),
    ('{"reward": ["rule", "--output=X"]}', "--reward --output=X"),
    ('{"kl_band": [0.1, 0.2, "-h"]}', "'-h'"), ('{"kl-coef": 0.1}', "spelt like kl_coef"),
    ('{"template_args": [1]}', "--template-args"), ('{"template_args": 1}', "--template-args")])
def test_a_bad_config(capsys, tmp_path, config, words):
    path = tmp_path / "c.json"
    path.write_text(config, encoding="utf-8", errors="surrogateescape")
    assert words in refused_before_a_folder_is_made(capsys, tmp_path, f"--config={path}")


@pytest.mark.parametrize("prompt", [
    r"Put it in \boxed{} .", r"\frac{1}{2}", r"a \times b", r"\right)"])
def test_a_system_prompt_has_no_control_character(capsys, tmp_path, prompt):
    """From a config, from Python; one with line ends and tabs is taken."""
    path = tmp_path / "c.json"
    path.write_text(f'{{"system_prompt": "{prompt}"}}')
    slipped = json.loads(path.read_text())["system_prompt"]
    for flag in (f"--config={path}", f"--system-prompt={slipped}"):
        line = refused_before_a_folder_is_made(capsys, tmp_path, flag)
        assert "--system-prompt: in JSON " in line and "two backslashes" in line
    for fine in (prompt, "Answer:\n\tnot 5\nin a box"):
        train.plan_memory(train.parse([f"--system-prompt={fine}"]))


# --- Models. A folder is the tiny policy's with something wrong in it -----------------------------
def no_end_token(m, nothing):
    (m / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    edit_json(m / "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        edit_json(m / name, eos_token_id=nothing)


def without(*names):
    return lambda m: [(m / name).unlink() for name in names]


def pickled(m):
    (m / "model.safetensors").unlink()
    torch.save({}, m / "pytorch_model.bin")


def written(name, text):
    return lambda m: (m / name).write_text(text)


def reweighted(change):
    return lambda m: edit_tensors(m / "model.safetensors", change)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:5d41\nsize 988097824\n"
QUANTISED = [
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True},
    {"quant_method": "bitsandbytes", "load_in_8bit": True}, {"load_in_4bit": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 128}, {"quant_method": "awq", "bits": 4},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "mxfp4"},
    {"quant_method": "torchao", "quant_type": "int4"}, {"quant_method": "unheard of"}]


def quantised(config):
    return lambda m: edit_json(m / "config.json", quantization_config=config)


NORM = "model.norm.weight"
MODELS = [
    (without("chat_template.jinja"),
     "the chat template fails (Cannot use chat template"),
    *((written("chat_template.jinja", text), words) for text, words in (
        ("", "chat template"), ("{{ messages[7].content.oh }}", "chat template"),
        ("{% if", "chat template fails"))),
    *((lambda m, ends=ends: no_end_token(m, ends), "names an end token") for ends in (None, [])),
    (written("config.json", "{"), "cannot be loaded"), (pickled, "cannot be loaded"),
    (written("model.safetensors", "torn"), "cannot be loaded"),
    (reweighted(lambda w: {k: v for k, v in w.items() if ".layers.1." not in k}),
     "its files lack weights: model.layers.1."),
    (lambda m: edit_json(m / "config.json", tie_word_embeddings=False),
     "its files lack weights: lm_head.weight"),
    (reweighted(lambda w: {f"other.{k}": v for k, v in w.items()}), "its files lack weights"),
    (reweighted(lambda w: {**w, NORM: torch.ones(65)}), "mismatched_sizes"),
    (without("tokenizer.json", "tokenizer_config.json"), "the folder lacks tokenizer.json"),
    (lambda m: (m / "config.json").rename(m / "adapter_config.json"), "it is an adapter: merge it"),
    (written("adapter_config.json", "{}"), "it is an adapter: merge it"),
    *((written(name, POINTER), "git lfs pull")
      for name in ("config.json", "tokenizer.json", "model.safetensors")),
    *((quantised(config), "quantised weights cannot be trained; name the unquantised model")
      for config in QUANTISED)]


@pytest.mark.parametrize("make_wrong, words", MODELS)
def test_a_bad_model(capsys, tmp_path, make_wrong, words):
    folder = shutil.copytree(TINY, tmp_path / "m")
    make_wrong(folder)
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--config={TINY / 'grpo.json'}",
                                           f"--model={folder}")
    assert words in line and (str(folder) in line or "chat template" in words + line)


def test_a_quantised_folder_is_refused_wherever_it_is_opened(capsys, run_here, tmp_path):
    """Before its weights are read; one that is dequantised as it is loaded is none."""
    folder = shutil.copytree(TINY, tmp_path / "m")
    quantised(QUANTISED[0])(folder)
    (folder / "model.safetensors").write_text("torn")
    assert "quantised" in run_here("sample.py", f"--model={folder}", status=2)
    for flags in ([f"--model={folder}", "--dry-run=24"], [f"--reward-model={folder}"]):
        assert "quantised" in refused(capsys, *flags)
    quantised({"quant_method": "fp8", "dequantize": True})(folder)
    assert train.sample.checked_config(folder).hidden_size == 64


# --- Data -----------------------------------------------------------------------------------------
def test_problems_that_cannot_be_asked_or_held_out_are_named(capsys, tmp_path):
    """One that the model has no room for, and a role that nobody plays."""
    longer = [{**GOOD, "question": GOOD["question"] * n} for n in (1, 9, 12, 10)]
    asked = {"messages": [{"role": "boss", "content": "?"}, {"role": "user", "content": "?"}]}
    for flag, rows, words in (
            *(("--prompts-per-step", rows, "x.jsonl has only 0 to train on, beside those that "
               "are held out (--eval-data") for rows in ([GOOD], [GOOD] * 2, [GOOD] * 60)),
            ("--data", longer, "x.jsonl, problem 2: a prompt of "),
            ("--data", [GOOD, {**GOOD, "question": "half a \ud800"}], "x.jsonl, problem 2: "),
            ("--data", [{**GOOD, "messages": ["?", asked["messages"][1]]}], "x.jsonl, line 2: "),
            ("--data", [GOOD, {**GOOD, **asked}], "problem 2: a message has no text, or a ")):
        (tmp_path / "x.jsonl").write_text("\n" + json_lines(*rows))
        line = refused_before_a_folder_is_made(capsys, tmp_path, f"--data={tmp_path / 'x.jsonl'}")
        assert line.startswith(f"train.py: {flag}") and words in line


# --- The terminal ---------------------------------------------------------------------------------
def test_bars_on_a_slow_machine(capsys, monkeypatch, tmp_path):
    """While answers are written and while it trains; on a fast one the loop's and evaluation's."""
    for slow in (False, True):
        if slow:
            monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a second a look
        trains(*FLAGS, "--max-new-tokens=40", "--micro-batch-tokens=1", "--group-size=16",
               f"--output={tmp_path / str(slow)}")
        err = capsys.readouterr().err
        bars = [word in err for word in ("GRPO", "prompts", "tokens:", "micro-batches:")]
        assert bars == [True, slow, slow, slow]


@pytest.mark.parametrize("script, arguments", [
    ("train.py", FLAGS), ("sample.py", ["--max-new-tokens=2", "--group-size=1"])])
def test_a_stream_that_can_only_write(monkeypatch, script, arguments):
    """A notebook's, into which %run prints; and IDLE's."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr("warnings.showwarning", print)    # which train.py sets
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
        sys.exit(0)
    assert end.value.code == 0 and "How many ?" in "".join(written)


@pytest.mark.parametrize("stage", ["sample", "advantage", "logprob", "loss", "train"])
def test_help_says_how_a_script_is_called(run_here, stage):
    assert f"{stage}.py " in run_here(f"{stage}.py", "--help")


@pytest.mark.parametrize("script, arguments, word", [
    ("advantage.py", ["1", "apple"], "apple"), ("advantage.py", ["1", "1e16"], "1e15"),
    ("advantage.py", ["1"], "1"), ("advantage.py", ["-help"], "usage: python advantage.py"),
    ("sample.py", ["--model=nowhere"], "cannot be loaded"),
    *(("sample.py", [flag], "--max-new-tokens and --group-size must be at least 1, --temp")
      for flag in ("--max-new-tokens=0", "--temperature=-1", "--temperature=nan",
                   "--group-size=0")),
    ("sample.py", ["--model=."], "it is an adapter"),
    ("sample.py", ["--device=tpu"], "tpu"), ("sample.py", ["Anna has 9 . " * 50], "128"),
    ("logprob.py", ["--model=."], "."), ("logprob.py", ["--model=./nowhere"], "nowhere")])
def test_a_script_refuses_in_one_line(run_here, tmp_path, script, arguments, word):
    (tmp_path / "here" / "adapter_config.json").touch()
    [line] = run_here(script, *arguments, status=2).splitlines()
    assert line.startswith(f"{script}: ") and word in line
