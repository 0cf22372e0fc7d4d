"""Runs that survive: checkpoints, --resume, signals, rewards that fail."""
import fcntl
import functools
import itertools
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from itertools import chain, repeat
import pytest
import torch
from checks import same
from files import (FEW, LIMIT, MINE, ROOT, TINY, assert_bitwise, assert_same_checkpoint,
                   checkpoint_of, counters_of, curve, edit_json, edit_tensors, lines_of, metrics_of,
                   snapshot)
from runs import begin, one_line_of, refused, started, trained, trains, well_ended
from steps import NO_MEMORY, log, raises, run_in
from safetensors import SafetensorError
from safetensors.torch import load_file
import page
import train

FLAGS = (*FEW, "--steps=6", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=4", "--eval-every=3", "--save-every=1", "--warmup-steps=3",
         "--updates-per-rollout=2")
CHECKPOINT = "checkpoint.safetensors"
LORA = ("--lora-rank=4", "--lr=0.003")
OWN_REWARD = (*FLAGS, f"--reward={MINE}:score")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), *FLAGS)


@pytest.fixture
def run_folder(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted, tmp_path / "run")


def ended_the_same(folder, whole):
    assert_bitwise(folder, whole)                         # no step twice, none missing
    steps = [record["step"] for record in lines_of(folder / "samples.jsonl")]
    assert steps == sorted(2 * list(range(1, 7)))


def resumed_ends_the_same(folder, whole, *flags):
    trains(f"--resume={folder}", *flags)
    ended_the_same(folder, whole)


