"""The whole program on CUDA, held against itself on the CPU, on the card that is there.

Without a card all of this is skipped. On a software GPU beside the checkout (.ci/run) torch's own
CUDA code runs: its checks, its allocator, the capture of graphs. Only the kernels are not real.
"""
# ruff: noqa: I001 - several names to a line
import copy
import functools
import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

os.environ.setdefault("SOFTGPU_COUNT", "2")  # a software GPU has two cards

import first_run  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from checks import seeded  # noqa: E402
from files import FEW, LIMIT, MINE, ROOT, checkpoint_of, metrics_of  # noqa: E402
from models import answer_rows, small_model  # noqa: E402
from runs import refused, trains, well_ended  # noqa: E402
from steps import NO_MEMORY, REWARDS, parts, rollout_of  # noqa: E402

import logprob  # noqa: E402
import sample  # noqa: E402
import train  # noqa: E402
from advantage import group_advantages  # noqa: E402
from logprob import checkpoint_layers, plain_logprobs, token_logprobs  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")
CUDA = "cuda:0"
FLASH = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
HALF = torch.bfloat16 if FLASH else torch.float16
DTYPES = {"float32": torch.float32, "half": HALF}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """What a test gives up is there again in the next one, and its memory is free."""
    # Kept: a software GPU says that an event is over while its copies are not.
    kept, pin = [], torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: kept.append(pin(x)) or kept[-1])
    before = races()
    yield
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert races() == before, "pinned memory was written while a copy was under way"


@pytest.fixture
def graphs(monkeypatch):
    counts = {"captured": 0, "replayed": 0}

    class Graph(torch.cuda.CUDAGraph):
        def capture_end(self):
            super().capture_end()
            counts["captured"] += 1

        def replay(self):
            super().replay()
            counts["replayed"] += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return counts


def races():
    """What a software GPU has seen so far that a real one would do wrong now and then."""
    counters = first_run.softgpu.counters() if first_run.softgpu else {}
    return sum(n for name, n in counters.items() if name.startswith("races:"))


def same(a, b, tolerance):
    a, b = (x.detach().cpu().double() for x in (a, b))
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm() + 1e-12)


# --- [A] Sampling through graphs ------------------------------------------------------------------
PROMPTS = ["Anna has 9 books .", "How many ?", "8 - 4",
           "Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?"]


def random_policy(dtype=torch.float32, device=CUDA, ends=(1, 20, 30, 40), **changes):
    """A small random Qwen2 with the words of tests/tiny; its query heads share key heads."""
    model = small_model("qwen2", **{"vocab_size": 57, **changes}).to(device, dtype)
    model.generation_config.eos_token_id = list(ends)
    return model


def drawn(model, tiny, prompts=PROMPTS, max_new_tokens=28, temperature=1.0, G=4):
    """A rollout, from the same random numbers every time."""
    generators = [seeded(j) for j in range(len(prompts))]
    return sample.sample_groups(model, tiny[1], prompts, G, max_new_tokens, temperature, generators)


def nats_off(model, rollout, temperature):
    """The rollout's log-probs against the formula's, in float32 on the CPU: the mean difference."""
    model = copy.deepcopy(model).to("cpu", torch.float32)
    with torch.no_grad():
        expected = plain_logprobs(model, rollout.input_ids.cpu(), rollout.labels.cpu(), temperature)
    mask = rollout.mask.cpu()
    return (rollout.sampler_logprobs.cpu() - expected)[mask].abs().mean()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@dtypes
def test_sampling_through_graphs(tiny, graphs, dtype, temperature):
    model = random_policy(dtype)
    rollout = drawn(model, tiny, temperature=temperature)
    lengths = rollout.mask.sum(dim=1)
    assert lengths.min() < 16 and lengths.max() > 20         # rows end at different times
    assert 2 <= graphs["captured"] <= 5                      # for some of 16, 8, 4, 2, 1 rows
    assert graphs["replayed"] >= lengths.max() - 1
    assert nats_off(model, rollout, temperature or 1.0) < (1e-5 if dtype == torch.float32 else 0.05)
    model.fast = None
    before = dict(graphs)
    plain = drawn(model, tiny, temperature=temperature)
    assert graphs == before
    if dtype == torch.float32:                               # rounding moves a few draws of half
        assert torch.equal(rollout.labels, plain.labels)
    else:
        first = rollout.mask.int().argmax(dim=1, keepdim=True) + 1
        differs = rollout.input_ids.gather(1, first) != plain.input_ids.gather(1, first)
        assert differs.sum() <= 1


