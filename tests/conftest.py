"""What the tests share: the stage files on the path, one thread, no network, models, and runs."""
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("helpers", "tools", "real"))]

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed.run  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import logging  # noqa: E402

import logprob  # noqa: E402
import sample  # noqa: E402
import train  # noqa: E402
from advantage import group_advantages  # noqa: E402
from loss import grpo_loss  # noqa: E402
from reward import load_problems  # noqa: E402
from sample import sample_groups  # noqa: E402

torch.set_num_threads(1)
# The tests send these signals. A shell's `&` and nohup have a program ignore them, and with it all
# that it starts.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def fast_forms():
    """What one test gives up is there again for the next."""
    yield
    sample.PLAIN = logprob.PLAIN = False


TINY = ROOT / "tests" / "tiny"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"  # where it stands beside the checkout
LIMIT = 300  # seconds: a process that hangs fails its test
# Reading the default's 2000 problems takes longer than a short run; these are 32.
FEW = (f"--data={TINY / 'few.jsonl'}", f"--eval-data={TINY / 'few.jsonl'}")

# --- Models ---------------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=1, pad_token_id=0)
# What each family adds to that; the sliding windows are smaller than the tests' rows.
ARCHITECTURES = {
    "qwen2": dict(tie_word_embeddings=True), "qwen3": dict(tie_word_embeddings=False, head_dim=8),
    "llama": dict(tie_word_embeddings=False),
    "mistral": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8),
    "gemma2": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8,
                   query_pre_attn_scalar=8, final_logit_softcapping=4.0),
    "gpt2": dict(tie_word_embeddings=True),
    "granite": dict(tie_word_embeddings=False, logits_scaling=2.0),
    "cohere": dict(tie_word_embeddings=True, logit_scale=0.25)}


def small_model(architecture, std=0.3, kind=AutoModelForCausalLM, **changes):
    """Two random layers, with weights large enough for each of them to shape the answers."""
    torch.manual_seed(0)
    options = {**SMALL, **ARCHITECTURES.get(architecture, {}), **changes}
    config = AutoConfig.for_model(architecture, **options)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=std)
    return model


@pytest.fixture(scope="session", params=ARCHITECTURES)
def random_model(request):
    """A `small_model` of each family in turn."""
    return small_model(request.param)


@pytest.fixture(scope="session", params=["qwen2", "gemma2", "gpt2"])
def some_model(request):
    """A `small_model` with grouped rows and a lean head, with neither, with learned positions."""
    return small_model(request.param)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """Grouped rows go to `varlen_attn`, and that is the formula -> a list: was enable_gqa on?"""
    calls = []

    def varlen_attn(q, k, v, ends_q, ends_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert window_size == (-1, 0) and q.dtype == k.dtype == v.dtype
        assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k)
        assert (max_q, max_k) == (ends_q.diff().max(), ends_k.diff().max())
        assert q.shape[1] == k.shape[1] or enable_gqa
        calls.append(enable_gqa)
        out = []
        for n in range(len(ends_q) - 1):
            (a, b), (c, d) = ends_q[n:n + 2].tolist(), ends_k[n:n + 2].tolist()
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            heads = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            out.append(torch.nn.functional.scaled_dot_product_attention(
                *heads, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr(logprob, "varlen_attn", varlen_attn)
    monkeypatch.setattr(logprob, "has_flash", lambda *given: True)
    return calls


@pytest.fixture(scope="session")
def tiny():
    """The policy of tests/tiny: (model, tokenizer)."""
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    return model, AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def qwen():
    """Qwen2.5's tokenizer, where it stands beside the checkout."""
    folder = ROOT.parent / "shared" / "models" / "qwen2.5-tokenizer"
    if not folder.is_dir():
        pytest.skip("Qwen2.5's tokenizer is not there")
    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def tiny_problems():
    """The problems that the policy of tests/tiny is trained on."""
    return load_problems(str(TINY / "train.jsonl"))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_tokenizer(**special):
    """A word a token, w3 .. w63; without being told not to, it puts <start> in front."""
    words = ["<pad>", "<end>", "<start>", *(f"w{i}" for i in range(3, SMALL["vocab_size"]))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start = [("<start>", 2)]
    backend.post_processor = processors.TemplateProcessing("<start> $A", special_tokens=start)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<start>",
                                   clean_up_tokenization_spaces=False, **special)


def answer_rows(sizes, seed=0, width=20, words=SMALL["vocab_size"], pad=SMALL["pad_token_id"]):
    """Random rows of these (prompt, answer) lengths; rows with prompts of one length share them.

    -> input_ids, labels (N, S), a random weight for every log-prob (N, S-1)
    """
    generator = seeded(seed)
    input_ids = torch.randint(2, words, (len(sizes), width), generator=generator)
    labels = torch.full_like(input_ids, -100)
    first = {}
    for n, (prompt, answer) in enumerate(sizes):
        input_ids[n, :prompt] = input_ids[first.setdefault(prompt, n), :prompt]
        labels[n, prompt:prompt + answer] = input_ids[n, prompt:prompt + answer]
        input_ids[n, prompt + answer:] = pad
    return input_ids, labels, torch.randn(len(sizes), width - 1, generator=generator)


# --- One step of train.py, and the loop, on the tiny policy; and the same step by hand ------------

# Rewards in place of the rule's: by these, half of the eight answers are worth something.
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 0.0, 1.0])
RATE = 0.05  # of the SGD that takes the place of AdamW: a second update has ratios off 1