KINDS = {  # what each has to find again
    "the masters of bfloat16": ("--dtype=bfloat16",),
    "LoRA's first weights": (*LORA, "--dtype=bfloat16", "--kl-coef=0"),
    "LoRA's renewed reference": (*LORA, "--dtype=bfloat16", "--renew-reference=1"),
    "reference, beta, other problems, schedule": (
        "--steps=4", "--renew-reference=2", "--kl-band", "0.0001", "0.0002", "--max-resample=1",
        "--lr-schedule=cosine", "--weight-decay=0.1", "--minibatches=2", "--advantage=gtpo",
        "--lr=0.002", "--seed=1", "--group-size=2", "--updates-per-rollout=1")}


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_a_run_in_two_parts_is_the_run_bit_for_bit(monkeypatch, tmp_path, flags):
    """Stopped before its last step."""
    flags = (*FLAGS, "--eval-every=1", "--steps=2", *flags)
    whole, parts = trained(tmp_path / "whole", *flags), tmp_path / "parts"
    metrics = curve(whole)

    def evaluate_if_due(run, *given, real=train.evaluate_if_due):
        real(run, *given)
        if run.step == len(metrics) - 2:
            train.RECEIVED.append(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate_if_due", evaluate_if_due)
        assert train.main([*flags, f"--output={parts}"]) == 130
    trains(f"--resume={parts}")
    assert_bitwise(parts, whole)
    assert_same_checkpoint(parts, whole)
    saved = checkpoint_of(parts)
    references = {name for name in saved if name.startswith("weight/reference/")}
    assert bool(references) == any("--renew" in flag for flag in flags)
    if "--kl-coef=0" in flags:                            # LoRA's factors, and nothing else
        assert all("lora_" in name or name == "counters" for name in saved)
    if "--renew-reference=2" in flags:                    # the last: it is the policy of the end
        assert [m["step"] for m in metrics if "reference_renewed" in m] == [2, 4]
        assert metrics[-1]["resampled_groups"]
        for name in references:
            same(saved[name], saved[name.replace("reference/", "")], name)


def test_killed_at_any_moment_the_run_ends_the_same(uninterrupted, tmp_path):
    """SIGKILL in a rollout, an update, an evaluation or a save, as the machine has it."""
    folder = tmp_path / "run"
    log = folder / "metrics.jsonl"
    for steps in (1, 3):
        begun = (folder / "config.json").is_file()
        flags = [f"--resume={folder}"] if begun else [*FLAGS, f"--output={folder}"]
        process, *_ = started("train.py", *flags)
        while process.poll() is None:
            if log.is_file() and log.read_text().count("\n") > steps:
                break
            time.sleep(0.01)
        time.sleep(0.07 * steps)
        process.kill()
        process.wait()
    resumed_ends_the_same(folder, uninterrupted)


# --- Signals, and rewards that fail ---------------------------------------------------------------
@pytest.fixture(scope="module")
def own_reward(tmp_path_factory):
    """The folder of a run with a reward that can fail, and to which nothing happened."""
    return trained(tmp_path_factory.mktemp("own"), *OWN_REWARD)


@pytest.mark.parametrize("fault, call, status, said, last", [
    *((name, 4, status, "step 2", 2)
      for name, status in (("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGUSR1", 138),
                           ("SIGUSR2", 140), ("SIGXCPU", 152))),
    ("SIGTERM", 1, 143, "step 0", 0), ("SIGTERM", 5, 143, "step 3", 3),
    *(("raise", call, None, "no, please", last)
      for call, last in ((1, 0), (4, 2), (5, 3)))])       # of the first evaluation, of another
def test_what_ends_a_run_is_told_and_it_goes_on(capsys, monkeypatch, tmp_path, own_reward, fault,
                                                call, status, said, last):
    """On what was scored before a signal no step is trained; an error keeps its traceback.

    Neither costs a whole step, though only the first checkpoint was written before.
    """
    folder, handlers = tmp_path / "run", [*map(signal.getsignal, signal.Signals)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_AT", str(call))
    flags = [*OWN_REWARD, "--save-every=100", "--output=run"]
    if status:
        assert train.main(flags) == status
        out, err = capsys.readouterr()
        assert "stopping" in err and "Traceback" not in err
    else:
        with pytest.raises(train.reward.ForeignError) as raised:
            train.main(flags)
        out = "\n".join([str(raised.value.__cause__), *raised.value.__notes__])
    assert handlers == [*map(signal.getsignal, signal.Signals)] and not train.RECEIVED
    assert re.search(said, out) and train.command("train.py", "--resume", str(folder)) in out
    assert counters_of(folder)["step"] == last and not (folder / "final").exists()
    monkeypatch.delenv("FAULT")
    resumed_ends_the_same(folder, own_reward)


def test_a_signal_ends_an_evaluation_within_a_batch(monkeypatch, tmp_path):
    """Here the first of the first one's five."""
    monkeypatch.chdir(tmp_path)                           # the reward goes elsewhere
    monkeypatch.setenv("FAULT", "SIGTERM")
    monkeypatch.setenv("FAULT_AT", "1")
    flags = (*OWN_REWARD, "--prompts-per-step=1", "--group-size=2", "--eval-limit=10")
    assert train.main([*flags, f"--output={tmp_path / 'run'}"]) == 143
    assert sys.modules["mine"].calls == 1


def test_a_kill_in_an_evaluation_costs_no_step(tmp_path, own_reward):
    """The checkpoint of that step is written before it."""
    folder = tmp_path / "run"
    end = begin("train.py", *OWN_REWARD, "--save-every=3", f"--output={folder}", FAULT="SIGKILL",
                FAULT_AT="5")
    assert end().returncode == -signal.SIGKILL
    assert counters_of(folder)["step"] == 3
    resumed_ends_the_same(folder, own_reward)


def test_the_line_that_is_printed_continues_the_run(tmp_path, own_reward):
    """From the shell and another folder; in a terminal that lacks the blocks of the curves."""
    folder = tmp_path / "a run"
    end = begin("train.py", *OWN_REWARD, f"--output={folder}", folder=tmp_path, FAULT="SIGINT")
    done = end()
    assert done.returncode == 130, done.stderr
    line = done.stdout.split("continue with: ")[1].splitlines()[0]
    out = well_ended(subprocess.run(line, shell=True, capture_output=True, encoding="cp1252",
                                    timeout=LIMIT, cwd=tmp_path,
                                    env={**os.environ, "PYTHONIOENCODING": "cp1252"}))
    ended_the_same(folder, own_reward)
    assert " ??? " in out and "talk to the result" in out


def test_the_handlers_belong_to_the_process_that_set_them(tmp_path):
    """A pool ends its workers with SIGTERM; a worker that took it for the run's would live on."""
    folder, forks = tmp_path / "run", MINE.with_name("forks.py")
    trains(*FLAGS, "--steps=1", f"--reward={forks}:waits", f"--output={folder}")
    assert metrics_of(folder)[-1]["reward_mean"] == -signal.SIGTERM


def test_runs_of_one_process_whose_reward_opens_a_pool_end(tmp_path):
    """As in a notebook: no handler or fork hook of an earlier run reaches a worker."""
    flags = [*FLAGS, f"--reward={MINE.with_name('forks.py')}:ended_at_once"]
    script = f"""if True:
        import os, signal
        os.register_at_fork(after_in_child=lambda: "END_AT_ONCE" in os.environ and os.kill(
            os.getpid(), signal.SIGTERM))
        import train
        for n in range(4):
            assert train.main({flags} + [f"--output={tmp_path}/{{n}}"]) == 0"""
    # What it prints goes nowhere: a worker that lives on would hold a pipe open.
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=LIMIT, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for n in range(4):
        assert {m["reward_mean"] for m in metrics_of(tmp_path / str(n))[1:]} == {-signal.SIGTERM}


def test_a_pool_lives_until_the_step_ends(tmp_path):
    """A terminal sends Ctrl-C to every process of its group, the pool's workers too."""
    flags = (*FLAGS, "--steps=100000", "--eval-every=100000", "--save-every=100000",
             f"--reward={MINE.with_name('forks.py')}:score", f"--output={tmp_path}/run")
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *flags], start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "run" / "metrics.jsonl"
    for _ in range(10 * LIMIT):
        if log.exists() and log.read_text().count("\n") > 2:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT) == 130


