"""Greedy and G sampled answers of a policy to the held-out problems, or two policies compared.

    python tests/tools/evaluate.py                             # the policy of the first command
    python tests/tools/evaluate.py MODEL --eval-limit 0        # a model or a run's folder: all of
    python tests/tools/evaluate.py RUN --against OTHER         # the problems; greedy answers of two

Behind MODEL stand flags of train.py that do not only train; a run's policy is asked as in its run.
Of sampled answers it prints pass@k, maj@k, and of your own rewards the best of k.
"""
import argparse
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from statistics import multimode

TOOLS = Path(__file__).resolve().parent
if __name__ == "__main__":  # a reward may import another evaluate; Ctrl-C ends this at once
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != TOOLS]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.insert(0, str(TOOLS.parents[1]))
import train  # noqa: E402  # first: it sets what torch reads when it is imported
from reward import BadInput, accepted, blame, canonical, extract_boxed, groups_of  # noqa: E402
from train import column, compared, flag_of, print0, reward_names  # noqa: E402

with_error = train.reward.with_error

# The flags of train.py that say what is asked, and how: others only train
ASKED = """model data eval_data question_field answer_field system_prompt template_args reward
reward_weights step_reward reward_model reply max_turns prompts_per_step group_size max_new_tokens
temperature fast eval_limit seed device dtype threads config""".split()


def main(words):
    """The words of a command line -> exit status: 0 done; 2 bad input, one line of it."""
    with train.in_one_line("evaluate.py", train.Run()):
        s, against = parse(words)
        train.join_ranks(s)
        s = train.on_rank_0(train.plan_memory, s, False)
        parts = train.load(s, to_train=False)
        if against:
            print_comparison(parts, s, against)
        else:
            print_figures(parts, s)
        train.leave_ranks(0)
        return 0
    return 2


def parse(words):
    """The words of a command line -> Settings, the folder of the other policy or ""."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.error = train.refuse_flags
    parser.add_argument("--against", default="", type=os.path.expanduser, metavar="OTHER")
    own, words = parser.parse_known_args(list(map(str, words)))
    if words and not words[0].startswith("-"):
        words.insert(0, "--model")
    flags = train.parse_flags(words)
    for name in sorted(flags.keys() - ASKED):
        raise BadInput(f"{flag_of(name)}: does nothing in an evaluation")
    source = train.config_of(flags.get("model"))
    if source and "config" not in flags:
        config = train.read_config(source)
        for name in train.code_in(config, flags):
            raise BadInput(f"{flag_of(name)}: {source} names code, {config[name]}; to run it, name "
                           "it in the command, too")
        words += ["--config", source]
    return train.parse(words), train.final_of(own.against)


def print_figures(parts, s):
    """The figures of greedy and of G sampled answers, and what one of k samples is worth."""
    G = s.group_size
    _, greedy = train.evaluate(parts, s)
    _, rows = train.evaluate(parts, s, G, s.temperature)
    print_means(s.model, greedy, f"{G} samples of each at temperature {s.temperature}", rows)
    truths = train.truths_of(parts.eval_problems)
    # An answer whose prompt opened its reasoning, which was cut in there, has no vote.
    final = groups_of([row.get("boxed") and extract_boxed(row["answer"]) for row in rows], G)
    names = ["right"] * has_boxes(greedy + rows) + reward_names(rows) * bool(parts.reward_of)
    powers = [k for k in range(1, G) if k.bit_count() == 1]
    for k in [*powers, G]:  # 1, 2, 4, 8 … G
        for name in names:
            best = best_of_k(column(rows, name).view(-1, G), k)                        # (B,)
            title = f"pass@{k}" if name == "right" else f"{name}, best of {k}"
            print0(f"{title:25} {with_error(best)}")
        if "right" in names and None not in truths:
            print0(f"{f'maj@{k}':25} {with_error(majority_at_k(final, truths, k))}")


def print_comparison(parts, s, against):
    """Greedy answers of both policies: their figures, what was gained and lost."""
    other = with_policy(parts, s, against)
    train.tell_differences("--against", against, s)
    _, after = train.evaluate(parts, s)
    _, before = train.evaluate(other, s)
    print_means(s.model, after, against, before)
    for name in reward_names(after) + ["right"] * has_boxes(after + before):
        print0(f"{name:25} {compared(before, after, name)}")


def with_policy(parts, s, against):
    """The parts with the other policy. BadInput: its template or its length does not fit."""
    other = replace(s, model=against)
    with blame(f"--against {against}:"):
        policy, tokenizer = train.load_policy(other)
    train.check_prompts(f"--against {against}", parts.eval_problems, tokenizer, other)
    twin = train.twin_of(policy, s)
    return replace(parts, policy_model=train.shard(policy, s), twin=twin, tokenizer=tokenizer)


def print_means(model, rows, title, others):
    """The means of an evaluation's rows, and of others, of which a problem may have several."""
    B = len(rows)
    print0(f"{B} problems, ± is the standard error over them: {model}, then {title}")
    names = [*reward_names(rows), "tokens", "cut"]
    if has_boxes(rows + others):  # else these lines would say nothing
        names += ["right", "boxed", "right of boxed and uncut"]
    for name in names:
        left = with_error(column(rows, name))
        right = with_error(column(others, name).view(B, -1).nanmean(dim=1))
        print0(f"{name:25} {left:18} {right}")


def has_boxes(rows):
    return bool((column(rows, "boxed") > 0).any())


def best_of_k(values, k):
    """What the best of k samples is worth, unbiased from n >= k samples: (B, n) -> (B,).

    Of values that are 1 for right and 0 it is pass@k (arXiv 2107.03374, eq. 1). In ascending order
    the i-th value, counted from 0, is the best of C(i, k-1) of the C(n, k) sets of k samples.
    """
    n = values.shape[1]
    chances = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    ascending = values.double().sort(dim=1).values                                     # (B, n)
    return ascending @ ascending.new_tensor(chances)


def majority_at_k(answers, truths, k):
    """maj@k: whether the most frequent of k final answers is right, (B,).

    answers: B lists of n >= k final answers, of which the first k vote; None is no vote. A tie
    counts as the share of the tied ones that are right, and no vote at all counts as 0.
    """
    shares = []
    for row, truth in zip(answers, truths, strict=True):
        votes = [canonical(answer) for answer in row[:k] if answer]
        winners = multimode(votes)
        right = set(winners).intersection(map(canonical, accepted(truth)))
        shares.append(len(right) / max(len(winners), 1))
    return train.torch.tensor(shares, dtype=train.torch.float64)


if __name__ == "__main__":
    train.as_command(main)
