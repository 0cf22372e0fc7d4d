"""Is a review positive or negative? SmolLM2 learns to say it in a word, in one or two CPU minutes.

    python tests/real/words.py --run  # makes model and problems (see real_model.py), and trains
    python tests/real/words.py --controls  # six seeds, and two rewards that tell no truth
    python tests/real/words.py --odds  # what the untrained model knew without saying it
    python tests/real/words.py  # the table, from the answers that are kept in words.json

Flags that are not its own go to train.py: --run --seed 1. All is written to runs/words.

No judging word (lovely, terrible), no stem of one and no judged thing of the 60 held-out reviews
is trained on. The controls: the truths of the training problems shuffled; and `form` alone.
"""
import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LABELS = ("positive", "negative")

# --------------------------------------------------------------------------------------------------
# The rewards

def labels_in(text):
    return re.findall("|".join(LABELS), text.lower())


def right(completions, answer, **columns):
    """1 where the answer names the true label, anywhere, and not the other one."""
    return [float(set(labels_in(text)) == {truth}) for text, truth in zip(completions, answer)]


def form(completions, **columns):
    """1 where the answer is one label and nothing else, which the question asks for."""
    return [float(text.lower().strip(" .\n") in LABELS) for text in completions]


def last_label(completions, answer, **columns):
    """1 where the label that is named last is the true one: a lenient reading, never trained on."""
    return [float(labels_in(text)[-1:] == [truth]) for text, truth in zip(completions, answer)]


# --------------------------------------------------------------------------------------------------
# The problems

WORDS = {
    ("train", "positive"): """attractive beautiful bright cheerful clean comfortable delicious
        efficient enjoyable entertaining excellent exceptional exciting fresh friendly fun funny
        generous good great helpful impressive inspiring kind lovely magnificent outstanding
        peaceful perfect pleasant refreshing relaxing reliable safe smart spectacular tasty terrific
        wonderful worthwhile""",
    ("train", "negative"): """awful bad boring broken clumsy damaged dangerous defective depressing
        disgusting dishonest dull faulty filthy foul hostile irritating lousy mediocre miserable
        moldy nasty noisy overpriced painful pathetic poor repulsive ridiculous rotten sloppy
        tasteless tedious terrible ugly unfriendly unpleasant unreliable useless worthless""",
    ("test", "positive"): """adorable amazing attentive awesome brilliant charming clever delightful
        elegant exquisite fabulous fantastic fascinating flawless gorgeous graceful incredible
        marvelous memorable nice polite remarkable satisfying splendid stunning stylish superb
        sweet thrilling warm""",
    ("test", "negative"): """abysmal annoying appalling atrocious bland careless cruel dirty
        disappointing disastrous dreadful frustrating gloomy greedy harsh hideous horrendous
        horrible incompetent inferior lazy offensive rude shabby smelly stale stupid tiresome
        unacceptable unbearable""",
}
THINGS = {"train": "food staff film room music service book garden soup driver".split(),
          "test": "hotel waiter concert cake museum guide".split()}
REVIEWS = ["The {thing} was {word}.", "We found the {thing} {word}.", "It was a {word} {thing}.",
           "My friends say that the {thing} is {word}."]
QUESTION = "Review: {} Is this review positive or negative? Answer with one word."


def make_problems(part):
    """A review for each word that is held out, four for each of the others."""
    rng = random.Random(part)
    problems = []
    for label in LABELS:
        for word in WORDS[part, label].split():
            for review in REVIEWS if part == "train" else [rng.choice(REVIEWS)]:
                told = review.format(thing=rng.choice(THINGS[part]), word=word)
                told = re.sub(" a (?=[aeiou])", " an ", told)
                problems.append({"question": QUESTION.format(told), "answer": label})
    return problems


FLAGS = {
    "eval_data": "test.jsonl",
    "reward": ["words.py:right", "words.py:form"],
    "system_prompt": "",       # the model's chat template brings its own
    "max_new_tokens": 8,
    "temperature": 0.7,        # at 1.0 eight untrained answers find a right one less often
    "lr": 2e-5,                # at 1e-6 twelve steps move this model little
    "warmup_steps": 2,
    "steps": 12,
    "eval_every": 6,
    "eval_limit": 0,
    "dtype": "bfloat16",
    "threads": 1,
}
ARMS = {
    "right, and 0.3 for the form": {"data": "train.jsonl", "reward_weights": [1, 0.3]},
    "the same, truths shuffled": {"data": "shuffled.jsonl", "reward_weights": [1, 0.3]},
    "the form alone": {"data": "train.jsonl", "reward_weights": [0, 1]},
}