# --- A terminal or a reader that is lost ----------------------------------------------------------
def test_a_run_outlives_its_terminal(tmp_path):
    """The kernel sends SIGHUP when it is closed; nobody reads what is printed from then on."""
    ours, its = pty.openpty()
    flags = (*FLAGS, "--steps=100000", "--eval-every=100000", "--save-every=100000")
    command = [sys.executable, ROOT / "train.py", *flags, f"--output={tmp_path}/run"]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True,
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(its)
    log = tmp_path / "run" / "metrics.jsonl"
    for _ in range(10 * LIMIT):                           # it waits until somebody reads
        if log.exists() and log.read_text().count("\n") > 2:
            break
        if select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 10_000)
    os.close(ours)
    assert process.wait(LIMIT) == 129
    assert counters_of(tmp_path / "run")["step"] == metrics_of(tmp_path / "run")[-1]["step"] >= 2


def test_a_reader_that_leaves_early_ends_nothing(tmp_path):
    line = shlex.join([sys.executable, "train.py", *FLAGS, f"--output={tmp_path / 'run'}"])
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{line} |& head -1"], cwd=ROOT,
                          capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("\n") == 1 and (tmp_path / "run" / "final").exists()


def test_signals_while_a_line_waits_for_its_reader():
    """The first goes nowhere and the run goes on, the second leaves; nohup's does nothing."""
    script = """if True:
        import os, signal, sys, threading, train
        _, pipe = os.pipe()
        os.set_blocking(pipe, False)
        try:
            while True:
                os.write(pipe, bytes(4096))
        except BlockingIOError:
            os.set_blocking(pipe, True)
        sys.stderr = open(pipe, "w")
        train.survive_closing(sys.stderr)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with train.listening_to_signals():
            signal.raise_signal(signal.SIGHUP)
            main = threading.get_ident()
            threading.Timer(1, signal.pthread_kill, (main, signal.SIGTERM)).start()
            print("waits", file=sys.stderr)
            print(train.stopped(), flush=True)
            signal.raise_signal(signal.SIGTERM)"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=LIMIT, stdout=-1)
    assert (done.stdout, done.returncode) == (b"15\n", -signal.SIGTERM)


# --- What --resume changes; what it refuses is one line, and no byte of the run changes -----------
def refuses_to_resume(capsys, folder, *flags):
    before = snapshot(folder)
    line = refused(capsys, f"--resume={folder}", *flags)
    assert snapshot(folder) == before
    return line


def test_any_flag_may_change(run_folder):
    """And one that config.json does not know yet has today's default."""
    path = run_folder / "config.json"
    edit_json(path, ratio=None, clip_eps_high=None)
    trains(f"--resume={run_folder}", "--steps=7", "--kl-coef=0.08", "--lr-schedule=linear",
           "--group-size=4", "--no-scale-by-std", "--eval-limit=1", "--eval-every=1")
    assert [(m["step"], m.get("kl_coef")) for m in metrics_of(run_folder)[-2:]] == [
        (6, 0.02), (7, 0.08)]
    config = json.loads(path.read_text())
    assert config["kl_coef"] == 0.08 and config["ratio"] == "token"


