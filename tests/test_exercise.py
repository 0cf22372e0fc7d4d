"""tests/tools/exercise.py: what its folder holds; and the lesson tells each common mistake."""
import ast
import importlib
import inspect
import subprocess
import sys
from unittest.mock import Mock
import pytest
import test_lesson
from exercise import RULER, STAYS, YOURS, main
from files import LIMIT, ROOT
import train

MODULE = {name: importlib.import_module(file.removesuffix(".py")) for name, file in YOURS.items()}


def parts_of(source):
    """{name: what stands there} of a file's functions and classes, and all else by itself."""
    parts = {part: ast.dump(part) for part in ast.parse(source).body}
    return {getattr(part, "name", text): text for part, text in parts.items()}


def test_a_folder_has_all_but_the_answers(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    in_sight = []
    for file in set(YOURS.values()):
        whole, exercise = ((place / file).read_text("utf-8") for place in (ROOT, tmp_path))
        in_sight += filter(str.isidentifier, parts_of(exercise.split(RULER)[0]))
        whole, exercise = parts_of(whole), parts_of(exercise)
        assert whole.keys() == exercise.keys()
        assert {name for name in whole if whole[name] != exercise[name]} == {
            name for name in YOURS if YOURS[name] == file}
    assert {*in_sight} == {*YOURS, *STAYS}
    # One stage is written. The others are told to be missing.
    (tmp_path / "loss.py").write_bytes((ROOT / "loss.py").read_bytes())
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "lesson"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=LIMIT)
    assert "test_ef_plain_loss PASSED" in done.stdout and "6 failed, 1 passed" in done.stdout
    assert done.stdout.count(" - NotImplementedError\n") == 6
    capsys.readouterr()
    for folder in (tmp_path, tmp_path / "loss.py", ROOT / "runs"):
        assert main([str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def told(name):
    """The first sentence that the lesson has on this function; "" if it is right."""
    for title, test in vars(test_lesson).items():
        if title.startswith("test_") and name in title:
            try:
                test()
            except AssertionError as error:
                return str(error).splitlines()[0]
    return ""


@pytest.mark.parametrize("name", YOURS)
def test_a_lesson_waits_for_no_other_function(monkeypatch, name):
    for other in set(YOURS) - {name}:
        for module in (MODULE[other], train):
            monkeypatch.setattr(module, other, Mock(side_effect=NotImplementedError), raising=False)
    assert told(name) == ""


DIVIDED = "(std + eps))"
LOGP = "logp = plain_logprobs(policy, rollout.input_ids, rollout.labels)"
LOSS = "plain_loss(logp, old, ref, A, rollout.mask, clip_eps, kl_coef)"
PARTS = ("sum(plain_loss(*(x[part] for x in (logp, old, ref, A, rollout.mask)), clip_eps, kl_coef)"
         "/ 2 for part in (slice(3), slice(3, 4)))")


@pytest.mark.parametrize("name, right, wrong, said", [
    ("plain_answer", "return ids", "return prompt_ids + ids", "prompt is no part"),
    ("plain_answer", "ids.append", "if token in ends: break\n        ids.append", "end token belo"),
    ("plain_answer", "<= number", "< number", "(<=)"),
    ("plain_answer", "logits = model(row).logits[0, -1]",
     "logits = model(row).logits[0, -1]; logits[logits < logits.topk(2)[0][1]] = -99", "no top-k"),
    ("plain_answer", "double() / temperature", "double()", "temperature before the draw"),
    ("plain_answer", "p[token].log()", "logits.log_softmax(dim=0)[token]", "distribution that"),
    ("extract_boxed", "last_boxes(text, boxes)", "text[boxes[0]]", "last box"),
    ("extract_boxed", "last_boxes(text, boxes)", "text[boxes[-1]].split('}')[0]", "balance"),
    ("rule_reward", "is_equal(answer, ground_truth)", "(answer == ground_truth)", "not texts"),
    ("rule_reward", "is_equal(answer, ground_truth)", "(abs(float(answer) - 63) < .01)", "Nearly"),
    ("plain_advantages", "correction=0", "correction=1", "not by G - 1"),
    ("plain_advantages", DIVIDED, "std)", "0 / 0"),
    ("plain_advantages", DIVIDED, DIVIDED + ".where(std >= 1e-8, 0)", "std below 1e-8"),
    ("plain_logprobs", "logits[:, :-1]", "logits[:, 1:]", "token t + 1"),
    ("plain_logprobs", ".where(is_label, 0)", "", "Prompt and padding"),
    ("plain_logprobs", ".where(is_label, 0)", ".where(is_label, 0).sum(dim=1)", "no sum"),
    ("plain_logprobs", " / temperature", "", "divided by the temperature"),
    ("plain_loss", ".minimum", ".maximum", "minimum counts"),
    ("plain_loss", "(logprobs - old_logprobs)", "(logprobs - old_logprobs).sum(1, True)", "whole"),
    ("plain_loss", "J - kl_coef", "J + kl_coef", "makes the loss larger"),
    ("plain_loss", "ref_logprobs - logprobs", "logprobs - ref_logprobs", "not the reverse"),
    ("plain_loss", "d.expm1() - d", "d.exp() - d - 1", "0 in float32"),
    ("plain_loss", "* KL) * mask", "* KL)", "Only the answer's"),
    ("plain_loss", ".sum(dim=1) / mask.sum(dim=1)", ".sum() / mask.sum()", "counts the same"),
    ("plain_step", "rewards =", "rollout.input_ids = tokenizer(prompts)\n    rewards =", "no text"),
    ("plain_step", "rollout.responses", "[prompts[0] + y for y in rollout.responses]", "prompt"),
    ("plain_step", LOGP, f"old = {LOGP}.detach()\n        {LOGP}", "pi_old is asked once"),
    ("plain_step", "torch.no_grad()", "torch.enable_grad()", "pi_old stands still"),
    ("plain_step", LOSS, PARTS, "by their sizes"),
    ("plain_step", "optimizer.zero_grad()", "pass", "zero_grad()")])
def test_a_mistake_is_told(monkeypatch, name, right, wrong, said):
    source = inspect.getsource(getattr(MODULE[name], name))
    assert source.count(right) == 1
    planted = {}
    exec(source.replace(right, wrong), vars(MODULE[name]), planted)
    monkeypatch.setattr(MODULE[name], name, planted[name])
    assert said in told(name)
