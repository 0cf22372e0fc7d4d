"""train.py as a command: begun, refused, done."""
import io
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout, suppress

import evaluate
from files import LIMIT, ROOT
from torch.distributed import TCPStore

import train


def one_line_of(err, program="train.py"):
    """The line by which a program refuses something: its only one, and no traceback."""
    lines = [line for line in err.splitlines() if line.startswith(f"{program}: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def refused(capsys, *flags, begun=False, program=train):
    """The program refuses these flags, before it has begun to print: status 2 and one line."""
    assert program.main(flags) == 2
    err = capsys.readouterr().err.rpartition("\r")[2]  # behind the bar of a slow machine
    line = one_line_of(err, f"{program.__name__}.py")
    assert begun or err == line + "\n", err
    return line


def trains(*flags):
    """train.py does what it is told."""
    assert train.main(flags) == 0


def trained(folder, *flags):
    """The folder, in which train.py has done what it is told."""
    trains(*flags, f"--output={folder}")
    return folder


def evaluates(*words):
    """tests/tools/evaluate.py does what it is told."""
    assert evaluate.main(words) == 0


def told(*flags, by=trains):
    """train.py does what it is told -> what it prints, on its two streams."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        by(*flags)
    return [stream.detach().getvalue().decode() for stream in (out, err)]


def begin(program, *arguments, ranks=1, folder=ROOT, **environment):
    """Begin `python PROGRAM ARGUMENTS` -> a function that waits for the end; what hangs is killed.

    It returns the worst status and all that was printed. Ranks are told what torchrun tells them.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # 0: a port is free
    told = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    begun = []
    for rank in map(str, range(ranks)):
        place = {"RANK": rank, "LOCAL_RANK": rank, **told} if ranks > 1 else {}
        begun.append(started(program, *arguments, folder=folder, **place, **environment))

    def end(store=store):                                 # the store lives until then
        for process, *files in begun:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
            process.kill()
            process.wait()
            for file in files:
                file.seek(0)
        codes, outs, errs = zip(*((process.returncode, out.read(), err.read())
                                  for process, out, err in begun))
        return subprocess.CompletedProcess(program, max(codes, key=abs), "".join(outs),
                                           "".join(errs))
    return end


def started(program, *arguments, folder=ROOT, **environment):
    """Start `python PROGRAM ARGUMENTS` -> the process, files of what it prints."""
    # No fork: the threads of this process may hold a lock that a child would wait for.
    out, err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))
    process = subprocess.Popen([sys.executable, ROOT / program, *map(str, arguments)], cwd=folder,
                               stdout=out, stderr=err, env={**os.environ, **environment})
    return process, out, err


def well_ended(done):
    """What a program has printed, which has ended without an error."""
    assert done.returncode == 0, done.stderr
    return done.stdout
