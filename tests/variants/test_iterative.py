"""Process supervision (--step-reward), iterative training with a reward model (--reward-model)."""
import copy
import functools
import json
import math
import shutil
import types
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          AutoTokenizer, PreTrainedTokenizerFast)
from checks import is_same, same, seeded, value_error
from files import (FEW, MINE, TINY, apart, assert_bitwise, assert_same_checkpoint, assert_same_run,
                   checkpoint_of, curve, json_lines, lines_of)
from models import logprobs_on_full_logits, small_model
from runs import begin, refused, trained, trains, well_ended
from steps import PROBLEMS, all_gradients, own_rewards, parts, whole_step
import reward
import sample
import train
from advantage import process_advantages
from reward import model_rewards, reward_model_scores, score_rows

MODEL = TINY / "reward_model"
FLAGS = (*FEW, "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=40", "--device=cpu",
         "--eval-limit=2", "--eval-every=1", "--save-every=1", "--lr=2e-3")
ITERATIVE = (*FLAGS, "--renew-reference=2", f"--reward-model={MODEL}", "--reward-model-lr=1e-3")


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "run"
    return folder, begin("train.py", *ITERATIVE, "--steps=4", f"--output={folder}", ranks=2)


@pytest.fixture(scope="module")
def whole(two_ranks, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), *ITERATIVE, "--steps=4")


@pytest.fixture
def learner():
    return reward.open_reward_model(MODEL, 1e-3, "cpu")[0]


