"""What foreign code does to a run, and foreign text to a terminal. Each input is our own: names,
links, what a reward leaves behind and raises, threads, reasoning, control characters, starts."""
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace
import pytest
import torch
from evaluate import print_figures
from files import FEW, LIMIT, ROOT, SHORT, TINY, lines_of
from runs import refused, trained
from steps import NO_MEMORY, parts, raises, run_in, whole_step
import page
import reward
import sample
import train
from reward import ForeignError, boxed_candidates, final_answer, foreign_code, rule_reward

FLAGS = (*FEW, *SHORT)
ANSWERS = {"completions": ["7", "88"], "completion_ids": [[5, 6], [7]]}


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def called(spec):
    """--reward with this function -> its rewards."""
    reward.load_rewards(None)                             # a new run
    function = reward.load_function("--reward", spec)
    return reward.call_function("--reward", function, ANSWERS, reward.as_reward)


SCORE = "def score(completions, **columns):\n    return [len(text) for text in completions]\n"


# --- Names that a child process imports -----------------------------------------------------------
@pytest.mark.parametrize("name", [
    "reward", "sample", "train", "time", "sys", "queue", "torch", "numpy", "tqdm", "mine.v2"])
def test_a_name_that_an_import_reads_otherwise_is_refused(capsys, tmp_path, name):
    """Before the file runs: our own, the standard library's, an installed package's, with dots."""
    written(tmp_path / "mine.py", "1 / 0")
    file = written(tmp_path / f"{name}.py", f"1 / 0\n{SCORE}")
    ours = {name: sys.modules[name] for name in ("reward", "time", "sys", "torch")}
    line = refused(capsys, *FLAGS, f"--reward={file}:score")
    assert f"--reward {file}:score: rename it" in line
    assert all(sys.modules[name] is module for name, module in ours.items())


def test_a_child_process_imports_the_file_by_its_name(tmp_path):
    """One that is spawned, as everywhere but on Linux."""
    file = written(tmp_path / "my-judge.py", """
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context
        import colorsys
        import neighbour
        def length(text):
            return len(text) + neighbour.points
        def score(completions, **columns):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                return list(pool.map(length, completions))
        """)
    written(tmp_path / "neighbour.py", "points = 5")
    written(tmp_path / "colorsys.py", "1 / 0")            # Python's own is found before it
    assert called(f"{file}:score") == [6.0, 7.0]


def test_two_files_of_one_name_are_told(capsys, tmp_path):
    files = [written(tmp_path / folder / "judge.py", SCORE) for folder in "ab"]
    line = refused(capsys, *FLAGS, "--reward", *(f"{file}:score" for file in files))
    assert all(str(file) in line for file in files) and "rename" in line
    for file in files[::-1]:                              # in a run of its own each may be named
        assert called(f"{file}:score") == [1.0, 2.0]


@pytest.mark.parametrize("own", ["ab", "a", "b"])
def test_two_helpers_of_one_name_are_told(capsys, tmp_path, own):
    """If one of them is imported, whichever that is: else each file might get the other's."""
    files = []
    for folder, name in zip("ab", ("first", "second")):
        written(tmp_path / folder / "helper.py", f"points = {name!r}")
        written(tmp_path / folder / "unused.py", "1 / 0")
        code = SCORE + "import helper" * (folder in own)
        files.append(written(tmp_path / folder / f"{name}.py", code))
    both = "--reward", *(f"{file}:score" for file in files)
    line = refused(capsys, *FLAGS, *both)
    assert "rename" in line and all(str(tmp_path / folder) in line for folder in "ab")
    assert "helper.py" in line
    (tmp_path / "b" / "helper.py").unlink()
    files[1].write_text(SCORE)
    for file in files:
        assert called(f"{file}:score") == [1.0, 2.0]
    assert reward.load_rewards([f"{file}:score" for file in files])


def test_a_link_is_the_file_that_it_is_named(tmp_path):
    """As in the hub's cache; what it imports stands beside it."""
    blob = written(tmp_path / "blobs" / "0a1b2c", f"from beside import score\n{SCORE}")
    written(tmp_path / "snapshot" / "beside.py", SCORE.replace("len(text)", "9"))
    link = tmp_path / "snapshot" / "judged.py"
    link.symlink_to(blob)
    assert called(f"{link}:score") == [1.0, 2.0]
    (tmp_path / "elsewhere").symlink_to(tmp_path / "snapshot")
    assert called(f"{tmp_path / 'elsewhere' / 'judged.py'}:score") == [1.0, 2.0]


