r"""How fairly answers are read: `python tests/tools/answers.py` prints how often.

Each line of answers.jsonl is an answer, the truth, and whether a fair reader would call the answer
right, written by hand from the forms in which models write numbers. An answer with \boxed in it
is the whole response, any other stands in a box. Where math_verify is installed (nothing here needs
it) its agreement is printed as well. `--all` lists every pair on which a judge differs.
"""
import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TABLE = Path(__file__).with_name("answers.jsonl")
PAIRS = [json.loads(line) for line in TABLE.open(encoding="utf-8")]


def response_of(pair):
    answer = pair["answer"]
    return answer if "\\boxed" in answer else f"So it is \\boxed{{{answer}}}."


def ours(pair):
    import reward  # needs torch; math_verify may live where torch does not

    return reward.rule_reward(response_of(pair), pair["truth"]) == 1.5


def math_verifys(pair):
    from math_verify import parse, verify

    return verify(parse(f"\\boxed{{{pair['truth']}}}"), parse(response_of(pair)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="list every pair on which one differs")
    show = parser.parse_args().all
    print(f"{len(PAIRS)} pairs, {sum(pair['fair'] for pair in PAIRS)} right to a fair reader")
    for name, judge in (("reward.py", ours), ("math_verify", math_verifys)):
        try:
            verdicts = [bool(judge(pair)) for pair in PAIRS]
        except ImportError as error:
            print(f"{name}: not here ({error})")
            continue
        agreed = sum(verdict == pair["fair"] for pair, verdict in zip(PAIRS, verdicts))
        paid = [pair for pair, verdict in zip(PAIRS, verdicts) if verdict and not pair["fair"]]
        missed = [pair for pair, verdict in zip(PAIRS, verdicts) if pair["fair"] and not verdict]
        print(f"{name}: agrees on {agreed} ({agreed / len(PAIRS):.1%}), "
              f"pays {len(paid)} that are not right, misses {len(missed)} that are")
        for kind, pairs in (("paid", paid), ("missed", missed)) if show else ():
            for pair in pairs:
                print(f"  {kind}: {pair['answer']}   truth {pair['truth']}")


if __name__ == "__main__":
    main()
