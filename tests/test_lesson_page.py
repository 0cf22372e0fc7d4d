"""tests/tools/lesson.py: its numbers are those of the steps, and no line that runs is left out."""
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

QUESTIONS, TRUTHS = zip(*lesson.PROBLEMS)
FUNCTIONS = [inspect.unwrap(function) for stage in lesson.STAGES for function in stage[1]]
SHOWN = 0, 1, 4                                               # the rows whose tokens stand by lines


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("lesson") / "lesson.html"
    lesson.main([f"--output={path}"])
    return path.read_text(encoding="utf-8")


def values_of(page, function):
    """{line: (code, what stands beside it)} of a function on the page."""
    _, _, table = page.partition(f"<h3>{function} ")
    rows = table.partition("</section>")[0].partition("<h3>")[0].split('<td class="line">')[1:]
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


def tables(page):
    """The tables that are not beside lines: [{head: its column}]."""
    found = []
    for table in re.findall('<table class="rows">(.*?)</table>', page):
        heads = re.findall("<th>(.*?)</th>", table)
        rows = [re.findall("<td>(.*?)</td>", row) for row in table.split("<tr>")[1:]]
        found.append(dict(zip(heads, zip(*rows))))
    return found


def column(table, head):
    return torch.tensor([float(number.replace("−", "-")) for number in table[head]])


def parts():
    """A policy, its reference, an optimizer, the tokenizer, and the prompts of the default page."""
    policy, tokenizer = sample.open_policy(TINY)
    optimizer = torch.optim.AdamW(policy.parameters(), 1.5e-3, weight_decay=0.0)
    reference = copy.deepcopy(policy).requires_grad_(False)
    return policy, reference, optimizer, tokenizer, [sample.chat_prompt(
        tokenizer, {"question": question}, "") for question in QUESTIONS]