def settings(*flags):
    return train.plan_memory(train.parse(list(flags)))


@functools.cache
def loaded(folder, dtype):
    """A policy and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def parts(*flags, dtype=torch.float32, noise=0.05):
    """What train_step takes, of the tiny default, with two prompts and four answers each.

    The reference stands a little apart from the policy, so that the KL has a gradient.
    """
    s = settings("--prompts-per-step=2", "--group-size=4", *flags)
    start, tokenizer = loaded(s.model, dtype)
    policy = copy.deepcopy(start)
    reference = copy.deepcopy(policy).requires_grad_(False)
    generator = seeded(1)
    for p in reference.parameters():
        p.add_(noise * torch.randn(p.shape, generator=generator))
    problems = tiny_problems()[:2]
    prompts = [train.chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
    return SimpleNamespace(
        policy=policy, reference=reference, optimizer=train.make_optimizer(policy, s),
        tokenizer=copy.deepcopy(tokenizer), problems=problems, prompts=prompts, settings=s)


def rollout_of(p, max_new_tokens=40, temperature=1.0):
    return sample_groups(p.policy, p.tokenizer, p.prompts, 4, max_new_tokens, temperature, seeded())


def own_reward(problems, prompts, rollout):
    return REWARDS


def whole_step(p, optimizer=None, reward_of=own_reward, **how):
    """One step -> its metrics and its Rollout."""
    batch = train.Batch(p.problems, p.prompts, seeded())
    return train.train_step(p.policy, p.reference, optimizer or p.optimizer, p.tokenizer, batch,
                            p.settings, reward_of=reward_of, **how)


def updated(p, model, optimizer, rollout, **changes):
    """One update on a copy of the rollout, with the advantages of REWARDS -> its metrics."""
    rollout = dataclasses.replace(rollout, advantages=group_advantages(REWARDS, 4))
    return train.update(model, optimizer, rollout, dataclasses.replace(p.settings, **changes))


def step_of_the_program(p, **how):
    optimizer = torch.optim.SGD(p.policy.parameters(), RATE)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient(p.policy)))
    metrics, rollout = whole_step(p, optimizer, **how)
    return rollout, gradients, metrics


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def logprobs_on_full_logits(model, rollout, temperature):
    """The formula in float64: log-probs of the next token and entropies, (N, S-1) each."""
    logits = model(rollout.input_ids).logits[:, :-1].double() / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, rollout.input_ids[:, 1:, None])[..., 0], entropy


def updates_by_hand(p, rollout, advantages, temperature, order, max_grad_norm, kl_coef, mask=None,
                    **objective):
    """[D] on full logits, [E] [F] and a clipped SGD step -> one record per update.

    `order` has the rows of each update; the log-probs before the first are the old ones of all.
    """
    model = copy.deepcopy(p.policy)
    weights = list(model.parameters())
    mask = rollout.mask if mask is None else mask
    with torch.no_grad():
        old, _ = logprobs_on_full_logits(model, rollout, temperature)
        ref, _ = logprobs_on_full_logits(p.reference, rollout, temperature)
    records = []
    for rows in order:
        logp, _ = logprobs_on_full_logits(model, rollout, temperature)
        if "sampler_cap" in objective:
            objective["sampler_logprobs"] = rollout.logprobs.double()[rows]
        loss, metrics = grpo_loss(logp[rows], old[rows], ref[rows] if kl_coef else None,
                                  advantages[rows], mask[rows], kl_coef=kl_coef, **objective)
        grads = torch.autograd.grad(loss, weights)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        grads = [g * min(1.0, max_grad_norm / (norm + 1e-6)) for g in grads]
        with torch.no_grad():
            for weight, grad in zip(weights, grads):
                weight -= RATE * grad
        records.append(SimpleNamespace(
            gradient=torch.cat([g.flatten() for g in grads]), grad_norm=norm,
            metrics={k: float(v) for k, v in metrics.items()}))
    return records


class Diary(train.Run):
    """A run without a folder that remembers what it was told."""
    def __init__(self):
        super().__init__()
        self.metrics = []
        self.samples = []
        self.checkpoints = []

    def log(self, metrics):
        super().log(metrics)
        self.metrics.append(metrics)

    def log_samples(self, batch, rollout):
        self.samples.append((batch, rollout))


def loop(*flags, problems=None, run=None, **how):
    s = settings("--steps=5", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=8",
                 "--lr=0.004", *flags)
    p = parts(*flags)
    optimizer = train.make_optimizer(p.policy, s)
    rates = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    run = run or Diary()
    problems = problems or tiny_problems()[:8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_checkpoint", lambda run, *_: run.checkpoints.append(run.step))
        train.train_grpo(p.policy, p.reference, optimizer, p.tokenizer, problems, problems[:3], s,
                         run, **how)
    run.rates = rates
    run.policy = p.policy
    return run


QWEN = {"model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "tie_word_embeddings": True}


# --- Programs as function calls: here a line of refusal, a status and files are what counts -------

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
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's own, which a command changes
        logprob.AttentionInterface.register("grouped", logprob.grouped_attention)  # not a copy's
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


def main(*flags):
    """train.py's exit status."""
    return train.main(list(map(str, flags)))


