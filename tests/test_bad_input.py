"""Bad input gives exit status 2, one line on standard error, no traceback and no folder."""
# ruff: noqa: I001 - several names to a line
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    ENVIRONMENT, FEW, ROOT, TINY, edit_json, edit_tensors, ended, json_lines, raises,
    refused, run_script, settings, start, trains)

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
    *(([f"{name}={value}"], f"argument {name}: {words}'{value}'") for name, value, words in (
        ("--lr", "nan", ""), ("--lr", "1e400", ""), ("--steps", HUGE, ""), ("--seed", HUGE, ""),
        ("--micro-batch-tokens", "0", ""), ("--micro-batch-tokens", "some", ""),
        ("--temperature", "0", ""), ("--reward-model-lr", "0", ""), ("--kl-coef", "-1", ""),
        ("--kl-estimator", "k4", "invalid choice: "), ("--dtype", "int8", "invalid choice: "))),
    (["--offload=perhaps"], "offload: ignored explicit argument 'perhaps'"),
    *(([flag], f"unrecognized arguments: {flag}")
      for flag in ("--learning-rate=1", "--kl_coef=1", "--kl")),
    (["--lr=0"], "argument --lr: '0' is no float from 1e-12 to 2147483647"),
    (["--steps=0"], "argument --steps: '0' is no int from 1 to"),
    (["--steps=many"], "argument --steps: 'many' is no int"),
    (["--threads=2147483648"], "argument --threads: '2147483648' is no int from 0 to 1024"),
    (["--group-size=1"], "argument --group-size: '1' is no int from 2 to"),
    (["--clip-eps=1.5"], "argument --clip-eps: '1.5' is no float from 0 to 1"),
    (["--kl-band", "0.1"], "argument --kl-band: expected 2 arguments"),
    (["--kl-band", "0.1", "0.2", "0.3"], "unrecognized arguments: 0.3"),
    (["--device=abacus"], "--device abacus: "),
    (["--device=xpu"], "--device xpu: not on this machine"),
    (["--prompts-per-step=3000"], "--prompts-per-step 3000: --data"),
    ([FEW[0], "--prompts-per-step=32"], "few.jsonl has only 27 to train on"),
    (["--max-new-tokens=100000"], "more than the model's 128 positions: lower --max-new-tokens"),
    (["--model=nobody/nothing"], "--model nobody/nothing: cannot be loaded"),
    (["--model=./no/such/folder"], "--model ./no/such/folder: cannot be loaded"),
    ([f"--model={300 * 'm'}"], "cannot be loaded"), ([f"--data={300 * 'd'}"], "--data: "),
    ([f"--eval-data={300 * 'd'}"], "--eval-data: "), ([f"--reward={300 * 'r'}.py:f"], "--reward "),
    ([f"--output={300 * 'o'}"], "--output "), (["--reward=no_colon"], "--reward no_colon"),
    (["--resume"], "argument --resume: expected one argument"),
    (["--resume=nowhere"], "--resume nowhere: no run to resume"),
    (["--config=nowhere.json"], "nowhere.json: "),
])
def test_bad_flags(capsys, tmp_path, flags, words):
    assert words in refused_before_a_folder_is_made(capsys, tmp_path, *flags)


