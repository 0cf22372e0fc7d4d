"""The study: figures, verdicts and plan on numbers written by hand; one of its runs, end to end."""
import itertools
import json
import math
import sys
import pytest
import study
from files import lines_of
from files import metrics_of as metrics_in
import train


def metrics_of(accuracies):
    """metrics.jsonl of a run: step 0 is the evaluation, then a line per step."""
    lines = [{"step": step, "accuracy": accuracy, "response_length_mean": 10.0 + step,
              "group_std": 0.5 / step, "flat_groups": 0.25, "grad_norm": 0.5,
              "approx_kl": None, "kl_coef": 0.02, "clip_fraction": 0.01 * step,
              "sampler_difference": 0.3 / step, "reward_mean": 1.0}
             for step, accuracy in enumerate(accuracies, 1)]
    lines[-1]["eval_accuracy"] = 0.75
    return [{"step": 0, "eval_accuracy": 0.1}, *lines]


def test_figures_of_a_run():
    found = study.figures(metrics_of([0.2] * 9 + [0.95, 0.4] + [0.8] * 9))      # 20 steps
    assert found["greedy"] == 0.75 and found["last_ten"] == pytest.approx((0.4 + 9 * 0.8) / 10)
    assert (found["at_09"], found["never"]) == (10, 0)
    assert (found["length"], found["length_growth"]) == pytest.approx((10 + 15.5, 10))
    early, late = (sum(0.5 / step for step in range(n, n + 10)) / 10 for n in (1, 11))
    assert found["std_fall"] == pytest.approx(early - late)
    assert found["clip_fraction"] == pytest.approx(0.01 * 10.5) and found["sampler_gap"] == 0.3
    assert math.isnan(found["approx_kl"])                                       # null throughout


def test_a_run_that_never_reaches_it_is_marked():
    found, there = (study.figures(metrics_of([0.5, best, 0.8])) for best in (0.89, 0.9))
    assert (found["at_09"], found["never"], there["at_09"], there["never"]) == (4, 1, 2, 0)
    assert study.cell([found, there], "at_09") == "≥ 3 ± 1.4"
    assert study.cell([there, there], "at_09") == "2 ± 0"
    assert study.cell([found], "approx_kl") == "–"


@pytest.mark.parametrize("relation, expected", [
    ("high > low", "seen: 5 ± 1 against 2 ± 1"), ("mid ~ low", "seen: 4 ± 1 against 2 ± 1"),
    ("low > high", "the opposite: 2 ± 1 against 5 ± 1"),
    # 2 apart: no more than both spreads
    ("mid > low", "not seen: 4 ± 1 against 2 ± 1"), ("low ~ high", "not seen: 2 ± 1 against 5 ± 1"),
    ("high > 0", "seen: 5 ± 1 against 0 ± 0"), ("wide > 0", "not seen: 4 ± 4 against 0 ± 0"),
    ("low in 1 3", "seen: 2 ± 1"), ("low in 2.5 3", "not seen: 2 ± 1"),
    ("none > low", "cannot be said: nan ± nan against 2 ± 1"),
    ("high > one", "cannot be said: fewer than two seeds")])
def test_verdicts(relation, expected):
    values = dict(high=[4, 5, 6], mid=[3, 4, 5], low=[1, 2, 3], wide=[0, 4, 8], one=[9],
                  none=[math.nan, math.nan])
    results = {label: [{"x": x, "never": 0} for x in some] for label, some in values.items()}
    assert study.verdict("x", relation, results) == expected


