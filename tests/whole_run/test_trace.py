"""--trace: one step, stage by stage, against the same step computed again."""
import dataclasses
import os
import re
from types import SimpleNamespace
import pytest
import torch
from models import logprobs_on_full_logits
from runs import told
from steps import PROBLEMS, parts, parts_of
import train
from loss import kl_estimate


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    flags = ("--group-size=4", "--lr=0.0005", "--temperature=0.9", "--length-rescale=0.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trace"))
        out, _ = told("--trace", *flags)
        assert not os.listdir()
    p = parts(*flags, noise=0)
    # The same step once more: another problem, until its answers disagree
    s = dataclasses.replace(p.settings, prompts_per_step=1, max_resample=20, updates_per_rollout=1)
    given = parts_of(p, PROBLEMS)
    batch = train.batch_of_step(given, 1, s)
    metrics, rollout = train.train_step(given, batch, s)
    with torch.no_grad():
        old, new = (logprobs_on_full_logits(policy, rollout, 0.9)[0]
                    for policy in (p.ref_model, p.policy_model))
    return SimpleNamespace(out=out, tokenizer=p.tokenizer, rollout=rollout, metrics=metrics,
                           old=old, new=new, prompt=rollout.prompts[0],
                           truth=rollout.problems[0]["answer"])


def test_the_trace_tells_the_stages_in_order(traced):
    assert re.findall(r"\[([A-H])\]", traced.out) == list("ABCDEFGH")
    assert traced.prompt in traced.out and f"truth is {traced.truth}" in traced.out
    rollout = traced.rollout
    for n, response in enumerate(rollout.responses):
        line = next(line for line in traced.out.splitlines() if f"  y_{n + 1} " in line)
        words = (f"{rollout.mask[n].sum()} tokens", f"r {rollout.rewards[n]:g}",
                 f"A {rollout.advantages[n]:+.4f}", train.one_line(response)[:60])
        assert all(word in line for word in words), line


def test_the_trace_agrees_with_a_step_computed_again(traced):
    rollout, mask, old, new = traced.rollout, traced.rollout.mask, traced.old, traced.new
    ratio = (new - old).exp()
    A = rollout.advantages[:, None].expand_as(ratio)
    J = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    k3 = kl_estimate(new, old)
    rows = re.findall(r"^  y_(\d) +('.*?'|\".*?\") +([-\d].*)$", traced.out, re.MULTILINE)
    expected = [(n, t) for n in range(4) for t in mask[n].nonzero()[:4, 0].tolist()]
    for (row, word, numbers), (n, t) in zip(rows, expected, strict=True):
        token = traced.tokenizer.decode(rollout.input_ids[n, t + 1:t + 2])
        assert (int(row), word) == (n + 1, repr(token[:10]))
        values = [float(x[n, t]) for x in (old, old, new, ratio, J, k3)]
        found = [float(x) for x in numbers.removesuffix(" clipped").split()]
        assert found == pytest.approx(values, rel=1e-3, abs=2e-3)
        assert numbers.endswith("clipped") == bool(J[n, t] < ratio[n, t] * A[n, t])
    loss, norm = (traced.metrics[name] for name in ("loss", "grad_norm"))
    assert "clipped\n" in traced.out and f"norm of its gradient {norm:.4f}"[:-1] in traced.out
    assert f"grpo_loss before the update {loss:+.6f}"[:-1] in traced.out
    agreed = ((new - old) * A)[mask]
    moved, of = map(int, re.search(r"(\d+) of (\d+) tokens have moved", traced.out).groups())
    # A token that has hardly moved may count or not
    assert 4 < (agreed > 1e-5).sum() <= moved <= (agreed > -1e-5).sum() and of == len(agreed)
