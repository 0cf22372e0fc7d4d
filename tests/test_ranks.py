"""Several processes: torchrun with gloo on the CPU against one process on the same batch."""
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_train import ENVIRONMENT, ROOT, curve, metrics_of, run_program
from transformers import AutoModelForCausalLM

FLAGS = ("--steps=3", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=24", "--eval-limit=6",
         "--eval-every=2", "--save-every=1", "--micro-batch-tokens=150", "--updates-per-rollout=2")


def torchrun(ranks, *flags, ok=True):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         str(ROOT / "train.py"), *map(str, flags)], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert not ok or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    run_program(*FLAGS, f"--output={folder}")
    return folder


def assert_same(folder, one):
    ours, theirs = curve(folder), curve(one)
    assert [m["step"] for m in ours] == [m["step"] for m in theirs]
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        for key in a.keys() - {"sampler_ratio_error"}:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)
    ours, theirs = (load_file(f / "final" / "model.safetensors") for f in (folder, one))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    AutoModelForCausalLM.from_pretrained(folder / "final")
    assert json.loads((folder / "final" / "config.json").read_text())["architectures"] == json.loads(
        (one / "final" / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_does(ranks, one, tmp_path):
    """Same problems, same answers, same gradient: weights after three steps equal to 1e-5, same metrics."""
    done = torchrun(ranks, *FLAGS, f"--output={tmp_path / 'run'}")
    assert_same(tmp_path / "run", one)
    assert done.stdout.count("question  ") == 1          # only rank 0 speaks
    assert len(metrics_of(tmp_path / "run")) == 4        # and writes


def test_a_run_of_two_ranks_resumes_on_one_and_on_four(one, tmp_path):
    folder = tmp_path / "run"
    torchrun(2, *FLAGS[1:], "--steps=1", f"--output={folder}")
    for ranks, steps in ((4, 2), (1, 3)):
        torchrun(ranks, f"--output={folder}", "--resume", f"--steps={steps}")
    ours, theirs = (load_file(f / "final" / "model.safetensors") for f in (folder, one))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5


def test_prompts_must_divide_among_the_ranks(tmp_path):
    done = torchrun(2, *FLAGS, "--prompts-per-step=3", f"--output={tmp_path / 'run'}", ok=False)
    assert done.returncode != 0
    assert "--prompts-per-step 3: not a multiple of the 2 processes" in done.stderr
    assert sum(line.startswith("train.py: ") for line in done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_reward_that_fails_on_one_rank_ends_the_step_on_all(one, tmp_path):
    folder, reward = tmp_path / "run", tmp_path / "mine.py"
    code = ("import os\nfrom reward import rule_reward\ncalls = 0\n"
            "def score(completions, answer, **columns):\n"
            "    global calls\n"
            "    calls += 1\n"
            "    if {broken} and calls >= 3 and os.environ.get('RANK') == '1':\n"
            "        raise KeyError('oh')\n"
            "    return [rule_reward(c, a) for c, a in zip(completions, answer)]\n")
    reward.write_text(code.format(broken=True))
    done = torchrun(2, *FLAGS, f"--output={folder}", f"--reward={reward}:score", ok=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert "row 0" in lines[0] and "KeyError: 'oh'" in lines[0]
    reward.write_text(code.format(broken=False))
    torchrun(2, f"--output={folder}", "--resume")
    assert_same(folder, one)


def test_a_rank_that_dies_ends_the_run_which_can_be_resumed(one, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from reward import rule_reward\n"
        "calls = 0\n"
        "def score(completions, answer, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    if calls == 3 and os.environ.get('RANK') == '1' and not os.path.exists({str(folder / 'died')!r}):\n"
        f"        open({str(folder / 'died')!r}, 'w').close()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return [rule_reward(c, a) for c, a in zip(completions, answer)]\n")
    done = torchrun(2, *FLAGS, f"--output={folder}", f"--reward={tmp_path / 'mine.py'}:score", ok=False)
    assert done.returncode != 0 and (folder / "died").is_file()
    assert "rank 0 lost another rank" in done.stderr and f"--output {folder} --resume" in done.stderr
    torchrun(2, f"--output={folder}", "--resume")
    assert_same(folder, one)
    assert os.path.isdir(folder / "final") and torch.distributed.is_available()
