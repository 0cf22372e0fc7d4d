"""The table of bad inputs: each gives exit status 2, one line on standard error, no traceback, no folder."""
import json
import shutil

import pytest
import torch

import train

GOOD = {"question": "Anna has 9 books , loses 4 . How many ?", "answer": "9 - 4 = 5\n#### 5"}
REWARD = "def no_function(): pass\n" + "".join(
    f"def {name}(completions, **columns): {body}\n" for name, body in {
        "raises": "raise KeyError('oh')", "nan": "return [float('nan')] * len(completions)",
        "short": "return [1.0]", "strings": "return ['1'] * len(completions)", "none": "return None"}.items())


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def edited(folder, name, **changes):
    """The tiny policy's folder with one JSON file changed; None takes a key out."""
    shutil.copytree(train.TINY, folder)
    content = json.loads((folder / name).read_text())
    content = {k: v for k, v in {**content, **changes}.items() if v is not None}
    (folder / name).write_text(json.dumps(content))
    return folder


def no_template(folder):
    edited(folder, "config.json")
    (folder / "chat_template.jinja").unlink()


def no_end_token(folder):
    edited(folder, "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": None}))


def pickled(folder):
    edited(folder, "config.json")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


TABLE = [  # what is wrong: flags, words of the message, and how the files they name are made
    ("no data file", ["--data={d}/none.jsonl"], "--data: {d}/none.jsonl: No such file", None),
    ("data is a folder", ["--data={d}"], "--data: {d}: Is a directory", None),
    ("empty data", ["--data={d}/x.jsonl"], "--data: {d}/x.jsonl: no problems in it", {"x.jsonl": ""}),
    ("a broken line", ["--data={d}/x.jsonl"], "x.jsonl, line 2: not JSON", {"x.jsonl": lines(GOOD, '{"question"')}),
    ("no ####", ["--eval-data={d}/x.jsonl"], "--eval-data: {d}/x.jsonl, line 1: 'answer'",
     {"x.jsonl": lines({**GOOD, "answer": "5"})}),
    ("no answer", ["--data={d}/x.jsonl"], "line 3: 'answer' is missing",
     {"x.jsonl": lines(GOOD, GOOD, {"question": "?"})}),
    ("more prompts a step than data", ["--data={d}/x.jsonl"],
     "--prompts-per-step 16: --data {d}/x.jsonl has 2 problems", {"x.jsonl": lines(GOOD, GOOD)}),
    ("a prompt longer than the positions", ["--data={d}/x.jsonl"], "--data: the prompt of problem 2 has 207 tokens",
     {"x.jsonl": lines(GOOD, {**GOOD, "question": "Anna " * 205})}),
    ("no such folder", ["--model={d}/none"], "--model {d}/none", None),
    ("no such hub model", ["--model=nobody/nothing"], "--model nobody/nothing: cannot be loaded", None),
    ("no chat template", ["--model={d}/m"], "--model {d}/m: its tokenizer has no chat template", no_template),
    ("no end token", ["--model={d}/m"], "neither generation config nor tokenizer names an end token", no_end_token),
    ("pickled weights", ["--model={d}/m"], "--model {d}/m: cannot be loaded", pickled),
    ("torn weights", ["--model={d}/m"], "--model {d}/m: cannot be loaded",
     lambda m: edited(m, "config.json") and (m / "model.safetensors").write_bytes(b"torn")),
    ("group of one", ["--group-size=1"], "--group-size 1: must be at least 2", None),
    ("no reward file", ["--reward={d}/none.py:f"], "--reward {d}/none.py:f: no file", None),
    ("no reward function", ["--reward={d}/r.py:f"], "has no function 'f'", {"r.py": REWARD}),
    ("a reward file with an error", ["--reward={d}/r.py:f"], "fails to load: SyntaxError", {"r.py": "def f(:"}),
    ("a reward that raises", ["--reward={d}/r.py:raises"], "row 0, response '\\\\boxed{{1}}': KeyError: 'oh'",
     {"r.py": REWARD}),
    ("a reward of NaN", ["--reward={d}/r.py:nan"], "row 0 got nan, not a finite number", {"r.py": REWARD}),
    ("too few rewards", ["--reward={d}/r.py:short"], "gave 1 rewards for 8 responses", {"r.py": REWARD}),
    ("rewards of text", ["--reward={d}/r.py:strings"], "row 0 got '1', not a finite number", {"r.py": REWARD}),
    ("no list of rewards", ["--reward={d}/r.py:none"], "gave NoneType, not a list", {"r.py": REWARD}),
    ("no such device", ["--device=abacus"], "--device abacus: not a device torch knows", None),
    ("a device that is not here", ["--device=xpu"], "--device xpu: not on this machine", None),
    ("a negative learning rate", ["--lr=-1"], "--lr -1.0: must be above 0", None),
    ("an unknown flag", ["--learning-rate=1"], "unrecognized arguments: --learning-rate=1", None),
    ("a word for a number", ["--steps=many"], "argument --steps: invalid int value: 'many'", None),
]


@pytest.mark.parametrize("flags, words, files", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_bad_input(capsys, monkeypatch, tmp_path, flags, words, files):
    if callable(files):
        files(tmp_path / "m")
        flags = [*flags, f"--data={train.TINY}/train.jsonl", f"--eval-data={train.TINY}/test.jsonl"]
    for name, text in (files or {}).items() if not callable(files) else ():
        (tmp_path / name).write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert train.main([flag.format(d=tmp_path) for flag in flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: ") and err.count("\n") == 1, err
    assert words.format(d=tmp_path) in err
    assert list((tmp_path / "here").iterdir()) == []     # no partial output folder


def test_a_dtype_the_device_lacks(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert train.main(["--dtype=bfloat16", "--device=cuda"]) == 2
    assert capsys.readouterr().err == "train.py: --dtype bfloat16: cuda has no bfloat16\n"


def test_memory_that_runs_out_while_sampling(capsys, monkeypatch, tmp_path):
    def sample(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(train, "sample_groups", sample)
    assert train.main([f"--output={tmp_path / 'run'}"]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert err[-1].startswith("train.py: out of memory: lower --prompts-per-step") and "Traceback" not in str(err)


def test_a_tokenizer_without_padding_token_needs_none(tmp_path):
    """Masks come from labels, never from a padding id: the end token fills the rows."""
    folder = edited(tmp_path / "m", "tokenizer_config.json", pad_token=None)
    assert train.main([f"--model={folder}", "--steps=1", "--prompts-per-step=2", "--group-size=2", "--eval-limit=2",
                       f"--output={tmp_path / 'run'}"]) == 0