@pytest.fixture(scope="module")
def steps():
    """The same steps by the plain functions: of each the rollout, A, and in both updates the loss,
    the log-probs and their gradient.
    """
    policy, reference, optimizer, tokenizer, prompts = parts()
    generator, found = seeded(lesson.SEED), []
    for _ in range(2):
        rollout = sample.sample_groups(policy, tokenizer, prompts, 4, 40, 1.0, generator)
        A = plain_advantages(score_responses(rollout.responses, TRUTHS, 4), 4)
        ref = plain_logprobs(reference, rollout.input_ids, rollout.labels)
        updates = []
        for _ in range(2):
            logp = plain_logprobs(policy, rollout.input_ids, rollout.labels)
            logp.retain_grad()
            old = updates[0][1] if updates else logp.detach()
            loss = plain_loss(logp, old, ref, A, rollout.mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates.append((loss.item(), logp.detach(), logp.grad))
        found.append((rollout, A, ref, updates))
    return found


def test_the_numbers_beside_the_lines_are_those_of_the_step(written, steps):
    rollout, A, _, ((first_loss, first, _), (second_loss, second, _)) = steps[0]
    shown = [(n, t) for n in SHOWN for t in rollout.mask[n].nonzero()[:4, 0].tolist()]
    w = (second - first).exp()
    for function, begin, mark, expected in (
            ("plain_logprobs", "logprobs =", "①", first), ("plain_loss", "w =", "②", w),
            ("plain_logprobs", "logprobs =", "②", second), ("plain_advantages", "return", "", A)):
        expected = [expected[n, t].item() for n, t in shown] if expected.ndim == 2 else A.tolist()
        found = numbers(beside(written, function, begin), mark)
        assert found == pytest.approx(expected, abs=6e-4), (function, begin, mark)
    # What stands above is not shown again
    assert "= logprobs ①" in beside(written, "plain_step", "old =")
    assert "= plain_advantages" in beside(written, "plain_step", "A =")
    assert first_loss == pytest.approx(0, abs=1e-7)
    for function, begin in (("plain_loss", "return"), ("plain_step", "loss =")):
        text = beside(written, function, begin)
        assert float(re.search("② −(.*?)<", text)[1]) == pytest.approx(-second_loss, rel=1e-3)
    # The draw: u lies in the drawn token's part of the running sum
    u = float(re.search("① (.*?) ②", beside(written, "plain_answer", "for number"))[1])
    p = numbers(beside(written, "plain_answer", "p ="), "①")
    n = beside(written, "plain_answer", "p =").split("<th>")[2:6]
    drawn = [word.partition("<")[0] for word in n].index("9")
    assert p[4 + drawn] - p[drawn] - 1e-3 < u < p[4 + drawn]


def test_token_by_token(written, steps):
    long, short, shares, later_long, later_short, later_shares = tables(written)
    for (rollout, A, ref, updates), rows, marks, found in (
            (steps[0], (0, 1), "①②", (long, short)),
            (steps[1], (4, 5), "③④", (later_long, later_short))):
        (_, old, first), (_, logp, second) = updates
        w, d, mask = (logp - old).exp(), ref - logp, rollout.mask
        clipped = (w > 1.2) & (A[:, None] > 0) | (w < 0.8) & (A[:, None] < 0)
        by_hand = -(w * A[:, None] * ~clipped + 0.04 * (d.exp() - 1)) * mask
        by_hand = by_hand / 8 / mask.sum(dim=1, keepdim=True)
        for n, table in zip(rows, found):
            t = column(table, f"{lesson.NAMES[n]}: t").long()
            for head, values in (
                    ("id", rollout.input_ids[:, 1:]), ("label", rollout.labels[:, 1:]),
                    ("mask", mask), ("log π_ref", ref), ("log π_old", old), ("w", w), ("d", d),
                    (f"log π {marks[1]}", logp), ("clipped", clipped), (marks[1], by_hand),
                    (f"∂L/∂logp {marks[0]}", first), (marks[1], second)):
                assert column(table, head) == pytest.approx(values[n, t].double(), abs=6e-5), head
            # The shift: a line's token is what the next line is predicted from
            words, before = table["token t + 1"], table["predicted from"]
            assert all(text.endswith(" " + word) for word, text in zip(words, before[1:]))
            assert set(column(table, "mask").tolist()) == {0, 1}
    assert column(long, "clipped").any() and column(short, "clipped").any()
    # In step 2 the ratio says nothing of the reference; and a change for the worse is not clipped
    assert (column(later_long, "log π_ref") - column(later_long, "log π_old")).abs().max() > 0.1
    assert ((column(later_short, "w") < 0.8) & (column(later_short, "∂L/∂logp ③") < 0)).any()
    assert not column(later_short, "clipped").any()
    # A long answer gets as much as its A says, and a flat group nothing
    assert column(shares, "|y|").tolist() == [22, *[4] * 7]
    assert column(shares, "A") == pytest.approx([1.7321, *[-0.5774] * 3, *[0] * 4])
    assert column(shares, "of all its tokens") == pytest.approx(
        -column(shares, "A") / 8, abs=1e-4)
    assert column(later_shares, "A").tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    # And the mean of y₁'s row can be computed from its tokens
    row = ((column(long, "J") - 0.04 * column(long, "KL")) * column(long, "mask")).sum() / 22
    assert numbers(beside(written, "plain_loss", "row_means ="), "②")[0] == pytest.approx(
        row.item(), abs=1e-3)


def test_the_story_is_true(written, steps):
    (rollout, _, _, ((_, first, _), (_, second, _))), (later, *_) = steps
    assert lesson.STORY in written and "≠" not in written and len(written.encode()) < 120_000
    told = [float(number.replace("−", "-")) for number in re.findall(r"−\d\.\d+", lesson.STORY)]
    t = [rollout.mask[n].nonzero()[0, 0] for n in (0, 1)]
    assert told == pytest.approx([x[n, t[n]].item() for n in (0, 1) for x in (first, second)],
                                 abs=6e-4)
    assert [["=" in text for text in x.responses] for x in (rollout, later)] == [
        [True, *[False] * 7], [True] * 5 + [False] * 3]
    assert written.count("−1.273") < 9                    # no number nine times over


@pytest.mark.parametrize("function, right, wrong, head", [
    (plain_logprobs, "logits[:, :-1]", "logits[:, 1:]", "log π_old"),
    (plain_logprobs, ".where(is_label, 0)", "", "log π_ref"),
    (plain_loss, "* mask  ", "", "∂L/∂logp ①"),
    (plain_loss, "return -", "return ", "∂L/∂logp ①"),
    (plain_loss, "w.clamp(1 - clip_eps, 1 + clip_eps)", "w", "②"),
    (plain_loss, "torch.minimum(w * A, w.clamp(1 - clip_eps, 1 + clip_eps) * A)",
     "w.clamp(1 - clip_eps, 1 + clip_eps) * A", "④"),
    (plain_loss, "ref_logprobs - logprobs", "old_logprobs - logprobs", "④"),
    (plain_loss, "J - kl_coef", "J + kl_coef", "②"),
    (train.plain_step, "(reference, rollout", "(policy, rollout", "log π_ref"),
    (train.plain_step, "rollout.mask", "rollout.mask | True", "mask"),
    (plain_advantages, ", correction=0", "", "A")])
def test_a_mistake_is_seen(tmp_path, monkeypatch, function, right, wrong, head):
    path = tmp_path / "wrong.py"
    source = inspect.getsource(function)
    assert right in source
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    names = dict(function.__globals__)
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    monkeypatch.setattr(function, "__code__", names[function.__name__].__code__)
    page = lesson.page_of(lesson.PROBLEMS)
    assert any("≠" in cell for table in tables(page) for cell in table.get(head, ()))


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
        train.plain_step(policy, reference, optimizer, tokenizer, prompts, TRUTHS, 4, 40,
                         seeded(lesson.SEED), updates=2)
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
    assert "(64,)" in page and lesson.STORY not in page and "≠" not in page
    assert numbers(beside(page, "plain_advantages", "return")) == pytest.approx([0] * 4, abs=1e-3)
    assert set(numbers(beside(page, "plain_loss", "w ="))) == {1}
    page = lesson.page_of([ask] * 3)                      # the tiny policy knows none of it
    assert "<script" not in page and "w7 &lt;script" in page and "&lt;/td&gt;" in page
    assert "<|" not in page and "&lt;|end|&gt;" in page


@pytest.mark.parametrize("flags", [["--model=nowhere"], ["--output=no/such/folder"]])
def test_what_cannot_be_read_or_written_is_told_in_a_line(flags, capsys):
    with pytest.raises(SystemExit) as leaving:
        lesson.main(flags)
    out, err = capsys.readouterr()
    assert leaving.value.code == 2 and not out
    assert err.startswith("lesson.py: ") and err.count("\n") == 1 and flags[0].split("=")[1] in err