def test_graphs_are_kept_and_see_updated_weights(tiny, graphs):
    """Rollouts of other shapes share them; nothing of an earlier one shows in a later one."""
    model = random_policy()
    shapes = [dict(G=20), dict(prompts=PROMPTS[:2], max_new_tokens=60), dict(temperature=0.0)]
    for shape in shapes:
        drawn(model, tiny, **shape)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.8)
    for shape in shapes:
        drawn(model, tiny, **shape)
    captured = graphs["captured"]
    kept = model.fast.decoder
    for past in sum(kept.past.values(), []):                     # not even a NaN shows
        past.fill_(torch.nan)
    kept.mask.fill_(False)
    for shape in shapes:
        found = drawn(model, tiny, **shape)
        expected = drawn(copy.deepcopy(model).cpu(), tiny, **shape)
        assert torch.equal(found.labels.cpu(), expected.labels)
    assert graphs["captured"] == captured and model.fast.decoder is kept
    model.fast.decoder = None
    drawn(model, tiny)
    assert graphs["captured"] > captured and (16, 128, 1.0) in model.fast.decoder.graphs
    kept = weakref.ref(model.fast.decoder)
    del model, past
    gc.collect()
    assert kept() is None                                        # it does not outlive its model


@pytest.mark.parametrize("changes, captures", [
    (dict(architecture="gemma2"), True), (dict(architecture="gpt2"), True),
    (dict(architecture="qwen3"), True), (dict(architecture="mistral"), True),
    (dict(architecture="llama", attention_bias=True, mlp_bias=True), True),
    (dict(architecture="falcon"), False),
    (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)), False)])
def test_a_step_that_no_graph_can_hold_needs_no_fast(tiny, graphs, changes, captures):
    """The others are captured, with windows, capped scores, norms of heads and biases, too."""
    model = small_model(**{"architecture": "qwen2", "vocab_size": 57, **changes}).to(CUDA)
    for prompts in (PROMPTS[::-1], PROMPTS[:3]):             # the second time places are left over
        expected = drawn(copy.deepcopy(model).cpu(), tiny, prompts)
        if not captures and model.fast:
            with pytest.raises(RuntimeError):
                drawn(model, tiny, prompts)
            model.fast = None
        found = drawn(model, tiny, prompts)
        assert torch.equal(found.labels.cpu(), expected.labels)
    assert bool(graphs["replayed"]) == captures


def test_weights_side_by_side_stay_themselves(tiny, tmp_path):
    """Once sampled from, q, k, v are parts of one tensor; whoever saves, copies or moves one of
    them sees it alone."""
    model = random_policy()
    before = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    answers = drawn(model, tiny).labels
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    copied = copy.deepcopy(model)
    assert not copied.fast.fused and not copied.fast.decoder
    for each in (model, saved, copied):
        assert all(torch.equal(weight.cpu(), before[name])
                   for name, weight in each.named_parameters())
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert sum(sizes) < 1.2 * sum(weight.nbytes for weight in before.values()) + 10_000
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(0.8)
    assert torch.equal(drawn(model, tiny).labels, answers)
    expected = drawn(copy.deepcopy(copied).cpu(), tiny).labels
    assert torch.equal(drawn(copied, tiny).labels, expected)
    # One of them moves away, and a graph is captured anew.
    attention.k_proj.weight.data = 0.5 * attention.k_proj.weight.data
    attention.v_proj.bias.data = attention.v_proj.bias.data + 1
    model.fast.decoder = None
    expected = drawn(copy.deepcopy(model).cpu(), tiny).labels
    assert torch.equal(drawn(model, tiny).labels, expected) and not torch.equal(expected, answers)


def test_answers_that_need_several_blocks_of_slots(tiny, graphs):
    """A kept cache is too small for the longer ones; graphs see 128, 256, ... 640 slots."""
    model = random_policy(ends=[45], max_position_embeddings=1024)
    tokenizer = copy.deepcopy(tiny[1])                       # whose own end token ends nothing
    tokenizer.eos_token, tokenizer.chat_template = None, "{{ messages[-1].content }}"
    for tokens in (100, 600):
        found = drawn(model, (None, tokenizer), max_new_tokens=tokens)
    expected = drawn(copy.deepcopy(model).cpu(), (None, tokenizer), max_new_tokens=tokens)
    assert torch.equal(found.labels.cpu(), expected.labels)
    assert {length for _, length, _ in model.fast.decoder.graphs} >= {*range(128, 641, 128)}


