"""train.py as a command: begun, refused, done."""
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback

from files import LIMIT, ROOT
from torch.distributed import TCPStore

import train


def one_line_of(err, program="train.py"):
    """The line by which a program refuses something: its only one, and no traceback."""
    lines = [line for line in err.splitlines() if line.startswith(f"{program}: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def refused(capsys, *flags, begun=False):
    """train.py refuses these flags, before it has begun to print: status 2 and one line."""
    assert train.main(flags) == 2
    err = capsys.readouterr().err.rpartition("\r")[2]  # behind the bar of a slow machine
    line = one_line_of(err)
    assert begun or err == line + "\n", err
    return line


def trains(*flags):
    """train.py does what it is told."""
    assert train.main(flags) == 0


def trained(folder, *flags):
    """The folder, in which train.py has done what it is told."""
    trains(*flags, f"--output={folder}")
    return folder


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
        begun.append(forked(program, *arguments, folder=folder, **place, **environment))

    def end(store=store):                                 # the store lives until then
        for process, *files in begun:
            process.join(LIMIT)
            process.kill()
            process.join()
            for file in files:
                file.seek(0)
        codes, outs, errs = zip(*((process.exitcode, out.read(), err.read())
                                  for process, out, err in begun))
        return subprocess.CompletedProcess(program, max(codes, key=abs), "".join(outs),
                                           "".join(errs))
    return end


def forked(program, *arguments, folder=ROOT, **environment):
    """`python PROGRAM ARGUMENTS` as a fork -> the process, files of what it prints.

    To import torch and transformers anew would take longer than most runs.
    """
    files = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
    command = [str(ROOT / program), *map(str, arguments)]
    process = multiprocessing.get_context("fork").Process(
        target=program_in_a_fork, args=(command, folder, environment, files))
    process.start()
    return process, *files


def program_in_a_fork(command, folder, environment, files):
    """What `python` would do with this command, there."""
    for number, file in enumerate(files, start=1):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (open(n, "w", 1, "utf-8") for n in (1, 2))  # written line by line
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def well_ended(done):
    """What a program has printed, which has ended without an error."""
    assert done.returncode == 0, done.stderr
    return done.stdout
