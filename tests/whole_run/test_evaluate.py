"""tests/tools/evaluate.py as a program: its flags, how it ends, what it loads, what rewards import.

What it prints is tested with [G] and [H], in tests/stages/test_gh_train.py.
"""
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
import pytest
from files import FEW, LIMIT, MINE, ROOT, TINY
from runs import begin, evaluates, refused, well_ended
import evaluate
import reward
import train

TOOL = "tests/tools/evaluate.py"
FLAGS = (TINY, *FEW, "--eval-limit=2", "--group-size=2", "--max-new-tokens=4")
OWN_REWARD = (*FLAGS, f"--reward={MINE}:score")


# --- Flags ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("flag", ["--lr=1", "--steps=3", "--output=x", "--resume=x", "--plain",
                                  "--dry-run", "--no-best", "--kl-band=0.1", "--offload"])
def test_a_flag_that_only_trains_is_refused(capsys, flag):
    """In the command: a run's config has them all."""
    assert refused(capsys, *FLAGS, flag, program=evaluate).startswith(
        f"evaluate.py: {flag.partition('=')[0].replace('no-', '')}: ")


def test_a_flag_is_asked_or_trains():
    """The figures of an evaluation do not change with those that are refused."""
    assert set(evaluate.ASKED) < set(train.FIELDS)
    assert not {"steps", *train.THIS_CALL} & {*evaluate.ASKED} - {"config"}


@pytest.mark.parametrize("words, line", [
    (["--against"], "--against: expected one argument"), (["--group-sizes=2"], "--group-sizes"),
    (["--group-size=2", str(TINY)], str(TINY)), ([str(TINY), "--against=nowhere"], "nowhere")])
def test_a_wrong_command_is_one_line(capsys, words, line):
    more = [f"--eval-data={TINY}/few.jsonl", "--eval-limit=1"] if "nowhere" in line else []
    assert line in refused(capsys, *words, *more, begun=bool(more), program=evaluate)


# --- What is loaded -------------------------------------------------------------------------------
def counted(function, calls, *given, **how):
    calls.append(function.__name__)
    return function(*given, **how)


@pytest.mark.parametrize("data", [FEW[:1], ("--data=nowhere", FEW[1])])
def test_nothing_is_loaded_twice(capsys, monkeypatch, tmp_path, data):
    """Nor is data to train on read where others are held out."""
    opened = []
    for name in ("load_problems", "open_reward_model"):
        real = getattr(reward, name)
        monkeypatch.setattr(reward, name, partial(counted, real, opened))
    other = shutil.copytree(TINY, tmp_path / "other")
    evaluates(TINY, *data, *FLAGS[3:], f"--reward-model={TINY / 'reward_model'}",
              f"--against={other}")
    assert sorted(opened) == ["load_problems", "open_reward_model"]
    assert ", no change" in capsys.readouterr().out


def test_the_other_policy_asks_by_its_own_template(capsys, tmp_path):
    other = shutil.copytree(TINY, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ 200 * ' Anna' }}")
    line = refused(capsys, *FLAGS, f"--against={other}", begun=True, program=evaluate)
    assert f"--against {other}, problem 1: a prompt of " in line and "128 positions" in line


# --- What a reward imports ------------------------------------------------------------------------
WORTH = "def worth():\n    return {}\n"


@pytest.mark.parametrize("installed", [False, True])
def test_a_reward_imports_its_own_evaluate(tmp_path, installed):
    """Hugging Face's, if it is installed, else the file beside it."""
    (tmp_path / "r.py").write_text(
        "import evaluate\n\n\ndef f(completions, **_):\n"
        "    return [evaluate.worth() for _ in completions]\n")
    (tmp_path / "evaluate.py").write_text(WORTH.format(7))
    package = tmp_path / "site" / "evaluate"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(WORTH.format(9))
    path = str(package.parent) if installed else ""
    out = well_ended(begin(TOOL, *FLAGS, f"--reward={tmp_path}/r.py:f", PYTHONPATH=path)())
    assert re.search(rf"\nreward +{9 if installed else 7}\.000, all equal ", out)


def test_a_reward_may_have_the_name_of_the_tool(tmp_path):
    (tmp_path / "evaluate.py").write_text(
        "def f(completions, **_):\n    return [5 for _ in completions]\n")
    out = well_ended(begin(TOOL, *FLAGS, f"--reward={tmp_path}/evaluate.py:f")())
    assert "5.000, all equal" in out


# --- How it ends ----------------------------------------------------------------------------------
def test_ctrl_c_ends_it_at_once():
    done = begin(TOOL, *OWN_REWARD, FAULT="SIGINT", FAULT_AT="1")()
    assert done.returncode == -signal.SIGINT
    assert "Traceback" not in done.stderr and "reward  " not in done.stdout


def test_a_reader_that_leaves_early_ends_nothing():
    line = shlex.join([sys.executable, TOOL, *map(str, FLAGS)])
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{line} |& head -1"], cwd=ROOT,
                          capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("\n") == 1


def test_a_fault_of_one_rank_ends_both_at_once():
    done = begin(TOOL, *OWN_REWARD, ranks=2, FAULT="raise", FAULT_AT="1")()
    assert done.returncode == 2 and "KeyError: 'no, please'" in done.stderr
    assert done.stderr.count("evaluate.py: rank 1: ") == 1


def test_two_ranks_print_what_one_does():
    one, two = (begin(TOOL, *FLAGS, f"--against={TINY}", ranks=ranks) for ranks in (1, 2))
    assert well_ended(one()) == well_ended(two())


def test_a_reward_that_fails_keeps_its_traceback(monkeypatch):
    monkeypatch.setenv("FAULT", "raise")
    monkeypatch.setenv("FAULT_AT", "1")
    with pytest.raises(train.reward.ForeignError) as fault:
        evaluate.main(OWN_REWARD)
    assert "no, please" in str(fault.value.__cause__)
    assert not hasattr(fault.value, "__notes__")          # there is nothing to continue
