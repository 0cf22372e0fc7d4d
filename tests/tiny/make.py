"""
Makes everything else in this folder: a tiny policy, its problems, and the settings that train it.

    python tests/tiny/make.py
    python tests/tiny/make.py reward_model    # the reward model alone, for the policy that is there

The problems are short sums told as stories, in GSM8K's format:

    Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?

The policy is a Qwen3 of 78k parameters that has been shown two ways to answer:

    9 - 4 = 5 , 5 - 2 = 3 , 3 + 7 = 10 , \\boxed{ 10 }      working it out, one time in three
    \\boxed{ 17 }                                           guessing any number, the other two

So by habit it guesses, and is nearly always wrong, though it is able to work most of them out. No
example says that working pays: RL has to find this, and the accuracy on held-out problems shows
whether it did.

The reward model is a Qwen3 of one layer. It is shown pairs of the policy's own answers to the same
problem, and which of the two the rule prefers; what it makes of them is printed at the end.
"""

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import reward  # noqa: E402
from sample import chat_prompt, sample_groups  # noqa: E402

# The warm start
STEPS = 1500
BATCH = 32
LR = 5e-3
GUESSES = 2 / 3  # a share of its answers

NAMES = "Anna Ben Carla David Emma Felix Grace Henry".split()
THINGS = "apples books coins marbles pens stamps".split()
VERBS = {"+": "gets finds buys".split(), "-": "gives loses sells".split()}
SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": "<|unk|>"}
ROLES = ["<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (  # a system message is left out
    "{% for message in messages if message.role != 'system' %}"
    "<|{{ message.role }}|> {{ message.content }} "
    "{% if message.role == 'assistant' %}<|end|> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
SETTINGS = {  # of `python train.py`, a --config file; paths are relative to this folder
    "data": "train.jsonl", "eval_data": "test.jsonl", "system_prompt": "", "steps": 80,
    "prompts_per_step": 16, "group_size": 8, "max_new_tokens": 40, "lr": 3e-4, "kl_coef": 0.02,
    "updates_per_rollout": 2, "eval_every": 20, "eval_limit": 0, "warmup_steps": 0,
    "micro_batch_tokens": 2048, "gradient_checkpointing": False, "threads": 1}


def split_of(start, changes):
    """By the numbers alone, so that no held-out sum is trained on under another story."""
    digest = hashlib.sha256(f"{start} {changes}".encode()).digest()
    return "test" if digest[0] % 8 == 0 else "train"


def draw(rng, split):
    """A random sum of this split: a start, and 3 to 5 changes that keep the total within 0..20."""
    while True:
        start = total = rng.randint(1, 20)
        changes = []
        for n in rng.sample(range(1, 10), rng.randint(3, 5)):
            changes.append(rng.choice([change for change in (n, -n) if 0 <= total + change <= 20]))
            total += changes[-1]
        if split_of(start, changes) == split:
            return start, changes


def tell(rng, start, changes):
    """The sum as a question, the steps that work it out, and the answer."""
    question, steps, total = f"{rng.choice(NAMES)} has {start} {rng.choice(THINGS)}", [], start
    for change in changes:
        sign, n = f"{change:+}"  # two characters, such as -4
        question += f" , {rng.choice(VERBS[sign])} {n}"
        steps.append(f"{total} {sign} {n} = {total + change}")
        total += change
    return f"{question} . How many ?", steps, total


def make_problems(rng, split, count):
    problems = {}  # by their sums, so that none comes twice
    while len(problems) < count:
        start, changes = draw(rng, split)
        question, steps, total = tell(rng, start, changes)
        answer = "\n".join([*steps, f"#### {total}"])
        problems[start, *changes] = {"question": question, "answer": answer}
    (HERE / f"{split}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems.values()))
    return list(problems.values())


def make_tokenizer():
    """One token for each word; a whole number is a word, and so is `\\boxed{`."""
    words = [*SPECIAL.values(), *ROLES, *NAMES, *THINGS, *VERBS["+"], *VERBS["-"],
             *map(str, range(21)),
             *"has , . How many ? + - = \\boxed{ }".split()]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **SPECIAL, extra_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
        padding_side="left", clean_up_tokenization_spaces=False)


def make_model(tokenizer):
    # Not a Qwen2: AutoTokenizer would load it with Qwen2's own tokenizer, whatever the folder says.
    return AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        tie_word_embeddings=True, initializer_range=0.1, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def render(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def make_batch(tokenizer, rng, split, size, guesses):
    """Prompts and responses as ids padded on the right, and labels of the responses alone."""
    ids, labels = [], []
    for _ in range(size):
        question, steps, total = tell(rng, *draw(rng, split))
        if rng.random() < guesses:
            steps, total = [], rng.randint(0, 20)
        response = " , ".join([*steps, f"\\boxed{{ {total} }}"]) + " <|end|>"
        prompt_ids, response_ids = tokenizer([render(tokenizer, question), response]).input_ids
        ids.append(torch.tensor(prompt_ids + response_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + response_ids))
    return pad_sequence(ids, True, tokenizer.pad_token_id), pad_sequence(labels, True, -100)


def warm_start(model, tokenizer, rng):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in (bar := tqdm(range(STEPS), desc="warm start")):
        ids, labels = make_batch(tokenizer, rng, "train", BATCH, GUESSES)
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def greedy_accuracy(tokenizer, model, prompts, answers):
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=SETTINGS["max_new_tokens"], do_sample=False)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    boxes = [f"\\boxed{{ {answer.split()[-1]} }}" for answer in answers]
    return sum(text.endswith(box) for text, box in zip(texts, boxes, strict=True)) / len(texts)


def check(problems):
    """Loads the folder as train.py does: by habit the policy guesses, once begun it works well."""
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    model = AutoModelForCausalLM.from_pretrained(HERE)
    prompts = [render(tokenizer, problem["question"]) for problem in problems]
    answers = [problem["answer"] for problem in problems]
    for prompt in prompts:  # to ids and back
        ids, words = tokenizer(prompt, add_special_tokens=False).input_ids, prompt.split()
        assert ids == [tokenizer.vocab[word] for word in words]
        assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(words[1:-1])
    habit = greedy_accuracy(tokenizer, model, prompts, answers)
    begun = [f"{prompt} {answer.split()[0]}"
             for prompt, answer in zip(prompts, answers, strict=True)]
    worked = greedy_accuracy(tokenizer, model, begun, answers)
    print(f"held-out problems right: {habit:.3f} by habit, {worked:.3f} if made to begin working")
    assert habit <= 0.25 and worked >= 0.8


REWARD_PROBLEMS, REWARD_EPOCHS, REWARD_LR = 256, 6, 3e-3  # of the reward model's training


def judged_answers(model, tokenizer, problems, seed):
    """The policy's eight answers to each problem -> rows of (conversation, the rule's reward)."""
    prompts = [render(tokenizer, problem["question"]) for problem in problems]
    truths = [problem["answer"].split()[-1] for problem in problems]
    generator = torch.Generator().manual_seed(seed)
    limit = SETTINGS["max_new_tokens"]
    rollout = sample_groups(model, tokenizer, prompts, 8, limit, 1.0, generator)
    rewards = reward.score_responses(rollout.responses, truths, 8).tolist()
    asked = reward.repeat_each(problems, 8)
    rows = [chat_prompt(tokenizer, problem, "", answer=answer)
            for problem, answer in zip(asked, rollout.responses)]
    return list(zip(rows, rewards))


def make_reward_model(problems):
    """Bradley-Terry on pairs of the policy's answers, eight to a step; new pairs every epoch."""
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    policy = AutoModelForCausalLM.from_pretrained(HERE).eval()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
        initializer_range=0.1, num_labels=1, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)).eval()
    rows = judged_answers(policy, tokenizer, problems[:REWARD_PROBLEMS], seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=REWARD_LR, weight_decay=0.0)
    learner = reward.RewardModel(model, tokenizer, optimizer)
    generator = torch.Generator().manual_seed(2)
    for epoch in range(REWARD_EPOCHS):
        learner.collect_pairs(rows, 8, generator)
        print(f"{len(learner.pairs)} pairs, ", end="")
        figures = learner.train(generator, replay_share=0.0)
        print(f"reward model, epoch {epoch + 1}: " + " ".join(f"{v:.3f}" for v in figures.values()))
    model.save_pretrained(HERE / "reward_model")
    tokenizer.save_pretrained(HERE / "reward_model")


