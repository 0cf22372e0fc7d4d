"""tests/tools/page.py: its numbers, its curves, what hostile text does to it."""
import html.parser
import re
import shutil
from types import SimpleNamespace
from unittest.mock import Mock, patch
import pytest
import torch
from files import FEW, MINE, TINY
from models import opened
from runs import trained
from steps import parts, rollout_of, run_in, settings
import page
import sample
import train
from advantage import group_advantages
from logprob import IGNORE, plain_logprobs

FLAGS = (*FEW, "--steps=2", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=12",
         "--eval-limit=2", "--save-every=9")
REPLY = (f"--reply={MINE.with_name('checker.py')}:check", "--max-turns=2", "--length-rescale=0.9")
HOSTILE = ('</i><script>alert("1")</script>', "]]>--><!--", '" onmouseover="x', "\u202eright\u200f",
           "\x00\x1b[2J\r", "\ud800", "'&lt;", "a\nb\u2066c", "</title></svg><style>")


class Tags(html.parser.HTMLParser):
    """Every tag in order with the names of its attributes, the texts; a tag left open fails."""
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.titles = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, *(name for name, _ in attributes)))
        self.titles += [value for name, value in attributes if name == "title"]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("page"), *FLAGS)


@pytest.mark.parametrize("more", [
    (), REPLY, ("--kl-coef=0",), ("--advantage=gtpo", "--temperature=0.9")])
def test_the_numbers_are_those_of_the_policy_now_and_as_it_drew(more, folder, tmp_path):
    """The first group was drawn by the policy of the start: both ends are at hand."""
    if more:
        folder = trained(tmp_path, *FLAGS, *more)
    run = page.run_of(folder)
    first, *more_groups = groups = page.tinted_groups(run)
    ids, labels = (torch.tensor(first[name]) for name in ("input_ids", "labels"))
    temperature = 0.9 if "--temperature=0.9" in more else 1.0
    with torch.no_grad():
        new, old = (plain_logprobs(opened(str(place))[0], ids, labels, temperature)
                    for place in (folder / "final", TINY))
    expected = [d for d in (new - old)[labels[:, 1:] != IGNORE].tolist() if abs(d) > 0.02]
    shown = Tags(page.main(folder).read_text(encoding="utf-8"))
    distances = [float(title) for title in shown.titles[:len(expected)]]
    assert distances == pytest.approx(expected, abs=1e-4) and len(distances) > 1
    text = "".join(shown.texts)
    assert first["step"] == 1 and more_groups[-1]["step"] == 2
    for group in groups:
        assert group["question"] in text and f"true answer: {group['truth']}" in text
    assert ("q",) in shown.tags or REPLY[0] not in more
    before, after = train.first_and_last(run)
    i = max(range(2), key=lambda i: after[i]["reward"] - before[i]["reward"])
    cards = [before[i]["problem"], before[i]["answer"], after[i]["answer"]]
    assert train.compared(before, after, "right") in text
    assert [text for text in shown.texts if text in cards][:3] == cards


def test_of_a_run_that_goes_on_its_best_state_is_shown(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("final"))
    shutil.copytree(folder / "final", copy / "best", dirs_exist_ok=True)
    pages = [page.main(place).read_text(encoding="utf-8") for place in (folder, copy)]
    assert pages[0].replace(folder.name, copy.name) == pages[1]


def section(word="w", advantages=(1.5, -1.5, 0.0, 6.0)):
    """The section of a group of made-up answers, its texts made of this word."""
    p = parts()
    rollout = sample.take(rollout_of(p), [0, 1, 2, 3])
    rollout.rewards, rollout.advantages = torch.arange(4.0), torch.as_tensor(advantages)
    group = {"step": 1, "question": word, "prompt": word, "truth": word}
    tokenizer = SimpleNamespace(decode=lambda ids, **how: word * len(ids),
                                batch_decode=lambda rows, **how: [word] * len(rows))
    moved = torch.full(rollout.mask.shape, 0.5)
    return page.section_of(group, rollout, moved, tokenizer), rollout


def test_a_bar_points_the_way_of_its_advantage():
    text, rollout = section()
    right, left = text.index("--A:1.50"), text.index("--A:-1.50")  # the style draws them
    assert text.index("A +1.50") < right < text.index("A -1.50") < left
    assert len(Tags(text).titles) == rollout.mask.sum()
    # Where tokens have advantages of their own, a row has their mean.
    per_token = torch.arange(rollout.mask.numel()).view(rollout.mask.shape) / 10
    means = [f"{per_token[n][own].mean():+.2f}" for n, own in enumerate(rollout.mask)]
    assert re.findall(r"A ([+-][\d.]+)", section("w", per_token)[0]) == means


def test_groups_that_teach_are_shown_of_steps_that_double(tmp_path):
    p, run = parts(), run_in(tmp_path)
    rollout = rollout_of(p)
    rollout.problems = [problem for problem in p.problems for _ in range(4)]
    rollout.prompts = [prompt for prompt in p.prompts for _ in range(4)]
    for step, teaches in enumerate(
            ((0, 1), (1, 0), (1, 1), (0, 0), (1, 1), (1, 1), (0, 1), (1, 1)), start=1):
        rollout.rewards = torch.tensor([float(r * n) for r in teaches for n in range(4)])
        rollout.advantages = group_advantages(rollout.rewards, 4)
        for record in train.samples_of(rollout, step, 4):
            run.append("samples.jsonl", record)
    questions = [problem["question"] for problem in p.problems]
    shown = [(group["step"], questions.index(group["question"]))
             for group in page.tinted_groups(run)]
    assert shown == [(1, 1), (2, 0), (8, 0), (8, 1)]