def write_task(task, model):
    """Problems, rewards and a config for each arm into the folder `task` -> the configs' paths."""
    task.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, task)
    test, train = make_problems("test"), make_problems("train")
    truths = random.Random(1).sample([problem["answer"] for problem in train], len(train))
    shuffled = [{**problem, "answer": truth} for problem, truth in zip(train, truths)]
    for name, problems in (("train", train), ("test", test), ("shuffled", shuffled)):
        lines = [json.dumps(problem) + "\n" for problem in problems]
        (task / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    paths = [task / f"arm-{n}.json" for n in range(len(ARMS))]
    for path, flags in zip(paths, ARMS.values()):
        path.write_text(json.dumps({"model": str(model), **FLAGS, **flags}), encoding="utf-8")
    return paths


# --------------------------------------------------------------------------------------------------
# Training, and what is kept of it

def train(config, flags):
    """One run of train.py -> what is kept: held-out answers of each evaluation, and seconds."""
    folder = config.with_name(f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    command = [sys.executable, str(ROOT / "train.py"), f"--config={config}", f"--output={folder}"]
    before = sum(os.times()[2:4])  # CPU seconds of the children, user's and system's
    if subprocess.call(command + flags):
        sys.exit(1)
    kept = {"right": {}, "form": {}, "cpu_seconds": round(sum(os.times()[2:4]) - before)}
    for line in map(json.loads, open(folder / "evaluations.jsonl", encoding="utf-8")):
        for name in ("right", "form"):
            bits = [f"{row[f'reward/{name}']:.0f}" for row in line["answers"]]
            kept[name][line["step"]] = "".join(bits)
    return kept


def table(kept):
    """Markdown, a line for each run: of the held-out answers how many are right, by step."""
    from train import sign_test
    yield "| | run | right, by step | gained, lost, p | in form | CPU s |\n|" + " --- |" * 6
    for arm, runs in kept.items():
        for seed, run in enumerate(runs):
            first, *_, last = run["right"].values()
            gained, lost = (list(zip(first, last)).count(tuple(pair)) for pair in ("01", "10"))
            right, form = (" → ".join(str(bits.count("1")) for bits in run[name].values())
                           for name in ("right", "form"))
            cells = right, f"{gained}, {lost}, {sign_test(gained, lost):.1g}", form
            yield f"| {arm} | {seed} | {' | '.join(cells)} | {run['cpu_seconds']} |"


def odds(model, problems):
    """How the odds of the untrained model's first word order the reviews, good before bad."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sample import chat_prompt, ids_of
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    good, bad = (ids_of(tokenizer, label)[0] for label in LABELS)
    found = {label: [] for label in LABELS}
    for problem in problems:
        ids = torch.tensor([ids_of(tokenizer, chat_prompt(tokenizer, problem, ""))])     # (1, P)
        logits = policy(ids).logits[0, -1]                                               # (V,)
        found[problem["answer"]].append(float(logits[good] - logits[bad]))
    pairs = [a > b for a in found["positive"] for b in found["negative"]]
    true = sum(x > 0 for x in found["positive"]) + sum(x < 0 for x in found["negative"])
    return (f"a good review has the larger odds in {sum(pairs)} of {len(pairs)} pairs; "
            f"the likelier label is the true one for {true} of {len(problems)}")


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="train once")
    parser.add_argument("--controls", action="store_true", help="train eighteen times")
    parser.add_argument("--odds", action="store_true", help="of the untrained model")
    args, flags = parser.parse_known_args(argv)
    sys.path.insert(0, str(ROOT))
    if args.run or args.controls or args.odds:
        from real_model import CACHE, model_folder
        model = CACHE / "grpo" / "smollm2-135m-instruct"
        model_folder(model)
        configs = write_task(ROOT / "runs" / "words", model)
    if args.odds:
        print(odds(model, make_problems("test")))
        return
    if args.run:
        kept = {"this run": [train(configs[0], flags)]}
    elif args.controls:
        kept = {arm: [train(config, [f"--seed={seed}", *flags]) for seed in range(6)]
                for arm, config in zip(ARMS, configs)}
        configs[0].with_name("words.json").write_text(json.dumps(kept) + "\n")
    else:
        kept = json.loads((HERE / "words.json").read_text(encoding="utf-8"))
    print(*table(kept), sep="\n")


if __name__ == "__main__":
    main()
