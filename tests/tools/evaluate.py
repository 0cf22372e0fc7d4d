"""Greedy and G sampled answers of a policy to the held-out problems, or two policies compared.

    python tests/tools/evaluate.py                             # the policy of the first command
    python tests/tools/evaluate.py MODEL --eval-limit 0        # a model or a run's folder: all of
    python tests/tools/evaluate.py RUN --against OTHER         # the problems; greedy answers of two

Behind MODEL the flags of train.py; a run's policy is asked as in its run. Of sampled answers it
prints pass@k, maj@k, and of your own rewards the best of k.
"""
import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import multimode

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train  # noqa: E402
from reward import BadInput, accepted, blame, canonical, extract_boxed, groups_of  # noqa: E402
from train import column, compared, flag_of, print0, reward_names, with_error  # noqa: E402


def main(words):
    """-> exit status: 0 done; 2 bad input, one line on standard error."""
    try:
        s, against = parse(words)
        train.join_ranks(s)
        s = train.on_rank_0(lambda: train.settings_of_device(s)[0])
        parts = train.load_to_evaluate(s)
        if against:
            print_comparison(parts, s, against)
        else:
            print_figures(parts, s)
        train.leave_ranks(0)
        return 0
    except Exception as error:
        fault = train.line_of(error)
        if not fault:
            raise
    print(f"evaluate.py: {fault}", file=sys.stderr)
    return 2


def parse(words):
    """The words of a command line -> Settings, the folder of the other policy or ""."""
    parser = argparse.ArgumentParser(
        usage="evaluate.py [MODEL] [--against OTHER] [flags of train.py]", allow_abbrev=False)
    parser.add_argument("--against", default="", help="another policy, asked the same problems")
    asked, words = parser.parse_known_args(list(map(str, words)))
    source = None
    if words and not words[0].startswith("-"):
        words.insert(0, "--model")
        source = config_of(words[1])
    flags = train.parse_flags(words)
    if source and "config" not in flags:
        config = train.read_config(source)
        for name in train.code_in(config, flags):
            raise BadInput(f"{flag_of(name)}: {source} names code, {config[name]}; to run it, name "
                           "it in the command, too")
        words += ["--config", source]
    return train.parse(words), train.final_of(asked.against)


def config_of(folder):
    """The config.json of the run that this is, or whose final/ or best/ this is; else None."""
    path = Path(str(folder))
    run = path.parent if path.name in ("final", "best") else path
    is_run = (run / "metrics.jsonl").is_file() and (run / "config.json").is_file()
    return f"{run}/config.json" if is_run else None


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
    with blame(f"--against {against}:"):  # its template and its length may not fit
        other = train.load_to_evaluate(replace(s, model=against))
    source = config_of(against)
    if source:  # its run may have asked otherwise
        trained = train.Settings(**train.read_config(source))
        for name in "system_prompt template_args max_new_tokens reply max_turns".split():
            if getattr(trained, name) != getattr(s, name):
                print0(f"--against {against}: asked with {flag_of(name)} {getattr(s, name)!r}, "
                       f"its run had {getattr(trained, name)!r}")
    _, after = train.evaluate(parts, s)
    _, before = train.evaluate(other, s)
    print_means(s.model, after, against, before)
    for name in reward_names(after) + ["right"] * has_boxes(after + before):
        print0(f"{name:25} {compared(before, after, name)}")


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
    return torch.tensor(shares, dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