def test_a_step_runs_once_before_its_capture(tiny, graphs, monkeypatch):
    """What CUDA and cuBLAS make at a kernel's first launch cannot be made in a capture."""
    captured = []

    def forward(*given, real=sample.Decoder.forward):
        captured.append(torch.cuda.is_current_stream_capturing())
        return real(*given)

    monkeypatch.setattr(sample.Decoder, "forward", forward)
    drawn(random_policy(), tiny)
    assert captured == [False, True] * graphs["captured"]


def test_many_words_are_drawn_as_on_the_cpu(tiny):
    """The running sum goes over blocks of 128 words; 4,001 do not fill the last one."""
    model = random_policy(vocab_size=4001, ends=[1])
    expected = drawn(copy.deepcopy(model).cpu(), tiny).labels
    same = (drawn(model, tiny).labels.cpu() == expected).all(dim=1)
    assert same.sum() >= len(same) - 2       # rounding may move a draw between rare neighbours


# --- [D] Log-probs and their gradients ------------------------------------------------------------
WAYS = {"padded": (False, False), "long row": (True, False), "checkpointed": (True, True)}


@pytest.mark.parametrize("fast, checkpointed", WAYS.values(), ids=WAYS)
@dtypes
def test_logprobs_and_gradients(dtype, fast, checkpointed):
    def run(model, ids, labels, weight):
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        slow = [] if fast else [SDPBackend.MATH]             # it holds all scores
        with sdpa_kernel(kernels + slow):
            values, entropy = token_logprobs(model, ids, labels, 0.9, measure=True)
            (values * weight).sum().backward()
        return [values, entropy, *(p.grad for p in model.parameters())]

    rows = answer_rows([(5, 15), (5, 4), (5, 1), (3, 14), (3, 1), (3, 17)], words=57)
    model = random_policy(dtype, fast=fast)
    if checkpointed:
        checkpoint_layers(model)
    expected = run(copy.deepcopy(model).to("cpu", torch.float32), *rows)
    found = run(model, *(x.to(CUDA) for x in rows))
    tolerance = 2e-5 if dtype == torch.float32 else 0.15
    assert all(same(a, b, tolerance) for a, b in zip(found, expected))


def test_the_head_makes_an_eighth_of_its_logits_at_a_time():
    hidden, weight = torch.empty(2**14, 1, device=CUDA), torch.empty(1000, 1)
    assert logprob.chunks(hidden, weight) == [slice(n, n + 2048) for n in range(0, 2**14, 2048)]
    assert logprob.chunks(hidden, torch.empty(2**18, 1))[0] == slice(0, 1024)    # 1 GB in float32


