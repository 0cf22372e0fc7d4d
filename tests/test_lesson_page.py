"""tests/tools/lesson.py: its numbers are those of the step, and no line that runs is left out."""
import copy
import html
import inspect
import re
import sys
import pytest
import torch
from checks import seeded
from files import TINY
from models import make_tokenizer, small_model
import lesson
import sample
import train
from advantage import plain_advantages
from logprob import plain_logprobs
from loss import plain_loss
from reward import score_responses

QUESTION, ANSWER = lesson.PROBLEM
FUNCTIONS = [inspect.unwrap(function) for stage in lesson.STAGES for function in stage[1]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("lesson") / "lesson.html"
    lesson.main([f"--output={path}"])
    return path.read_text(encoding="utf-8")


def values_of(page, function):
    """{line: (code, what stands beside it)} of a function on the page."""
    _, _, table = page.partition(f"<h3>{function} ")
    rows = table.partition("<h3>")[0].split('<tr><td class="line">')[1:]
    rows = (re.match(r'(\d+)</td><td><pre>(.*?)</pre></td><td class="values">(.*)</td></tr>', row,
                     re.DOTALL).groups() for row in rows)
    return {int(line): (html.unescape(re.sub("<.*?>", "", code)).strip(), values)
            for line, code, values in rows}


def beside(page, function, begin):
    """What stands beside the line that begins so."""
    found, = [values for code, values in values_of(page, function).values()
              if code.startswith(begin)]
    return found


def numbers(text, mark=""):
    """The numbers in the rows with this mark."""
    rows = re.findall(rf"<tr><th>{mark}</th>(.*?)</tr>", text)
    return [float(number.replace("−", "-"))
            for row in rows for number in re.findall(">(−?[.0-9]+)<", row)]


def parts():
    """A policy, its reference, an optimizer, the tokenizer, and the prompt of the default page."""
    policy, tokenizer = sample.open_policy(TINY)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=0.0)
    reference = copy.deepcopy(policy).requires_grad_(False)
    return policy, reference, optimizer, tokenizer, [sample.chat_prompt(
        tokenizer, {"question": QUESTION}, "")]


@pytest.fixture(scope="module")
def step():
    """The same step by the plain functions -> the rollout, A, the losses, which tokens are shown,
    and their log-probs in both updates.
    """
    policy, reference, optimizer, tokenizer, prompts = parts()
    rollout = sample.sample_groups(policy, tokenizer, prompts, 4, 40, 1.0, seeded(3))
    A = plain_advantages(score_responses(rollout.responses, [ANSWER], 4), 4)
    losses, logprobs = [], []
    for _ in range(2):
        logprobs.append(plain_logprobs(policy, rollout.input_ids, rollout.labels))
        old = logprobs[0].detach()
        losses.append(plain_loss(logprobs[-1], old, old, A, rollout.mask))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    shown = [(n, t) for n, own in enumerate(rollout.mask) for t in own.nonzero()[:4, 0].tolist()]
    first, second = ([logp[n, t].item() for n, t in shown] for logp in logprobs)
    return rollout, A, [loss.item() for loss in losses], shown, first, second


def test_the_numbers_are_those_of_the_step(written, step):
    rollout, A, losses, shown, first, second = step
    w = [torch.tensor(b - a).exp().item() for a, b in zip(first, second)]
    for function, begin, mark, expected in (
            ("plain_logprobs", "return", "①", first), ("plain_logprobs", "return", "②", second),
            ("plain_logprobs", "logprobs =", "②", second),
            ("plain_step", "logp =", "②", second), ("plain_step", "old =", "", first),
            ("plain_loss", "w =", "①", [1.0] * len(w)), ("plain_loss", "w =", "②", w),
            ("plain_advantages", "return", "", A.tolist()), ("plain_step", "A =", "", A.tolist())):
        found = numbers(beside(written, function, begin), mark)
        assert found == pytest.approx(expected, abs=6e-4), (function, begin, mark)
    assert losses[0] == 0
    for function, begin in (("plain_loss", "return"), ("plain_step", "loss =")):
        text = beside(written, function, begin)
        assert float(re.search("① 0 ② −(.*?)<", text)[1]) == pytest.approx(-losses[1], rel=1e-3)
    # What is framed: the clip bites there
    clipped = [(r > 1.2 and A[n] > 0) or (r < 0.8 and A[n] < 0) for r, (n, _) in zip(w, shown)]
    _, _, second_rows = zip(*re.findall(r"<tr><th>y.*?</tr>()(<tr>.*?</tr>)(<tr>.*?</tr>)",
                                        beside(written, "plain_loss", "J =")))
    framed = ["clip" in cell for row in second_rows for cell in row.split("</td>")[:-1]]
    assert framed == clipped and any(clipped)


