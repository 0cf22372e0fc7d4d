"""Runs that survive: checkpoints, --resume, signals, full disks, shared folders."""
import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from test_train import curve, metrics_of, run_program

import train

FLAGS = ("--steps=6", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16", "--eval-limit=4",
         "--eval-every=3", "--save-every=1", "--warmup-steps=3", "--updates-per-rollout=2")


# Forked by a server that has imported train and used nothing of it. A fork of this process would share the
# semaphore of its tqdm bars, and a child killed while it draws would leave it locked for all that come after.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["train"])
LIMIT = 120  # seconds: a process that hangs fails its test


def program(flags):
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os._exit(train.main(list(map(str, flags))) or 0)


def start(*flags):
    """train.main in a process of its own, its imports done."""
    process = PROCESSES.Process(target=program, args=(flags,), daemon=True)
    process.start()
    return process


def weights_of(folder):
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    start("--help").join(LIMIT)  # the server's imports
    started = time.perf_counter()
    process = start(*FLAGS, f"--output={folder}")
    process.join(LIMIT)
    assert process.exitcode == 0
    return folder, time.perf_counter() - started


def test_killed_twenty_times_the_run_ends_the_same(uninterrupted, tmp_path):
    """SIGKILL at random moments, in sampling, update, evaluation and save; then resumed to the end."""
    whole, seconds = uninterrupted
    chance, kills, runs = random.Random(0), 0, 0
    while kills < 20:
        folder, resume = tmp_path / str(runs), ()
        while True:
            process = start(*FLAGS, f"--output={folder}") if not resume else start(f"--output={folder}", "--resume")
            process.join(chance.uniform(0, 1.2 * seconds) if kills < 20 else LIMIT)
            if process.exitcode is None:
                assert kills < 20, "the last run hangs"
                process.kill()
                process.join()
                kills += 1
                resume = (folder / "config.json").is_file()
            else:
                assert process.exitcode == 0
                break
        assert curve(folder) == curve(whole)                                     # no step twice, none missing
        assert weights_of(folder) == weights_of(whole)
        steps = [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert steps == sorted(2 * list(range(1, 7)))
        runs += 1


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(uninterrupted, tmp_path, number, status):
    import subprocess
    import sys

    from test_train import ENVIRONMENT, ROOT
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *FLAGS, f"--output={folder}"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    while process.poll() is None and not (folder / "checkpoint" / "run.safetensors").is_file():
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    if process.returncode == 0:
        pytest.skip("the run was over before the signal arrived")
    assert process.returncode == status, err
    assert f"python train.py --output {folder} --resume" in out and "Traceback" not in err
    run_program(f"--output={folder}", "--resume")
    assert weights_of(folder) == weights_of(uninterrupted[0]) and curve(folder) == curve(uninterrupted[0])


def interrupted_twice():
    run = train.Run()
    run.stop_on_signals()
    os.kill(os.getpid(), signal.SIGINT)
    assert run.stopped() == signal.SIGINT
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def test_the_second_signal_leaves_at_once():
    process = PROCESSES.Process(target=interrupted_twice)
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 130


# ----- what --resume refuses --------------------------------------------------------------------------------


def refused(capsys, *flags):
    assert train.main(list(map(str, flags))) == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: ") and err.count("\n") == 1, err
    return err


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def run_folder(uninterrupted, tmp_path):
    import shutil
    return shutil.copytree(uninterrupted[0], tmp_path / "run")


def test_other_flags_than_the_saved_ones(capsys, run_folder):
    before = snapshot(run_folder)
    message = refused(capsys, f"--output={run_folder}", "--resume", "--lr=0.5")
    assert "--lr 0.5" in message and "0.0003" in message
    assert snapshot(run_folder) == before


def test_the_saved_flags_may_be_repeated_and_steps_may_grow(run_folder):
    run_program(f"--output={run_folder}", "--resume", "--group-size=4", "--steps=7")
    assert [m["step"] for m in metrics_of(run_folder)] == list(range(8))
    assert json.loads((run_folder / "config.json").read_text())["settings"]["steps"] == 7


def test_a_folder_that_holds_a_run(capsys, run_folder):
    before = snapshot(run_folder)
    assert "holds a run already" in refused(capsys, *FLAGS, f"--output={run_folder}")
    assert snapshot(run_folder) == before


def test_a_torn_checkpoint(capsys, run_folder):
    path = run_folder / "checkpoint" / "run.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    before = snapshot(run_folder)
    assert "torn" in refused(capsys, f"--output={run_folder}", "--resume")
    assert snapshot(run_folder) == before


def test_a_foreign_checkpoint(capsys, run_folder):
    from safetensors.torch import save_file
    path = run_folder / "checkpoint" / "run.safetensors"
    save_file({"x": torch.zeros(3)}, path)
    assert "no checkpoint of ours" in refused(capsys, f"--output={run_folder}", "--resume")
    save_file({"x": torch.zeros(3)}, path, metadata={"grpo": '{"step": 1, "skipped": 0, "before": []}'})
    assert "not of this model" in refused(capsys, f"--output={run_folder}", "--resume")


def test_nothing_to_resume(capsys, tmp_path):
    assert "no run to resume" in refused(capsys, f"--output={tmp_path}", "--resume")
    assert list(tmp_path.iterdir()) == []


def test_no_pickle_is_written_or_read(uninterrupted):
    names = [path.name for path in uninterrupted[0].rglob("*") if path.is_file()]
    assert names and all(name.endswith((".json", ".jsonl", ".safetensors", ".jinja", ".lock")) for name in names)


# ----- disks, folders ---------------------------------------------------------------------------------------


def test_two_runs_in_one_folder(capsys, run_folder):
    held = open(run_folder / ".lock", "w")
    train.fcntl.flock(held, train.fcntl.LOCK_EX)
    before = snapshot(run_folder)
    assert "another run is writing there" in refused(capsys, f"--output={run_folder}", "--resume")
    assert snapshot(run_folder) == before


def test_output_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, *FLAGS, f"--output={tmp_path / 'file' / 'run'}")


