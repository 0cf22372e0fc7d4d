"""page.html: its numbers, its tags whatever a model wrote, its size; ranks and a real browser."""
import html.parser
import json
import shutil
import subprocess

import pytest
import torch
from conftest import FEW, ROOT, TINY, curve, lines_of, loaded, run_ranks, settings, trains
from transformers import AutoModelForCausalLM, AutoTokenizer

import sample
import train
from logprob import IGNORE, token_logprobs

SMALL = (*FEW, "--steps=2", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=12",
         "--eval-limit=2", "--save-every=9")
REPLY = (f"--reply={ROOT / 'tests' / 'helpers' / 'checker.py'}:check", "--max-turns=2")
HOSTILE = ('</i><script>alert("1")</script>', "]]>--><!--", '" onmouseover="x', "\u202eright\u200f",
           "\x00\x1b[2J", "\ud800", "'&lt;", "a\nb\u2028c")


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


def page_in(folder):
    return Tags((folder / "page.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    trains(*SMALL, f"--output={folder}")
    return folder


def scored(model, group, temperature=1.0):
    """[D] of each answer by the definition, row by row; what the other side said is skipped."""
    rows = []
    for turns in group["ids"]:
        ids, labels = list(group["prompt_ids"]), [IGNORE] * len(group["prompt_ids"])
        for k, turn in enumerate(turns):
            ids += turn
            labels += [IGNORE] * len(turn) if k % 2 else turn
        ids, labels = torch.tensor([ids]), torch.tensor([labels])
        with torch.no_grad():
            found = token_logprobs(model, ids, labels, temperature)
        rows.append(found[labels[:, 1:] != IGNORE].tolist())
    return rows


def by_hand(folder, groups, *temperature):
    """The numbers of the page from the two models, or from what was recorded, in one list."""
    start, _ = loaded(str(TINY), torch.float32)
    now = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
    return [new - old for group in groups
            for pair in zip(scored(now, group, *temperature),
                            group.get("logprobs") or scored(start, group, *temperature))
            for new, old in zip(*pair)]


@pytest.mark.parametrize("more", [
    (), (*REPLY, "--length-rescale=0.9"), ("--kl-coef=0",), ("--renew-reference=1",),
    ("--advantage=gtpo", "--temperature=0.9")])
def test_the_numbers_are_those_of_the_two_models(more, folder, tmp_path):
    if more:
        folder = tmp_path / "run"
        trains(*SMALL, *more, f"--output={folder}")
    page = page_in(folder)
    run = train.Run(folder)
    run.step = 2
    groups = train.groups_to_show(run)
    assert [group["step"] for group in groups] == [1, 2]
    recorded = [group["logprobs"] for group in groups if "logprobs" in group]
    assert bool(recorded) == any("kl" in flag or "renew" in flag for flag in more)
    if recorded:  # those of the first step are the start's own
        assert sum(recorded[0], []) == pytest.approx(
            sum(scored(loaded(str(TINY), torch.float32)[0], groups[0]), []), abs=1e-5)
    found = [float(title) for title in page.titles]
    temperature = [0.9] * ("--temperature=0.9" in more)
    assert found == pytest.approx(by_hand(folder, groups, *temperature), abs=1e-5)
    assert max(map(abs, found)) > 1e-3
    text = "".join(page.texts)
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    for group in groups:
        assert group["question"] in text and group["prompt"] in text
        for turns in group["ids"]:
            assert tokenizer.decode(turns[0]) in text
    assert ("when it drew them" if recorded else "than at the start") in text
    assert "mean r" in text and "A +" in text
    cut = sum(not finished for group in groups for finished in group["finished"])
    assert text.count("cut at the limit") == cut
    assert ("q",) in page.tags or REPLY[0] not in more


def test_no_page_on_request(monkeypatch, capsys, folder, tmp_path):
    monkeypatch.setattr(train, "groups_to_show", None)    # nothing is read
    trains(*SMALL, "--no-page", f"--output={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "page.html").exists()
    assert "page.html" not in capsys.readouterr().out
    assert curve(tmp_path / "run") == curve(folder)       # and nothing is learned otherwise


def shown_with(folder, words, warning="w", groups=None):
    """The page of that run, with these words wherever a person or a model may have written."""
    run = train.Run(folder.parent / words[0].replace("/", "").replace("\0", ""))
    run.step, run.held_out = 2, [(0, 0.1), (2, 0.3)]
    run.history = [{**metrics, "warning": warning, f"reward/{warning}": 1.0}
                   for metrics in lines_of(folder / "metrics.jsonl")[1:]]
    real = train.Run(folder)
    real.step = 2
    groups = groups or train.groups_to_show(real)
    for group in groups:
        group["question"] = group["prompt"] = words[0]
        group["d"] = [[0.5 + t for t in range(sum(map(len, turns[::2])))] for turns in group["ids"]]

    class Speaks:
        def batch_decode(self, rows):
            return ["".join(words[token % len(words)] for token in row) for row in rows]

    s = settings(*SMALL)
    s.model = f"x/{warning}".replace("</", "<")
    return train.page_of(run, groups, Speaks(), s)


def test_what_a_model_wrote_is_text(folder):
    calm = Tags(shown_with(folder, ["word"]))
    assert shown_with(folder, ["word"]).count("Content-Security-Policy") == 1
    assert {"held out", "reward_mean", "reward/w", "approx_kl"} < set(calm.texts)
    for word in HOSTILE:
        text = shown_with(folder, [word], word)
        wild = Tags(text)
        assert wild.tags == calm.tags and len(wild.titles) == len(calm.titles)
        assert "script" not in {tag for tag, *_ in wild.tags}
        text.encode("utf-8")                              # no half of a surrogate pair is left
        assert not set("\x00\x1b\u202e\u200f\u2028\ud800") & set(text)
    assert "‹202E›" in shown_with(folder, HOSTILE[3:4])
    assert "&lt;script&gt;" in shown_with(folder, HOSTILE[:1])
    assert {name for _, *names in wild.tags for name in names} <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "style", "title", "dir",
        "viewbox", "points", "x", "width", "height"}      # none that loads or runs anything


@pytest.mark.parametrize("answers, tokens, word", [
    (8, 400, "word"), (64, 300, "word"), (4, 800, '"' * 120)])
def test_a_page_stays_small(folder, answers, tokens, word):
    group = {"rewards": [1.0, 0.0] * (answers // 2), "advantages": [1.0, -1.0] * (answers // 2),
             "finished": [True] * answers, "ids": [[[1] * tokens]] * answers}
    groups = [{**group, "step": 2**k} for k in range(9)]
    text = shown_with(folder, [word], groups=groups)
    assert len(text.encode()) <= 500_000
    Tags(text)
    assert text.count("<section>") == 9
    assert text.count(" title=") < 1.1 * train.MOST_TINTED


def test_a_bar_points_the_way_of_its_advantage(folder):
    group = {"rewards": [1.0, 0.0], "advantages": [1.5, -1.5], "finished": [True] * 2,
             "ids": [[[1]]] * 2, "step": 1}
    text = shown_with(folder, ["word"], groups=[group])
    right, left = text.index("width:25.0%;margin-left:50.0%"), text.index("margin-left:25.0%")
    assert text.index("A +1.50") < right < text.index("A -1.50") < left


def test_the_text_of_each_token(tiny, qwen):
    """Words with the spaces between them, bytes that are half a character: nothing is lost."""
    tokenizer = tiny[1]
    ids = tokenizer("9 - 4 = 5", add_special_tokens=False).input_ids
    assert sample.words_of(tokenizer, ids) == ["9", " -", " 4", " =", " 5"]
    text = "héllo 🧮𓀀 x"
    words = sample.words_of(qwen, qwen(text).input_ids)
    assert all(words) and words[0] == "h" and words[-1] == " x" and "�" in "".join(words)


def test_a_group_that_teaches_is_shown_where_a_step_has_one(tmp_path):
    groups = [(1, [0, 0]), (1, [0, 1]), (1, [1, 0]), (2, [1, 1]), (3, [0, 1]), (5, [0, 0])]
    lines = [json.dumps({"step": step, "rewards": rewards, "ids": []}) for step, rewards in groups]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    run = train.Run(tmp_path)
    run.step = 5
    shown = [(group["step"], group["rewards"]) for group in train.groups_to_show(run)]
    assert shown == [groups[1], groups[3], groups[5]]


def test_two_ranks_write_one_page(folder, tmp_path):
    done = run_ranks(2, "train.py", *SMALL, f"--output={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    ours, one = page_in(tmp_path / "run"), page_in(folder)
    assert ours.tags == one.tags
    assert list(map(float, ours.titles)) == pytest.approx(list(map(float, one.titles)), abs=1e-5)


def test_a_browser_reads_it_as_it_stands(folder, tmp_path):
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium")
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--disable-gpu", "--no-sandbox")
    done = subprocess.run([chromium, "--headless", *quiet, f"--user-data-dir={tmp_path}",
                           "--dump-dom", (folder / "page.html").as_uri()],
                          capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    seen, ours = Tags(done.stdout), page_in(folder)
    assert seen.tags == ours.tags and seen.titles == ours.titles
    assert "".join(seen.texts).split() == "".join(ours.texts).split()


def test_the_picture_is_small():
    picture = (TINY / "page.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and len(picture) <= 150_000


def test_samples_tell_who_wrote_what():
    told = IGNORE
    rows = sample.turns_of([5, 6, 7, 8, 9, 3, 0, 0], [told, told, 7, 8, told, 3, told, told])
    assert rows == [[5, 6], [7, 8], [9], [3]]
    assert sample.turns_of([5, 7], [IGNORE, 7]) == [[5], [7]]
    assert json.loads(json.dumps(rows)) == rows
