"""Runs that survive: checkpoints, --resume, signals, full disks, rewards that fail."""
# ruff: noqa: I001 - several names to a line
import errno
import fcntl
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from conftest import (
    ENVIRONMENT, FEW, LIMIT, NO_MEMORY, PROCESSES, ROOT, TINY, checkpoint_of, curve, edit_json,
    edit_tensors, ended, ends_badly, faulty_reward, lines_of, main, metrics_of, one_line_of,
    raises, refused, run_script, same_tensors, snapshot, start, trains, weights_of)

import train

FLAGS = (*FEW, "--steps=6", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=4", "--eval-every=3", "--save-every=1", "--warmup-steps=3",
         "--updates-per-rollout=2")
CHECKPOINT = "checkpoint/run.safetensors"
FULL = OSError(errno.ENOSPC, "No space left on device")
LORA = ("--lora-rank=4", "--lr=0.003")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    trains(*FLAGS, f"--output={folder}")
    return folder


@pytest.fixture
def run_folder(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted, tmp_path / "run")


def ended_the_same(folder, whole):
    assert curve(folder) == curve(whole)                  # no step twice, none missing
    assert weights_of(folder) == weights_of(whole)
    steps = [record["step"] for record in lines_of(folder / "samples.jsonl")]
    assert steps == sorted(2 * list(range(1, 7)))
    assert not (folder / "unfinished").exists()
    pages = {(place / "page.html").read_text(encoding="utf-8").split("</h1>", 1)[1]
             for place in (folder, whole)}               # after the name of the folder
    assert len(pages) == 1


def resumed_ends_the_same(folder, whole, *flags):
    trains(f"--resume={folder}", *flags)
    ended_the_same(folder, whole)


KINDS = {  # what each has to find again
    "the masters of bfloat16": ("--dtype=bfloat16",),
    "the loss scale of float16": ("--dtype=float16",),
    "LoRA's factors": LORA,
    "LoRA's first weights": (*LORA, "--dtype=bfloat16", "--kl-coef=0"),
    "LoRA's renewed reference": (*LORA, "--dtype=bfloat16", "--renew-reference=1"),
}


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_a_run_in_two_parts_is_the_run_bit_for_bit(tmp_path, flags):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (*FLAGS, "--eval-every=1", *flags)
    trains(*flags, "--steps=2", f"--output={whole}")
    trains(*flags, "--steps=1", f"--output={parts}")
    trains(f"--resume={parts}", "--steps=2")
    assert curve(parts) == curve(whole) and weights_of(parts) == weights_of(whole)
    saved = checkpoint_of(parts)
    assert same_tensors(saved, checkpoint_of(whole))
    last = curve(whole)[-1]
    if flags[-1].startswith("--dtype"):
        assert 0.9 < last["arrived"] < 1.1
        assert last["loss_scale"] == (65536 if "--dtype=float16" in flags else 1)
    if "--lora-rank=4" in flags and "--renew-reference=1" not in flags:
        assert all("lora_" in name or name == "counters" for name in saved), "and nothing else"


def killed_and_resumed(folder, chance, seconds, uninterrupted):
    """SIGKILL at five random moments, of one run or of several, each resumed to its end."""
    kills = 0
    for run in range(9):
        place = folder / str(run)
        begun = False
        while True:
            flags = [f"--resume={place}"] if begun else [*FLAGS, f"--output={place}"]
            process = start("train.py", *flags)
            process.join(chance.uniform(0, seconds) if kills < 5 else LIMIT)
            if process.exitcode is not None:
                assert process.exitcode == 0
                break
            assert kills < 5, "the last run hangs"
            process.kill()
            process.join()
            kills += 1
            begun = (place / "config.json").is_file()
        ended_the_same(place, uninterrupted)
        if kills == 5:
            return


def test_killed_at_random_the_run_ends_the_same(uninterrupted, tmp_path, help_of_train):
    """In loading, sampling, update, evaluation and save; two at a time."""
    started = time.perf_counter()
    assert run_script("train.py", *FLAGS, f"--output={tmp_path / 'timed'}").returncode == 0
    seconds = time.perf_counter() - started
    with ThreadPoolExecutor() as pool:
        chains = [pool.submit(killed_and_resumed, tmp_path / name, random.Random(name), seconds,
                              uninterrupted) for name in "ab"]
    assert [chain.result() for chain in chains] == [None, None]