def test_a_folder_that_holds_something_is_left_as_it_was(capsys, run_folder, tmp_path):
    somebody = tmp_path / "somebody"
    somebody.mkdir()
    (somebody / "letter.txt").write_text("mine")
    before = snapshot(tmp_path)
    assert str(somebody) in refuses_to_resume(capsys, somebody)
    (somebody / "final").mkdir()                          # which a run would replace
    for folder in (run_folder, somebody):                 # before the model is looked for
        line = refused(capsys, *FLAGS, f"--output={folder}", "--model=nobody/nothing")
        assert f"--output {folder}" in line
    for name in ("letter.txt/run", 300 * "x"):            # and what cannot be a folder
        assert "--output" in refused(capsys, *FLAGS, f"--output={somebody / name}")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("flags", [[], ["--resume=auto"]])
def test_a_folder_with_a_log_is_free(tmp_path, flags):
    """As a shell makes it with > out/log, and Slurm with --output=out/%j.out."""
    (tmp_path / "slurm-7.out").touch()
    trained(tmp_path, *FLAGS, "--steps=1", *flags)
    assert {"slurm-7.out", "final", "config.json"} < {path.name for path in tmp_path.iterdir()}


def test_runs_that_begin_in_one_second_have_two_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.time, "strftime", lambda form: "now-")
    names = {train.Run().claim_folder(train.Settings()) for _ in range(20)}
    assert len(names) == len([*(tmp_path / "runs").iterdir()]) == 20


def test_a_folder_in_which_another_process_trains(capsys, run_folder):
    lock = "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
    other = subprocess.Popen([sys.executable, "-c", lock + "print(flush=True)\ninput()",
                              run_folder / ".lock"], stdin=-1, stdout=-1)
    other.stdout.readline()                               # it has the lock
    assert str(run_folder) in refuses_to_resume(capsys, run_folder, "--steps=7")
    other.communicate(b"\n")