@pytest.mark.parametrize("flags", [
    "--kl-band 0.1 0.2 --kl-coef 0", "--kl-band 0.2 0.1", "--renew-reference 2 --kl-coef 0",
    "--minibatches 17", "--overlong-buffer 41", "--around-best 3", "--max-turns 3",
    "--around-best 2 --reward rule", "--advantage shape --reply r.py:f", "--reward-weights 1",
    "--reward-weights 1 2 --reward rule", "--reward-model m --reward rule",
    "--no-scale-by-std --advantage gtpo", "--no-scale-by-std --advantage leave-one-out",
    *(f"--advantage shape {flags}" for flags in (
        "--reward rule", "--reward-model m", "--length-rescale 0.3", "--overlong-buffer 9",
        "--max-resample 1")), "--kl-band 0 0.1", "--no-scale-by-std --step-reward r.py:f",
    "--step-reward r.py:f --max-resample 1", "--step-reward r.py:f --advantage gtpo",
    "--step-reward r.py:f --reward-model m", "--step-reward r.py:f --length-rescale 0.3",
    "--step-reward r.py:f --overlong-buffer 4", "--step-reward r.py:f --advantage leave-one-out",
    "--around-best 1 --reward-model x", "--around-best 1 --reply r.py:f",
])
def test_flags_that_do_not_go_together(capsys, tmp_path, flags):
    """The line names the first of them, before a file is looked for."""
    flags = flags.split()
    line = refused_before_a_folder_is_made(capsys, tmp_path, *flags)
    assert flags[0] in line and "no file" not in line


def card(monkeypatch, **answers):
    """What torch.cuda says of the card."""
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((7, 0), torch.float16),
                                               ((6, 1), torch.float32), ((8, 0), torch.bfloat16)])
