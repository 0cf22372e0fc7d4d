"""Where things lie; what a run has left in its folder, read, compared and changed."""
import json
from pathlib import Path

import pytest
import torch
from checks import same
from models import opened
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "tiny"
MINE = ROOT / "tests" / "helpers" / "mine.py"  # rewards of one's own
LIMIT = 300  # seconds: a process that hangs fails its test
# Reading the default's 2000 problems takes longer than a short run; these are 32.
FEW = (f"--data={TINY / 'few.jsonl'}", f"--eval-data={TINY / 'few.jsonl'}")
# Of a run that ends in a second
SHORT = ("--steps=4", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=4", "--eval-every=2", "--save-every=1", "--updates-per-rollout=1")


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(folder):
    """A dict for each step; an evaluation has a line of its own, behind that of its step."""
    steps = {}
    for line in lines_of(folder / "metrics.jsonl"):
        own = steps.setdefault(line["step"], {})
        assert not own.keys() & line.keys() - {"step", "eval_id", "eval_accuracy", "eval_reward"}
        own.update(line)
    return list(steps.values())


def without_clock(metrics):
    """The metrics of a step without those of the clock and of the machine, and names of files."""
    measured = ("second", "memory", "eval_id")
    return {name: value for name, value in metrics.items()
            if not any(word in name for word in measured)}


def curve(folder):
    return list(map(without_clock, metrics_of(folder)))


def checkpoint_of(folder):
    return load_file(folder / "checkpoint.safetensors")


def counters_of(folder):
    """What Run has saved in its checkpoint."""
    return json.loads(bytes(checkpoint_of(folder)["counters"].tolist()))


def assert_same_checkpoint(folder, whole):
    """All but the command that began the run."""
    found, expected = map(counters_of, (folder, whole))
    for counters in (found, expected):
        del counters["command"]
    assert found == expected
    found, expected = map(checkpoint_of, (folder, whole))
    same(found | {"counters": None}, expected | {"counters": None}, "checkpoint")


def assert_bitwise(folder, whole):
    """The same metrics and final weights."""
    assert curve(folder) == curve(whole)
    final, expected = (place / "final" / "model.safetensors" for place in (folder, whole))
    assert final.read_bytes() == expected.read_bytes()


def apart(ours, theirs, start):
    """How far apart the weights of two runs are, in parts of the way that they went."""
    # Of all together: AdamW makes a whole step of a gradient that is nothing but rounding.
    assert ours.keys() == theirs.keys()
    difference, way = (torch.cat([(a[name] - b[name]).flatten().double() for name in ours]).norm()
                       for a, b in ((ours, theirs), (theirs, start)))
    assert way > 0, "nothing was learned"
    return float(difference / way)


def assert_same_run(folder, one):
    """Metrics, weights to a hundredth of their way, and a final folder that opens."""
    for ours, theirs in zip(curve(folder), curve(one), strict=True):
        words = [name for name, value in theirs.items() if not isinstance(value, (int, float))]
        assert [ours.pop(name, 0) for name in words] == [theirs.pop(name) for name in words]
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(place / "final") for place in (folder, one)]
    weights = [model.state_dict() for model in (*models, opened(str(TINY))[0])]
    assert apart(*weights) < 0.01                         # of nine seeds, at most 0.0012
    assert models[0].config.architectures == models[1].config.architectures


def edit_json(path, **changes):
    """One JSON file changed; None takes a key out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_tensors(path, change):
    """One file of tensors changed: `change` gets {name: tensor} and gives what is saved."""
    save_file(change(load_file(path)), path, {"format": "pt"})


def json_lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def snapshot(folder):
    """Every file with its content: what a refused command must not change."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
