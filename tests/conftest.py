"""What the tests share: the stage files on the path, one thread, no network, models, and runs."""
# ruff: noqa: E402
import copy
import dataclasses
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("helpers", "tools", "real"))]

import pytest
import torch
from checks import seeded, value_error  # noqa: F401
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.distributed import TCPStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import logprob
import sample
import train
from advantage import group_advantages
from reward import own_reward_of

torch.set_num_threads(1)
# The tests send these signals, which a program ignores that was begun with nohup or a shell's `&`.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

TINY = ROOT / "tests" / "tiny"
PROBLEMS = train.reward.load_problems(str(TINY / "train.jsonl"))  # it is trained on these
MINE = ROOT / "tests" / "helpers" / "mine.py"  # rewards of one's own
LIMIT = 300  # seconds: a process that hangs fails its test
# Reading the default's 2000 problems takes longer than a short run; these are 32.
FEW = (f"--data={TINY / 'few.jsonl'}", f"--eval-data={TINY / 'few.jsonl'}")


@pytest.fixture(autouse=True)
def fast_forms():
    """What one test switches off is there again for the next."""
    yield
    sample.PLAIN = False


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             bos_token_id=None, eos_token_id=1, pad_token_id=0)
# What each family adds to that; the sliding windows are smaller than the tests' rows.
ARCHITECTURES = {
    "qwen2": dict(tie_word_embeddings=True), "qwen3": dict(head_dim=8), "llama": {}, "gpt2": {},
    "mistral": dict(head_dim=8, sliding_window=8), "granite": dict(logits_scaling=2.0),
    "gemma2": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8,
                   query_pre_attn_scalar=8, final_logit_softcapping=4.0),
    "cohere": dict(logit_scale=0.25)}


def small_model(architecture, std=0.3, kind=AutoModelForCausalLM, fast=True, dropout=None,
                **changes):
    """Two random layers, with weights large enough for each of them to shape the answers."""
    options = {**SMALL, **ARCHITECTURES.get(architecture, {}), **changes}
    config = AutoConfig.for_model(architecture, **options)
    for part in (config, config.get_text_config()):
        for key, value in vars(part).items():
            if dropout is not None and isinstance(value, float) and "drop" in key:
                setattr(part, key, dropout)
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=std)
    if fast:
        logprob.use_fast_paths(model)
    return model


@functools.cache
def opened(*given, **how):
    model, tokenizer = sample.open_policy(*given, **how)
    logprob.use_fast_paths(model)
    return model, tokenizer


@pytest.fixture(scope="session")
def tiny():
    """The policy of tests/tiny: (model, tokenizer)."""
    return opened(str(TINY))


def make_tokenizer(**special):
    """A word a token, w3 .. w63; without being told not to, it puts <start> in front."""
    words = ["<pad>", "<end>", "<start>", *(f"w{i}" for i in range(3, SMALL["vocab_size"]))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start = [("<start>", 2)]
    backend.post_processor = processors.TemplateProcessing("<start> $A", special_tokens=start)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<start>",
                                   clean_up_tokenization_spaces=False, **special)


def answer_rows(sizes, seed=0, width=20, words=SMALL["vocab_size"]):
    """Rows of such (prompt, answer) lengths -> ids, labels (N, S), weights (N, S-1)."""
    generator = seeded(seed)
    input_ids = torch.randint(2, words, (len(sizes), width), generator=generator)
    labels = torch.full_like(input_ids, -100)
    first = {}                                            # prompts of one length are the same
    for n, (prompt, answer) in enumerate(sizes):
        input_ids[n, :prompt] = input_ids[first.setdefault(prompt, n), :prompt]
        labels[n, prompt:prompt + answer] = input_ids[n, prompt:prompt + answer]
        input_ids[n, prompt + answer:] = SMALL["pad_token_id"]
    return input_ids, labels, torch.randn(len(sizes), width - 1, generator=generator)


# --- One step of train.py, and the loop, on the tiny policy ---------------------------------------
# Rewards in place of the rule's: by these, half of the eight answers are worth something.
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 0.0, 1.0])


