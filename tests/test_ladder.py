"""tests/tools/ladder.py: every rung is seen; one waits, and judges the functions beside it."""
import re
import shutil
import subprocess
import sys
from files import LIMIT, ROOT
import ladder


def test_every_rung_is_seen(tmp_path, capsys):
    assert ladder.main([f"--output={tmp_path / 'ladder.html'}"]) == 0
    told = re.findall(r"^(\d+)\. .*: seen", capsys.readouterr().out, flags=re.M)
    assert told == [str(n) for n in range(1, 11)]
    page = (tmp_path / "ladder.html").read_text("utf-8")
    _, *rungs = page.split("<h2>")
    assert len(rungs) == 10 and len(page) < 150_000
    for rung in rungs:
        in_sight, folded = rung.split("<details>")
        assert "<svg" in folded and "Rule: " in folded and "Only here: " in folded
        assert "runs" in in_sight and "Seen?" not in in_sight and "Rule: " not in in_sight


def test_a_rung_waits_and_judges_the_functions_beside_it(tmp_path):
    for name in ("advantage.py", "logprob.py", "loss.py", "tests/tools/ladder.py",
                 "tests/tools/ladder.md"):
        shutil.copy(ROOT / name, tmp_path)
    loss = (tmp_path / "loss.py").read_text("utf-8")
    without_a_clip = loss.replace("w.clamp(1 - clip_eps, 1 + clip_eps) * A)", "w * A)")
    assert without_a_clip != loss
    (tmp_path / "loss.py").write_text(without_a_clip, "utf-8")
    process = subprocess.Popen([sys.executable, "-u", "ladder.py", "4"], cwd=tmp_path, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    question = ""
    while "press Enter" not in question:
        question += process.stdout.readline()
    lesson, _ = process.communicate("\n", timeout=LIMIT)
    assert "def the_clip" in question and "Rule: " not in question
    assert "4. The clip: not seen: is the ratio clipped?" in lesson and "Rule: " in lesson
    assert process.returncode == 1