def test_gradients_of_the_head_are_summed_in_float32():
    """All logits are 0, p is 1/64 and every product exact: only sums could be rounded."""
    hidden, weight = torch.randint(-50, 50, (2, 512, 64), generator=seeded()).to(CUDA, HALF)
    hidden[:, ::2] = weight[:, 1::2] = 0                         # orthogonal
    weight = weight[:64].requires_grad_()
    weight.grad_dtype = None                                     # allows float32
    targets = torch.arange(512, device=CUDA) % 7
    logprobs, _ = logprob.LeanHead.apply(hidden.requires_grad_(), weight, targets, 1.0, False)
    (3 * logprobs).sum().backward()
    exact = [x.detach().cpu().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    (3 * logits.log_softmax(dim=1).gather(1, targets.cpu()[:, None])).sum().backward()
    assert torch.equal(hidden.grad.cpu(), exact[0].grad.to(HALF))
    assert same(weight.grad, exact[1].grad, 1e-6)


def test_logits_are_not_rounded_to_half_precision(tiny):
    """[A] and [D] on logits of about a hundred, which differ by little: rounding would show."""
    model = random_policy(HALF)
    with torch.no_grad():
        model.lm_head.weight += 16 * torch.randn(32, generator=seeded()).to(CUDA)  # one for all
        rollout = drawn(model, tiny)
        found, _ = token_logprobs(model, rollout.input_ids, rollout.labels)
        hidden = model.model(rollout.input_ids.to(CUDA)).last_hidden_state[:, :-1].cpu().double()
    logits = hidden @ model.lm_head.weight.detach().cpu().double().T
    expected = logits.log_softmax(dim=2).gather(2, rollout.input_ids.cpu()[:, 1:, None])[:, :, 0]
    for logprobs in (rollout.sampler_logprobs, found):
        error = (logprobs.cpu() - expected)[rollout.mask.cpu()].abs().mean()
        assert error < 5 * torch.finfo(HALF).eps


# --- [G] [H] Runs ---------------------------------------------------------------------------------
def updates(device, dtype):
    """Two updates on answers that a policy on the CPU has drawn -> the metrics of each."""
    p = parts(f"--device={device}", "--lr=2e-3")  # at 1e-3 a ratio ends on the edge of a clip
    rollout = rollout_of(p)
    rollout.advantages = group_advantages(REWARDS, 4)
    with torch.no_grad():
        rollout.ref_logprobs, _ = token_logprobs(p.ref_model, rollout.input_ids, rollout.labels)
    p.policy_model.to(device, dtype)
    p.optimizer = train.make_optimizer(p.policy_model, p.settings)
    rollout.old_logprobs, _ = train.rollout_logprobs(p.policy_model, rollout, p.settings)
    return [train.gradient_step(p, rollout, p.settings, measure) for measure in (True, False)]


@pytest.mark.parametrize("dtype", [torch.float32, *[torch.bfloat16] * FLASH])
def test_updates_on_the_same_answers(dtype):
    """Every metric of them."""
    rel = 1e-5 if dtype == torch.float32 else 0.02
    for found, expected in zip(updates(CUDA, dtype), updates("cpu", torch.float32)):
        for name in expected:
            assert found[name] == pytest.approx(expected[name], rel=rel, abs=rel / 4), name


SHORT = (*FEW, "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=20", "--eval-limit=2",
         "--steps=2", "--eval-every=2", "--save-every=2")


def run(*flags):
    """-> metrics of the steps, {name: tensor} of the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        trains(f"--output={folder}/run", *flags)
        run = Path(folder, "run")
        return metrics_of(run), checkpoint_of(run)


on_the_cpu = functools.cache(lambda *flags: run(*flags, "--device=cpu", "--dtype=float32"))
LEARNED = ("reward_mean", "response_length_mean", "entropy", "loss", "grad_norm", "approx_kl")


def assert_same_steps(found, expected, rel, names=LEARNED):
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for a, b in zip(found[1:], expected[1:]):
        for name in names:
            assert a[name] == pytest.approx(b[name], rel=rel, abs=rel), (a["step"], name)
        assert a["skipped_updates"] == 0


def assert_same_weights(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in found:
        if name.startswith("weight/"):
            assert same(found[name], expected[name], tolerance), name


# The prompts of the default run have many lengths, so that rows are padded in the cache.
VARIANTS = {"default": ["--steps=3", "--prompts-per-step=16", "--group-size=8", "--eval-limit=8",
                        "--max-new-tokens=40"],
            "slow": ["--no-fast"], "checkpointing": ["--gradient-checkpointing"],
            "LoRA": ["--lora-rank=2"],
            "conversations": [f"--reply={MINE.with_name('checker.py')}:check", "--max-turns=2"],
            "dynamic sampling": ["--max-resample=2"], "GTPO": ["--advantage=gtpo"],
            "branches": ["--around-best=1"],
            "mini-batches": ["--minibatches=2", "--renew-reference=2"]}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_variants_in_float32(graphs, flags):
    metrics, tensors = run(*SHORT, *flags, "--device=cuda", "--dtype=float32")
    expected, weights = on_the_cpu(*SHORT, *flags)
    is_default = flags is VARIANTS["default"]
    assert_same_steps(metrics, expected, 1e-5 if is_default else 1e-4)
    assert_same_weights(tensors, weights, 1e-5 if is_default else 1e-4)
    assert bool(graphs["replayed"]) == ("--no-fast" not in flags)
    if is_default:
        assert metrics[-1]["eval_accuracy"] == expected[-1]["eval_accuracy"]
        assert graphs["captured"] <= 10 < graphs["replayed"]  # graphs of two temperatures are kept


IN_HALF = {"default": [], "offload": ["--offload"], "checkpointing": ["--gradient-checkpointing"],
           "LoRA": ["--lora-rank=2"],
           "LoRA, offload": ["--lora-rank=2", "--offload", "--kl-coef=0"], "slow": ["--no-fast"]}


@pytest.mark.parametrize("flags", IN_HALF.values(), ids=IN_HALF)
def test_steps_in_half_precision(flags):
    """Within rounding of the CPU's run: a few draws differ, and with them the answers."""
    metrics, tensors = run(*SHORT, *flags, "--device=cuda")
    expected, weights = on_the_cpu(*SHORT, *[flag for flag in flags if flag != "--offload"])
    assert_same_steps(metrics[:2], expected[:2], 0.15, LEARNED[:3])
    assert_same_steps(metrics, expected, 0.4, LEARNED[:3])
    assert all(line["sampler_difference"] < 0.05 for line in metrics[1:])
    # LoRA's factors begin at 0, and Adam's first steps are signs of gradients.
    tolerance = 0.6 if "--lora-rank=2" in flags else 0.05
    assert_same_weights({k: v for k, v in tensors.items() if k in weights}, weights, tolerance)


@pytest.mark.parametrize("how", [["--dtype=float32"], [], ["--lora-rank=2"]],
                         ids=["float32", "half", "LoRA"])
def test_a_run_and_its_resume(tmp_path, how):
    """Two steps in one go, and with a resume between them, wherever the masters live."""
    flags = (*SHORT, "--device=cuda", "--eval-every=1", "--save-every=1", "--steps=2", *how)
    whole, parts, moved = (tmp_path / name for name in ("whole", "parts", "moved"))
    trains(f"--output={whole}", *flags, "--no-offload")
    trains(f"--output={parts}", *flags, "--steps=1", "--offload")
    shutil.copytree(parts, moved)
    trains(f"--resume={parts}", "--steps=2")
    trains(f"--resume={moved}", "--steps=2", "--no-offload")
    expected = checkpoint_of(whole)
    for folder in (parts, moved):
        assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2]
        found = checkpoint_of(folder)
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"counters"}:
            assert same(found[name].float(), expected[name].float(), 1e-3), name