# --- What a user's code leaves behind -------------------------------------------------------------
LEFT = {
    **{f"{name} {kind}": f"import signal; signal.signal(signal.{name}, {kind})"
       for name, kind in (("SIGTERM", "lambda *_: None"), ("SIGINT", "signal.SIG_DFL"),
                          ("SIGHUP", "signal.SIG_IGN"), ("SIGUSR1", "print"), ("SIGUSR2", "print"),
                          ("SIGXCPU", "signal.SIG_IGN"))},
    "alarm": "import signal; signal.signal(signal.SIGALRM, print); signal.alarm(30)",
    "timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 30, 5)",
    "no grad": "import torch; torch.no_grad().__enter__()",
    "grad off": "import torch; torch._C._set_grad_enabled(False)",
    "inference": "import torch; torch.inference_mode().__enter__()",
    "autocast": "import torch; torch.autocast('cpu', dtype=torch.bfloat16).__enter__()",
    "autocast of a GPU": "import torch; torch.set_autocast_enabled('cuda', True)",
    "autocast of a Mac": "import torch; torch.set_autocast_enabled('mps', True)",
    "dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "device": "import torch; torch.set_default_device('meta')"}


def state():
    numbers = [number for number in signal.Signals if number.name in
               "SIGINT SIGTERM SIGHUP SIGUSR1 SIGUSR2 SIGXCPU".split()]
    assert len(numbers) == 6
    return ([signal.getsignal(number) for number in numbers], signal.getitimer(signal.ITIMER_REAL),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
            torch.is_autocast_enabled("mps"),
            torch.get_default_dtype(), torch.get_default_device(), torch.zeros(1).device)


@pytest.fixture
def handlers():
    """Those of before the test, whatever it sets."""
    kept = [(number, signal.getsignal(number)) for number in signal.Signals
            if number not in (signal.SIGKILL, signal.SIGSTOP)]
    yield
    signal.alarm(0)
    for number, handler in kept:
        signal.signal(number, handler)


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("where", ["import", "call", "raises", "reply"])
def test_what_user_code_changes_is_put_back(tmp_path, handlers, left, where):
    """When its file is loaded, in a call, in one that fails, in a reply."""
    ways = {"import": f"{LEFT[left]}\ndef score(completions): return [1, 2]",
            "call": f"def score(completions):\n    {LEFT[left]}\n    return [1, 2]",
            "raises": f"def score(completions):\n    {LEFT[left]}\n    1 / 0",
            "reply": f"def score(prompt, turns):\n    {LEFT[left]}\n    return 'So?'"}
    file = written(tmp_path / "leaves.py", ways[where])
    before = state()
    if where == "raises":
        with pytest.raises(ForeignError):
            called(f"{file}:score")
    elif where == "reply":
        reward.load_rewards(None)                         # a new run
        reply = reward.load_function("--reply", f"{file}:score")
        assert reward.text_or_none("--reply", reply, "Anna", ["5"]) == "So?"
    else:
        assert called(f"{file}:score") == [1.0, 2.0]
    assert state() == before
    torch.ones(2, requires_grad=True).sum().backward()


def test_what_was_set_before_is_there_again(handlers):
    """By the program that calls train() from Python."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            with foreign_code("its"):
                assert torch.is_grad_enabled()
                signal.alarm(1)
                torch.set_default_dtype(torch.float16)
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float64
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_handler_for_alarms_stays_the_users(tmp_path, handlers):
    """Set once, when the file is loaded; each call may set an alarm."""
    file = written(tmp_path / "limits.py", """
        import signal, time
        def late(*_):
            raise TimeoutError
        signal.signal(signal.SIGALRM, late)
        def score(completions):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            try:
                time.sleep(20)
            except TimeoutError:
                return [1, 2]
        """)
    for _ in range(2):
        assert called(f"{file}:score") == [1.0, 2.0]


def test_a_run_hears_its_signals_though_a_library_set_handlers(handlers):
    """And the second one still stops it at once, where the first came while a reward ran."""
    with train.listening_to_signals():
        listens = signal.getsignal(signal.SIGTERM)
        with foreign_code("a reward"):
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == listens
        with foreign_code("a reward"):
            signal.raise_signal(signal.SIGTERM)
        assert train.RECEIVED == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == listens
        with foreign_code("another reward"):
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_outside_of_the_main_thread_a_reward_is_called_as_ever():
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reward.call_function, "--reward", lambda completions: [1, 2], ANSWERS,
                            reward.as_reward)
        assert found.result() == [1.0, 2.0]


def test_a_run_trains_as_if_its_reward_left_nothing_behind(tmp_path, handlers):
    """All of it at once, in each call."""
    lines = "\n    ".join(LEFT.values())
    code = SCORE.replace("    return", f"    {lines}\n    return")
    files = [written(tmp_path / name / "lengths.py", text) for name, text in
             (("loud", code), ("quiet", SCORE))]
    folders = [trained(file.parent / "run", *FLAGS, f"--reward={file}:score") for file in files]
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


# --- What a user's code raises is the user's ------------------------------------------------------
RAISED = ["MemoryError", "RuntimeError('the judge answered 500: CUDA out of memory')",
          "OSError('HTTP 413: File too large')", "OSError(28, 'No space left on device')",
          "reward.BadInput('mine')", "ValueError('cannot read')", "KeyboardInterrupt"]


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("where", ["import", "reward", "step-reward", "reply"])
def test_its_place_is_shown_whatever_it_says(tmp_path, error, where):
    """No line speaks of this machine's memory or disk, or of input."""
    line = f"raise {error}"
    file = written(tmp_path / "raises.py", f"""
        import reward
        {line if where == "import" else ""}
        def fails(*given, **columns):
            {line}
        """)
    flag = "reward" if where == "import" else where
    with pytest.raises(ForeignError) as raised:
        train.main([*FLAGS, f"--{flag}={file}:fails", f"--output={tmp_path / 'run'}"])
    assert train.line_of(raised.value) == ""
    assert f"--{flag} " in str(raised.value) or str(file) in str(raised.value)
    shown = str(raised.getrepr(chain=True, abspath=True))
    assert str(file) in shown and line in shown


def test_our_own_memory_is_still_told(capsys, monkeypatch, tmp_path):
    """Where a reward is called, too: it is not its code that failed."""
    file = written(tmp_path / "lengths.py", SCORE)
    monkeypatch.setattr(train, "grpo_loss", raises(NO_MEMORY[0]))
    line = refused(capsys, *FLAGS, f"--reward={file}:score", f"--output={tmp_path / 'run'}",
                   begun=True)
    assert "out of memory; to need less" in line


# --- Threads --------------------------------------------------------------------------------------
def test_a_thread_that_never_ends_keeps_no_process(tmp_path):
    """A judge's, and a pool's that waits for its answer: the status is that of the run."""
    file = written(tmp_path / "judges.py", """
        import atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        def score(completions, **columns):
            threading.Thread(target=time.sleep, args=[10_000]).start()
            pool.submit(time.sleep, 10_000)
            return [len(text) for text in completions]
        """)
    start = time.monotonic()
    done = subprocess.run([sys.executable, ROOT / "train.py", *FLAGS, "--steps=1",
                           f"--reward={file}:score", f"--output={tmp_path / 'run'}"],
                          capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and "train it further" in done.stdout, done.stderr
    assert (tmp_path / "run" / "final").exists() and time.monotonic() - start < LIMIT / 2


# --- Reasoning is no answer -----------------------------------------------------------------------
BOX = r"\boxed{5}"


@pytest.mark.parametrize("text, paid", [
    (BOX, 1.5), (f"<think> x </think> {BOX}", 1.5), (f"x </think> {BOX}", 1.5),
    (rf"<think> \boxed{{4}} </think> {BOX}", 1.5), (rf"<think> {BOX} </think> \boxed{{4}}", 0.5),
    (rf"<think> {BOX} </think> \boxed 4", 0.5), (f"<think> {BOX} </think> It is 5.", 0.0),
    (f"<think> {BOX} . Wait", 0.0), (f"{BOX} <think> Wait", 0.0), ("<think> \\boxed 5 . Wait", 0.0),
    (f"<think> {BOX} </think>", 0.0), (f"<think>a</think><think>{BOX}</think>", 0.0),
    (f"<think>a</think> {BOX} <think>", 0.0), (f"<think><think>a</think> {BOX}", 1.5),
    (rf"<think> \boxed{{ </think> {BOX}", 1.5), (r"<think> \boxed{4</think>5}", 0.0),
    ("<think> \\boxed 4 </think> \\boxed 5", 1.5), (f"</think> {BOX} and \\boxed{{6}}", 0.5),
    (f"<think> {BOX} </THINK> ", 0.0), ("<think>" * 10_000 + BOX, 0.0)])
def test_the_rule_reads_what_stands_behind_reasoning(run_here, text, paid):
    assert rule_reward(text, "5") == paid
    if len(text) < 1000:
        assert run_here("reward.py", text, "5") == f"{paid}\n"


@pytest.mark.parametrize("text, truth", [
    (f"<think> {BOX} </think> #### 7", "7"), ("<think> 5 </think> 7", "7"),
    (rf"<think> {BOX} </think> \boxed{{7}}", "7"), (f"<think> {BOX} . Wait", None),
    ("<think> The answer is 5. Wait", None), ("<think> 5 </think> The answer is 7.", "7"),
    ([f"<think> {BOX}", "7"], ["7"])])
def test_a_truth_is_no_reasoning(text, truth):
    assert final_answer(text) == truth or final_answer(text) == f"{truth}."


def test_candidates_are_no_reasoning():
    words = ["<think>", rf" {BOX}", " so", "</think>", " is", rf" {BOX}", r" \boxed{4}"]
    assert boxed_candidates([words], ["5"]) == [[(0, 5, 1.0), (6, 6, 0.0)]]
    assert boxed_candidates([words[:3]], ["5"]) == [[]]


def ended_by(prompt_end, texts):
    """A step on answers with these texts, to prompts that end so -> metrics, Rollout."""
    def sampler(*given, **how):
        rollout = sample.sample_groups(*given, **how)
        rollout.responses = texts
        return rollout
    p = parts("--updates-per-rollout=1")
    p.prompts = [prompt + prompt_end for prompt in p.prompts]
    p.problems = [{**problem, "answer": "5"} for problem in p.problems]
    metrics, rollout, _ = whole_step(p, reward_of=None, sampler=sampler)
    return metrics, rollout


def test_a_prompt_may_open_the_reasoning():
    """As some chat templates do: an answer that is cut in there earns nothing."""
    texts = [BOX, f"{BOX} </think>", f"x </think> {BOX}", r"</think> \boxed{4}", BOX, "", "5",
             f"<think> {BOX} </think> {BOX}"]
    _, rollout = ended_by(" <think>\n", texts)
    assert rollout.rule_rewards.tolist() == [0, 0, 1.5, 0.5, 0, 0, 0, 1.5]
    own = reward.REWARDS_BY_NAME["rule"]
    assert own(texts, ["5"] * 8, ["Q <think>"] * 8) == [0, 0, 1.5, 0.5, 0, 0, 0, 1.5]
    _, rollout = ended_by("", texts)
    assert rollout.rule_rewards.tolist() == [1.5, 0, 1.5, 0.5, 1.5, 0, 0, 1.5]


def test_a_majority_of_thoughts_is_none(monkeypatch, capsys):
    """maj@k counts answers that the rule saw."""
    rows = [{"answer": text, "reward": paid, "tokens": 3, "boxed": paid > 0, "right": paid > 1}
            for text, paid in ((BOX, 0.0), (BOX, 0.0), (r"</think> \boxed{4}", 0.5))]
    monkeypatch.setattr(train, "evaluate", lambda *given: ({}, rows if given[2:] else rows[:1]))
    given = SimpleNamespace(eval_problems=[{"answer": "5"}], reward_of=None)
    print_figures(given, SimpleNamespace(group_size=3, temperature=1.0, model="m"))
    maj = [line for line in capsys.readouterr().out.splitlines() if line.startswith("maj@3")]
    assert len(maj) == 1 and maj[0].split()[1].startswith("0.000")


# --- Text of others is printed as signs -----------------------------------------------------------
HOSTILE = "\x1b[2J\x1b]0;owned\x07 5 \r\x9b2J\u202eright\x00\x7f"


def steers(text):
    return set(text) & {*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e"} - {*"\n\t"}


@pytest.mark.parametrize("text", [
    "", "a\tb\nc", "1\u00a0000 €", "Ž😀 中文 ‹5›", "می\u200cخواهم", "👩\u200d💻", "क्\u200dष"])
def test_what_steers_nothing_is_printed_as_it_is(text):
    assert sample.printable(text) == text


def test_a_sign_stands_for_each_that_does():
    shown = sample.printable(HOSTILE)
    assert not steers(shown) and shown.startswith("‹001B›[2J‹001B›]0;owned‹0007› 5 ‹000D›‹009B›2J")
    assert sample.printable("\ud83d") == "‹D83D›"


def test_nothing_that_a_run_prints_steers_the_terminal(capsys, tmp_path):
    """Last lines, a warning, a refusal: of questions, of answers, of a template's error."""
    rows = [{"problem": HOSTILE, "truth": HOSTILE, "answer": HOSTILE, "reward": 1.0, "right": True}]
    run = run_in(tmp_path)
    for step in (0, 1):
        run.append("evaluations.jsonl", {"step": step, "eval_id": 5, "answers": rows})
        run.evaluations.append({"step": step, "eval_id": 5, "eval_accuracy": 1.0})
    run.history.append({"step": 1, "reward_mean": 1.0})
    run.step = 1
    train.print_story(run)
    train.print0(UserWarning(HOSTILE), sys.stderr)
    out, err = capsys.readouterr()
    assert not steers(out) and out.count("‹001B›[2J") == 4 and "owned" in err and not steers(err)
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('" + HOSTILE[:-2] + "') }}")
    line = refused(capsys, *FLAGS, f"--model={model}")
    assert "owned" in line and not steers(line)


def test_sample_prints_signs(run_here, tmp_path):
    out = run_here("sample.py", "--group-size=1", "--max-new-tokens=2", f"How {HOSTILE}")
    assert "owned" in out and not steers(out)


# --- Ways to start it, and foreign files ----------------------------------------------------------
@pytest.mark.parametrize("start, environment", [
    (["-P"], {}), ([], {"PYTHONSAFEPATH": "1"}), (["-m", "cProfile"], {})])
def test_it_starts_as_people_start_programs(tmp_path, start, environment):
    """Also with a config of another folder, which a relative path of ours would not survive."""
    config = written(tmp_path / "there" / "c.json", '{"steps": 7}')
    done = subprocess.run([sys.executable, *start, "train.py", f"--config={config}", "--dry-run",
                           "--device=abacus", "--seed=5"], cwd=ROOT, capture_output=True, text=True,
                          timeout=LIMIT, env={**os.environ, **environment})
    assert "--device abacus" in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = subprocess.run([sys.executable, *start, "train.py", "--help"], cwd=ROOT, text=True,
                          capture_output=True, timeout=LIMIT, env={**os.environ, **environment})
    assert "--lora-rank N" in done.stdout and "LoRA: train factors" in done.stdout, done.stderr


def test_a_copy_of_it_has_its_own_flags(tmp_path):
    """Under another name, with a flag more: its help is its comment."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    source = (ROOT / "train.py").read_text("utf-8")
    flag = "    seed: from_0 = 0  #"
    mine = source.replace(flag, f"    luck: from_0 = 7  # of mine\n{flag}")
    (tmp_path / "mine.py").write_text(mine, "utf-8")
    done = subprocess.run([sys.executable, "mine.py", "--help"], cwd=tmp_path, text=True,
                          capture_output=True, timeout=LIMIT)
    assert "--luck N" in done.stdout and "of mine [7]" in done.stdout, done.stderr


def test_a_config_may_begin_with_a_mark(tmp_path):
    """As an editor on Windows writes it."""
    path = tmp_path / "c.json"
    path.write_text('{"steps": 7}', encoding="utf-8-sig")
    assert train.parse([f"--config={path}"]).steps == 7


def test_a_page_has_a_dash_where_no_reward_applies(tmp_path):
    """Of the held-out problem that it shows, and of an answer in a group."""
    file = written(tmp_path / "some.py", """
        def score(completions, **columns):
            return [None if n % 4 == 0 else len(text) % 5 for n, text in enumerate(completions)]
        """)
    folder = trained(tmp_path / "run", *FLAGS, f"--reward={file}:score")
    lines = lines_of(folder / "evaluations.jsonl")
    for line in lines:
        for n, row in enumerate(line["answers"]):         # none gains
            row["reward"] = n and 1.0 or None
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page.main(folder).read_text(encoding="utf-8")
    assert text.count("<small>reward –</small>") == 2 and "r –" in text and "nan" not in text