def settings(*flags):
    return train.plan_memory(train.parse(flags))


def parts(*flags, dtype=torch.float32, noise=0.05):
    """What train_step takes: two prompts, four answers each; the reference a little apart."""
    s = settings("--prompts-per-step=2", "--group-size=4", *flags)
    policy, tokenizer = copy.deepcopy(opened(s.model, dtype=dtype))
    reference = copy.deepcopy(policy).requires_grad_(False)
    generator = seeded(1)
    for p in reference.parameters():
        p.add_(noise * torch.randn(p.shape, generator=generator))
    problems = PROBLEMS[:2]
    prompts = [train.chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
    return SimpleNamespace(
        policy_model=policy, ref_model=reference, optimizer=train.make_optimizer(policy, s),
        tokenizer=tokenizer, problems=problems, eval_problems=problems, reward_of=None,
        sampler=sample.sample_groups, reward_model=None, prompts=prompts, settings=s)


def parts_of(p, problems, **changes):
    """The same with other problems: what train_grpo and evaluate take."""
    changes = {"problems": problems, "eval_problems": problems, **changes}
    return SimpleNamespace(**{**vars(p), **changes})


def rollout_of(p):
    return sample.sample_groups(p.policy_model, p.tokenizer, p.prompts, 4, 40, 1.0, seeded())


def whole_step(p, reward_of=lambda *_: REWARDS, **how):
    """One step -> its metrics, its Rollout, the gradient of each update."""
    found = []
    p.optimizer.register_step_pre_hook(lambda *_: found.append(gradient(p.policy_model)))
    batch = train.Batch(p.problems, p.prompts, seeded())
    given = parts_of(p, p.problems, reward_of=reward_of, **how)
    return *train.train_step(given, batch, p.settings), found


def updated(p, model, optimizer, rollout, **changes):
    """One update on a copy of the rollout, with the advantages of REWARDS -> its metrics."""
    rollout = dataclasses.replace(rollout, advantages=group_advantages(REWARDS, 4))
    given = parts_of(p, p.problems, policy_model=model, optimizer=optimizer)
    return train.update(given, rollout, dataclasses.replace(p.settings, **changes))


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def logprobs_on_full_logits(model, rollout, temperature):
    """The formula in float64: log-probs of the next token and entropies, (N, S-1) each."""
    logits = model(rollout.input_ids).logits[:, :-1].double() / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, rollout.input_ids[:, 1:, None])[..., 0], entropy


def run_in(folder):
    """A Run that writes there; on rank 0 alone, as ever."""
    run = train.Run()
    run.name = str(folder)
    run.folder = folder if train.rank() == 0 else None
    return run


class Watched(train.Run):
    """A Run that keeps what it logs, and the steps at which it saves."""

    def __init__(self, folder):
        super().__init__()
        self.name, self.folder = str(folder), folder
        self.samples, self.checkpoints, self.rates = [], [], []

    def log_samples(self, *given):
        self.samples.append(given)

    def replacing(self, name):
        if name == train.CHECKPOINT:
            self.checkpoints.append(self.step)
        return super().replacing(name)


def loop(folder, *flags, problems=PROBLEMS[:8], sampler=sample.sample_groups, reward_of=None):
    """train_grpo on the tiny policy -> its Watched run, with the rates that it learned by."""
    p = parts("--steps=5", "--group-size=2", "--max-new-tokens=8", "--lr=0.004", "--no-page",
              *flags)
    run = Watched(folder)
    rate = p.optimizer.param_groups[0]
    p.optimizer.register_step_pre_hook(lambda *_: run.rates.append(rate["lr"]))
    given = parts_of(p, problems, sampler=sampler, reward_of=reward_of)
    given.eval_problems = problems[:3]
    train.train_grpo(given, p.settings, run)
    return run