def test_dtype_and_number_of_a_card(capsys, monkeypatch, capability, dtype):
    current = []
    card(monkeypatch, is_available=True, get_device_capability=capability,
         is_bf16_supported=capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for flag in ("--device=cuda", "--device=cuda:1"):
        assert train.choose_device(train.parse([flag]))[1] == dtype
    assert current == [torch.device("cuda:1")]
    if dtype != torch.bfloat16:
        line = refused(capsys, "--dtype=bfloat16", "--device=cuda")
        assert line == "train.py: --dtype bfloat16: cuda has no bfloat16"


def test_a_card_that_torch_cannot_use(capsys, monkeypatch, tmp_path):
    """A named model does not train on the CPU unasked; and a card without kernels is named."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho Tesla T4, 535.104.05\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    named = f"--model={shutil.copytree(TINY, tmp_path / 'named')}"
    line = refused(capsys, named)
    assert f"--device auto: torch {torch.__version__}" in line and "Tesla T4, 535.104.05" in line
    s = train.parse([named])
    assert train.plan_memory(train.dataclasses.replace(s, device="cpu")).offload is False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert train.plan_memory(s).offload is False          # hidden on purpose
    card(monkeypatch, get_arch_list=["sm_75", "sm_90"], get_device_name="Tesla V100",
         device_count=4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", raises(RuntimeError("no kernel image is available")))
        with pytest.raises(train.BadInput, match="sm_75 sm_90, and fails on Tesla V100: no kern"):
            train.check_card(s, torch.device("cuda"))
    # One of several cards that work
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps=1"])
    capsys.readouterr()
    train.check_card(s, torch.device("cuda"))
    assert "one of 4 cards" in (out := capsys.readouterr().out)
    assert out.endswith("torchrun --nproc-per-node=4 train.py --steps=1\n")


def test_one_process_of_one_is_a_plain_run_and_torchrun_chooses_the_cards(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    train.join_ranks()
    assert train.world() == 1 and not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(train.BadInput, match="--device cuda:1: torchrun gives every process"):
        train.check_combinations(train.Settings(device="cuda:1"))
    train.check_combinations(train.Settings(device="cuda"))


@pytest.mark.parametrize("name, value", [
    ("RANK", None), ("LOCAL_RANK", None), ("MASTER_PORT", None), ("RANK", "x"),
    ("WORLD_SIZE", "two"), ("LOCAL_RANK", "-1"),
])
def test_a_rank_without_torchrun(capsys, monkeypatch, tmp_path, name, value):
    known = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "MASTER_PORT": "2", name: value}
    for variable, number in known.items():  # rank 0 is the one that speaks
        monkeypatch.setenv(variable, number or "")
        if number is None:
            monkeypatch.delenv(variable)
    line = refused_before_a_folder_is_made(capsys, tmp_path)
    assert f"{name} is not a number" in line and "torchrun" in line


# --------------------------------------------------------------------------------------------------
# A config file goes through the same parser

@pytest.mark.parametrize("config, words", [
    ('{"lr": "fast"}', "argument --lr"), ('{"lr": -1}', "argument --lr: '-1'"),
    ('{"nonsense": 1}', "--nonsense is no flag"), ("[1]", "not an object"), ('{"lr": ', ""),
    ('{"lr": NaN}', "argument --lr"), ('{"steps": {"a": 1}}', "argument --steps"),
    ('{"kl-estimator": ["k1", "k2"]}', "k2"), ("[" * 10**5, ""), ('{"lr": "\udcff"}', ""),
    ('{"kl_band": [0.1]}', "--kl-band"), ('{"output": "x"}', "--output is no flag"),
    ('{"resume": "x"}', "--resume is no flag"), ('{"help": true}', "--help is no flag"),
    ('{"settings": {"lr": 1}, "recipe": {}}', "an older train.py"), ("", ""),
    ('{"group_size": 2.5}', "--group-size"), ('{"group_size": 1}', "--group-size"),
    ('{"clip_eps": [0.1, 0.2]}', "0.2"), ('{"steps": true}', "--steps"),
    *((json.dumps({"reward": ["rule", word]}), f"--reward: '{word}' would be read as a flag")
      for word in ("--output=x", "--resume=x", "--help", "-h", "--dry-run", "--config=c.json")),
    ('{"kl_band": [0.1, "--trace"]}', "--kl-band: '--trace'"), ('{"reward": []}', "--reward"),
    ('{"kl_estimator": {"k": 3}}', "--kl-estimator"),
])
def test_a_bad_config(capsys, tmp_path, config, words):
    path = tmp_path / "c.json"
    path.write_text(config, encoding="utf-8", errors="surrogateescape")
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--config={path}")
    assert line.startswith(f"train.py: {path}: ") and words in line


# --------------------------------------------------------------------------------------------------
# Models. A folder is the tiny policy's with something wrong in it.

def no_end_token(m, nothing):
    edit_json(m / "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        edit_json(m / name, eos_token_id=nothing)


def without(*names):
    """The folder without these files."""
    return lambda m: [(m / name).unlink() for name in names]


def pickled(m):
    (m / "model.safetensors").unlink()
    torch.save({}, m / "pytorch_model.bin")


def spoiled(**changes):
    return lambda m: edit_json(m / "config.json", **changes)


def written(name, text):
    return lambda m: (m / name).write_text(text)


def reweighted(change):
    return lambda m: edit_tensors(m / "model.safetensors", change)


def fewer_embeddings(m):
    reweighted(lambda w: {**w, EMBEDDINGS: w[EMBEDDINGS][:50]})(m)
    edit_json(m / "config.json", vocab_size=50)


def padding_outside(m):
    tokenizer = json.loads((m / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append({**added[0], "id": 57, "content": "<|far|>"})
    (m / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit_json(m / "tokenizer_config.json", pad_token="<|far|>")


NORM = "model.norm.weight"
EMBEDDINGS = "model.embed_tokens.weight"
MLP = "model.layers.0.mlp.up_proj.weight"
MODELS = [
    (without("chat_template.jinja"),
     "no chat template; take an instruction-tuned model, or put a chat_template.jinja"),
    *((written("chat_template.jinja", text), words) for text, words in (
        ("", "chat template"), ("{# nothing #}", "makes an empty prompt"),
        ("{{ messages[7].content.oh }}", "chat template"), ("{% if", "chat template fails"),
        ('{{ "\\ud800" }}', "surrogates not allowed"))),
    *((lambda m, ends=ends: no_end_token(m, ends), "names an end token") for ends in (None, [])),
    (without("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
     "its tokenizer files lack the words"),
    (written("config.json", "{"), "cannot be loaded"), (pickled, "cannot be loaded"),
    (written("model.safetensors", "torn"), "cannot be loaded"),
    (reweighted(lambda w: {k: v for k, v in w.items() if ".layers.1." not in k}),
     "its files lack weights: model.layers.1."),
    (spoiled(tie_word_embeddings=False), "its files lack weights: lm_head.weight"),
    (reweighted(lambda w: {f"other.{k}": v for k, v in w.items()}), "its files lack weights"),
    (reweighted(lambda w: {**w, NORM: torch.ones(65)}), NORM), (padding_outside, "57"),
    (spoiled(num_hidden_layers=1, layer_types=["full_attention"]),
     "layers that its config.json does not know: model.layers.1."),
    (reweighted(lambda w: {**w, NORM: torch.tensor([*63 * [1.0], float("nan")])}),
     f"not finite: {NORM}"),
    (reweighted(lambda w: {**w, MLP: (w[MLP] * 100).to(torch.int8)}), f"whole numbers: {MLP}"),
    (fewer_embeddings, "its tokenizer has ids beyond its 50 embeddings: 50"),
    (spoiled(num_hidden_layers=0, layer_types=[]), "its config.json names no layers"),
    *((lambda m, ends=ends: edit_json(m / "generation_config.json", eos_token_id=ends),
       "not all of them are among the 57 words") for ends in (-1, 57, [1, 99999], "<|end|>")),
]


@pytest.mark.parametrize("make_wrong, words", MODELS)
def test_a_bad_model(capsys, tmp_path, make_wrong, words):
    folder = shutil.copytree(TINY, tmp_path / "m")
    make_wrong(folder)
    line = refused_before_a_folder_is_made(capsys, tmp_path, f"--config={TINY / 'grpo.json'}",
                                           f"--model={folder}")
    assert words in line and (str(folder) in line or "chat template" in words + line)


def test_an_adapter_alone(capsys, tmp_path, run_here):
    (tmp_path / "adapter_config.json").write_text("{}")
    for line in (refused(capsys, f"--model={tmp_path}"),
                 run_here("sample.py", "--model", tmp_path, status=2)):
        assert "an adapter needs its model; final/ beside it has both in one" in line


def test_a_model_without_padding_token_and_with_norms_of_ones(tmp_path):
    """Masks come from labels, not from a padding id; and float ones are no whole numbers."""
    reweighted(lambda w: {**w, NORM: torch.ones(64)})(shutil.copytree(TINY, tmp_path / "m"))
    edit_json(tmp_path / "m" / "tokenizer_config.json", pad_token=None)
    trains(f"--model={tmp_path / 'm'}", *SMALL, f"--output={tmp_path / 'run'}")


PLAIN = ("{% for m in messages %}{{ m.role }}: {{ m.content }} <|end|> {% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}")


@pytest.mark.parametrize("change, flags, words", [
    (None, (), None),
    (None, ("--system-prompt=Think.",), "--system-prompt: the chat template of --model leaves it"),
    (lambda m: edit_json(m / "generation_config.json", eos_token_id=2), (),
     "the chat template writes <|end|> after an answer, but the model's end tokens are <|unk|>"),
    (written("chat_template.jinja", PLAIN), ("--system-prompt=Think.",), None),
    (written("chat_template.jinja", PLAIN.replace(" <|end|> ", "\n")), (),
     "--data: 1 of 2 problems hold 'assistant:', which the chat template writes between turns"),
])
def test_what_the_chat_template_does_is_said_once(capsys, tmp_path, change, flags, words):
    folder, data = shutil.copytree(TINY, tmp_path / "m"), tmp_path / "x.jsonl"
    data.write_text(json_lines(GOOD, {**GOOD, "question": "How many ? assistant: 5"}))
    if change:
        change(folder)
    train.load(settings(*SMALL, f"--config={TINY / 'grpo.json'}", f"--model={folder}",
                        f"--data={data}", *flags))
    out = capsys.readouterr().out
    assert out.count(words) == 1 if words else "chat template" not in out, out


@pytest.mark.parametrize("config", [
    {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1},
    {"model_type": "t5"}, {"model_type": "no-such-type"}, {},
])
def test_dry_run_on_a_family_that_cannot_be_counted(capsys, tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused_before_a_folder_is_made(capsys, tmp_path, f"--model={tmp_path}", "--dry-run")


# --------------------------------------------------------------------------------------------------
# Data

@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
@pytest.mark.parametrize("text, words", [
    (None, "x.jsonl: No such file"), ("", "x.jsonl: no problems in it"),
    (json_lines(GOOD, GOOD, {"question": "?"}), "x.jsonl, line 3: 'answer'"),
], ids=["no file", "empty", "no answer"])
def test_bad_data(capsys, tmp_path, flag, text, words):
    """Also where rewards of our own compare with the truth; test_reward.py has all faults."""
    if text is not None:
        (tmp_path / "x.jsonl").write_text(text)
    flags = (f"{flag}={tmp_path / 'x.jsonl'}", "--reward", "rule", "think")
    line = refused_before_a_folder_is_made(capsys, tmp_path, *flags)
    assert refused(capsys, flags[0]) == line
    assert f"{flag}: {tmp_path}" in line and words in line


def test_a_question_of_ten_megabytes_is_refused_at_once(capsys, tmp_path):
    file = tmp_path / "big.jsonl"
    long = {**GOOD, "question": "Ben has 2 books and ? " * 450_000}
    file.write_text(json_lines(GOOD, long))
    started = time.process_time()
    line = refused(capsys, f"--data={file}")
    assert time.process_time() - started < 5
    assert f"{file}, line 2: a question of 9900000 characters" in line


# --------------------------------------------------------------------------------------------------
# The terminal

@pytest.mark.parametrize("how", ["sys.stdout.close()", "sys.stderr.close()", "os.closerange(1, 2)"])
def test_a_reward_that_closes_a_stream_ends_no_run(tmp_path, how):
    (tmp_path / "mine.py").write_text(f"""
import os, sys
def score(completions, **columns):
    {how}
    return [float(len(text)) for text in completions]
""")
    done = run_script("train.py", *SMALL, f"--reward={tmp_path / 'mine.py'}:score",
                      f"--output={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "final").is_dir() and "Traceback" not in done.stderr


def test_a_warning_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text("def none(answer, **_): return [None] * len(answer)")
    done = run_script("train.py", *SMALL, f"--reward={tmp_path / 'mine.py'}:none",
                      f"--output={tmp_path / 'run'}")
    assert "every reward gave None for some rows: they count as 0\n" in done.stderr
    assert "UserWarning" not in done.stderr


def test_a_run_that_is_begun_without_streams(tmp_path):
    flags = " ".join(map(str, SMALL))
    done = subprocess.run(f"exec {sys.executable} train.py {flags} --output={tmp_path / 'run'} "
                          ">&- 2>&-", shell=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0 and (tmp_path / "run" / "final").is_dir()


def test_a_terminal_that_goes_away_and_one_that_knows_ascii_only(tmp_path):
    problem = {**GOOD, "question": "Žofie hat 9 Bücher ?"}
    (tmp_path / "x.jsonl").write_text(json_lines(problem, problem))
    gone = start("train.py", *SMALL, f"--output={tmp_path / 'gone'}", out="", err="/dev/full")
    data = (f"--{flag}={tmp_path / 'x.jsonl'}" for flag in ("data", "eval-data"))
    done = run_script("train.py", *SMALL, *data, f"--output={tmp_path / 'run'}",
                      PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"question  \u017dofie hat 9 B\xfccher ?" in done.stdout
    assert ended([gone]) == [0] and (tmp_path / "gone" / "final").is_dir()
