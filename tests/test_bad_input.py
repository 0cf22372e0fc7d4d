"""Bad input gives exit status 2, one line on standard error, no traceback and no folder."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ENVIRONMENT,
    FEW,
    LIMIT,
    ROOT,
    TINY,
    ended,
    ends_badly,
    refused,
    run_script,
    start,
    trains,
)
from safetensors import safe_open
from safetensors.torch import save_file

import train

GOOD = {"question": "Anna has 9 books , loses 4 . How many ?", "answer": "9 - 4 = 5\n#### 5"}
SMALL = (*FEW, "--steps=1", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=8",
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


# --------------------------------------------------------------------------------------------------
# Flags

HUGE = "9" * 30


@pytest.mark.parametrize("flags, words", [
    (["--lr=0"], "--lr 0.0: must be above 0"),
    (["--lr=-1"], "--lr -1.0: must be above 0"),
    (["--lr=nan"], "--lr nan: not a finite number"),
    (["--lr=1e400"], "--lr inf: not a finite number"),
    (["--lr=1e300"], "--lr 1e+300: must be at most"),
    (["--steps=0"], "--steps 0: must be at least 1"),
    (["--steps=many"], "argument --steps: invalid int value: 'many'"),
    ([f"--steps={HUGE}"], "must be at most"),
    (["--threads=2147483648"], "--threads 2147483648: must be at most"),
    ([f"--seed={HUGE}"], "--seed"),
    ([f"--micro-batch-tokens={HUGE}"], "--micro-batch-tokens"),
    (["--micro-batch-tokens=0"], "--micro-batch-tokens 0: must be at least 1"),
    (["--micro-batch-tokens=some"], "--micro-batch-tokens"),
    (["--group-size=1"], "--group-size 1: must be at least 2"),
    (["--temperature=0"], "--temperature 0.0: must be above 0"),
    (["--max-grad-norm=0"], "--max-grad-norm 0.0: must be above 0"),
    (["--clip-eps=1.5"], "--clip-eps 1.5: must be at most 1"),
    (["--clip-eps=-0.1"], "--clip-eps -0.1: must be at least 0"),
    (["--kl-coef=-1"], "--kl-coef -1.0: must be at least 0"),
    (["--warmup-steps=-1"], "--warmup-steps -1: must be at least 0"),
    (["--kl-estimator=k4"], "--kl-estimator"),
    (["--offload=perhaps"], "--offload"),
    (["--learning-rate=1"], "unrecognized arguments: --learning-rate=1"),
    (["--kl"], "unrecognized arguments: --kl"),
    (["--device=abacus"], "--device abacus: not a device torch knows"),
    (["--device=xpu"], "--device xpu: not on this machine"),
    (["--dtype=float16"], "--dtype"),
    (["--prompts-per-step=100000"], "--prompts-per-step 100000: --data"),
    (["--max-new-tokens=100000"], "--max-new-tokens 100000"),
    (["--model=nobody/nothing"], "--model nobody/nothing: cannot be loaded"),
    (["--model=./no/such/folder"], "--model ./no/such/folder: cannot be loaded"),
    ([f"--model={300 * 'm'}"], "cannot be loaded"),
    ([f"--data={300 * 'd'}"], "--data: "),
    ([f"--eval-data={300 * 'd'}"], "--eval-data: "),
    ([f"--reward={300 * 'r'}.py:f"], "--reward "),
    ([f"--output={300 * 'o'}"], "--output "),
    (["--reward=no_colon"], "--reward no_colon"),
    (["--reward-weights=1", "2"], "--reward-weights"),
    (["--resume"], "--resume: needs --output"),
])
def test_bad_flags(capsys, monkeypatch, tmp_path, flags, words):
    if flags[0] == "--reward-weights=1":
        (tmp_path / "r.py").write_text("def f(completions, **columns): return []")
        flags = [f"--reward={tmp_path / 'r.py'}:f", "--reward-weights", "1", "2"]
    line = refused_before_a_folder_is_made(capsys, tmp_path, *flags)
    assert words in line
    assert not re.search(r"--\w+_\w+", line.replace("no_colon", ""))    # one spelling is enough


def test_a_dtype_the_device_lacks(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    line = refused(capsys, "--dtype=bfloat16", "--device=cuda")
    assert line == "train.py: --dtype bfloat16: cuda has no bfloat16"


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_torchrun(capsys, monkeypatch, tmp_path, missing):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"),
                        ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    line = refused_before_a_folder_is_made(capsys, tmp_path)
    assert f"{missing} is not" in line and "torchrun" in line


# --------------------------------------------------------------------------------------------------
# A recipe is foreign input: it may say how to train, never what to run or where to write

@pytest.mark.parametrize("recipe, words", [
    ('{"lr": "fast"}', "--lr"), ('{"lr": -1}', "--lr -1.0"), ('{"nonsense": 1}', "--nonsense"),
    ("[1]", "not an object"), ('{"lr": ', "recipe.json: "), ('{"lr": NaN}', "--lr nan"),
    ('{"steps": {"a": 1}}', "--steps"), ('{"kl-estimator": ["k1", "k2"]}', "--kl-estimator"),
    ("[" * 10**5, "recipe.json: "), (b'{"lr": "\xff"}', "recipe.json: "),
    ('{"lr": [0.1, "--reward=evil.py:f"]}', "--lr: not a single value"),
    ('{"data": ["a.jsonl", "--output=run"]}', "--data: not a single value"),
])
def test_a_bad_recipe(capsys, tmp_path, recipe, words):
    recipe = recipe if isinstance(recipe, bytes) else recipe.encode()
    (tmp_path / "recipe.json").write_bytes(recipe)
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--model={tmp_path}")
    assert words in line


@pytest.mark.parametrize("name, value", [
    ("reward-weights", [1.0]), ("output", "run"), ("resume", True), ("dry-run", True),
    ("eval-only", True), ("dry_run", True), ("help", True), ("model", "x"),
    ("device", "cpu"), ("dtype", "bfloat16"), ("seed", 1),
])
def test_what_is_not_for_a_recipe_to_set(capsys, tmp_path, name, value):
    (tmp_path / "recipe.json").write_text(json.dumps({"lr": 1.0, name: value}))
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--model={tmp_path}")
    assert f"{train.flag_of(name.replace('-', '_'))} is not for a recipe to set" in line
    # nor on the way to a flag that is allowed
    (tmp_path / "recipe.json").write_text(json.dumps({"system-prompt": f"x --{name}={value}"}))
    assert getattr(train.parse([f"--model={tmp_path}"])[0], name.replace("-", "_"), None) in (
        None, False, "", str(tmp_path), 0, "auto")


@pytest.mark.parametrize("value", [["evil.py:f"], "evil.py:f", [1], {"evil.py:f": 1}])
def test_the_reward_in_a_recipe_is_told_and_never_run(capsys, tmp_path, value):
    (tmp_path / "evil.py").write_text("open('was_here', 'w')\ndef f(**columns): pass\n")
    (tmp_path / "recipe.json").write_text(json.dumps({"lr": 1.0, "reward": value}))
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--model={tmp_path}")
    assert "was trained with --reward" in line and "name it again" in line
    settings, recipe = train.parse([f"--model={tmp_path}", "--reward=rule"])
    assert settings.reward == ["rule"] and "reward" not in recipe
    assert not (tmp_path / "was_here").exists()


# --------------------------------------------------------------------------------------------------
# Models. A folder is the tiny policy's with something wrong in it.

def edited(folder, name, **changes):
    """One JSON file changed; None takes a key out."""
    content = json.loads((folder / name).read_text())
    content = {k: v for k, v in {**content, **changes}.items() if v is not None}
    (folder / name).write_text(json.dumps(content))


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def saved(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_template(m):
    (m / "chat_template.jinja").unlink()


def template(m, text):
    (m / "chat_template.jinja").write_text(text)


def no_end_token(m):
    edited(m, "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        edited(m, name, eos_token_id=None)


def empty_end_token(m):
    edited(m, "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        edited(m, name, eos_token_id=[])


def no_tokenizer(m):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (m / name).unlink()


def pickled(m):
    (m / "model.safetensors").unlink()
    torch.save({}, m / "pytorch_model.bin")


def torn(m):
    (m / "model.safetensors").write_bytes(b"torn")


def without_a_layer(m):
    saved(m, {k: v for k, v in tensors_of(m).items() if ".layers.1." not in k})


def without_its_head(m):
    edited(m, "config.json", tie_word_embeddings=False)


def nothing_that_fits(m):
    saved(m, {f"other.{k}": v for k, v in tensors_of(m).items()})


def another_shape(m):
    saved(m, {**tensors_of(m), "model.norm.weight": torch.ones(65)})


def one_layer_too_many(m):
    edited(m, "config.json", num_hidden_layers=1, layer_types=["full_attention"])


def not_finite(m):
    norm = torch.ones(64)
    norm[3] = float("nan")
    saved(m, {**tensors_of(m), "model.norm.weight": norm})


def fewer_embeddings(m):
    tensors = tensors_of(m)
    saved(m, {**tensors, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:50]})
    edited(m, "config.json", vocab_size=50)


def padding_outside(m):
    tokenizer = json.loads((m / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append({**added[0], "id": 57, "content": "<|far|>"})
    (m / "tokenizer.json").write_text(json.dumps(tokenizer))
    edited(m, "tokenizer_config.json", pad_token="<|far|>")


MODELS = [
    (no_template, "its tokenizer has no chat template"),
    (lambda m: template(m, ""), "chat template"),
    (lambda m: template(m, "{# nothing #}"), "makes an empty prompt"),
    (lambda m: template(m, "{{ messages[7].content.oh }}"), "chat template"),
    (lambda m: template(m, "{% if"), "chat template fails"),
    (no_end_token, "neither generation config nor tokenizer names an end token"),
    (empty_end_token, "neither generation config nor tokenizer names an end token"),
    (no_tokenizer, "tokenizer"),
    (lambda m: (m / "config.json").write_text("{"), "cannot be loaded"),
    (pickled, "cannot be loaded"),
    (torn, "cannot be loaded"),
    (without_a_layer, "its files lack weights: model.layers.1."),
    (without_its_head, "its files lack weights: lm_head.weight"),
    (nothing_that_fits, "its files lack weights"),
    (another_shape, "model.norm.weight"),
    (one_layer_too_many, "layers that its config.json does not know: model.layers.1."),
    (not_finite, "model.norm.weight is not finite"),
    (fewer_embeddings, "ids up to 56, its embeddings only 50 rows"),
    (padding_outside, "57"),
]


@pytest.mark.parametrize("make_wrong, words", MODELS)
def test_a_bad_model(capsys, tmp_path, make_wrong, words):
    folder = tmp_path / "m"
    shutil.copytree(TINY, folder)
    make_wrong(folder)
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--model={folder}")
    assert words in line and (str(folder) in line or "chat template" in words + line)


def test_a_tokenizer_without_padding_token_needs_none(tmp_path):
    """Masks come from labels, never from a padding id: the end token fills the rows."""
    shutil.copytree(TINY, tmp_path / "m")
    edited(tmp_path / "m", "tokenizer_config.json", pad_token=None)
    trains(f"--model={tmp_path / 'm'}", *SMALL, f"--output={tmp_path / 'run'}")


def test_weights_that_are_left_over_may_be_a_tower_of_another_kind():
    model = SimpleNamespace(named_parameters=lambda: [("model.layers.0.x", torch.ones(1))])
    report = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": ["vision.layers.3.x"]}
    train.check_weights(model, report)
    report["unexpected_keys"] += ["model.layers.1.x"]
    with pytest.raises(ValueError, match="does not know: model.layers.1.x"):
        train.check_weights(model, report)


@pytest.mark.parametrize("config", [
    {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1},
    {"model_type": "t5"}, {"model_type": "no-such-type"}, {},
])
def test_dry_run_on_a_family_that_cannot_be_counted(capsys, tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for device in ("cuda", "cpu"):
        refused_before_a_folder_is_made(
            capsys, tmp_path, f"--model={tmp_path}", "--dry-run", f"--device={device}")


@pytest.mark.parametrize("flags", [["--model={d}/none"], ["--device=abacus"], ["--device=xpu"]])
def test_dry_run_refuses_as_a_run_does(capsys, tmp_path, flags):
    flags = [flag.format(d=tmp_path) for flag in flags]
    refused_before_a_folder_is_made(capsys, tmp_path, "--dry-run", *flags)


# --------------------------------------------------------------------------------------------------
# Data and rewards

def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


DATA = {
    "no file": (None, "x.jsonl: No such file"),
    "empty": ("", "x.jsonl: no problems in it"),
    "a broken line": (lines(GOOD, '{"question"'), "x.jsonl, line 2: not JSON"),
    "no ####": (lines({**GOOD, "answer": "5"}), "x.jsonl, line 1: 'answer'"),
    "no answer": (lines(GOOD, GOOD, {"question": "?"}), "line 3: 'answer' is missing"),
}


@pytest.mark.parametrize("what", DATA)
@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_bad_data(capsys, tmp_path, flag, what):
    text, words = DATA[what]
    if text is not None:
        (tmp_path / "x.jsonl").write_text(text)
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"{flag}={tmp_path / 'x.jsonl'}")
    assert f"{flag}: {tmp_path}" in line and words in line


def test_too_few_and_too_long_problems(capsys, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(lines(GOOD, {**GOOD, "question": "How many ?"}))
    line = refused_before_a_folder_is_made(
        capsys, tmp_path, f"--data={path}", f"--eval-data={TINY / 'test.jsonl'}")
    assert f"--prompts-per-step 16: --data {path} has 2 problems" in line
    path.write_text(lines(GOOD, {**GOOD, "question": "How " + "Anna " * 204}))
    for flag in ("--data", "--eval-data"):
        line = refused_before_a_folder_is_made(
            capsys, tmp_path, f"--eval-data={TINY / 'test.jsonl'}", f"{flag}={path}")
        assert f"{flag}: the prompt of 'How Anna Anna" in line and "has 207 tokens" in line


@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_data_that_never_ends(capsys, tmp_path, flag):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        line = refused_before_a_folder_is_made(capsys, tmp_path, f"{flag}={path}")
        assert f"{flag}: {path}" in line


REWARDS = {
    "no file": (None, "no_file.py"),
    "no function": ("def other(**columns): pass", "has no function 'f'"),
    "an error in the file": ("def f(:", "SyntaxError"),
    "an exit in the file": ("import sys\nsys.exit()", "SystemExit"),
}


@pytest.mark.parametrize("what", REWARDS)
def test_a_reward_that_cannot_be_loaded(capsys, tmp_path, what):
    code, words = REWARDS[what]
    path = tmp_path / ("no_file.py" if code is None else "r.py")
    if code is not None:
        path.write_text(code)
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--reward={path}:f")
    assert f"--reward {path}:f" in line and words in line


@pytest.mark.parametrize("body, words", [
    ("raise KeyError('oh')", "KeyError: 'oh'"),
    ("import sys; sys.exit()", "SystemExit"),
    ("return None", "NoneType"),
    ("return ['one'] * len(completions)", "one"),
])
def test_a_reward_that_cannot_be_used(capsys, tmp_path, body, words):
    """Found by the first evaluation; the run can be resumed with a better one."""
    (tmp_path / "r.py").write_text(f"def f(completions, **columns): {body}\n")
    line = ends_badly(capsys, *SMALL, f"--reward={tmp_path / 'r.py'}:f",
                      f"--output={tmp_path / 'run'}")
    assert f"--reward {tmp_path / 'r.py'}:f" in line and words in line


@pytest.mark.parametrize("value", ["[float('nan')] * N", "[1e300] * N", "['1'] * N", "[1.0]"])
def test_a_reward_that_is_no_finite_number_for_each_row(capsys, tmp_path, value):
    (tmp_path / "r.py").write_text(
        f"def f(completions, **columns):\n    N = len(completions)\n    return {value}\n")
    line = ends_badly(capsys, *SMALL, f"--reward={tmp_path / 'r.py'}:f",
                      f"--output={tmp_path / 'run'}")
    assert "row 0" in line


def test_memory_that_runs_out_while_sampling(capsys, monkeypatch, tmp_path):
    def no_room(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(train, "sample_groups", no_room)
    line = ends_badly(capsys, *SMALL, f"--output={tmp_path / 'run'}")
    assert "out of memory: lower --prompts-per-step" in line


# --------------------------------------------------------------------------------------------------
# The terminal

@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_ctrl_c_while_torch_is_imported_is_quiet():
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py")], env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = f"/proc/{process.pid}/maps"
    while process.poll() is None and "torch" not in open(maps).read():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_terminal_that_goes_away_does_not_stop_the_run(tmp_path):
    process = start("train.py", *SMALL, f"--output={tmp_path / 'run'}", out="", err="/dev/full")
    assert ended([process]) == [0]
    assert (tmp_path / "run" / "final").is_dir()


def test_a_terminal_that_knows_ascii_only(tmp_path):
    (tmp_path / "x.jsonl").write_text(lines(*2 * [{**GOOD, "question": "Žofie hat 9 Bücher ?"}]))
    done = run_script("train.py", *SMALL, f"--data={tmp_path / 'x.jsonl'}",
                      f"--eval-data={tmp_path / 'x.jsonl'}", f"--output={tmp_path / 'run'}",
                      PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"question  \u017dofie hat 9 B\xfccher ?" in done.stdout


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"),
                                   ValueError("I/O operation on closed file")])
def test_a_patient_stream(error):
    def fails(*given):
        told.append(given)
        raise error

    told = []
    train.patient(fails)("four")
    train.patient(fails)()
    assert told == [("four",), ()]
