"""Warnings: each known failure is provoked, and nothing is said of a healthy run."""
import copy
import re
import time
from unittest.mock import Mock
import pytest
from files import FEW, SHORT, metrics_of
from runs import trains
from steps import log, run_in
import train


def history(n, **series):
    """n steps of a healthy run; of a name in `series` the last values are these."""
    rows = [dict(approx_kl=0.01, flat_groups=0.3, entropy=0.5, reward_std=0.5, grad_norm=1.0,
                 reward_mean=step / 100, accuracy=0.4, kl_coef=0.02) for step in range(n)]
    for name, values in series.items():
        for row, value in zip(rows[-len(values):], values):
            row[name] = value
    return rows


@pytest.mark.parametrize("rewards, told", [
    ([0.5] * 30, False), ([0.5], False), ([0.9, 0.3], True), ([0.9, 0.5], False),
    ([1.0, *[0.8] * 20], False), ([*[0.1] * 20, *[0.8] * 20, *[0.4] * 10], True),
    ([*[0.1] * 20, *[0.8] * 20, *[0.4] * 5], False), ([-9.0, *[-9.2] * 20], False)])
def test_only_a_reward_that_has_fallen_is_trouble(rewards, told):
    """It names --lr first; half a standard deviation of the answers is a quarter here."""
    rows = [{**row, "reward_mean": reward} for row, reward in zip(history(len(rewards)), rewards)]
    before = copy.deepcopy(rows)
    assert ("--lr" in train.symptoms(rows)) == told
    assert train.symptoms([{**row, "reward_std": 0.0} for row in rows[:1]]) == ""
    assert rows == before                                 # a pure function


@pytest.mark.parametrize("n, series, told", [
    (3, {}, True), (2, {}, False), (9, {}, True), (3, {"reward_mean": [0.4]}, False),
    (3, {"reward_std": [0.1, 0.0, 0.0]}, False), (3, {"policy_loss": [0.01]}, False)])
def test_nothing_to_learn_is_told_after_three_steps(n, series, told):
    """Not one whose first step alone is flat, and not one that step rewards teach."""
    flat = dict.fromkeys(("reward_mean", "reward_std", "policy_loss", "format_rate"), [0.0] * n)
    rows = history(n, **flat, truncated_fraction=[0.9] * n)
    for name, values in series.items():
        for row, value in zip(rows, values):
            row[name] = value
    line = train.symptoms(rows)
    for word in ("earned 0,", "0% have a \\boxed{}", "90%", "--data", "--max-new-tokens"):
        assert (word in line) == told


def test_a_warning_is_told_once(tmp_path, capsys):
    """The learning rate is a hundred times too high, and the first warning says so."""
    trains(*FEW, *SHORT, "--steps=6", "--lr=0.03", "--prompts-per-step=8", "--group-size=8",
           f"--output={tmp_path}")
    step, warning = next((m["step"], m["warning"]) for m in metrics_of(tmp_path) if "warning" in m)
    assert re.findall(r"--[a-z-]+", warning)[0] == "--lr"
    assert f"step {step}: {warning}" in capsys.readouterr().err
    # The checkpoint knows what was told.
    trains("--resume", tmp_path, "--steps=8")
    assert not any("warning" in m for m in metrics_of(tmp_path)[5:])


def test_a_step_late_in_a_long_run_costs_what_an_early_one_does(tmp_path):
    """CPU seconds of what is logged and shown beside train_step, after 100 steps and 20,000."""
    def seconds(n):
        run = run_in(tmp_path / str(n))
        run.folder.mkdir()
        run.history = [{"step": step, **history(1)[0]} for step in range(n)]
        run.evaluations = [{"step": 0, "eval_id": 1, "eval_accuracy": 0.5}]
        spent = []
        for step in range(n, n + 20):
            begun = time.process_time()
            log(run, {"step": step, **history(1)[0]})
            train.update_bar(Mock(), run)
            spent.append(time.process_time() - begun)
        return min(spent)

    assert seconds(20_000) < 2 * seconds(100)
