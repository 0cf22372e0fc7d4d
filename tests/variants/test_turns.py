"""Conversations (--reply), branches of the best (--around-best), and --advantage shape."""
import torch
from checks import seeded
from files import FEW, MINE, assert_same_run, lines_of, metrics_of
from runs import begin, refused, trains, well_ended
from steps import PROBLEMS, parts, step_on, whole_step
import sample
import train
from advantage import shape_advantages

FLAGS = (*FEW, "--steps=3", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=10",
         "--eval-limit=3", "--eval-every=2", "--save-every=1", "--updates-per-rollout=1")
REPLY = f"--reply={MINE.with_name('checker.py')}:check"


def test_a_conversation_ends_where_no_room_is_left(tiny):
    """The tiny policy has 128 positions: a prompt of 22, answers of 20, and much to listen to."""
    def reply(prompt, turns):
        return "Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?"

    prompt = train.chat_prompt(tiny[1], PROBLEMS[0], "")
    rollout = sample.sample_conversations(*tiny, [prompt], 4, 20, 1.0, [seeded(1)], reply=reply,
                                          max_turns=9)
    assert rollout.input_ids.shape[1] <= 128
    assert all(2 <= len(text.split("\n")) <= 4 for text in rollout.responses)


def test_a_reply_that_is_no_text_is_named(capsys, tmp_path):
    (tmp_path / "r.py").write_text("def five(prompt, turns):\n    return 5\n")
    line = refused(capsys, *FLAGS, f"--reply={tmp_path / 'r.py'}:five",
                   f"--output={tmp_path / 'run'}", begun=True)
    assert f"--reply {tmp_path / 'r.py'}:five: returned 5" in line


def test_two_ranks_draw_what_one_process_draws_and_one_goes_on(tmp_path):
    flags = (*FLAGS, "--prompts-per-step=4", REPLY, "--max-turns=2")
    one, two = tmp_path / "one", tmp_path / "two"
    end = begin("train.py", *flags, "--steps=2", f"--output={two}", ranks=2)
    trains(*flags, f"--output={one}")
    well_ended(end())
    trains("--resume", two, "--steps=3")
    assert_same_run(two, one)
    for metrics in metrics_of(one)[1:]:                   # [D] finds the sampler's numbers
        assert metrics["sampler_difference"] < 1e-4 and metrics["tokens"] > 16
    talks = sum((line["responses"] for line in lines_of(two / "samples.jsonl")), [])
    assert {len(turns) for turns in talks} <= {1, 3}      # answer, reply, answer
    assert any(turns[1:2] == ["How many ?"] and len(turns) == 3 for turns in talks)


def test_half_of_a_group_goes_on_from_what_the_rule_finds_best():
    """Of four answers two, best first; with two answers on, each begins with half of one."""
    p = parts("--around-best=2", "--group-size=8")
    _, rollout, _ = whole_step(p, reward_of=None)
    assert len(rollout.responses) == 16
    answers = rollout.answer_ids
    for first in (0, 8):
        rewards = rollout.rule_rewards[first:first + 4]
        best = rewards.argsort(descending=True, stable=True)[:2].tolist()
        assert rewards.unique().numel() > 1, "or nothing is better"
        for i, fine in enumerate(answers[first + 4:first + 8]):
            stem = answers[first + best[i // 2]]
            stem = stem[:len(stem) // 2]
            assert stem and fine[:len(stem)] == stem


def test_a_prompt_that_opens_the_reasoning_is_ranked_as_it_is_paid(monkeypatch):
    """A box in reasoning that does not end earns nothing, in the first half of a group, too."""
    p = parts("--around-best=2", "--group-size=8")
    p.prompts = [f"{prompt} <think>" for prompt in p.prompts]
    scored = []
    real = train.score_responses
    monkeypatch.setattr(train, "score_responses",
                        lambda *given: scored.append(real(*given)) or scored[-1])
    _, rollout, _ = whole_step(p, reward_of=None)
    assert [len(rewards) for rewards in scored] == [8, 16] and not torch.cat(scored).any()
    assert any("boxed" in answer for answer in rollout.responses[:4] + rollout.responses[8:12])


def test_shapley_shares_arrive():
    """--advantage shape: each box of an answer earns its own share, tokens behind the last none."""
    p = parts("--advantage=shape", "--updates-per-rollout=1", "--sampler-correction=2.0", *FLAGS)
    texts = ["\\boxed{ 7 } \\boxed{ 9 } , 9", "\\boxed{ 5 }", "7 + 2", "\\boxed{ 9 } \\boxed{ 5 }"]
    prompt = p.tokenizer(p.prompts[0], add_special_tokens=False).input_ids
    rows = [p.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    rows = [(row, [-1.0] * len(row)) for row in rows]
    rollout = sample.to_rollout(p.tokenizer, [prompt], rows, [1])
    p.sampler = lambda *_: rollout
    step_on(p, p.settings, [{"question": "q", "answer": "9"}], p.prompts[:1])
    mask = rollout.mask
    # where the boxes close, counted by hand: the tokens of each text as far as its box
    ends = [[len(p.tokenizer(text[:end + 1], add_special_tokens=False).input_ids) - 1
             for end, sign in enumerate(text) if sign == "}"] for text in texts]
    candidates = [[(0 if k == 0 else found[k - 1] + 1, end, float(k == best))
                   for k, end in enumerate(found)] for found, best in zip(ends, [1, None, None, 0])]
    expected = shape_advantages(candidates, mask, 4)
    assert torch.allclose(rollout.advantages, expected, atol=1e-6) and expected.abs().max() > 0.5
    assert not expected[2].any() and not expected[0][mask[0]][-2:].any()
