"""Conversations (--reply), branches of the best (--around-best), and --advantage shape."""
# ruff: noqa: I001 - several names to a line
import pytest
import torch
from conftest import (
    FEW, ROOT, assert_same_run, begin_ranks, ends_badly, lines_of, metrics_of, one_line_of, parts,
    refused, run_ranks, seeded, tiny_problems, trains)

import sample
import train
from advantage import shape_advantages
from logprob import IGNORE
from reward import rule_reward, truths_of

SMALL = (*FEW, "--steps=3", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=10",
         "--eval-limit=3", "--eval-every=2", "--save-every=1", "--updates-per-rollout=1")
REPLY = f"--reply={ROOT / 'tests' / 'helpers' / 'checker.py'}:check"


def test_a_conversation_ends_where_no_room_is_left(tiny):
    """The tiny policy has 128 positions: a prompt of 22, answers of 20, and much to listen to."""
    def reply(prompt, turns):
        return "Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?"

    prompt = train.chat_prompt(tiny[1], tiny_problems()[0], "")
    rollout = sample.sample_conversations(*tiny, [prompt], 4, 20, 1.0, [seeded(1)], reply=reply,
                                          max_turns=9)
    assert rollout.input_ids.shape[1] <= 128
    assert all(2 <= len(text.split("\n")) <= 4 for text in rollout.responses)


@pytest.mark.parametrize("kind", [(REPLY, "--max-turns=2"),
                                  ("--around-best=2", "--advantage=shape")])
def test_two_ranks_draw_what_one_process_draws_and_one_goes_on(kind, tmp_path):
    """Two steps on two ranks, the third in one process, against all of them there."""
    flags = (*SMALL, "--prompts-per-step=4", *kind)
    one, two = tmp_path / "one", tmp_path / "two"
    end = begin_ranks(2, "train.py", *flags, "--steps=2", f"--output={two}")
    trains(*flags, f"--output={one}")
    done = end()
    assert done.returncode == 0, done.stderr
    trains("--resume", two, "--steps=3")
    assert_same_run(two, one)
    for metrics in metrics_of(one)[1:]:                   # [D] finds the sampler's numbers
        assert metrics["sampler_difference"] < 1e-4 and metrics["tokens"] > 16
    if REPLY in kind:
        talks = sum((line["responses"] for line in lines_of(two / "samples.jsonl")), [])
        assert {len(turns) for turns in talks} <= {1, 3}  # answer, reply, answer
        assert any(turns[1:2] == ["How many ?"] and len(turns) == 3 for turns in talks)


def test_a_reply_that_fails_on_one_rank_ends_the_step_on_all(tmp_path):
    flags = (*SMALL, REPLY, "--prompts-per-step=4", f"--output={tmp_path / 'run'}")
    done = run_ranks(2, "train.py", *flags, REPLY="raise")
    line = one_line_of(done.stderr)
    assert done.returncode != 0 and "--reply" in line and "KeyError: 'oh'" in line


def test_a_reply_that_fails_ends_the_step(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("REPLY", "raise")
    line = ends_badly(capsys, *SMALL, REPLY, f"--output={tmp_path / 'run'}")
    assert "--reply" in line and "KeyError: 'oh' (checker.py, line 11)" in line
    assert not (tmp_path / "run" / "final").exists()
    monkeypatch.delenv("REPLY")
    trains("--resume", tmp_path / "run")
    assert len(metrics_of(tmp_path / "run")) == 4


def test_what_cannot_be_said_is_refused(capsys):
    assert "--reply" in refused(capsys, "--dtype=float32", "--reply=nowhere.py:check")
    assert "--reply" in refused(capsys, *SMALL, REPLY.replace(":check", ":other"))
    line = refused(capsys, *SMALL, REPLY, "--max-turns=50")
    assert "--max-new-tokens" in line and "--max-turns" in line
    assert "--max-turns" in refused(capsys, *SMALL, REPLY, "--max-turns=0")
    assert "--around-best" in refused(capsys, *SMALL, "--around-best=3")


def test_half_of_a_group_goes_on_from_the_best_of_the_other():
    """Branches begin as the best answer of the first half does, and evaluation knows none."""
    flags = (*SMALL, "--around-best=2", "--group-size=8")
    p = parts(*flags)
    batch = train.batch_of_step(p.tokenizer, tiny_problems()[:4], 1, p.settings)
    _, rollout = train.train_step(p.policy, p.reference, p.optimizer, p.tokenizer, batch,
                                  p.settings)
    for b, truth in enumerate(truths_of(batch.problems)):
        rows = rollout.labels[8 * b:8 * b + 8]
        answers = [row[row != IGNORE].tolist() for row in rows]
        rewards = [rule_reward(rollout.responses[8 * b + n], truth) for n in range(4)]
        ranked = sorted(range(4), key=lambda n: -rewards[n])
        for place, branches in ((0, answers[4:6]), (1, answers[6:])):
            best = answers[ranked[place]]
            stem = best[:len(best) // 2]
            assert stem and all(answer[:len(stem)] == stem for answer in branches)


def test_shapley_shares_arrive():
    """--advantage shape: each box of an answer earns its own share, tokens behind the last none."""
    p = parts("--advantage=shape", "--updates-per-rollout=1", *SMALL)
    texts = ["\\boxed{ 7 } \\boxed{ 9 } , 9", "\\boxed{ 5 }", "7 + 2", "\\boxed{ 9 } \\boxed{ 5 }"]
    prompt = p.tokenizer(p.prompts[0], add_special_tokens=False).input_ids
    rows = [p.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    width = max(map(len, rows))
    labels = torch.tensor([[IGNORE] * len(prompt) + row + [IGNORE] * (width - len(row))
                           for row in rows])
    ids = labels.clamp(min=0)
    ids[:, :len(prompt)] = torch.tensor(prompt)
    rollout = sample.Rollout(ids, labels, torch.zeros(ids[:, 1:].shape), texts, torch.zeros(4) > 0,
                             torch.zeros(4).long())
    batch = train.Batch([{"question": "q", "answer": "9"}], p.prompts[:1])
    train.train_step(p.policy, p.reference, p.optimizer, p.tokenizer, batch, p.settings,
                     lambda *_: rollout)
    mask = rollout.mask
    # where the boxes close, counted by hand: the tokens of each text as far as its box
    ends = [[len(p.tokenizer(text[:end + 1], add_special_tokens=False).input_ids) - 1
             for end, sign in enumerate(text) if sign == "}"] for text in texts]
    spans = [[(0 if k == 0 else found[k - 1] + 1, end) for k, end in enumerate(found)]
             for found in ends]
    expected = shape_advantages([[0.0, 1.0], [0.0], [], [1.0, 0.0]], spans, mask, 4)
    assert torch.allclose(rollout.advantages, expected, atol=1e-6) and expected.abs().max() > 0.5
    assert not expected[2].any() and not expected[0][mask[0]][-2:].any()
