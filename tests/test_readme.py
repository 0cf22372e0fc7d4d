"""The README's claims: names, commands, worked numbers, flags, the layout."""
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
import pytest
import dates
from files import MINE, ROOT, TINY, lines_of, metrics_of
from runs import trains
import gsm8k_h200
import study
import train

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS, MACHINES, THEORY = ((ROOT / "tests" / f"{name}.md").read_text(encoding="utf-8")
                             for name in ("RESULTS", "MACHINES", "THEORY"))
TEXTS = {"README": README, "RESULTS": RESULTS, "MACHINES": MACHINES, "THEORY": THEORY}
STAGES = ("sample", "reward", "advantage", "logprob", "loss", "train")


def test_every_function_of_the_tables_is_in_its_file():
    rows = re.findall(r"^\| \[([A-H])\] \|.*\| `(\w+)\.py` \| (.*) \|$", README, flags=re.M)
    assert [letter for letter, *_ in rows] == list("ABCDEFGH")
    for letter, file, names in rows:
        module = importlib.import_module(file)
        assert f"[{letter}]" in (ROOT / f"{file}.py").read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert callable(getattr(module, name)), (file, name)
    rows = re.findall(r"^\|.*\| `(\w+)\.py` \| (.*) \|$", THEORY, flags=re.M)
    assert len(rows) > 20
    for file, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(file), name), (file, name)


FIELDS = {train.flag_of(field.name) for field in dataclasses.fields(train.Settings)}
# of torchrun, and of tests/
OTHERS = {"--against", "--all", "--bf16", "--controls", "--dist", "--folder", "--kept",
          "--micro-batches", "--mugs", "--nnodes", "--nproc-per-node", "--only", "--only-model",
          "--prompts", "--real", "--repeat", "--run", "--seeds", "--shutdown-timeout",
          "--steps-per-sum", "--threads", "--tiny"}


def test_every_flag_is_a_flag():
    known = FIELDS | {flag.replace("--", "--no-", 1) for flag in FIELDS}
    named = set(re.findall(r"--[a-z][a-z0-9-]+", "".join(TEXTS.values()))) - OTHERS
    assert named <= known, named - known


# name, flags, what it helps against
CELL = r"[^|\n]+\|"
VARIANTS = re.findall(rf"^\|{CELL} (`--[^|\n]+) \|{CELL}$", README, flags=re.M)


def test_the_flags_of_a_variant_are_taken():
    assert len(VARIANTS) >= 7
    for flags in VARIANTS:
        first = re.match("`([^`]+)`", flags)[1].replace("f.py:steps", f"{MINE}:steps")
        assert train.parse(shlex.split(first))


@pytest.mark.parametrize("name, most", [("README", 12_500), ("RESULTS", 15_000),
                                        ("MACHINES", 8_000), ("THEORY", 8_000)])
def test_no_text_outgrows_its_reader_and_every_link_has_its_place(name, most):
    assert len(TEXTS[name]) <= most
    folder = ROOT if name == "README" else ROOT / "tests"
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[name]):
        file, _, anchor = target.partition("#")
        path = folder / (file or f"{name}.md")
        assert path.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", TEXTS[path.stem], flags=re.M)
            assert anchor in [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
                              for line in headings], target


def test_no_sentence_of_the_readme_has_more_than_three_numbers():
    """Evidence stands in tables. Code, tables and links are no sentences."""
    prose = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->|^\|[^\n]*|\]\([^)]*\)", "", README,
                   flags=re.DOTALL | re.MULTILINE)
    for sentence in re.split(r"(?<=[.:;?!]) |\n", prose):
        assert len(re.findall(r"\b\d[\d,.]*", sentence)) <= 3, sentence


def test_the_kept_answers_of_the_card_give_the_tables(capsys):
    """RESULTS' rows of the H200, and the rates in README, from gsm8k_h200.json."""
    gsm8k_h200.main()
    out = capsys.readouterr().out.replace("-0.", "−0.")
    rows = re.findall(r"^\| [\w-]+ (\| \d.*)$", out, flags=re.M)
    assert len(rows) == 5
    for row in rows:
        assert row.replace("|  |  |", "| | |") in RESULTS, row
        assert row.split()[1] in README
    rate, difference = re.search(r"seeds: (\S+ ± \S+), difference (\S+ ± \S+);", out).groups()
    assert difference in README and f"| {rate} | {difference} |" in RESULTS
    t, p = re.search(r"t = (\S+), p = (\S+)$", out, flags=re.M).groups()
    assert f"Student's t is {t} and its p {p}" in RESULTS
    net, formed = zip(*re.findall(r"(\d+), (\d+)(?:;| $)", out, flags=re.M))
    for numbers in (net, formed):
        assert "{}, {} and {}".format(*numbers) in RESULTS


