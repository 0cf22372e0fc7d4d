"""Warnings: each known failure is provoked, and nothing is said of a healthy run."""
import copy
import re
import pytest
from files import FEW, SHORT, metrics_of
from runs import trains
import train


def history(n, **series):
    """n steps of a healthy run; of a name in `series` the last values are these."""
    rows = [dict(approx_kl=0.01, flat_groups=0.3, entropy=0.5, reward_std=0.5, grad_norm=1.0,
                 reward_mean=step / 100, accuracy=0.4, kl_coef=0.02) for step in range(n)]
    for name, values in series.items():
        for row, value in zip(rows[-len(values):], values):
            row[name] = value
    return rows


def in_trouble(rows):
    """The same with a reward that has fallen after the first step."""
    return [{**row, "reward_mean": float(step == 0)} for step, row in enumerate(rows)]


@pytest.mark.parametrize("rewards, accuracy, told", [
    ([0.5] * 29, 0.4, []), ([0.5] * 30, 0.4, ["stuck reward"]), ([0.5] * 30, 0.95, []),
    ([0.5] * 30, None, ["stuck reward"]), ([*[0.5] * 29, 0.55], 0.4, []), ([0.5], 0.4, []),
    ([0.9, 0.3], 0.4, ["fallen reward"]), ([0.9, 0.5], 0.4, []), ([1.0, *[0.8] * 20], 0.4, []),
    ([*[0.1] * 20, *[0.8] * 20, *[0.4] * 10], 0.95, ["fallen reward"]),
    ([*[0.1] * 20, *[0.8] * 20, *[0.4] * 5], 0.4, []), ([-9.0, *[-9.2] * 20], 0.4, [])])
def test_only_a_reward_that_has_fallen_or_stands_is_trouble(rewards, accuracy, told):
    """A fallen one names --lr first; half a standard deviation of the answers is a quarter here."""
    rows = [{**row, "reward_mean": reward, "accuracy": accuracy}
            for row, reward in zip(history(len(rewards)), rewards)]
    found = train.symptoms(rows)
    assert list(found) == told and all("--lr" in line for line in found.values())
    assert train.symptoms([{**row, "reward_std": 0.0} for row in rows[:1]]) == {}


def test_a_beta_that_has_grown_is_named_and_not_the_rate():
    rows = in_trouble(history(12, kl_coef=[0.022]))
    assert [train.symptoms(rows)["fallen reward"].endswith(flag) for flag in
            ("try a higher --kl-band", "--lr")] == [True, False]


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
    line = train.symptoms(rows).get("nothing to learn", "")
    for word in ("earned 0,", "0% have a \\boxed{}", "90%", "--data", "--max-new-tokens"):
        assert (word in line) == told


@pytest.mark.parametrize("what, n, name, failing, healthy, words", [
    ("gradient", 45, "grad_norm", [10.5], [9.5], ("10 times", "--lr")),
    ("KL", 12, "approx_kl", [0.06] * 10, [0.04] * 10, ("0.06 ", "--kl-band 0.02 0.05")),
    ("flat groups", 10, "flat_groups", [0.51] * 10, [0.5] * 10,
     ("51%", "--max-resample 3")),
    ("cut answers", 10, "truncated_fraction", [0.96] * 10, [0.95] * 9, ("96%", "--max-new-tokens")),
    ("entropy", 20, "entropy", [0.049] * 10, [0.051] * 10, ("1/10", "--clip-eps-high 0.28"))])
def test_a_failure_is_named_with_its_number_and_its_remedy(what, n, name, failing, healthy, words):
    rows = in_trouble(history(n, **{name: failing}))
    before = copy.deepcopy(rows)
    (first, _), (found, line) = train.symptoms(rows).items()
    assert first == "fallen reward" and found == what
    assert all(word in line for word in words) and "\n" not in line, line
    for well in (history(n, **{name: failing}), history(n)):
        assert train.symptoms(well) == {}
    assert list(train.symptoms(in_trouble(history(n, **{name: healthy})))) == ["fallen reward"]
    assert rows == before                                 # a pure function


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