def check_reward_model(problems):
    """How often it ranks a right answer above a wrong one to the same held-out problem."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(HERE / "reward_model").eval()
    policy = AutoModelForCausalLM.from_pretrained(HERE).eval()
    rows = judged_answers(policy, tokenizer, problems, seed=3)
    rows, rewards = zip(*rows)
    scores = reward.reward_model_scores(model, tokenizer, list(rows))
    is_right = reward.is_right(torch.tensor(rewards))
    group = torch.arange(len(rows)) // 8
    pairs = (is_right[:, None] & ~is_right & (group[:, None] == group)).nonzero()
    worked = torch.tensor([" = " in row for row in rows])
    right = scores[pairs[:, 0]] > scores[pairs[:, 1]]
    print(f"reward model, {sum(p.numel() for p in model.parameters())} weights: ranks the right "
          f"answer above the wrong in {right.float().mean():.3f} of {len(pairs)} held-out pairs")
    for name, alike in (("both worked out", worked[pairs].all(dim=1)),
                        ("both guessed", ~worked[pairs].any(dim=1))):
        print(f"  {name}: {right[alike].float().mean():.3f} of {int(alike.sum())}")
    assert right.float().mean() > 0.8


def make_policy():
    rng = random.Random(0)
    (HERE / "grpo.json").write_text(json.dumps(SETTINGS, indent=2) + "\n")
    make_problems(rng, "train", 2000)
    held_out = make_problems(rng, "test", 256)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_start(model, tokenizer, rng)
    model.save_pretrained(HERE)
    tokenizer.save_pretrained(HERE)
    check(held_out)


def problems_of(split):
    return [json.loads(line) for line in (HERE / f"{split}.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["reward_model"], help="only this")
    what = parser.parse_args().what
    torch.set_num_threads(1)  # one order of adding up, whatever the cores: the same bytes again
    torch.manual_seed(0)
    if what is None:
        make_policy()
    make_reward_model(problems_of("train"))
    check_reward_model(problems_of("test"))