def test_a_run_that_moves_goes_on(capsys, monkeypatch, tmp_path):
    """Model, data and reward were named by relative paths; what has moved is named anew."""
    home = tmp_path / "home"
    shutil.copytree(TINY, home / "model")
    for name in ("train.jsonl", "test.jsonl"):
        (home / name).write_text("".join((TINY / name).open().readlines()[:8]))
    shutil.copy(MINE, home / "ours.py")
    monkeypatch.chdir(home)
    trains(*FLAGS, "--steps=2", "--model=model", "--data=train.jsonl", "--eval-data=test.jsonl",
           "--reward=ours.py:score", "--output=runs/one")
    monkeypatch.chdir("/")
    folder = (home / "runs" / "one").rename(tmp_path / "run")
    steps = iter(range(3, 9))

    def goes_on(*flags):
        trains(f"--resume={folder}", f"--steps={next(steps)}", *flags)
        capsys.readouterr()

    goes_on()
    for old, new in (("model", "m"), ("train.jsonl", "t.jsonl"), ("ours.py", "his.py")):
        (home / old).rename(tmp_path / new)
    flags = []
    for flag in ("--model=m", "--reward=his.py:score", "--data=t.jsonl"):
        line = refuses_to_resume(capsys, folder, *flags)
        assert flag.split("=")[0] in line and "huggingface" not in line
        flags.append(flag)
        monkeypatch.chdir(tmp_path)
    goes_on(*flags)
    (tmp_path / "his.py").write_text("def other(answer, **_):\n    return [7.0] * len(answer)\n")
    goes_on("--reward=his.py:other")
    assert [m["reward_mean"] == 7 for m in metrics_of(folder)[1:]] == [*4 * [False], True]
    config = json.loads((folder / "config.json").read_text())
    assert config["model"] == str(tmp_path / "m")
    assert config["eval_data"] == str(home / "test.jsonl")


def test_what_a_kill_has_left_behind_goes(uninterrupted, run_folder):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run_folder / name, "a") as file:
            file.write('{"step": 7, "lo')
    (run_folder / f"{CHECKPOINT}.new").write_text("half")
    resumed_ends_the_same(run_folder, uninterrupted)
    # A kill between the answers of an evaluation and its figures: it is asked again.
    log = run_folder / "metrics.jsonl"
    *lines, figures = log.read_text().splitlines(keepends=True)
    assert "eval_accuracy" in figures
    log.write_text("".join(lines))
    resumed_ends_the_same(run_folder, uninterrupted)


def of_another_version(path):
    counters = torch.frombuffer(bytearray(b'{"step": 6, "data": "a digest"}'), dtype=torch.uint8)
    edit_tensors(path, lambda tensors: {**tensors, "counters": counters})


def with_another_shape(path):
    name = "weight/model.norm.weight"
    edit_tensors(path, lambda tensors: {**tensors, name: tensors[name][:2].clone()})


def of_another_optimizer(path):
    """Without its momentum the run would go elsewhere."""
    edit_tensors(path, lambda tensors: tensors | {"momentum_buffer/x": torch.ones(2)})


@pytest.mark.parametrize("spoil, words", [
    (with_another_shape, "damaged, or not of this model"), (of_another_version, "another version"),
    (of_another_optimizer, "momentum_buffer/x"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "damaged"),
    (lambda path: path.unlink(), "No such file")])
def test_a_checkpoint_that_is_not_whole(capsys, run_folder, spoil, words):
    """Or deleted, though the run has begun: it would begin again, over its own metrics."""
    path = run_folder / CHECKPOINT
    spoil(path)
    line = refuses_to_resume(capsys, run_folder)
    assert f"--resume: {path}" in line and words in line


@pytest.mark.parametrize("spoil", [
    lambda log: log.unlink(), lambda log: log.write_bytes(log.read_bytes()[:500])])
@pytest.mark.parametrize("name", train.LOGS)
def test_a_checkpoint_is_enough_to_go_on(capsys, run_folder, name, spoil):
    """What a log lacks is told in one line, and left out of the last lines and of the page."""
    spoil(run_folder / name)
    trains(f"--resume={run_folder}", "--steps=7", "--eval-every=1")
    out = capsys.readouterr().out
    assert f"{run_folder}/{name}" in out
    assert [m["step"] for m in metrics_of(run_folder)][-1] == 7
    assert page.main(run_folder).exists()