def test_the_story_is_true(written, step):
    rollout, A, _, shown, first, second = step
    assert lesson.STORY in written
    beginnings = [shown.index((n, t)) for n, t in shown if t == shown[0][1]]
    (sum_, guess, _, lucky) = beginnings
    told = [float(number.replace("−", "-")) for number in re.findall(r"−\d\.\d+", lesson.STORY)]
    assert told == pytest.approx([first[sum_], second[sum_], first[guess], second[guess]], abs=6e-4)
    assert ["=" in text for text in rollout.responses] == [True, False, False, False]
    assert A.sign().tolist() == [1, -1, -1, 1] and second[lucky] < first[lucky]


def test_every_line_that_runs_has_its_values(written):
    codes = {function.__code__: function.__name__ for function in FUNCTIONS}
    ran = {name: set() for name in codes.values()}

    def trace(frame, event, _):
        if frame.f_code in codes and event == "line":
            ran[codes[frame.f_code]].add(frame.f_lineno)
        return trace

    policy, reference, optimizer, tokenizer, prompts = parts()
    sys.settrace(trace)
    try:
        train.plain_step(policy, reference, optimizer, tokenizer, prompts, [ANSWER], 4, 40,
                         seeded(3), updates=2)
    finally:
        sys.settrace(None)
    for name, lines in ran.items():
        on_page = values_of(written, name)
        head = {line for line, (code, _) in on_page.items() if code.startswith("def ")}
        assert len(lines) > 0 and lines | head == {
            line for line, (_, values) in on_page.items() if values}, name


def test_another_model_and_ones_own_question(tmp_path, capsys):
    small_model("llama").save_pretrained(tmp_path)
    make_tokenizer(pad_token="<pad>", eos_token="<end>", unk_token="w3", chat_template=(
        "{{ messages[-1].content }}")).save_pretrained(tmp_path)
    ask = ["w7 <script>", "</td>"]
    lesson.main([f"--model={tmp_path}", "--ask", *ask, f"--output={tmp_path / 'page'}"])
    out, err = capsys.readouterr()
    page = (tmp_path / "page").read_text(encoding="utf-8")
    assert "nothing is learned" in err and str(tmp_path / "page") in out
    assert "(64,)" in page and lesson.STORY not in page
    assert numbers(beside(page, "plain_advantages", "return")) == [0] * 4
    assert set(numbers(beside(page, "plain_loss", "w ="))) == {1}
    page = lesson.page_of(*ask)                           # the tiny policy knows none of it
    assert "<script" not in page and "w7 &lt;script" in page and "&lt;/td&gt;" in page
    assert "<|" not in page and "&lt;|end|&gt;" in page


@pytest.mark.parametrize("flags", [["--model=nowhere"], ["--output=no/such/folder"]])
def test_what_cannot_be_read_or_written_is_told_in_a_line(flags, capsys):
    with pytest.raises(SystemExit) as leaving:
        lesson.main(flags)
    out, err = capsys.readouterr()
    assert leaving.value.code == 2 and not out
    assert err.startswith("lesson.py: ") and err.count("\n") == 1 and flags[0].split("=")[1] in err
