"""tests/tools/lesson.py: its numbers are those of the steps, and no line that runs is left out."""
import html
import inspect
import re
import runpy
import trace
import pytest
import torch
from checks import seeded
from models import make_tokenizer, small_model
from steps import parts as parts_of_a_step
import lesson
import sample
import train
from advantage import plain_advantages
from logprob import plain_logprobs
from loss import plain_loss
from reward import score_responses

QUESTIONS, TRUTHS = zip(*lesson.PROBLEMS)


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
    """The tables that are not beside lines, each as {head: its column}."""
    for table in re.findall('<table class="rows">(.*?)</table>', page):
        heads = re.findall("<th>(.*?)</th>", table)
        rows = [re.findall("<td>(.*?)</td>", row) for row in table.split("<tr>")[1:]]
        yield dict(zip(heads, zip(*rows)))


def parts():
    """A policy, its reference, an optimizer, the tokenizer, and the prompts of the default page."""
    p = parts_of_a_step("--lr=1.5e-3", noise=0)
    prompts = [sample.chat_prompt(p.tokenizer, {"question": x}, "") for x in QUESTIONS]
    return p.policy_model, p.ref_model, p.optimizer, p.tokenizer, prompts


@pytest.fixture(scope="module")
def steps():
    """The same steps by the plain functions: of each the rollout, A, ref and two log-probs."""
    policy, reference, optimizer, tokenizer, prompts = parts()
    generator, found = seeded(lesson.SEED), []
    for _ in range(2):
        rollout = sample.sample_groups(policy, tokenizer, prompts, 4, 40, 1.0, generator)
        A = plain_advantages(score_responses(rollout.responses, TRUTHS, 4), 4)
        row = rollout.input_ids, rollout.labels
        ref, old = plain_logprobs(reference, *row), plain_logprobs(policy, *row).detach()
        for _ in range(2):
            logp = plain_logprobs(policy, *row)
            loss = plain_loss(logp, old, ref, A, rollout.mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append((rollout, A, ref, old, logp.detach(), loss.item()))
    return found


def test_the_numbers_beside_the_lines_are_those_of_the_step(written, steps):
    rollout, A, _, old, logp, loss = steps[0]
    # By the lines stand tokens of two siblings, and of an answer of the other group.
    shown = [(n, t) for n in (0, 1, 4) for t in rollout.mask[n].nonzero()[:4, 0].tolist()]
    assert numbers(beside(written, "plain_advantages", "return")) == pytest.approx(
        [*[3 ** 0.5, *[-3 ** -0.5] * 3], *[0] * 4], abs=6e-4)       # 1 of 4, then a flat group
    d = old - logp                                        # in step 1 pi_old is the reference
    for function, begin, mark, values in (
            ("plain_logprobs", "logprobs =", "①", old), ("plain_loss", "d =", "②", d),
            ("plain_logprobs", "logprobs =", "②", logp), ("plain_loss", "w =", "②", (-d).exp())):
        found = numbers(beside(written, function, begin), mark)
        assert found == pytest.approx([values[n, t].item() for n, t in shown], abs=6e-4), begin
    assert "= logprobs ②" in beside(written, "plain_step", "logp =")    # it is not shown again
    assert written.count("−1.273") < 9
    for function, begin in (("plain_loss", "return"), ("plain_step", "loss =")):
        text = beside(written, function, begin)
        assert float(re.search("② −(.*?)<", text)[1]) == pytest.approx(-loss, rel=1e-3)
    # The draw: u lies in the part of the running sum that the token 9 adds
    u = float(re.search("① (.*?) ②", beside(written, "plain_answer", "for number"))[1])
    text = beside(written, "plain_answer", "p =")
    drawn = re.findall("<th>(.*?)</th>", text)[1:5].index("9")
    p, total = numbers(text, "①")[drawn::4]
    assert total - p - 1e-3 < u < total


def test_token_by_token(written, steps):
    found = tables(written)
    for (rollout, A, ref, old, logp, _), rows, marks in zip(steps, ((0, 1), (4, 5)), ("①②", "③④")):
        w, d, mask = (logp - old).exp(), ref - logp, rollout.mask
        clipped = (w > 1.2) & (A[:, None] > 0) | (w < 0.8) & (A[:, None] < 0)
        first = -(A[:, None] + 0.04 * (ref - old).expm1())            # its w is 1
        last = -(w * A[:, None] * ~clipped + 0.04 * d.expm1())
        shares = mask / mask.sum(dim=1, keepdim=True) / 8
        for n, table in zip(rows, found):
            t = [int(t) for t in table[f"{lesson.NAMES[n]}: t"][:-1]]
            for head, values in (
                    ("id", rollout.input_ids[:, 1:]), ("label", rollout.labels[:, 1:]),
                    ("mask", mask), ("log π_ref", ref), ("log π_old", old), ("w", w), ("d", d),
                    ("clipped", clipped), (f"∂L/∂logp {marks[0]}", first * shares),
                    (marks[1], last * shares)):
                column = [float(number.replace("−", "-")) for number in table[head][:len(t)]]
                assert column == pytest.approx(values[n, t].double().tolist(), abs=6e-5)
            # A token is what the next one is predicted from; before and after it nothing counts
            for word, text in zip(table["token t + 1"], table["predicted from"][1:len(t)]):
                assert text.endswith(" " + word)
            assert {"0", "1"} == {*table["mask"][:-1]}


def test_the_story_is_true(written, steps):
    (rollout, _, _, old, logp, _), (later, A, ref, later_old, later_logp, _) = steps
    assert lesson.STORY in written and "≠" not in written and len(written.encode()) < 120_000
    told = [float(number.replace("−", "-")) for number in re.findall(r"−\d\.\d+", lesson.STORY)]
    first = [row.nonzero()[0, 0] for row in rollout.mask]
    assert told == pytest.approx([x[n, first[n]].item() for n in (0, 1) for x in (old, logp)],
                                 abs=6e-4)
    assert [["=" in text for text in x.responses] for x in (rollout, later)] == [
        [True, *[False] * 7], [True] * 5 + [False] * 3]
    t = later.mask[5].nonzero()[0, 0]
    assert A[5] > 0 and later_logp[5, t] - later_old[5, t] < torch.tensor(0.8).log()
    assert abs(ref[5, t] - later_old[5, t]) > 0.05        # the reference is no longer pi_old


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
    (plain_advantages, ", correction=0", "", "predicted from")])
def test_a_mistake_is_seen(tmp_path, monkeypatch, function, right, wrong, head):
    path = tmp_path / "wrong.py"
    source = inspect.getsource(function)
    assert right in source
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    wrong_one = runpy.run_path(path, function.__globals__)[function.__name__]
    monkeypatch.setattr(function, "__code__", wrong_one.__code__)
    page = lesson.page_of(lesson.PROBLEMS)
    assert any("≠" in cell for table in tables(page) for cell in table.get(head, ()))


def test_every_line_that_runs_has_its_values(written):
    tracer = trace.Trace(trace=False)
    tracer.runfunc(train.plain_step, *parts(), TRUTHS, 4, 40, seeded(lesson.SEED), updates=2)
    ran = tracer.results().counts                         # {(file, line): how often}
    for function in [inspect.unwrap(f) for stage in lesson.STAGES for f in stage[1]]:
        on_page = values_of(written, function.__name__)
        file = function.__code__.co_filename
        lines = {line for line in on_page if (file, line) in ran}
        head = {line for line, (text, _) in on_page.items() if text.startswith("def ")}
        shown = {line for line, (_, values) in on_page.items() if values}
        assert len(lines) > 0 and lines | head == shown, function.__name__


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