def test_the_second_of_two_cards(capsys, monkeypatch, graphs, run_here):
    if torch.cuda.device_count() < 2:
        pytest.skip("one card")
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)  # as in a new process
    metrics, _ = run(*SHORT, "--device=cuda:1", "--dtype=float32")
    assert_same_steps(metrics, on_the_cpu(*SHORT)[0], 1e-4)
    assert graphs["replayed"]
    capsys.readouterr()
    torch.cuda.set_device(0)                                 # the model's card is not the current
    on_card, on_cpu = (run_here("sample.py", "--device", device) for device in ("cuda:1", "cpu"))
    assert on_card == on_cpu and torch.cuda.current_device() == 0


def test_two_ranks_on_two_cards(tmp_path):
    """A run, its resume, and LoRA, one after another: what one process computes on the CPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one card")
    flags = (*SHORT, "--save-every=1", "--eval-every=1", "--updates-per-rollout=2")
    on_cards = [*flags, "--device=cuda", "--dtype=float32"]
    runs = [[*on_cards, "--steps=1", "--output=whole"], ["--resume=whole", "--steps=2"],
            [*on_cards, "--lora-rank=2", "--output=lora"]]
    program = tmp_path / "runs.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
                       "leave, train.leave_ranks = train.leave_ranks, lambda status: None\n"
                       f"for flags in {runs}:\n    assert train.main(flags) == 0\n"
                       "    train.join_ranks = lambda s: None  # they have met\n"
                       "leave(0)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    well_ended(subprocess.run([*torchrun, program], capture_output=True, text=True, timeout=LIMIT,
                              cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    for name, more in (("whole", ()), ("lora", ("--lora-rank=2",))):
        expected, weights = on_the_cpu(*flags, *more)
        assert_same_steps(metrics_of(tmp_path / name), expected, 1e-4)
        assert_same_weights(checkpoint_of(tmp_path / name), weights, 1e-4)


# --- What fails on its way ------------------------------------------------------------------------
def failing_after(calls, function, message="CUDA error: an illegal instruction"):
    left = [calls]

    @functools.wraps(function)
    def failing(*given, **how):
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError(message)
        return function(*given, **how)

    return failing


def flash_fails_backward(monkeypatch):
    if not FLASH:
        pytest.skip("the card has no flash attention")
    fail = failing_after(2, lambda grad: grad)

    @functools.wraps(logprob.varlen_attn)                    # its signature says what it takes
    def attention(*given, real=logprob.varlen_attn, **how):
        out = real(*given, **how)
        if out.requires_grad:
            out.register_hook(fail)
        return out

    monkeypatch.setattr(logprob, "varlen_attn", attention)


def replay_fails(monkeypatch):
    replay = failing_after(9, torch.cuda.CUDAGraph.replay)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)


def capture_fails(monkeypatch):
    """The host reads a number, which no capture allows; outside of one it only waits."""
    def draw(logits, *given, real=sample.draw):
        float(logits[0, 0])
        return real(logits, *given)

    monkeypatch.setattr(sample, "draw", draw)


def sampler_is_off(monkeypatch):
    """By 0.2 nats, while its fast form is used."""
    def off(*given, real=train.sample_groups, **how):
        rollout = real(*given, **how)
        rollout.sampler_logprobs -= 0.2 * rollout.mask * bool(given[0].fast)
        return rollout

    off.__module__ = "sample"
    monkeypatch.setattr(train, "sample_groups", off)


def memory_runs_out(monkeypatch):
    fail = failing_after(1, train.grpo_loss, str(NO_MEMORY[0]))
    monkeypatch.setattr(train, "grpo_loss", fail)


FAULTS = {"a replay": replay_fails, "a capture": capture_fails,
          "flash attention's gradient": flash_fails_backward,
          "the sampler's log-probs": sampler_is_off, "memory in the loss": memory_runs_out}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_run_goes_on_after_a_fault(monkeypatch, capsys, tmp_path, fault):
    """By the command that it names: without fast forms, or with smaller micro-batches."""
    expected, _ = on_the_cpu(*SHORT)                         # before anything is at fault
    with monkeypatch.context() as patch:
        fault(patch)
        try:
            said = refused(capsys, f"--output={tmp_path / 'run'}", *SHORT, "--device=cuda",
                           begun=True)
        except RuntimeError as error:                        # below its traceback
            said = error.__notes__[0]
    more = "--micro-batch-tokens" if fault is memory_runs_out else "--no-fast"
    assert more in said
    command = shlex.split(said.partition("continue with: ")[2].partition(" (")[0])
    trains(*command[2:], more + "=256" * (fault is memory_runs_out))     # behind python, train.py
    metrics = metrics_of(tmp_path / "run")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert not any(line["skipped_updates"] for line in metrics[1:])
    assert_same_steps(metrics, expected, 0.4, LEARNED[:3])


@pytest.fixture
def only_so_much_memory():
    """A function that leaves so many bytes beside those that the allocator cannot free."""
    def leave(more):
        gc.collect()
        torch.cuda.empty_cache()
        size = torch.cuda.memory_reserved() + more
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(max(size / total, 1e-9), 1.0))

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("more", [0, 2**22, 2**24])
def test_memory_that_runs_out_early(tmp_path, capsys, only_so_much_memory, more):
    """Before the model is there or in a rollout: one line, and a run that can be resumed."""
    folder = tmp_path / "run"
    only_so_much_memory(more)
    assert "memory" in refused(capsys, f"--output={folder}", *SHORT, "--device=cuda", begun=True)
    torch.cuda.set_per_process_memory_fraction(1.0)
    if folder.exists():
        trains(f"--resume={folder}")
        assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2]


def test_a_step_fits_into_what_the_rule_says():
    """Two steps of a model whose cache of keys and values is a fifth of the whole."""
    size = dict(hidden=1536, ffn=3072, kv_heads=12, vocab=8192)
    tools = str(Path(first_run.__file__).parent)
    program = (f"import sys; sys.path += {[str(ROOT), tools]}; import first_run\n"
               f"first_run.QWEN |= {size}; first_run.main(['--layers=4', '--only=memory'])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=LIMIT, env={**os.environ, "SOFTGPU_VALUES": "sizes"})
    rule, peak = map(float, re.search(r"needs some ([\d.]+) GB(?s:.*)live peak ([\d.]+) GB",
                                      well_ended(done)).groups())
    assert peak <= rule <= peak + train.REST


def test_what_first_run_counts(capsys):
    """A token is a launched graph and a few copies around it; an update waits where it must."""
    assert first_run.main(["--only", "counts"]) == 0
    decoding, *updates = re.findall(r"([\d.]+) launches, ([\d.]+) waits", capsys.readouterr().out)
    assert 1 <= float(decoding[0]) <= 20 and float(decoding[1]) <= 0.1
    assert len(updates) == 2
    assert all(100 <= float(launches) and float(waits) <= 15 for launches, waits in updates)


def test_a_device_that_is_not_there_is_one_line(capsys):
    assert "--device cuda:7" in refused(capsys, "--device=cuda:7", begun=True)
