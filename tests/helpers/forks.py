"""For --reward: rewards that fork processes. Used by test_resume.py."""
import multiprocessing
import os
import signal

fork = multiprocessing.get_context("fork")


def score(completions, **columns):
    with fork.Pool(2) as pool:
        return pool.map(float, map(len, completions))


def ended_at_once(completions, **columns):
    """A worker that SIGTERM reaches while it is forked, as a pool that is closed at once sends it.

    A fork hook that test_resume.py registers sends it.
    """
    os.environ["END_AT_ONCE"] = "1"
    child = fork.Process(target=os.getpid)
    child.start()
    del os.environ["END_AT_ONCE"]
    child.join(20)
    score(completions)
    return [child.exitcode] * len(completions)


def wait_for_work():
    os.kill(os.getpid(), signal.SIGTERM)


def waits(completions, **columns):
    child = fork.Process(target=wait_for_work)
    child.start()
    child.join(20)
    return [child.exitcode or 0.0] * len(completions)