@pytest.mark.parametrize("name", train.LOGS)
def test_a_finished_run_that_has_lost_a_log_says_so(capsys, run_folder, name):
    (run_folder / name).unlink()
    trains(f"--resume={run_folder}")
    assert f"{run_folder}/{name} is lacking" in capsys.readouterr().out


@pytest.mark.parametrize("update, kept", [(5, 2), (6, 0)])
def test_an_error_before_the_first_update_costs_no_step(monkeypatch, tmp_path, update, kept):
    """As out of memory in a backward pass; behind an update the weights are half a step on."""
    calls = itertools.count(1)

    def backward(*given, real=train.backward):
        if next(calls) == update:
            raise RuntimeError("no, please")
        return real(*given)
    monkeypatch.setattr(train, "backward", backward)
    with pytest.raises(RuntimeError, match="no, please"):
        train.main([*FLAGS, "--save-every=100", f"--output={tmp_path / 'run'}"])
    assert counters_of(tmp_path / "run")["step"] == kept


def test_rewards_that_an_advantage_refuses_cost_no_step(capsys, tmp_path):
    """MaxRL, and a reward that is negative from step 3 on: one line, and two steps are kept."""
    (tmp_path / "worse.py").write_text("""
calls = 0
def score(completions, **columns):
    global calls
    calls += 1
    return [float(len(text)) * (-1 if calls > 3 else 1) for text in completions]
""")
    folder = tmp_path / "run"
    line = refused(capsys, *FLAGS, f"--reward={tmp_path}/worse.py:score", "--advantage=max-rl",
                   "--save-every=100", f"--output={folder}", begun=True)
    assert "--advantage max-rl" in line and "--resume" in line
    assert counters_of(folder)["step"] == 2


def test_factors_of_another_rank_are_not_repeated(capsys, tmp_path):
    """One row of factors would fit four, by torch's broadcasting."""
    trains(*FLAGS, "--steps=1", "--lora-rank=1", f"--output={tmp_path / 'run'}")
    capsys.readouterr()
    assert "not of this model" in refuses_to_resume(capsys, tmp_path / "run", "--lora-rank=4")


@pytest.fixture
def stopped_by_a_full_disk(capsys, monkeypatch, tmp_path):
    """A run that goes on, for which the disk was full when it wrote the file of this name."""
    def stopped(name, *flags):
        folder = tmp_path / "full"

        def claim_folder(run, s, real=train.Run.claim_folder):
            claimed = real(run, s)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to("/dev/full")
            return claimed

        with monkeypatch.context() as patch:
            if name == CHECKPOINT:                        # which safetensors writes elsewhere first
                full = SafetensorError("No space left on device")
                patch.setattr(train, "save_file", raises(full))
            patch.setattr(train.Run, "claim_folder", claim_folder)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)    # what is planted here stays
            line = refused(capsys, *flags, f"--output={folder}", begun=True)
        assert "disk is full" in line
        goes_on = line.endswith(train.command("train.py", "--resume", str(folder)))
        assert goes_on == (name != CHECKPOINT)            # without the first there is no run
        (folder / name).unlink()
        trains(*[f"--resume={folder}"] if goes_on else [*flags, f"--output={folder}"])
        return folder
    return stopped


