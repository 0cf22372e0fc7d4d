"""What all tests have: the stage files on the path, one thread, no network; and two fixtures."""
# ruff: noqa: E402
import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("helpers", "tools", "real", "stages")
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in FOLDERS)]

import pytest
import torch

torch.set_num_threads(1)
# The tests send these signals, which a program ignores that was begun with nohup or a shell's `&`.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_configure(config):
    """`-m lesson` names each test, and shows the whole sentence of one that failed."""
    config.addinivalue_line("markers", "lesson: what a plain function of one's own must do")
    if config.option.markexpr == "lesson" and config.option.verbose == 0:
        config.option.verbose = 2
        config.option.tbstyle = "short"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """A test that hangs ends its process after ten minutes, and so it fails."""
    faulthandler.dump_traceback_later(600, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def tiny():
    """The policy of tests/tiny: (model, tokenizer)."""
    from files import TINY  # here, because the tests of [C], [E] and [F] need torch alone
    from models import opened
    return opened(str(TINY))


@pytest.fixture
def run_here(monkeypatch, capsys):
    """A stage's command without a new interpreter -> what it printed, on stderr if it refuses."""
    def run(name, *arguments, status=0):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(ROOT / name), run_name="__main__")
            sys.exit(0)
        if "sample" in sys.modules:                       # not a copy's
            sample = sys.modules["sample"]
            sample.AttentionInterface.register("fast", sample.fast_attention)
            sample.AttentionMaskInterface.register("fast", sample.added_mask)
        out, err = capsys.readouterr()
        assert leaving.value.code == status and not (status and out), out + err
        return err if status else out
    return run
