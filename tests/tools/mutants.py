"""One-line faults, planted one at a time: do the tests of that file see them?

    python tests/tools/mutants.py                    # all of them, two at a time
    python tests/tools/mutants.py loss.py reward.py  # those of some files

Each row of mutants.json names a file, a fragment that stands in it exactly once, and what it
becomes: another operator, sign or constant, an argument dropped, a mask shifted by one. The fault
is planted in a copy of the project and the tests of that file are run there; when one fails, the
fault was seen. What nobody saw is printed at the end. A fault that no test can see carries the
reason in its row.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.json")
# Tests beside tests/test_FILE.py that speak of the same file
ALSO = {"train.py": ["test_rounding.py", "test_resume.py", "test_bad_input.py", "test_variants.py",
                     "test_iterative.py", "test_turns.py", "test_lora.py", "test_page.py"],
        "reward.py": ["test_iterative.py"], "sample.py": ["test_cuda.py"],
        "logprob.py": ["test_lora.py"]}


def read_table():
    """The rows as dicts; ValueError for a fragment that does not stand in its file exactly once."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    for row in rows:
        count = (ROOT / row["file"]).read_text(encoding="utf-8").count(row["original"])
        if count != 1:
            raise ValueError(f"{row['file']}: {row['original']!r} stands there {count} times")
    return rows


def is_seen(row):
    """Plants the fault in a copy of the project -> whether a test fails there."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        path = copy / row["file"]
        text = path.read_text(encoding="utf-8")
        if row["original"]:
            path.write_text(text.replace(row["original"], row["fault"]), encoding="utf-8")
        names = [f"test_{row['file']}", *ALSO.get(row["file"], ())]
        tests = [f"tests/{name}" for name in names]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=1800,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
    # 1: tests failed; 2: the fault stopped their collection. The rest is no verdict of the tests.
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}")
    return done.returncode != 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="sample.py, reward.py, ...")
    files = parser.parse_args().files
    rows = [row for row in read_table() if not files or row["file"] in files]
    for file in dict.fromkeys(row["file"] for row in rows):
        # Tests that fail by themselves would see every fault.
        if is_seen({"file": file, "original": "", "fault": ""}):
            print(f"{file}: its tests fail without a fault", file=sys.stderr)
            return 2
    survivors = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for row, seen in zip(rows, pool.map(is_seen, rows)):
            fault = f"{row['file']}: {row['original']}  ->  {row['fault']}"
            print(f"{'seen    ' if seen else 'SURVIVED'} {fault}", flush=True)
            if not seen:
                survivors.append((fault, row.get("reason")))
    print(f"\n{len(rows)} faults, {len(rows) - len(survivors)} seen, {len(survivors)} survived")
    for fault, reason in survivors:
        print(f"  {fault}\n      {reason or 'NO REASON IS GIVEN'}")
    return any(reason is None for _, reason in survivors)


if __name__ == "__main__":
    sys.exit(main())