@pytest.mark.parametrize("name", study.STUDY)
def test_the_plan_names_what_exists(name):
    _, more, arms, claims = study.STUDY[name]
    labels = [arm.label for arm in arms]
    assert len(set(labels)) == len(labels)
    assert len({study.folder_of("", arm, 0, 80) for arm in arms}) == len(arms)
    for arm in arms:
        flags = arm.flags.format(study=study.__file__, real=train.TINY / "grpo.json",
                                 rewards=study.REWARDS)
        train.check_settings(train.parse(flags.split()))
        assert arm.answers in ("its own", "untrained", "kept", "worked")
    for document, figure, relation, _ in claims:
        assert document in ("000", "001", "002", "003", "004")
        assert figure in [*study.COLUMNS, *more]
        label, sign, other = study.parts_of(relation)
        assert label in labels
        assert other in labels or sign == "in" or (sign, other) == (">", "0")


def test_controls_pay_what_they_say():
    rows = dict(prompts=["p"] * 4 + ["q"] * 2, answer=["7"] * 4 + ["5"] * 2, completions=[
        "\\boxed{ 7 }", "\\boxed{ 8 }", "?", "\\boxed{ 7 }", "\\boxed{ 5 }", "?"])
    dealt = [study.permuted(**rows) for _ in range(20)]
    assert all(sorted(some[:4]) == [0, 0.5, 1.5, 1.5] for some in dealt)
    assert all(sorted(some[4:]) == [0, 1.5] for some in dealt) and len(set(map(tuple, dealt))) > 5
    tossed = study.coin(["right"] * 1000)
    assert {*tossed} == {0, 1} and 400 < sum(tossed) < 600


@pytest.fixture
def watched(monkeypatch):
    """Everything that a run of the study replaces."""
    for name in ("step_metrics", "sample_groups", "answers_and_rewards", "check_sampler"):
        monkeypatch.setattr(train, name, getattr(train, name))
    monkeypatch.setitem(train.ADVANTAGES, "group", train.ADVANTAGES["group"])


@pytest.mark.parametrize("label", ["online imitation", "self-SFT", "SFT"])
def test_imitation(watched, tmp_path, label):
    """Right answers have A = 1, wrong ones 0. Whose answers they are, whose accuracy is told."""
    arm, = [arm for arm in study.STUDY["controls"][2] if arm.label == label]
    assert study.run_one(tmp_path, arm, 0, 3) == 0
    folder = study.folder_of(tmp_path, arm, 0, 3)
    groups, metrics = lines_of(folder / "samples.jsonl"), metrics_in(folder)[1:]
    assert all(group["advantages"] == [float(r == 1.5) for r in group["rewards"]]
               for group in groups)
    own_answers = label == "online imitation"
    # From step 2 on the policy has moved, and only its own answers are as likely as when drawn.
    assert (metrics[-1]["sampler_difference"] < 1e-4) == own_answers
    means = list(map(share_right, metrics))
    assert ([step["accuracy"] for step in metrics] == pytest.approx(means)) == own_answers
    if label == "SFT":
        assert all(group["rewards"] == [1.5, 1.5] for group in groups)
        assert " = " in groups[0]["responses"][0]
    assert json.loads((folder / "figures.json").read_text())["figures"]["sampled"] > 0.4
    assert not isinstance(train.answers_and_rewards, study.OtherAnswers)     # the exam asks its own


def test_right_answers_of_the_untrained_policy_again_and_again(watched, tmp_path):
    """All that it draws in the run, and each of them once before one comes again."""
    arm = study.Arm("", f"{study.IMITATION} --aggregate token", imitates=True, answers="kept")
    drawn = study.Arm("", arm.flags, imitates=True, answers="untrained")
    for one in (drawn, arm):
        assert study.run_one(tmp_path, one, 0, 5) == 0
    once, again = (metrics_in(study.folder_of(tmp_path, one, 0, 5))[1:] for one in (drawn, arm))
    n_right = sum(round(128 * share_right(step)) for step in once)
    assert {step["kept"] for step in again} == {n_right} and 0 < again[0]["distinct"] < n_right
    assert all(step["reward_mean"] == 1.5 and step["flat_groups"] == 1 for step in again)
    rows = list(itertools.islice(study.passes(7, 0), 21))
    passes = [rows[start:start + 7] for start in (0, 7, 14)]
    assert [sorted(some) for some in passes] == [list(range(7))] * 3 and passes[0] != passes[1]