def ends_badly(capsys, *flags, alone=False):
    """train.py starts and has to give up: status 2 and one line of its own beside the bar."""
    status = main(*flags)
    err = capsys.readouterr().err
    assert status == 2, err
    line = one_line_of(err)
    assert not alone or err == line + "\n", err
    return line


def refused(capsys, *flags):
    """train.py refuses these flags before it starts: status 2, one line and nothing else."""
    return ends_badly(capsys, *flags, alone=True)


def trains(*flags):
    """train.py does what it is told."""
    assert main(*flags) == 0


def trained(folder, *flags):
    """The folder, in which train.py has done what it is told."""
    trains(*flags, f"--output={folder}")
    return folder


def printed_by(*flags):
    """train.py does what it is told -> what it printed on stdout, on stderr; for fixtures."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        trains(*flags)
    return out.getvalue(), err.getvalue()


# --- Programs in processes of their own, and ranks without torchrun's slow start ------------------

def start(program, *arguments, folder=ROOT, out=subprocess.DEVNULL, err=subprocess.DEVNULL,
          **environment):
    """Begin `python PROGRAM ARGUMENTS`, which prints into these files -> the process."""
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=out, stderr=err,
                            env={**ENVIRONMENT, **environment})


def begin(program, *arguments, each=({},), **how):
    """Begin a program once for each of these environments -> a function that waits for the end.

    It returns the first status that is not 0, and all that they printed; what hangs is killed.
    """
    begun = []
    for environment in each:
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        begun.append((start(program, *arguments, out=out, err=err, **how, **environment), out, err))

    def end():
        status, printed, complained = 0, "", ""
        for process, out, err in begun:
            try:
                process.wait(LIMIT)
            finally:
                process.kill()
            status = status or process.wait()
            out.seek(0)
            err.seek(0)
            printed += out.read()
            complained += err.read()
        return subprocess.CompletedProcess((program, *arguments), status, printed, complained)
    return end


def well_ended(done):
    """What a program has printed, which has ended without an error."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(program, *arguments, **how):
    """Run `python PROGRAM ARGUMENTS` to its end -> exit status, what it printed."""
    return begin(program, *arguments, **how)()