def test_the_kept_sums_give_the_tables(capsys, monkeypatch):
    """RESULTS' rows of SmolLM2's sums, and each seed's rate in README."""
    kept = ROOT / "tests" / "real" / "sums_smollm2.json"
    monkeypatch.setattr(sys, "argv", ["study.py", f"--kept={kept}"])
    study.main()
    out = capsys.readouterr().out
    rows = re.findall(r"^\| .* \| \d \| (0.*) \|$", out, flags=re.M)
    section = RESULTS[RESULTS.index("## SmolLM2 learns sums"):RESULTS.index("## SmolLM2 learns d")]
    shown = re.findall(r"^\| .* \| \d? ?\| (0.*) \|$", section, flags=re.M)
    for row, told in zip(rows[1:-2], shown, strict=True):    # the others were asked elsewhere
        greedy, sampled, _, _, pass_8, _ = row.split(" | ")
        for printed, cell in zip((greedy, sampled, pass_8), told.split(" | "), strict=True):
            for pair in zip(*(re.findall(r"[\d.]+", text) for text in (printed, cell))):
                assert float(pair[0]) == pytest.approx(float(pair[1]), abs=5e-4), (row, told)
    for label in ("GRPO", "online imitation", "self-SFT, several passes", "it ends in time, alone"):
        rates = re.findall(rf"→ {label}, run \d, greedy: .* → (\S+) ±", out)
        assert f"| {', '.join(rate[:4] for rate in rates)} |" in README


def test_a_stage_imports_no_other_stage():
    for stage in STAGES[:-1]:
        text = (ROOT / f"{stage}.py").read_text(encoding="utf-8")
        imports = rf"^\s*(from|import) ({'|'.join(STAGES)})\b"
        assert not re.search(imports, text, flags=re.M), stage


def test_without_flags_the_loss_is_the_papers():
    """THEORY's "none: our defaults", here in numbers and words; and that grpo_loss has the same."""
    paper = {"clip_eps": 0.2, "kl_coef": 0.04, "kl_estimator": "k3", "aggregate": "sequence",
             "ratio": "token", "objective": "clip", "clip_eps_high": None}
    ours = vars(train.Settings())
    assert {name: ours[name] for name in paper} == paper
    assert (ours["advantage"], ours["scale_by_std"]) == ("group", True)
    options = inspect.signature(train.grpo_loss).parameters
    assert {name: options[name].default for name in paper} == paper
    *_, table = re.findall(r"\| who \| what they do \| flags \|\n((?:\|.*\n)+)", THEORY)
    given = re.findall("`(--[^`]+)` ?,? ?(?:or|\\|)", table)
    assert len(given) >= 3 and all(train.parse(flags.split()) for flags in given)


def test_the_first_steps_of_the_default_run(tmp_path):
    """The row of step 1 in "Reading a run", and the first of the way from 0.0586 to 1."""
    trains("--steps=6", "--eval-every=6", f"--output={tmp_path}")
    start, first, *_, last = metrics_of(tmp_path)
    table = README[README.index("| step | sampled reward |"):]
    names = ("reward_mean", "accuracy", "loss", "policy_loss", "approx_kl", "grad_norm",
             "flat_groups")
    row = re.search(r"^\| 1 \| (.*) \|$", table, flags=re.M)[1].replace("−", "-").split(" | ")
    found = [first[name] for name in names]
    assert found == pytest.approx(list(map(float, row)), abs=0.01)
    accuracy = start["eval_accuracy"]
    assert re.search(rf"^held-out accuracy +{accuracy:.3g} ▁", README, flags=re.M)
    assert f"| the tiny policy | {accuracy:.3f} |" in README
    assert last["eval_accuracy"] > 0.8                    # 0.941 was measured


def block(language, after, text=README):
    return re.search(rf"```{language}\n(.*?)```", text[text.index(after):], re.DOTALL)[1]


def test_the_recipe_of_a_task(monkeypatch, tmp_path, capsys):
    """Its commands run as they stand, here for one step of the tiny policy."""
    assert block("python", "## A task of your own") in Path(dates.__file__).read_text()
    monkeypatch.chdir(ROOT)
    (tmp_path / "runs").mkdir()
    model, problems, training = (
        line.replace("runs/", f"{tmp_path}/runs/").split()[1:]
        for line in block("sh", "## A task of your own").splitlines())
    assert model[0] == "tests/real/real_model.py" and training[0] == "train.py"
    subprocess.run([sys.executable, *problems], check=True)
    row, = map(json.loads, block("json", "## A task of your own").splitlines())
    assert row in lines_of(Path(problems[1])) and len(lines_of(Path(problems[1]))) == 600
    few = ["--steps=1", "--eval-limit=4", f"--output={tmp_path}/run", f"--model={TINY}"]
    assert train.main([*training[1:], *few]) == 0
    out = capsys.readouterr().out
    name, = re.findall(r"^held-out \w+", block("text", "## A task of your own"), flags=re.M)
    assert "540 problems, 4 held out" in out and f"\n{name} " in out


def test_the_notebook(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    code = block("python", "## From Python", MACHINES)
    assert len(code.splitlines()) <= 10
    exec(compile(code, "MACHINES.md", "exec"), {})
    assert len(re.findall(r"-\d+\.\d+", capsys.readouterr().out.splitlines()[-1])) == 3
    assert list(tmp_path.iterdir()) == []                 # without a folder nothing is written
    call = re.search(r"`(train\.train\(.*?\))`", MACHINES)[1]
    hook = block("python", "Metrics go to W", MACHINES)
    board = SimpleNamespace(log=lambda line, step: lines.append((step, line["loss"])))
    names, lines = {"train": train, "wandb": board}, []
    exec(compile(hook, "MACHINES.md", "exec"), names)
    names["Watched"]().append("metrics.jsonl", {"step": 2, "loss": 0.5})
    assert lines == [(2, 0.5)]
    code = re.sub(r"train\.train_grpo\([^)]*\)", call, code).replace("--steps=3", "--output=mine")
    exec(compile(code.replace('"--eval', '"--steps=1", "--eval'), "MACHINES.md", "exec"), {})
    assert (tmp_path / "mine" / "final").is_dir()