# --- Programs as function calls: here a line of refusal, a status and files are what counts -------
@pytest.fixture
def run_here(monkeypatch, capsys):
    """A stage's command without a new interpreter -> what it printed, on stderr if it refuses."""
    def run(name, *arguments, status=0):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(ROOT / name), run_name="__main__")
            sys.exit(0)
        logprob.AttentionInterface.register("long rows", logprob.long_row_attention)  # not a copy's
        out, err = capsys.readouterr()
        assert leaving.value.code == status and not (status and out), out + err
        return err if status else out
    return run


def one_line_of(err, program="train.py"):
    """The line by which a program refuses something: its only one, and no traceback."""
    lines = [line for line in err.splitlines() if line.startswith(f"{program}: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def refused(capsys, *flags, begun=False):
    """train.py refuses these flags, before it has begun to print: status 2 and one line."""
    assert train.main(flags) == 2
    err = capsys.readouterr().err.rpartition("\r")[2]  # behind the bar of a slow machine
    line = one_line_of(err)
    assert begun or err == line + "\n", err
    return line


def trains(*flags):
    """train.py does what it is told."""
    assert train.main(flags) == 0


def trained(folder, *flags):
    """The folder, in which train.py has done what it is told."""
    trains(*flags, f"--output={folder}")
    return folder


def begin(program, *arguments, ranks=1, folder=ROOT, **environment):
    """Begin `python PROGRAM ARGUMENTS` -> a function that waits for the end; what hangs is killed.

    It returns the worst status and all that was printed. Ranks are told what torchrun tells them.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # 0: a port is free
    told = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    command = [sys.executable, ROOT / program, *map(str, arguments)]
    run = functools.partial(subprocess.run, command, cwd=folder, capture_output=True, text=True,
                            timeout=LIMIT)
    pool = ThreadPoolExecutor(ranks)
    begun = []
    for rank in map(str, range(ranks)):
        place = {"RANK": rank, "LOCAL_RANK": rank, **told} if ranks > 1 else {}
        begun.append(pool.submit(run, env={**os.environ, **place, **environment}))

    def end(store=store):                                 # the store lives until then
        ended = [one.result() for one in begun]
        status = max((one.returncode for one in ended), key=abs)
        return subprocess.CompletedProcess(program, status, "".join(one.stdout for one in ended),
                                           "".join(one.stderr for one in ended))
    return end


def well_ended(done):
    """What a program has printed, which has ended without an error."""
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def machine(monkeypatch):
    """Make this machine one with so many GB free on its device, and in host memory."""
    def make(device, free, host=1e6, capability=(8, 0)):
        ones, read_text = torch.ones, Path.read_text
        if device != "cuda":                              # its memory is the host's
            host = min(free, host)

        def read(path, **how):
            if str(path) == "/proc/meminfo":
                return f"MemAvailable: {host * 1e9 / 1024:.0f} kB"
            return read_text(path, **how)

        monkeypatch.setattr(Path, "read_text", read)
        monkeypatch.setattr(torch, "ones", lambda size, device=None: ones(size))  # not on a card
        for name, found in dict(
                is_available=device == "cuda", device_count=1, mem_get_info=2 * (free * 1e9,),
                is_bf16_supported=capability >= (8, 0), get_device_capability=capability).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, found=found, **how: found)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: device == "mps")
    return make


# --- What a run has left in its folder ------------------------------------------------------------
def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of(folder):
    return lines_of(folder / "metrics.jsonl")


def curve(folder):
    """The metrics without those of the clock and of the machine."""
    measured = ("second", "memory")
    return [{name: value for name, value in metrics.items()
             if not any(word in name for word in measured)} for metrics in metrics_of(folder)]


def checkpoint_of(folder):
    return load_file(folder / "checkpoint.safetensors")


def assert_same_checkpoint(folder, whole):
    """All but the command that began the run."""
    found = [checkpoint_of(folder), checkpoint_of(whole)]
    counters = [json.loads(bytes(tensors.pop("counters").tolist())) for tensors in found]
    assert counters[0] | {"command": ""} == counters[1] | {"command": ""}
    assert same_tensors(*found)


def own_rewards(s):
    return own_reward_of(s.reward, s.reward_weights, s.step_reward)


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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


NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]


def raises(error):
    """A function that takes anything and raises this."""
    return Mock(side_effect=error)
