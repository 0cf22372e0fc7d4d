"""tests/tools/exercise.py: what its folder holds; and the lesson tells each common mistake."""
import ast
import importlib
import inspect
import re
import subprocess
import sys
from unittest.mock import create_autospec
import pytest
import torch
import test_lesson
from exercise import RULER, STAYS, YOURS, main
from files import LIMIT, ROOT, metrics_of
from runs import trained
import train

MODULE = {name: importlib.import_module(file.removesuffix(".py")) for name, file in YOURS.items()}


def parts_of(source):
    """{name: what stands there} of a file's functions and classes, and all else by itself."""
    parts = {part: ast.dump(part) for part in ast.parse(source).body}
    return {getattr(part, "name", text): text for part, text in parts.items()}


def test_a_folder_has_all_but_the_answers(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    way = capsys.readouterr().out
    assert str(tmp_path) in way and "python -m pytest -m lesson -k plain_answer" in way
    in_sight = []
    for file in set(YOURS.values()):
        whole, exercise = ((place / file).read_text("utf-8") for place in (ROOT, tmp_path))
        above, below = exercise.split(RULER)
        in_sight += filter(str.isidentifier, parts_of(above))
        assert below.partition("\n\n")[2].startswith(50 * "\n")             # an empty screen
        whole, exercise = parts_of(whole), parts_of(exercise)
        assert whole.keys() == exercise.keys()
        assert {name for name in whole if whole[name] != exercise[name]} == {
            name for name in YOURS if YOURS[name] == file}
    assert {*in_sight} == {*YOURS, *STAYS}
    path = (tmp_path / "README.md").read_text("utf-8")
    assert re.findall(r"\d \| `(\w+)` in (\w+\.py)", path) == [*YOURS.items()]
    assert re.findall(r"lesson -k (\w+)", path) == [*YOURS]
    # One stage is written. The others are told to be missing.
    (tmp_path / "loss.py").write_bytes((ROOT / "loss.py").read_bytes())
    told = here(tmp_path, "-m", "pytest", "-m", "lesson")
    assert "test_ef_plain_loss PASSED" in told and "5 failed, 1 passed" in told
    assert len(re.findall(r"^FAILED .*: This function is not written yet\.$", told, re.M)) == 5
    assert here(tmp_path, "tests/tools/ladder.py").count("not seen: it raised Not") > 5
    assert (tmp_path / "ladder.html").exists()
    # All are written, and the pages are of the folder's own lines.
    for file in set(YOURS.values()):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    source = (ROOT / "loss.py").read_text("utf-8")
    (tmp_path / "loss.py").write_text(source.replace("row_means", "my_means"), "utf-8")
    here(tmp_path, "tests/tools/lesson.py")
    assert "my_means" in (tmp_path / "lesson.html").read_text("utf-8")
    for folder in (tmp_path, tmp_path / "loss.py", ROOT / "runs"):
        assert main([str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def here(folder, *command):
    """What a command prints in this folder."""
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True,
                          timeout=LIMIT).stdout


def test_the_rewards_of_the_path_are_those_of_a_run(tmp_path):
    metrics = metrics_of(trained(tmp_path, "--steps=10", "--eval-limit=2"))
    path = (ROOT / "tests" / "tools" / "exercise.md").read_text("utf-8")
    assert " ".join(f"{m['reward_mean']:.4f}" for m in metrics[1:]) in path


def told(name):
    """The first sentence that the lesson has on this function; "" if it is right."""
    test, = [test for title, test in vars(test_lesson).items() if title.endswith(f"_{name}")]
    try:
        test()
    except (AssertionError, pytest.fail.Exception) as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.parametrize("name", YOURS)
def test_a_lesson_waits_for_no_other_function(monkeypatch, name):
    for other in set(YOURS) - {name}:
        missing = create_autospec(getattr(MODULE[other], other), side_effect=NotImplementedError)
        for module in (MODULE[other], train):
            monkeypatch.setattr(module, other, missing, raising=False)
    assert told(name) == ""


def written_otherwise(name):
    """The rows of mistakes.txt on this function, each as (sentence, changed source)."""
    text = (ROOT / "tests" / "helpers" / "mistakes.txt").read_text("utf-8")
    _, _, rows = text.partition(f"\n[{name}]\n")
    for row in rows.partition("\n\n")[0].splitlines():
        sentence, changes = row.split(" | ", 1)
        source = inspect.getsource(getattr(MODULE[name], name))
        for change in changes.split(" && "):
            right, wrong = re.split(" => ?", change, maxsplit=1)
            assert source.count(right) == 1, row
            source = source.replace(right, wrong.replace(r"\n", "\n"))
        yield sentence, source


@pytest.mark.parametrize("name", YOURS)
def test_each_mistake_is_told_by_its_own_sentence(monkeypatch, name):
    monkeypatch.setattr(test_lesson, "PATIENCE", 1)
    rows = [*written_otherwise(name)]
    assert len(rows) > 20
    for sentence, source in rows:
        planted = {}
        exec(source, vars(MODULE[name]), planted)
        monkeypatch.setattr(MODULE[name], name, planted[name])
        with torch.enable_grad():
            found = told(name)
        assert (sentence in found) if sentence != "-" else (found == ""), (sentence, found, source)