@pytest.mark.parametrize("name", [                        # what a run writes, early and late
    CHECKPOINT, "metrics.jsonl", "samples.jsonl", "final.new/config.json"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_is_one_line_and_it_goes_on(stopped_by_a_full_disk, uninterrupted, name):
    ended_the_same(stopped_by_a_full_disk(name, *FLAGS), uninterrupted)


def test_a_file_that_may_not_grow_is_told_like_a_full_disk(tmp_path):
    """ulimit -f, here of 32 KiB: less than a checkpoint."""
    command = shlex.join([sys.executable, "train.py", *FLAGS, f"--output={tmp_path / 'run'}"])
    done = subprocess.run(["bash", "-c", f"ulimit -f 32; {command}"], cwd=ROOT, text=True,
                          capture_output=True, timeout=LIMIT)
    assert done.returncode == 2 and "disk is full" in one_line_of(done.stderr), done.stderr


def evaluate_by(monkeypatch, measured):
    """In place of an evaluation measured(settings, step)."""
    now = {}

    def evaluate_if_due(run, *given, real=train.evaluate_if_due):
        now["step"] = run.step
        real(run, *given)

    monkeypatch.setattr(train, "evaluate_if_due", evaluate_if_due)
    monkeypatch.setattr(train, "evaluate", lambda parts, s: measured(s, now["step"]))


def test_the_best_state_is_kept(capsys, monkeypatch, tmp_path, stopped_by_a_full_disk):
    """best/ is the policy of the best evaluation, here that of step 2, and trains on."""
    scores = {0: 0.25, 1: 0.25, 2: 0.75, 3: 0.75, 4: 0.5}
    row = {"problem": "", "truth": "", "answer": "", "reward": 0.0}
    evaluate_by(monkeypatch, lambda s, step: ({"eval_accuracy": scores[step]}, [row] * 4))
    flags = (*FLAGS, "--steps=4", "--eval-every=1")
    whole = trained(tmp_path / "whole", *flags)
    assert f"best state           {whole}/best, of step 2\n" in capsys.readouterr().out
    two = trained(tmp_path / "two", *flags, "--steps=2", "--no-best")
    assert not (two / "best").exists() and "best state" not in capsys.readouterr().out
    best, final = (load_file(folder / "model.safetensors")
                   for folder in (whole / "best", two / "final"))
    same(best, final)
    assert (whole / "best" / "step-2").exists()
    folder = stopped_by_a_full_disk("best.new/config.json", *flags)     # nothing is lost
    assert_bitwise(folder, whole)
    same(load_file(folder / "best" / "model.safetensors"), best)
    again = ("--config", str(whole / "config.json"), "--model", str(whole / "best"))
    loaded = train.load(train.parse(again)).policy_model
    same(dict(loaded.named_parameters()), best)


def test_the_best_state_after_a_kill_is_of_a_step_that_counts(capsys, monkeypatch, tmp_path):
    """None of a later step that is forgotten; and scores of other problems do not compete."""
    scores = {0: 0.25, 1: 0.5, 2: 1.0, 3: 0.0, 4: 0.25, 5: 0.125}
    folder, killed = tmp_path / "run", 3

    def measured(s, step):
        if step == killed:
            raise KeyboardInterrupt                       # like a kill: nothing is saved
        rows = [{"problem": str(n), "truth": "", "answer": "", "reward": 0.0}
                for n in range(s.eval_limit)]
        return {"eval_accuracy": scores[step]}, rows

    def best():
        (name,) = folder.glob("best/step-*")
        assert f"best state           {folder}/best, of {name.name.replace('-', ' ')}\n" in out
        return int(name.name.removeprefix("step-"))

    evaluate_by(monkeypatch, measured)
    with pytest.raises(KeyboardInterrupt):
        trains(*FLAGS, "--eval-every=1", "--save-every=100", f"--output={folder}")
    assert (folder / "best" / "step-2").exists()
    killed = None
    for step in (1, 2):                                   # by other answers than before the kill
        scores[step] = 0.2
    trains(f"--resume={folder}", "--steps=4")
    out = capsys.readouterr().out
    assert "best state" not in out and not (folder / "best").exists()  # it is the start
    trains(f"--resume={folder}", "--steps=5", "--eval-limit=1")  # step 4 is asked anew
    out = capsys.readouterr().out
    assert best() == 4 and re.search("held-out accuracy +0.25 .. 0.125\n", out)
    trains(f"--resume={folder}", "--reward=rule")         # another reward never competes, either
    out = capsys.readouterr().out
    assert best() == 5 and re.search("held-out accuracy +0.125 . 0.125\n", out)


def test_a_finished_run_goes_on_with_other_problems_and_answers(capsys, uninterrupted, run_folder):
    """By the command that it printed; the steps it has done are those of a longer run."""
    trains(f"--resume={run_folder}", "--steps=12")
    samples = lines_of(run_folder / "samples.jsonl")
    assert samples[:12] == lines_of(uninterrupted / "samples.jsonl") and len(samples) == 24
    questions = [record["question"] for record in samples[::2]]
    assert questions[:6] != questions[6:]


# --- Numbers that are not finite, memory that runs out --------------------------------------------
def test_ten_steps_that_skip_updates_stop_it(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "run"
    factors = chain(4 * [1], repeat(torch.inf))           # from step 3: two updates in a step

    @functools.wraps(train.grpo_loss)
    def infinite_from_step_3(*given, real=train.grpo_loss, **options):
        value, metrics = real(*given, **options)
        factor = next(factors)
        return value * factor, {**metrics, "loss": metrics["loss"] * factor}

    with monkeypatch.context() as patch:
        patch.setattr(train, "grpo_loss", infinite_from_step_3)
        line = refused(capsys, *FLAGS, "--steps=100", f"--output={folder}", begun=True)
    assert "10 steps in a row" in line
    assert all(cause in line for cause in ("--lr", "reward", "--temperature"))
    assert not re.search("NaN|Infinity", (folder / "metrics.jsonl").read_text())  # no JSON
    metrics = metrics_of(folder)
    assert metrics[-1]["step"] == 12 and metrics[-1]["loss"] is None
    assert [m["skipped_updates"] for m in metrics[1:]] == [0, 0, *10 * [2]]
    trains(f"--resume={folder}", "--steps=13")            # no weight was moved: it may go on
    assert [m["step"] for m in metrics_of(folder)] == [*range(14)]
    run = run_in(tmp_path)                                # one now and then does not stop it
    for step in range(21):
        log(run, {"step": step, "skipped_updates": 3 if step % 4 else 0})


def test_weights_that_are_not_finite_are_never_saved(capsys, monkeypatch, tmp_path):
    def overflow(optimizer):
        optimizer.weights[0].detach().fill_(torch.inf)

    monkeypatch.setattr(train.MasterAdamW, "round", overflow)
    folder = tmp_path / "run"
    flags = (*FLAGS, "--dtype=bfloat16", f"--output={folder}")
    line = refused(capsys, *flags, "--steps=4", "--eval-every=1", begun=True)
    assert "--weight-decay" in line and "not finite" in line
    for file in folder.rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())
    assert not (folder / "final").exists()
    assert train.command("train.py", "--resume", str(folder)) in line


@pytest.mark.parametrize("stage", ["make_optimizer", "sample_groups", "grpo_loss"])
def test_out_of_memory_for_good_is_one_line(capsys, monkeypatch, tmp_path, stage):
    monkeypatch.setattr(train, stage, raises(NO_MEMORY[0]))
    line = refused(capsys, *FLAGS, f"--output={tmp_path / 'run'}", begun=True)
    assert "out of memory" in line and "--lora-rank 16" in line


def test_below_a_traceback_stands_the_command_that_goes_on(monkeypatch, tmp_path, uninterrupted):
    """With --no-fast to the same rewards."""
    with monkeypatch.context() as patch:
        patch.setattr("train.sample.packed", raises(RuntimeError("no kernel")))
        with pytest.raises(RuntimeError, match="no kernel") as caught:
            trains(*FLAGS, f"--output={tmp_path / 'run'}")
    note, = caught.value.__notes__
    command = note.partition("continue with: ")[2].partition(" (")[0]
    program, *flags = shlex.split(command)[1:]
    assert "--no-fast" in note and program.endswith("train.py")
    trains(*flags, "--no-fast")
    rewards = [[m["reward_mean"] for m in metrics_of(folder)[1:]]
               for folder in (tmp_path / "run", uninterrupted)]
    assert rewards[0] == pytest.approx(rewards[1])