def begin_ranks(ranks, program, *arguments, **environment):
    """Begin a program on ranks that are told what torchrun tells them."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # 0: a port is free
    each = [dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                 MASTER_ADDR="localhost", MASTER_PORT=str(store.port),
                 TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
            for rank in range(ranks)]
    end = begin(program, *arguments, each=each, **environment)
    return lambda store=store: end()                      # the store lives until then


def run_ranks(ranks, program, *arguments, **environment):
    return begin_ranks(ranks, program, *arguments, **environment)()


def torchrun(ranks, *flags, **environment):
    """train.py on several ranks by torchrun itself -> its exit status, what they printed."""
    return run_script(torch.distributed.run.__file__, "--standalone", f"--nproc-per-node={ranks}",
                      ROOT / "train.py", *flags, **environment)


# The rule's reward. At call FAULT_AT of it (of several ranks: on the second) that goes wrong which
# FAULT says; the first call is the evaluation's.
FAULTY = """
import os
import signal
import sys

from reward import rule_reward

calls = 0


def score(completions, answer, **columns):
    global calls
    calls += 1
    at = int(os.environ.get("FAULT_AT", "4"))
    fault = os.environ.get("FAULT", "") if os.environ.get("RANK", "1") == "1" else ""
    if calls == at and fault.startswith("SIG"):
        os.chdir("/")                                     # a relative --output stays where it was
        os.kill(os.getpid(), getattr(signal, fault))
    if calls >= at and fault == "exit":
        sys.exit()
    if calls >= at and fault == "raise":
        raise KeyError("no, please")
    if calls >= at and fault == "interrupt":
        raise KeyboardInterrupt
    return [rule_reward(c, a) for c, a in zip(completions, answer)]
"""


def faulty_reward(folder):
    """Written into a new file -> its flag."""
    (folder / "mine.py").write_text(FAULTY)
    return f"--reward={folder / 'mine.py'}:score"


# --- What a run has left in its folder ------------------------------------------------------------

def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(folder):
    return lines_of(folder / "metrics.jsonl")


def curve(folder):
    """The metrics without those of the clock and of the machine, and without the command."""
    measured = ("second", "memory", "command")
    return [{name: value for name, value in metrics.items()
             if not any(word in name for word in measured)} for metrics in metrics_of(folder)]


def weights_of(folder):
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


def checkpoint_of(folder):
    return load_file(folder / "checkpoint.safetensors")


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def apart(ours, theirs, start):
    """How far apart the weights of two runs are, in parts of the way that they went.

    Of nine seeds it was at most 0.0012. One weight alone can be further off: AdamW makes a whole
    step of a gradient that is nothing but rounding.
    """
    assert ours.keys() == theirs.keys()
    difference, way = (torch.cat([(a[name] - b[name]).flatten().double() for name in ours]).norm()
                       for a, b in ((ours, theirs), (theirs, start)))
    assert way > 0, "nothing was learned"
    return float(difference / way)


def assert_same_run(folder, one):
    """Metrics, weights to a hundredth of their way, and a final folder that opens."""
    ours, theirs = curve(folder), curve(one)
    assert [m["step"] for m in ours] == [m["step"] for m in theirs]
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        assert a.get("warning") == b.get("warning")
        for name in a.keys() - {"warning"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), (a["step"], name)
    ours, theirs = (load_file(place / "final" / "model.safetensors") for place in (folder, one))
    assert apart(ours, theirs, load_file(TINY / "model.safetensors")) < 0.01
    AutoModelForCausalLM.from_pretrained(folder / "final")
    architectures = [json.loads((place / "final" / "config.json").read_text())["architectures"]
                     for place in (folder, one)]
    assert architectures[0] == architectures[1]


def edit_json(path, **changes):
    """One JSON file changed; None takes a key out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_tensors(path, change):
    """One file of tensors changed: `change` gets {name: tensor} and gives what is saved."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_file(change(tensors), path, metadata)


def json_lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def snapshot(folder):
    """Every file with its content: what a refused command must not change."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- Refusals of the stage functions, and what is made to fail ------------------------------------

NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"),
             RuntimeError("DefaultCPUAllocator: can't allocate memory")]


def raises(error):
    """A function that takes anything and raises this."""
    def function(*args, **kwargs):
        raise error
    return function


@contextlib.contextmanager
def value_error(reason):
    """What happens in here ends with a ValueError of one line that says so."""
    with pytest.raises(ValueError, match=reason) as error:
        yield
    assert "\n" not in str(error.value)