# --- The iteration --------------------------------------------------------------------------------
def test_two_iterations_are_those_of_the_formulas(whole, learner):
    """Rewards, pairs, replay and the trained weights again, from the answers that were logged."""
    problems = reward.load_problems(str(TINY / "few.jsonl"))
    truths = {problem["question"]: problem["answer"] for problem in problems}
    model, tokenizer = learner.model, learner.tokenizer
    learner.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    metrics = {m["step"]: m for m in curve(whole)}
    records = lines_of(whole / "samples.jsonl")
    for step in range(1, 5):
        groups = [record for record in records if record["step"] == step]
        assert len(groups) == 2
        responses = groups[0]["responses"] + groups[1]["responses"]
        asked = [groups[n // 4]["question"] for n in range(8)]
        told = [tokenizer.apply_chat_template([
            {"role": "system", "content": train.BOXED}, {"role": "user", "content": question},
            {"role": "assistant", "content": answer}], tokenize=False)
            for question, answer in zip(asked, responses)]
        scores = reward.reward_model_scores(model, tokenizer, told)
        logged = torch.tensor(groups[0]["rewards"] + groups[1]["rewards"])
        assert torch.allclose(logged, scores, atol=1e-5)
        assert metrics[step]["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
        rule = reward.score_responses(responses, [truths[g["question"]] for g in groups], 4)
        assert metrics[step]["accuracy"] == pytest.approx(float((rule == 1.5).float().mean()))
        rows = list(zip(told, rule.tolist()))
        learner.collect_pairs(rows, 4, train.seeded(0, "pairs", step))
        if step % 2:
            assert "reward_model_loss" not in metrics[step]
            continue
        assert len(learner.pairs) > 2
        figures = learner.train(train.seeded(0, "reward model", step))
        for name, value in figures.items():
            assert metrics[step][name] == pytest.approx(value, rel=1e-5)
    found = weights(whole / "reward_model")
    same(found, dict(model.named_parameters()))
    assert not is_same(found, weights(MODEL))
    assert AutoTokenizer.from_pretrained(whole / "reward_model").chat_template
    AutoModelForCausalLM.from_pretrained(whole / "final")


def test_a_resumed_run_is_bitwise_the_same(whole, tmp_path):
    """Stopped in the middle of an iteration, and at its end."""
    folder = trained(tmp_path / "run", *ITERATIVE, "--steps=1")
    for steps in (2, 3, 4):
        trains("--resume", folder, f"--steps={steps}")
    assert_bitwise(folder, whole)
    same(weights(folder / "reward_model"), weights(whole / "reward_model"))
    saved = checkpoint_of(folder)
    assert_same_checkpoint(folder, whole)
    kinds = {name.split("/")[0] for name in saved if "/reward_model/" in name}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert any(json.loads(saved["counters"].numpy().tobytes())["pairs"])


def test_two_ranks_train_the_same_reward_model(whole, two_ranks):
    folder, end = two_ranks
    well_ended(end())
    assert_same_run(folder, whole)
    ours, theirs = (weights(place / "reward_model") for place in (folder, whole))
    assert apart(ours, theirs, weights(MODEL)) < 0.01


def test_without_truths_or_renewal_the_reward_model_stays(capsys, tmp_path):
    asked = [{"question": problem["question"]} for problem in PROBLEMS[:12]]
    (tmp_path / "asked.jsonl").write_text(json_lines(*asked))
    folder = trained(tmp_path / "run", *ITERATIVE, "--steps=2",
                     f"--data={tmp_path / 'asked.jsonl'}")
    last = curve(folder)[-1]
    assert last["reward_model_loss"] is None and last["accuracy"] is None
    assert last["reward_std"] > 0 and last["grad_norm"] > 0
    same(weights(folder / "reward_model"), weights(MODEL))
    assert "--renew-reference: no true answer is known" in capsys.readouterr().out
    folder = trained(tmp_path / "fixed", *FLAGS, f"--reward-model={MODEL}", "--steps=1")
    assert not (folder / "reward_model").exists()
    assert not any("/reward_model/" in name for name in checkpoint_of(folder))
    assert curve(folder)[1]["reward_mean"] != 0 and "eval_reward" in curve(folder)[1]


# --- The reward model's own learning --------------------------------------------------------------
def fresh_learner(lr=1e-2, **changes):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(MODEL, **changes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    return reward.RewardModel(model, tokenizer, optimizer)


def worked_and_guessed(first, last):
    """Rows of a group of two per problem: worked out, and a guess that is wrong."""
    rows = []
    for problem in PROBLEMS[first:last]:
        steps = problem["solution"].replace("\n", " , ")
        rows.append((f"{problem['question']} {steps} , \\boxed{{ {problem['answer']} }}", 1.5))
        rows.append((f"{problem['question']} \\boxed{{ 3 }}", 0.5))
    return rows


def test_a_reward_model_learns_from_round_to_round(monkeypatch):
    """Pairs and replay are bounded, and keep some of what is old."""
    learner = fresh_learner()
    generator = seeded()
    figures = []
    for k in range(4):
        learner.collect_pairs(worked_and_guessed(24 * k, 24 * k + 24), 2, generator)
        assert len(learner.pairs) == 24 and len(learner.replay) == 24 * k
        figures.append(learner.train(generator))
    first, last = figures[0], figures[-1]
    assert first["reward_model_accuracy"] < 0.9 and last["reward_model_accuracy"] == 1.0
    assert last["reward_model_loss"] < 0.2 < first["reward_model_loss"] and learner.pairs == []
    assert all(p.grad is None for p in learner.model.parameters())
    monkeypatch.setattr(reward, "MAX_PAIRS", 8)
    learner = fresh_learner()
    for first, last in ((0, 8), (8, 20)):
        learner.collect_pairs(worked_and_guessed(first, last), 2, generator)
        assert len(learner.pairs) == len(set(learner.pairs)) == 8
        learner.train(generator)
        assert len(learner.replay) == 8
    seen = {row[0] for row in worked_and_guessed(0, 8)}
    assert 0 < sum(better in seen for better, _ in learner.replay) < 8


# --- Process supervision --------------------------------------------------------------------------
def test_step_rewards_reach_the_gradient():
    p = parts("--step-reward", f"{MINE}:commas", "--updates-per-rollout=1", "--max-grad-norm=1e9",
              "--kl-coef=0")
    start = copy.deepcopy(p.policy_model)
    metrics, rollout, gradients = whole_step(p, reward_of=own_rewards(p.settings))
    steps = []                                 # what `commas` says, from the ids that were trained
    for n, ids in enumerate(rollout.answer_ids):
        comma, worked = p.tokenizer.vocab[","], p.problems[n // 4]["solution"]
        ends = [i for i, token in enumerate(ids) if token == comma] + [len(ids) - 1]
        steps.append([(end, float((7 * end + len(worked)) % 5)) for end in ends])
    mask = rollout.mask                                                                # (N, S-1)
    A = process_advantages(steps, mask, 4)
    same(rollout.advantages, A)
    assert A[mask].std() > 0
    # Curves, flat groups and best/ are those of the sums of the steps
    sums = [float(sum(reward for _, reward in row)) for row in steps]
    assert rollout.rewards.tolist() == sums
    same(rollout.reward_parts["reward/rule"].float(), rollout.rule_rewards)
    teaches = [bool(A[rows].any()) for rows in (slice(4), slice(4, 8))]
    assert metrics["flat_groups"] == 1 - sum(teaches) / 2
    assert metrics["reward_mean"] == pytest.approx(float(rollout.rewards.mean()))
    logp, _ = logprobs_on_full_logits(start, rollout, 1.0)
    (-(logp * A * mask).sum(1) / mask.sum(1)).mean().backward()
    assert (all_gradients(start) - gradients[0]).norm() <= 1e-5 * all_gradients(start).norm()


@pytest.mark.parametrize("second", [[0.5], 5, [(0, 1.0, 2.0)], [(0.5, 1.0)], None, [(0, None)],
                                    [(0, "much")], [(2, 1.0)], [(-1, 1.0)], [(1, math.nan)],
                                    [(torch.tensor([0, 1]), 1.0)]])
def test_what_a_step_function_gives_is_looked_at(second):
    """It may be nothing, and numbers of any kind; and it belongs to a token of the answer."""
    table = {"completions": ["good", "bad"], "completion_ids": [[4, 5, 6], [7, 8]]}

    def given(*steps):
        return reward.call_function("mine.py:steps", lambda **_: iter(steps), table,
                                    reward.as_steps)

    found = given([], [(torch.tensor(1), torch.tensor(0.5)), [0, 1]])
    assert found == [[], [(1, 0.5), (0, 1.0)]]
    with value_error("^mine.py:steps "):
        given([(0, 1.0)], second)


@pytest.mark.parametrize("change, said", [
    (shutil.rmtree, "cannot be loaded"),
    (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    (lambda folder: shutil.copytree(TINY, folder, dirs_exist_ok=True), "2 labels"),
    (lambda folder: fresh_learner(num_labels=2).model.save_pretrained(folder), "has 2 labels, a")])
def test_folders_that_are_no_reward_model_are_refused(tmp_path, capsys, change, said):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    change(folder)
    capsys.readouterr()
    line = refused(capsys, *FLAGS, "--steps=1", f"--output={tmp_path / 'run'}",
                   f"--reward-model={folder}")
    assert said in line and f"--reward-model {folder}" in line
    assert not (tmp_path / "run").exists()


# --- A reward model -------------------------------------------------------------------------------
def small_reward_model(architecture="qwen2", **changes):
    sizes = {"max_position_embeddings": 64, "pad_token_id": None, "num_labels": 1, **changes}
    return small_model(architecture, 0.2, AutoModelForSequenceClassification, **sizes)


class Ids:
    """A tokenizer of rows that are ids."""
    chat_template = "its own"

    def __new__(cls, rows, **options):
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


ROWS = [[5, 6, 7, 1], [8], [9, 10, 11, 12, 13, 14, 1], [0, 0, 0], [5, 6, 7, 1]]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2", "bert"])
def test_a_row_scores_the_same_alone_and_padded(architecture):
    model = small_reward_model(architecture, pad_token_id=0 if architecture == "bert" else None)
    scores = score_rows(model, Ids, ROWS)
    assert scores.shape == (5,) and scores.dtype == torch.float32 and scores.requires_grad
    with torch.no_grad():  # transformers' own, one by one and without padding
        alone = [float(model(input_ids=torch.tensor([row])).logits) for row in ROWS]
    assert scores.tolist() == pytest.approx(alone, abs=1e-5)
    assert torch.tensor(alone[:4]).std() > 0.01
    if architecture == "qwen2":
        model.config.pad_token_id = 1  # the end token pads, as in many checkpoints: it counts
        same(score_rows(model, Ids, ROWS), scores)
    with value_error("^--reward-model: a row of 65 tokens"):
        score_rows(model, Ids, [[5] * 65])


def test_reward_model_scores(tiny):
    model, tokenizer = small_reward_model(), tiny[1]
    rows = [sample.chat_prompt(tokenizer, {"question": question}, "", answer=answer)
            for question, answer in zip(["1 + 2", "1 + 2", "5"], ["3", "4 and 5 and 6", ""])]
    scores = reward_model_scores(model, tokenizer, rows)
    assert scores.shape == (3,) and scores.dtype == torch.float32 and not scores.requires_grad
    for found in (score_rows(model, tokenizer, rows),
                  reward_model_scores(model, tokenizer, rows, batch_rows=1)):
        assert scores.tolist() == pytest.approx(found.tolist(), abs=1e-5)


def test_pairs_are_of_one_group_the_better_first():
    rewards = [0.5, 0.5, 0.5, 0.5, 0.0, 1.5, 0.5, math.nan, 0.0, 1.5, 0.5, 1.5]
    rows = [(("abc"[n // 4], n % 4), reward) for n, reward in enumerate(rewards)]
    drawn = []
    for seed in (0, 0, 1, 2, 3):
        r = reward.RewardModel(None, None, None)
        r.collect_pairs(rows, 4, seeded(seed))
        assert all(better[0] == worse[0] for better, worse in r.pairs)
        found = [(better[0], better[1], worse[1]) for better, worse in r.pairs]
        assert sorted(found)[:3] == [("b", 1, 0), ("b", 1, 2), ("b", 2, 0)]
        drawn.append({pair for pair in found if pair[0] == "c"})           # at most four
        assert len(r.pairs) == 7 and len(drawn[-1]) == 4
        assert drawn[-1] < {("c", i, j) for i, j in ((1, 0), (1, 2), (2, 0), (3, 0), (3, 2))}
    assert drawn[0] == drawn[1] and any(pairs != drawn[0] for pairs in drawn)


class Seen(list):
    """A tokenizer that remembers the texts it was given; one token per letter."""
    chat_template = "its own"

    def __call__(self, texts, **options):
        self += texts
        return {"input_ids": [[2 + ord(c) % 60 for c in text] for text in texts]}


def still_learner(pairs=(), replay=()):
    model = small_reward_model()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    return reward.RewardModel(model, Seen(), still, list(pairs), list(replay))


def test_an_iteration_mixes_a_tenth_of_old_pairs():
    pairs, replay = ([(f"{name}{i}", "bad") for i in range(count)]
                     for name, count in (("new", 45), ("old", 50)))
    r = still_learner(pairs, replay)
    figures = r.train(seeded())
    seen = r.tokenizer
    assert sorted(text for text in seen if "new" in text) == sorted(p[0] for p in pairs)
    assert len({text for text in seen if "old" in text}) == 5  # 5 of 50
    assert r.pairs == [] and sorted(r.replay) == sorted(replay + pairs)
    # With a learning rate of 0, the figures are those of the mix as it was.
    rows = [t for t in seen if t != "bad"] + ["bad"] * 50
    chosen, rejected = score_rows(r.model, Seen(), rows).chunk(2)
    losses = [math.log(1 + math.exp(b - a)) for a, b in zip(chosen.tolist(), rejected.tolist())]
    assert figures["reward_model_loss"] == pytest.approx(sum(losses) / 50, abs=1e-5)
    assert figures["reward_model_accuracy"] == int((chosen > rejected).sum()) / 50
    gradients = []  # of the same pair three times: nothing is left over from the step before
    r.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(r.model.score.weight.grad.clone()))
    for _ in range(2):
        r.pairs, r.replay = pairs[:1] * 2, []
        r.train(batch_pairs=1)
    assert len(gradients) == 4 and gradients[0].any()
    same(gradients, 4 * gradients[:1])
    none = still_learner(replay=replay)
    assert all(map(math.isnan, none.train().values()))
    assert sorted(none.replay) == sorted(replay) and none.tokenizer == []


def encoder():
    """A small BERT, which has seen rows of [CLS] question [SEP] answer [SEP] alone."""
    words = ["[PAD]", "[CLS]", "[SEP]", *map(str, range(10)), *"abcdef"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    return small_reward_model("bert", pad_token_id=0), tokenizer


def spoken(problems, responses):
    return types.SimpleNamespace(problems=problems, responses=responses,
                                 rule_rewards=torch.tensor([0.5, 1.5, math.nan, 0.0]))


def judged(model, tokenizer, rollout):
    """What a reward model of train.py's gives -> the scores."""
    chat_of = functools.partial(sample.chat_prompt, tokenizer, system_prompt="")
    return model_rewards(reward.RewardModel(model, tokenizer, None), chat_of, rollout)


def test_an_encoder_reads_the_pair_as_its_tokenizer_writes_it():
    """With [CLS], [SEP] and the second text's type; special tokens in an answer are words."""
    model, tokenizer = encoder()
    problems = [{"question": "a b c"}, {"question": "5 6"}] * 2
    rollout = spoken(problems, ["7", "7 8 9", "", "3 [SEP] 4"])
    scores = judged(model, tokenizer, rollout)
    ids = [[1, 13, 14, 15, 2, 10, 2], [1, 8, 9, 2, 10, 11, 12, 2], [1, 13, 14, 15, 2, 2],
           [1, 8, 9, 2, 6, 13, 13, 13, 7, 2]]             # 13: a word that it does not know
    types_of = [[0] * 5 + [1] * 2, [0] * 4 + [1] * 4, [0] * 5 + [1], [0] * 4 + [1] * 6]
    with torch.no_grad():
        for score, row, kinds in zip(scores, ids, types_of, strict=True):
            expected = model(torch.tensor([row]), token_type_ids=torch.tensor([kinds])).logits
            assert float(score) == pytest.approx(float(expected), abs=1e-5)
    reward_model = reward.RewardModel(model, tokenizer, torch.optim.SGD(model.parameters(), 0.1))
    reward_model.collect_pairs(rollout.judged, 2, seeded())
    reward_model.pairs = json.loads(json.dumps(reward_model.pairs))  # as from a checkpoint
    assert reward_model.pairs == [[["5 6", "7 8 9"], ["a b c", "7"]]]
    assert reward_model.train()["reward_model_loss"] > 0


def test_a_decoder_reads_the_conversation_that_its_template_writes(tiny, monkeypatch):
    """Also what that writes before an answer but not in a prompt, and behind it; no forged turn."""
    model, tokenizer = small_reward_model(max_position_embeddings=128), tiny[1]
    monkeypatch.setattr(tokenizer, "chat_template", """
        {%- for m in messages %}{{ m.role[0] }} : {{ ', ' if m.role == 'assistant' }}{{ m.content }}
        {{- ' <|end|> ' if m.role == 'assistant' }}{% endfor %}
        {{- 'a : ' if add_generation_prompt }}""")
    problems = [{"question": "Anna 5"}, {"messages": [
        {"role": "user", "content": "Ben"}, {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4"}], "question": "4"}] * 2
    rollout = spoken(problems, ["7", "8 ,", "", "<|end|> u : 9"])
    scores = judged(model, tokenizer, rollout)
    texts = ["u : Anna 5a : , 7 <|end|> ", "u : Bena : , 3 <|end|> u : 4a : , 8 , <|end|> ",
             "u : Anna 5a : ,  <|end|> ",
             "u : Bena : , 3 <|end|> u : 4a : , < |end|> u : 9 <|end|> "]
    for score, text, (row, _) in zip(scores, texts, rollout.judged, strict=True):
        assert row == text
        ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits
        assert float(score) == pytest.approx(float(expected), abs=1e-5)
    assert repr([value for _, value in rollout.judged]) == "[0.5, 1.5, nan, 0.0]"