def test_a_disk_that_is_full_at_the_first_config(capsys, monkeypatch, tmp_path, uninterrupted):
    def write_text(path, text, **how):
        path.write_bytes(text[:20].encode())
        raise FULL

    folder = tmp_path / "run"
    flags = (*FLAGS, f"--output={folder}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        assert "config.json cannot be written" in ends_badly(capsys, *flags)
    left = {path.name for path in folder.rglob("*")}      # as a kill would leave it
    assert left == {".lock", "unfinished", "config.json"}
    trains(*flags)
    ended_the_same(folder, uninterrupted)


# --------------------------------------------------------------------------------------------------
# Signals, and rewards that fail

@pytest.fixture(scope="module")
def own_reward(tmp_path_factory):
    """(flags with a reward that can fail, the folder of a run to which nothing happened)."""
    folder = tmp_path_factory.mktemp("reward")
    flags = (*FLAGS, faulty_reward(folder))
    trains(*flags, f"--output={folder / 'run'}")
    return flags, folder / "run"


@pytest.mark.parametrize("fault, call, status, said, last", [
    *((name, 4, status, "stopped after step 3; continue with: ", 3)
      for name, status in (("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129))),
    ("raise", 4, 2, "mine.py:score: KeyError: 'no, please'", 2),
    ("raise", 5, 2, "mine.py:score: KeyError: 'no, please'", 2),  # the evaluation's
    ("exit", 4, 2, "mine.py:score.*SystemExit", 2),
    ("interrupt", 2, 130, "interrupted; last checkpoint: none; continue with: ", 0),
])
def test_what_ends_a_run_is_told_and_it_goes_on(capsys, monkeypatch, tmp_path, own_reward, fault,
                                                call, status, said, last):
    """A signal waits for the step's end and saves; an error does not, in an evaluation either."""
    flags, whole = own_reward
    folder = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_AT", str(call))
    assert main(*flags, "--output=run") == status
    out, err = capsys.readouterr()
    signalled = fault.startswith("SIG")
    line = out if signalled else one_line_of(err)
    assert re.search(said, line) and train.command("train.py", "--resume", str(folder)) in line
    assert "Traceback" not in err and (fault in err or not signalled)
    lines = metrics_of(folder) if last else [{"step": 0}]
    assert lines[-1]["step"] == last and not (folder / "final").exists()
    monkeypatch.delenv("FAULT")
    resumed_ends_the_same(folder, whole)


def test_the_line_that_is_printed_continues_the_run(tmp_path, own_reward):
    """From the shell, and from another folder; `python` alone may be another Python."""
    flags, whole = own_reward
    folder = tmp_path / "a run"
    done = run_script("train.py", *flags, f"--output={folder}", folder=tmp_path, FAULT="SIGINT")
    assert done.returncode == 130, done.stderr
    line = done.stdout.split("continue with: ")[1].splitlines()[0]
    done = subprocess.run(line, shell=True, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=LIMIT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ended_the_same(folder, whole)


def test_the_handlers_belong_to_the_process_that_set_them(capsys, tmp_path):
    """A pool ends its workers with SIGTERM; a worker that took it for the run's would live on."""
    folder, forks = tmp_path / "run", ROOT / "tests" / "helpers" / "forks.py"
    trains(*FLAGS, "--steps=1", f"--reward={forks}:waits", f"--output={folder}")
    assert metrics_of(folder)[-1]["reward_mean"] == -signal.SIGTERM
    trains(*FLAGS, "--steps=1", f"--reward={forks}:score", f"--output={folder}2")
    assert "stopping" not in capsys.readouterr().err


def interrupted_twice():
    with train.Run().stopping_on_signals():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        os._exit(1)


def test_the_second_signal_leaves_at_once():
    process = PROCESSES.Process(target=interrupted_twice)
    process.start()
    assert ended([process]) == [-signal.SIGINT]


def test_main_puts_signals_back_and_works_in_a_thread(tmp_path, uninterrupted):
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(name) for name in names]
    with ThreadPoolExecutor() as pool:
        flags = [*FLAGS, f"--output={tmp_path / 'run'}"]
        assert pool.submit(train.main, flags).result(LIMIT) == 0
    ended_the_same(tmp_path / "run", uninterrupted)
    trains(*FLAGS, "--steps=1", f"--output={tmp_path / 'other'}")
    assert [signal.getsignal(name) for name in names] == before
    fork = multiprocessing.get_context("fork")            # and a process that is forked later
    child = fork.Process(target=lambda: os._exit(signal.getsignal(signal.SIGINT) is before[0]))
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 1


def test_a_reward_that_fails_at_once_can_be_mended(capsys, tmp_path, own_reward):
    flags, whole = own_reward
    folder, mine = tmp_path / "run", tmp_path / "mine.py"
    mine.write_text("def score(completions, **columns):\n    raise KeyError('not yet')\n")
    line = ends_badly(capsys, *flags[:-1], f"--reward={mine}:score", f"--output={folder}")
    assert "not yet" in line
    assert line.endswith("continue with: " + train.command("train.py", "--resume", str(folder)))
    faulty_reward(tmp_path)                               # which has no fault to do
    resumed_ends_the_same(folder, whole)
    assert f"{mine}:score has changed since this run began" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# What --resume refuses: one line, and not a byte of the run is changed

def refuses_to_resume(capsys, folder, *flags):
    before = snapshot(folder)
    line = refused(capsys, f"--resume={folder}", *flags)
    assert snapshot(folder) == before
    return line


@pytest.mark.parametrize("flag, words", [
    ("--lr=0.5", "--lr 0.5: the run in {folder} has 0.0003"),
    ("--seed=1", "--seed 1: the run in {folder} has 0"),
    ("--no-scale-by-std", "--no-scale-by-std: the run in {folder} was begun without it"),
    ("--output=elsewhere", "--output elsewhere: "),
    ("--config=c.json", "--config c.json: "),
    ("--eval-only", "--eval-only: the run in {folder} was begun without it"),
    ("--steps=3", "--steps 3: the run in {folder} is at step 6"),
])
def test_what_a_resumed_run_cannot_change(capsys, run_folder, flag, words):
    assert words.format(folder=run_folder) in refuses_to_resume(capsys, run_folder, flag)


def test_the_saved_flags_may_be_repeated_and_steps_may_grow(capsys, run_folder):
    """And a flag that config.json does not know yet has today's default."""
    path = run_folder / "config.json"
    edit_json(path, ratio=None, max_prompt_tokens=None)
    (run_folder / "inputs.json").unlink()
    trains(f"--resume={run_folder}", "--group-size=4", "--steps=7")
    assert f"settings of its config.json; run in {run_folder}" in capsys.readouterr().out
    assert [m["step"] for m in metrics_of(run_folder)] == list(range(8))
    config = json.loads(path.read_text())
    assert config["steps"] == 7 and config["ratio"] == "token"


def test_a_folder_that_holds_something_is_left_as_it_was(capsys, run_folder, tmp_path):
    somebody = tmp_path / "somebody"
    somebody.mkdir()
    (somebody / "letter.txt").write_text("mine")
    for folder in (run_folder, somebody):
        before = snapshot(folder)
        assert "holds a run already" in refused(capsys, *FLAGS, f"--output={folder}")
        assert snapshot(folder) == before
    assert "no run to resume" in refuses_to_resume(capsys, somebody)
    for name in ("letter.txt/run", 300 * "x", "\udcff"):  # and what cannot be a folder
        assert "--output" in refused(capsys, *FLAGS, f"--output={somebody / name}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", ".lock"])
def test_what_stands_outside_the_folder_is_left_as_it_was(capsys, run_folder, tmp_path, name):
    shutil.move(run_folder / name, tmp_path / "other")
    (tmp_path / "other").write_text("a line of somebody else's\n")
    (run_folder / name).symlink_to(tmp_path / "other")
    assert "has links to files elsewhere" in refuses_to_resume(capsys, run_folder)
    assert (tmp_path / "other").read_text() == "a line of somebody else's\n"


@pytest.fixture(scope="module")
def movable(tmp_path_factory):
    """A run of two steps on a model and data of its own, all named by relative paths."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(TINY, home / "model")
    for name in ("train.jsonl", "test.jsonl"):
        (home / name).write_text("".join((TINY / name).open().readlines()[:8]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        trains(*FLAGS, "--steps=2", "--model=model", "--data=train.jsonl",
               "--eval-data=test.jsonl", "--output=run")
    return home


@pytest.fixture
def home(movable, tmp_path, monkeypatch):
    """A copy of it, under the name that its config.json knows."""
    kept = movable.with_name("kept")
    shutil.copytree(movable, kept)
    monkeypatch.chdir(tmp_path)
    yield movable
    shutil.rmtree(movable)
    kept.rename(movable)


def test_a_run_is_resumed_from_elsewhere_with_another_version(capsys, home):
    edit_json(home / "run" / "inputs.json", torch="1.0")
    trains(f"--resume={home / 'run'}", "--steps=3")       # its relative paths are found
    assert [m["step"] for m in metrics_of(home / "run")] == [0, 1, 2, 3]
    assert "torch has changed since this run began" in capsys.readouterr().out


def lines_changed(change):
    return lambda path: path.write_text("".join(change(path.read_text().splitlines(True))))


def tensors_changed(change):
    return lambda path: edit_tensors(path, change)


def counters_with(tensor, name, value):
    text = json.dumps({**json.loads(tensor.numpy().tobytes()), name: value})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


NORM = "model.norm.weight"
BLANK = lines_changed(lambda lines: [*lines, " "])


@pytest.mark.parametrize("name, change, what", [
    ("train.jsonl", lines_changed(reversed), "--data"),
    ("train.jsonl", lines_changed(lambda lines: lines[:-1]), "--data"),
    ("test.jsonl", lines_changed(reversed), "--eval-data"),
    ("model/model.safetensors", tensors_changed(lambda x: {**x, NORM: 1.001 * x[NORM]}),
     "--model model.safetensors"),
    ("model/tokenizer.json", BLANK, "--model tokenizer.json"),
    ("model/generation_config.json", BLANK, "--model generation_config.json"),
    ("model/chat_template.jinja", BLANK, "--model chat_template.jinja"),
])
def test_what_the_run_started_from_has_changed(capsys, home, name, change, what):
    change(home / name)
    line = refuses_to_resume(capsys, home / "run", "--steps=3")
    assert f"--resume: {what}: the content is not what the run" in line


@pytest.mark.parametrize("edit", [
    lambda c: "{", lambda c: "", lambda c: {"settings": c, "recipe": {}},  # of an older train.py
    lambda c: {**c, "no_such_flag": 1}, lambda c: {**c, "dry_run": True},  # of one command
    lambda c: {**c, "lr": -1}, lambda c: {**c, "reward": []},
    lambda c: {**c, "model": "/no/such/folder"},
])
def test_an_edited_config(capsys, run_folder, edit):
    """It is checked as any other config: test_bad_input.py has the rest of the table."""
    path = run_folder / "config.json"
    edited = edit(json.loads(path.read_text()))
    path.write_text(edited if isinstance(edited, str) else json.dumps(edited))
    line = refuses_to_resume(capsys, run_folder)
    assert str(path) in line or "/no/such/folder" in line
    assert "older train.py" in line or "recipe" not in edited


@pytest.mark.parametrize("broken", ["not JSON", '{"no step": 1}', "3", '{"step": "x"}',
                                    '{"step": null}', "\x00\x01"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_broken_line(capsys, run_folder, name, broken):
    path = run_folder / name
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], broken, *lines[2:]]) + "\n")
    line = refuses_to_resume(capsys, run_folder)
    assert f"{path}: not lines of train.py" in line


def test_what_a_kill_has_left_behind_goes(uninterrupted, run_folder):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run_folder / name, "a") as file:
            file.write('{"step": 7, "lo')
    (run_folder / "unfinished").mkdir()
    (run_folder / "unfinished" / "model.safetensors").write_text("half")
    resumed_ends_the_same(run_folder, uninterrupted)


@pytest.mark.parametrize("spoil", [
    *(tensors_changed(lambda x, name=name, change=change: {**x, name: change(x[name])})
      for name in (f"weight/{NORM}", f"exp_avg/{NORM}", f"exp_avg_sq/{NORM}")
      for change in (lambda x: x[:1].clone(), lambda x: x * torch.nan, lambda x: x.double())),
    *(tensors_changed(lambda x, name=name, value=value: {
        **x, "counters": counters_with(x["counters"], name, value)})
      for name, value in (("step", 1.5), ("step", -1), ("kl_coef", "x"), ("kl_coef", math.nan),
                          ("held_out", [[0, "x"]]), ("told", {"kl": "x"}), ("before", 3))),
    tensors_changed(lambda x: {**x, "counters": torch.zeros(9, dtype=torch.uint8)}),
    tensors_changed(lambda x: {**x, f"step/{NORM}": torch.ones(2)}),
    *(tensors_changed(lambda x, name=name: x.pop(name) is None or x)
      for name in (f"weight/{NORM}", "counters")),
    lambda path: path.write_bytes(path.read_bytes()[:-1000]),
])
def test_a_checkpoint_that_is_not_whole(capsys, run_folder, spoil):
    path = run_folder / CHECKPOINT
    spoil(path)
    assert f"{path} is damaged, or not of this model: " in refuses_to_resume(capsys, run_folder)


def test_weights_that_are_not_finite_are_not_saved(run_folder):
    s = train.plan_memory(train.parse(list(FLAGS)))
    policy, _ = train.load_policy(s)
    run = train.Run(run_folder)
    path = run_folder / CHECKPOINT
    before = path.read_bytes()
    for value, saved in ((torch.nan, None), (1.0, "of step 0")):
        with torch.no_grad():
            policy.model.norm.weight[3] = value
        train.save_checkpoint(run, policy, train.make_optimizer(policy, s))
        assert run.saved == saved and (path.read_bytes() != before) == bool(saved)


def test_two_runs_in_one_folder(capsys, run_folder):
    with open(run_folder / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another run writes there" in refuses_to_resume(capsys, run_folder)


def test_what_reaches_the_disk_and_how(monkeypatch, tmp_path):
    """Metrics before the checkpoint that follows them; the umask is kept; nothing is a pickle."""
    done = []

    def noted(name, function, *given, **how):
        done.append((name, *(Path(x).name for x in given if isinstance(x, str | Path))))
        return function(*given, **how)

    for place, name in ((train, "reach_the_disk"), (train, "save_file"), (os, "replace")):
        monkeypatch.setattr(place, name, partial(noted, name, getattr(place, name)))
    folder = tmp_path / "run"
    before = os.umask(0o027)
    try:
        trains(*FLAGS, "--steps=1", f"--output={folder}")
    finally:
        assert os.umask(before) == 0o027
    start = done.index(("reach_the_disk", "samples.jsonl"))
    assert done[start + 1:start + 5] == [
        ("reach_the_disk", "metrics.jsonl"), ("save_file", "run.safetensors"),
        ("reach_the_disk", "run.safetensors"), ("replace", *2 * ["run.safetensors"])]
    for name in (CHECKPOINT, "config.json", "metrics.jsonl"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o640, name
    known = (".json", ".jsonl", ".safetensors", ".jinja", ".lock", ".html")
    assert all(path.name.endswith(known) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("what", [CHECKPOINT, "metrics.jsonl", "samples.jsonl", "final"])
def test_a_full_disk_costs_one_line_and_no_checkpoint(
        capsys, monkeypatch, tmp_path, uninterrupted, tiny, what):
    folder = tmp_path / "run"

    def save(tensors, path, real=train.save_file):
        if what == CHECKPOINT and json.loads(tensors["counters"].numpy().tobytes())["step"] > 2:
            Path(path).write_bytes(b"half a ch")
            raise FULL
        real(tensors, path)

    def append(self, name, records, real=train.Run.append):
        if name == what and records[0]["step"] > 2:
            with self.writing(name):
                raise FULL
        real(self, name, records)

    with monkeypatch.context() as patch:
        patch.setattr(train, "save_file", save)
        patch.setattr(train.Run, "append", append)
        if what == "final":                               # as the library in Rust does
            patch.setattr(type(tiny[1]), "save_pretrained", raises(Exception(FULL.strerror)))
        line = ends_badly(capsys, *FLAGS, f"--output={folder}")
    last = 6 if what == "final" else 2
    assert "No space left" in line and f"{what} cannot be written" in line
    assert f"last checkpoint: of step {last}; continue with: " in line
    resumed_ends_the_same(folder, uninterrupted)


# --------------------------------------------------------------------------------------------------
# Numbers that are not finite, memory that runs out

def test_ten_skipped_updates_stop_the_run_and_the_last_good_checkpoint_stays(
        capsys, monkeypatch, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    factors = chain(4 * [1], repeat(torch.inf))           # from step 3: two updates in a step

    def infinite_from_step_3(*given, real=train.grpo_loss, **options):
        value, metrics = real(*given, **options)
        factor = next(factors)
        return value * factor, {**metrics, "loss": metrics["loss"] * factor}

    with monkeypatch.context() as patch:
        patch.setattr(train, "grpo_loss", infinite_from_step_3)
        line = ends_badly(capsys, *FLAGS, "--steps=100", f"--output={folder}")
    assert "10 updates in a row" in line and "last checkpoint: of step 2; " in line
    assert all(cause in line for cause in ("--lr", "reward", "--temperature"))
    assert not re.search("NaN|Infinity", (folder / "metrics.jsonl").read_text())  # no JSON
    metrics = metrics_of(folder)
    assert metrics[-1]["step"] == 7 and metrics[-1]["loss"] is None
    assert [m["skipped_updates"] for m in metrics[1:]] == [0, 0, 2, 2, 2, 2, 2]
    resumed_ends_the_same(folder, uninterrupted, "--steps=6")


def test_updates_that_are_skipped_now_and_then_do_not_stop_it(tmp_path):
    run = train.Run(tmp_path)
    for step in range(1, 21):
        run.log({"step": step, "skipped_updates": 3 if step % 4 else 0})
    assert run.skipped == 45
    for step in range(21, 30):
        run.log({"step": step, "skipped_updates": 1})
    with pytest.raises(train.BadInput, match="10 updates in a row"):
        run.log({"step": 30, "skipped_updates": 1})


@pytest.mark.parametrize("error", NO_MEMORY)
def test_out_of_memory_halves_the_micro_batch_until_it_fits(
        capsys, monkeypatch, tmp_path, uninterrupted, error):
    budgets = []
    losses = chain([train.grpo_loss, raises(error), raises(error)], repeat(train.grpo_loss))
    cut = train.logprob.micro_batches
    monkeypatch.setattr(train, "grpo_loss", lambda *given, **how: next(losses)(*given, **how))
    monkeypatch.setattr(train.logprob, "micro_batches",
                        lambda *given: budgets.append(given[2]) or cut(*given))
    trains(*FLAGS, "--micro-batch-tokens=10001", f"--output={tmp_path / 'run'}")
    # reference, update, its two repeats, from there on a quarter; and both models for two pages
    assert budgets == 3 * [10001] + [5000] + (len(budgets) - 4) * [2500]
    assert len(budgets) == 6 * 3 + 2 + 2 * 2
    out, err = capsys.readouterr()
    for n in (5000, 2500):
        assert (out + err).count(f"out of memory: --micro-batch-tokens is now {n}") == 1
    ended_the_same(tmp_path / "run", uninterrupted)       # nothing of the first tries is left


@pytest.mark.parametrize("stage", ["grpo_loss", "sample_groups"])
def test_out_of_memory_for_good_is_one_line(capsys, monkeypatch, tmp_path, stage):
    monkeypatch.setattr(train, stage, raises(NO_MEMORY[0]))
    line = ends_badly(capsys, *FLAGS, f"--output={tmp_path / 'run'}")
    assert "out of memory: lower --prompts-per-step" in line


def test_another_runtime_error_is_not_taken_for_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "grpo_loss", raises(RuntimeError("shapes do not match")))
    for stage in (train.sample, train.logprob):
        monkeypatch.setattr(stage, "PLAIN", None)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        main(*FLAGS, f"--output={tmp_path / 'run'}")
    assert re.fullmatch(r"train.py: go on with: .* --resume .*run --plain", *caught.value.__notes__)
