"""Is a review positive or negative? SmolLM2 learns to say it in a word, in two CPU minutes.

    python tests/real/words.py --run  # makes model and problems (see real_model.py), and trains
    python tests/real/words.py --controls  # three seeds, and two rewards that tell no truth
    python tests/real/words.py --odds  # what the untrained model knew without saying it
    python tests/real/words.py  # the table, from the answers that are kept in words.json

Flags that are not its own go to train.py: --run --seed 1. All is written to --task.

No judging word (lovely, terrible), no stem of one and no judged thing of the 60 held-out reviews
is trained on. The controls: the truths of the training problems shuffled; and `form` alone.
"""
import argparse
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE / "words.json"

# --------------------------------------------------------------------------------------------------
# The rewards

LABELS = re.compile("positive|negative")


def right(completions, answer, **columns):
    """1 where the answer names the true label, anywhere, and not the other one."""
    return [float(set(LABELS.findall(text.lower())) == {truth})
            for text, truth in zip(completions, answer)]


def form(completions, **columns):
    """1 where the answer is one label and nothing else, which the question asks for."""
    bare = [text.lower().strip(" .\n") for text in completions]
    return [float(LABELS.fullmatch(text) is not None) for text in bare]


def last_label(completions, answer, **columns):
    """1 where the label that is named last is the true one: a lenient reading, never trained on."""
    return [float(LABELS.findall(text.lower())[-1:] == [truth])
            for text, truth in zip(completions, answer)]


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
    for label in ("positive", "negative"):
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
    command = [sys.executable, str(HERE.parents[1] / "train.py"), "--config", str(config),
               "--output", str(folder), *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    if subprocess.call(command):
        raise SystemExit(1)
    kept = {"cpu_seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)}
    for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name in ("right", "form"):
            steps = kept.setdefault(name, {})
            steps[row["step"]] = steps.get(row["step"], "") + str(int(row[f"reward/{name}"]))
    return kept


def table(kept):
    """Markdown, a line for each run: of the held-out answers how many are right, by step."""
    from reward import sign_test
    yield "| | seed | right, by step | gained, lost, p | of the form | CPU s |"
    yield "|" + " --- |" * 6
    for arm, runs in kept.items():
        for seed, run in enumerate(runs):
            first, *_, last = run["right"].values()
            pairs = [*zip(first, last)]
            gained, lost = pairs.count(("0", "1")), pairs.count(("1", "0"))
            right, form = (" → ".join(str(bits.count("1")) for bits in run[name].values())
                           for name in ("right", "form"))
            p = sign_test(gained, lost)
            yield f"| {arm} | {seed} | {right} | {gained}, {lost}, {p:.1g} | {form} | " \
                  f"{run['cpu_seconds']} |"


def odds(model, task):
    """How the untrained model's first word orders the held-out reviews, good before bad."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from reward import load_problems
    from sample import chat_prompt, ids_of
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    good, bad = (ids_of(tokenizer, word)[0] for word in ("positive", "negative"))
    found = {"positive": [], "negative": []}
    for problem in load_problems(str(task / "test.jsonl")):
        ids = torch.tensor([ids_of(tokenizer, chat_prompt(tokenizer, problem, ""))])
        logits = policy(ids).logits[0, -1].detach()
        found[problem["answer"]].append(float(logits[good] - logits[bad]))
    pairs = [a > b for a in found["positive"] for b in found["negative"]]
    likelier = sum(x > 0 for x in found["positive"]) + sum(x < 0 for x in found["negative"])
    return (f"a good review has larger odds than a bad one in {sum(pairs)} of {len(pairs)} pairs; "
            f"the likelier label is the true one for {likelier} of 60")


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="train once")
    parser.add_argument("--controls", action="store_true", help="nine trainings")
    parser.add_argument("--odds", action="store_true")
    parser.add_argument("--task", type=Path, default=HERE.parents[1] / "runs" / "words",
                        help="a folder; default: %(default)s")
    args, flags = parser.parse_known_args(argv)
    sys.path.insert(0, str(HERE.parents[1]))
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    if args.run or args.controls or args.odds:
        from real_model import CACHE, model_folder
        model = CACHE / "grpo" / "smollm2-135m-instruct"
        model_folder(model)
        configs = write_task(args.task, model)
    if args.odds:
        print(odds(model, args.task))
        return
    if args.run:
        kept = {"this run": [train(configs[0], flags)]}
    if args.controls:
        kept = {arm: [train(config, ["--seed", str(seed), *flags]) for seed in range(3)]
                for arm, config in zip(ARMS, configs)}
        (args.task / KEPT.name).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(*table(kept), sep="\n")


if __name__ == "__main__":
    main()
