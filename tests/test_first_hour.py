"""What somebody meets in the first hour with problems, rewards and models of their own."""
import json
import shutil
import time

import pytest
from conftest import TINY, ends_badly, lines_of, refused, trains

SHORT = ("--steps=2", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=8",
         "--eval-every=1", "--save-every=2", "--updates-per-rollout=1")
REWARDS = """
def length(completions, **columns):
    return [len(text) / 100 for text in completions]

def interrupted(completions, **columns):
    raise KeyboardInterrupt

def half_a_pair(prompt, turns):
    return "\\ud800"

def again(prompt, turns):
    return "How many ?"
"""


@pytest.fixture
def mine(tmp_path):
    """A file of functions, and problems that do not ask for a box -> the flags for both."""
    (tmp_path / "mine.py").write_text(REWARDS)
    lines = [json.dumps({"question": f"Tell of day {n} , please", "answer": ""}) + "\n"
             for n in range(8)]
    (tmp_path / "mine.jsonl").write_text("".join(lines))
    return tmp_path / "mine.py", (f"--data={tmp_path / 'mine.jsonl'}",
                                  f"--eval-data={tmp_path / 'mine.jsonl'}")


def test_with_a_reward_of_ones_own_its_held_out_mean_is_shown(capsys, mine, tmp_path):
    """The rule's accuracy would be 0 for ever: it is told of where something is boxed."""
    file, data = mine
    flags = (*data, f"--reward={file}:length")
    trains(*SHORT, *flags, f"--output={tmp_path / 'own'}")
    out, err = capsys.readouterr()
    figures = [m["eval_reward"] for m in lines_of(tmp_path / "own" / "metrics.jsonl")]
    assert f"held-out reward{figures[0]:15.3f} " in out and f" {figures[-1]:.3f}\n" in out
    assert f"held out {figures[0]:.2f}" in err


def test_without_boxes_the_story_is_silent_about_accuracy(capsys, tmp_path):
    import train
    run = train.Run()
    run.before = run.after = ["no box"]
    run.held_out = [(0, 0.25), (2, 0.5)]
    row = {"accuracy": 0.0, "format_rate": 0.0, "reward_mean": 1.0, "approx_kl": 0.0,
           "response_length_mean": 2.0}
    run.history = [row]
    problems = [{"question": "?", "answer": "4"}]
    train.print_story(run, problems, "reward")
    out = capsys.readouterr().out
    assert "held-out reward" in out and "accuracy" not in out
    run.history = [{**row, "format_rate": 0.5}]
    train.print_story(run, problems, "accuracy")
    assert "\naccuracy" in capsys.readouterr().out


def test_unknown_words_are_told_of(capsys, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"question": f"Where does the blue river {n} end", "answer":
                                       "7"}) + "\n" for n in range(8)))
    trains("--eval-only", f"--eval-data={own}", "--max-new-tokens=4", "--group-size=2")
    line, = [line for line in capsys.readouterr().out.splitlines() if "unknown" in line]
    assert line.startswith("--eval-data: 67% of the prompts' tokens are") and "--model" in line
    # The default's own words are all known.
    trains("--eval-only", f"--eval-data={TINY / 'test.jsonl'}", "--eval-limit=8",
           "--max-new-tokens=4", "--group-size=2")
    assert "unknown" not in capsys.readouterr().out


def test_a_question_of_ten_megabytes_is_refused_at_once(capsys, tmp_path):
    file = tmp_path / "big.jsonl"
    rows = [{"question": "How many ?", "answer": "1"},
            {"question": "Ben has 2 books and ? " * 450_000, "answer": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = time.process_time()
    line = refused(capsys, f"--data={file}")
    assert time.process_time() - started < 5
    assert f"{file}, line 2: a question of 9900000 characters" in line


def test_half_a_surrogate_pair_is_refused_in_a_line(capsys, mine, tmp_path):
    file, _ = mine
    line = ends_badly(capsys, *SHORT, "--max-turns=2", f"--reply={file}:half_a_pair",
                      f"--output={tmp_path / 'run'}")
    assert "--reply the reply to row 0 fails (UnicodeEncodeError" in line
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text('{{ "\\ud800" }}')
    line = refused_after_loading(capsys, tmp_path / "model")
    assert "surrogates not allowed" in line


def refused_after_loading(capsys, model):
    """One line; but for what was said about the model's fast forms."""
    return ends_badly(capsys, f"--model={model}", f"--data={TINY / 'test.jsonl'}",
                      f"--eval-data={TINY / 'test.jsonl'}", "--max-new-tokens=8")


def without(name):
    def spoil(folder):
        for path in folder.glob(name):
            path.unlink()
    return spoil


@pytest.mark.parametrize("spoil, words", [
    (without("chat_template.jinja"), "no chat template; take an instruction-tuned model, or put a "
                                     "chat_template.jinja"),
    (without("tokenizer*"), "its tokenizer files lack the words"),
], ids=["template", "tokenizer"])
def test_what_a_model_folder_lacks_is_named(capsys, tmp_path, spoil, words):
    shutil.copytree(TINY, tmp_path / "model")
    spoil(tmp_path / "model")
    assert words in refused_after_loading(capsys, tmp_path / "model")


def test_an_interrupt_inside_a_reward_says_where_the_run_stands(capsys, mine, tmp_path):
    import train
    file, data = mine
    status = train.main([*SHORT, *data, f"--reward={file}:interrupted",
                         f"--output={tmp_path / 'run'}"])
    err = capsys.readouterr().err
    assert status == 130
    assert "interrupted; last checkpoint: none; continue with: " in err
    assert f"--resume {tmp_path / 'run'}" in err


def test_a_conversation_too_long_for_the_model_names_flags_that_help(capsys, mine):
    file, _ = mine
    line = ends_badly(capsys, f"--reply={file}:again", "--max-turns=4")
    assert "lower --max-new-tokens (now 40) or --max-turns (now 4)" in line
    line = ends_badly(capsys, "--max-new-tokens=120")
    assert "lower --max-new-tokens (now 120)" in line and "--max-turns" not in line


def test_help_has_every_flag_once_under_headings_with_its_default(run_here):
    from train import FIELDS, flag_of
    out = run_here("train.py", "--help")
    for name in FIELDS:
        assert sum(line.startswith(f"  {flag_of(name)} ") or line == f"  {flag_of(name)}"
                   or line.startswith(f"  {flag_of(name)},") for line in out.splitlines()) == 1
    words = " ".join(out.split())
    assert "number of rollouts [500] {80}" in words          # {}: the tiny policy's config
    assert words.index("the rollout:") < words.index("--steps") < words.index("the objective:")