def share_right(step):
    """Of a step whose answers earn 0, 0.5 for a box, or 1.5."""
    return step["reward_mean"] - 0.5 * step["format_rate"]


def test_real_controls_print_what_is_kept_of_them(capsys, monkeypatch, tmp_path):
    def run(greedy, sampled=None, curve=None):
        return {"greedy_right": greedy, "sampled_right": sampled, "samples": sampled and 2,
                "right_curve": curve, "cpu_seconds": None}

    arms = {"untrained": [run([0, 0], [1, 0])],
            "GRPO": [run([1, 0], [2, 0], [0.25] * 10 + [0.5] * 5), run([1, 1], [2, 1])],
            "GRPO, beta 0": [], "online imitation": [run([1, 0]), run([0, 0])], "self-SFT": [],
            "self-SFT, several passes": [], "old": [run([0, 1])]}
    kept = {"arms": arms, "told": {"old": {"sampled": "0.9 ± 0.1"}}}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    monkeypatch.setattr(sys, "argv", ["study.py", f"--kept={tmp_path / 'kept.json'}"])
    study.main()
    out = capsys.readouterr().out
    assert "| untrained | 1 | 0 | 0.25 | 0.5 |" in out
    assert "| old | 1 | 0.5 | (0.9 ± 0.1) | – |" in out
    assert "| GRPO | 2 | 0.75 ± 0.35 | 0.625 ± 0.18 | 0.75 ± 0.35 |" in out
    lines = [line for line in out.splitlines() if line.startswith("- ")]
    assert "run 1, greedy: 0.000" in lines[0] and "→ 0.500 ±" in lines[0]
    assert "1 gained, 0 lost" in lines[0] and "0.250 ±" in lines[1] and "→ 0.500 ±" in lines[1]
    assert "GRPO, run 2, pass@2: 0.500 ±" in lines[5] and "→ 1.000" in lines[5]
    assert "old, run 1, greedy" in lines[8] and "old, run 1, sampled" not in out
    assert lines[9].endswith("→ GRPO, greedy: difference 0.500 ± 0.500 over 2 seeds")
    assert lines[10].endswith("steps: 0.25, 0.50") and len(lines) == 11


def test_pass_at_k_of_a_problem():
    run = {"samples": 16, "sampled_right": [16, 1, 0]}
    assert study.powers(run) == [1, 2, 4, 8, 16]
    assert [study.found_by(k, run) for k in (1, 8)] == [[1, 1 / 16, 0], [1, 0.5, 0]]


def test_one_run_end_to_end_the_others_are_kept(watched, capsys, monkeypatch, tmp_path):
    arms = study.STUDY["mismatch"][2]
    assert study.run_one(tmp_path, arms[2], 0, 2) == 0
    folder = study.folder_of(tmp_path, arms[2], 0, 2)
    found = json.loads((folder / "figures.json").read_text())["figures"]
    assert found["sampler_gap"] > 0.01                   # sampled at 1.3, scored at 1.0
    assert 0 < found["sampled"] < 1 and 0 < found["entropy"] < 3 and abs(found["kl"]) < 0.05
    assert metrics_in(folder)[-1]["eval_accuracy"] == found["greedy"]
    for arm in arms[:2] + arms[3:]:
        folder = study.folder_of(tmp_path, arm, 0, 2)
        folder.mkdir()
        (folder / "figures.json").write_text(json.dumps({"code": "old", "figures": found}))
    flags = f"study.py --only mismatch --seeds 0 --steps 2 --output {tmp_path}"
    monkeypatch.setattr(sys, "argv", flags.split())
    with pytest.raises(SystemExit, match="0"):
        study.main()
    out, err = capsys.readouterr()
    assert "4 runs, 0 of them to do" in err and "0 runs missing, 3 made by other code" in out
    assert all(f"| {arm.label} | " in out for arm in arms)