def figure(points, last=10):
    text = page.figure_of_curve("metric", "title", points, last)
    numbers = re.findall(r"[\d.]+", re.search(r'points="([^"]*)"', text)[1])
    return text, [*zip(map(float, numbers[::2]), map(float, numbers[1::2]))]


def test_a_curve_between_its_axes():
    text, (left, middle, right) = figure([(0, 0.25), (5, 0.5), (10, 0.125)])
    assert middle[1] < left[1] < right[1]                 # y points down: the highest is on top
    assert middle[0] == (left[0] + right[0]) / 2 > left[0]
    for label in ("0.25 → 0.125", ">step 0<", ">10<"):
        assert label in text
    top, bottom = (int(re.search(rf'y="(\d+)">{value}<', text)[1]) for value in (0.5, 0))
    assert top < bottom
    for value in (0.0, 0.1, 1e-30, 1e17, -1e38):          # a flat curve
        heights = {y for _, y in figure([(n, value) for n in range(1000)], 1000)[1]}
        assert heights == {middle[1] if value > 0 else 78.0}
    dot = re.search('class="dot" points="([^ "]*) ', figure([(0, 1.0)])[0])[1]
    assert dot == "50.0,2.0"                              # one point is a dot


def test_which_curves_are_shown():
    """Means of five steps; what says nothing is left out, and what is new has its own name."""
    def curves(*history):
        lines = [{"step": step, **metrics} for step, metrics in enumerate(history)]
        run.evaluations = [line for line in lines if "eval_id" in line]
        run.history = [line for line in lines if "eval_id" not in line]
        return {name: points for name, _, points in train.curves_of(run)}

    run = train.Run()
    shown = curves({"eval_reward": 0.5, "eval_accuracy": 0.0, "eval_id": 1},
                   {"accuracy": 0.0, "reward_mean": 0.5, "clip_fraction": 0.0, "approx_kl": None,
                    "reward/a": 0.5, "reward/b": 0.0, "grad_norm": 1.0, "lr": 1.0, "mine": 0.5})
    assert [*shown] == ["eval_reward", "reward/a", "reward/b", "reward_mean", "grad_norm", "mine"]
    for n, first, last, many in ((20, 2, 17, 4), (2, 0, 1, 2), (1, 0, 0, 1), (1000, 12, 987, 40)):
        points = curves(*({"grad_norm": float(i)} for i in range(n)))["grad_norm"]
        assert (points[0][1], points[-1][1], len(points)) == (first, last, many)


def page_with(folder, word):
    """The page with this word wherever a person or a model may have written."""
    run = page.run_of(folder)
    run.folder = folder.parent / re.sub("[/\0]", "", word)
    run.history = [{**row, "warning": word, f"reward/{word}": 1.0} for row in run.history]
    rows = [{"problem": word, "truth": word, "answer": word, "reward": 1.0}]
    with patch.object(train, "first_and_last", lambda _: [rows, rows]):
        return page.page_of(run, section(word)[0], settings(*FLAGS))


def test_what_a_model_wrote_is_text(folder):
    calm = Tags(page_with(folder, "word"))
    for word in HOSTILE:
        text = page_with(folder, word)
        wild = Tags(text)
        assert wild.tags == calm.tags and len(wild.titles) == len(calm.titles)
        assert text.count("Content-Security-Policy") == 1
        text.encode("utf-8")                              # no half of a surrogate pair is left
        assert not set("\x00\x1b\r\u202e\u200f\u2066\ud800") & set(text)
    assert "‹202E›right‹200F›" in page_with(folder, HOSTILE[3])
    for word in ("می\u200cخواهم", "12\u202f000\u00a0€", "👩\u200d🚀", "a\tb"):  # stands as it is
        assert page_with(folder, word).count(word) > 9
    assert {name for _, *names in wild.tags for name in names} <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "style", "title", "dir",
        "viewbox", "points", "x", "y", "text-anchor"}     # none that loads or runs anything


def test_the_bar_shows_the_last_evaluation_and_the_last_step(tmp_path):
    run = run_in(tmp_path)
    run.evaluations = [{"step": 0, "eval_accuracy": 0.25, "eval_reward": None, "eval_id": 1},
                       {"step": 1, "eval_accuracy": 0.5, "eval_id": 1}]
    run.history = [{"step": 1, "reward_mean": 0.75, "approx_kl": 0.1},
                   {"step": 2, "reward_mean": 1.0, "approx_kl": None, "tokens": 7, "entropy": 2.0}]
    bar = Mock()
    train.update_bar(bar, run)
    run.history[1]["skipped_updates"] = 3
    train.update_bar(bar, run)
    shown = {"held-out accuracy": 0.5, "sampled reward": 1, "KL to the reference": 0.1,
             "entropy": 2}
    assert [given.args for given in bar.set_postfix.call_args_list] == [
        (shown,), ({**shown, "skipped updates": 3},)]
    assert bar.update.call_count == 2
