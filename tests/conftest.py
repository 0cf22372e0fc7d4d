"""What the tests share: the stage files on the path, one thread, no network, models, and runs."""
import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()

TINY = ROOT / "tests" / "tiny"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT = 120  # seconds: a process that hangs fails its test

# --------------------------------------------------------------------------------------------------
# Models

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=1, pad_token_id=0)
# What each family adds to that; the sliding windows are smaller than the tests' rows.
ARCHITECTURES = {
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False, head_dim=8),
    "llama": dict(tie_word_embeddings=False),
    "mistral": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8),
    "gemma2": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8,
                   query_pre_attn_scalar=8, final_logit_softcapping=4.0),
    "gpt2": dict(tie_word_embeddings=True),
    "granite": dict(tie_word_embeddings=False, logits_scaling=2.0),
    "cohere": dict(tie_word_embeddings=True, logit_scale=0.25),
}


def small_model(architecture, std=0.3, **changes):
    """Two random layers, with weights large enough for each of them to shape the answers."""
    torch.manual_seed(0)
    options = {**SMALL, **ARCHITECTURES.get(architecture, {}), **changes}
    config = AutoConfig.for_model(architecture, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=std)
    return model


@pytest.fixture(scope="session", params=ARCHITECTURES)
def random_model(request):
    """A `small_model` of each family in turn."""
    return small_model(request.param)


@pytest.fixture(scope="session")
def tiny():
    """The policy of tests/tiny: (model, tokenizer)."""
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    return model, AutoTokenizer.from_pretrained(TINY)


# --------------------------------------------------------------------------------------------------
# Programs: in a process of their own where that is the point, else as a function call

def run_script(name, *arguments, **how):
    """`python NAME ARGUMENTS`, with what it printed and its exit status."""
    command = [sys.executable, str(ROOT / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True,
                          **{"env": ENVIRONMENT, "timeout": LIMIT, **how})


@pytest.fixture
def run_here(monkeypatch, capsys):
    """A stage's command without a new interpreter -> what it printed, on stderr if it refuses."""
    def run(name, *arguments, status=0):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        ended = 0
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as leaving:
            ended = leaving.code or 0
        out, err = capsys.readouterr()
        assert ended == status, err
        assert not (status and out), out
        return err if status else out
    return run


def one_line_of(err, program="train.py"):
    """The line by which a program refuses something: its only one, and no traceback."""
    assert "Traceback" not in err, err
    lines = [line for line in err.splitlines() if line.startswith(f"{program}: ")]
    assert len(lines) == 1, err
    return lines[0]


def refused(capsys, *flags):
    """train.py refuses these flags before it starts: status 2, one line and nothing else."""
    import train
    status = train.main(list(map(str, flags)))
    err = capsys.readouterr().err
    assert status == 2, err
    line = one_line_of(err)
    assert err == line + "\n", err
    return line


def ends_badly(capsys, *flags):
    """train.py starts and has to give up: status 2 and one line of its own beside the bar."""
    import train
    status = train.main(list(map(str, flags)))
    err = capsys.readouterr().err
    assert status == 2, err
    return one_line_of(err)


def trains(*flags):
    """train.py does what it is told."""
    import train
    assert train.main(list(map(str, flags))) == 0


@pytest.fixture(autouse=True)
def signals():
    """A run takes over the signals of its process; a test gives them back."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.getsignal(name) for name in names}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


# --------------------------------------------------------------------------------------------------
# What a run has left in its folder

def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(folder):
    return lines_of(folder / "metrics.jsonl")


def curve(folder):
    """The metrics without those of the clock and of the machine."""
    measured = ("second", "memory")
    return [{name: value for name, value in metrics.items()
             if not any(word in name for word in measured)}
            for metrics in metrics_of(folder)]


def weights_of(folder):
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def snapshot(folder):
    """Every file with its content: what a refused command must not change."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