@pytest.mark.parametrize("what", ["checkpoint", "metrics.jsonl", "samples.jsonl"])
def test_a_full_disk_costs_one_line_and_no_checkpoint(capsys, monkeypatch, tmp_path, uninterrupted, what):
    full, folder = OSError(errno.ENOSPC, "No space left on device"), tmp_path / "run"
    with monkeypatch.context() as patch:
        def save(tensors, path, metadata):
            if json.loads(metadata["grpo"])["step"] > 2:
                open(path, "wb").write(b"half a ch")
                raise full
            return real_save(tensors, path, metadata)

        def append(self, name, records):
            if name == what and records[0]["step"] > 2:
                with self.writing(name):
                    raise full
            return real_append(self, name, records)
        real_save, real_append = train.save_file, train.Run.append
        if what == "checkpoint":
            patch.setattr(train, "save_file", save)
        else:
            patch.setattr(train.Run, "append", append)
        assert train.main([*FLAGS, f"--output={folder}"]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert len(err) == 1 and "No space left" in err[0] and what in err[0] and "last checkpoint: of step 2" in err[0]
    assert train.main([f"--output={folder}", "--resume"]) == 0
    assert weights_of(folder) == weights_of(uninterrupted[0]) and curve(folder) == curve(uninterrupted[0])


# ----- a reward that fails, memory that runs out ------------------------------------------------------------


def test_a_reward_that_raises_on_a_row_names_it_and_the_run_goes_on(capsys, tmp_path):
    path, folder = tmp_path / "mine.py", tmp_path / "run"
    code = """def score(completions, **columns):
    if {broken} and len(columns["prompts"]) >= 1 and any("=" in c for c in completions):
        raise KeyError("no equations, please")
    return [float(len(c)) for c in completions]
"""
    path.write_text(code.format(broken=True))
    assert train.main([*FLAGS, f"--output={folder}", f"--reward={path}:score"]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert len(err) == 1 and "row " in err[0] and "KeyError" in err[0] and "=" in err[0]
    path.write_text(code.format(broken=False))
    assert train.main([f"--output={folder}", "--resume"]) == 0
    assert train.main([*FLAGS, f"--output={tmp_path / 'whole'}", f"--reward={path}:score"]) == 0
    assert weights_of(folder) == weights_of(tmp_path / "whole") and curve(folder) == curve(tmp_path / "whole")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory_halves_the_micro_batch_once(capsys, monkeypatch, tmp_path, error):
    budgets, real = [], train.update

    def update(settings, *args):
        budgets.append(settings.micro_batch_tokens)
        if len(budgets) == 2:
            raise error
        return real(settings, *args)
    monkeypatch.setattr(train, "update", update)
    assert train.main([*FLAGS, "--micro-batch-tokens=1000", f"--output={tmp_path / 'run'}"]) == 0
    assert budgets == [1000, 1000] + [500] * 11
    out = capsys.readouterr()
    assert (out.out + out.err).count("out of memory: --micro-batch-tokens is now 500") == 1


def test_out_of_memory_again_is_one_line(capsys, monkeypatch, tmp_path):
    def update(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(train, "update", update)
    assert train.main([*FLAGS, f"--output={tmp_path / 'run'}"]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert len(err) == 1 and "out of memory: lower" in err[0]
