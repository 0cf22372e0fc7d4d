"""The CUDA branches keep to CUDA's rules: every stage on a stand-in for the device, held against
the same stage on the CPU.

The stand-in (stand_in.py) is tried first: it has to refuse what CUDA refuses. Nothing here measures
speed; kernels, waits and copies are counted, since those are what costs time on a GPU.
"""
# ruff: noqa: I001 - several names to a line
import copy
import functools
import itertools
import re
import shutil
import weakref

import pytest
import stand_in
import torch
from conftest import (
    FEW, NO_MEMORY, answer_rows, checkpoint_of, metrics_of, raises, reasons, same_tensors,
    seeded, small_model, tiny_problems, trains)
from safetensors.torch import load_file
from stand_in import CudaError, on_gpu
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import logprob
import sample
import train

BF16 = torch.bfloat16
PROMPTS = ["Anna has 9 books .", "How many ?", "8 - 4",
           "Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?"]


def drawn(model, tokenizer, max_new_tokens=40, temperature=1.0, G=4):
    """A rollout of 4 prompts x 4 answers, from the same random numbers every time."""
    generators = [seeded(j) for j in range(len(PROMPTS))]
    return sample.sample_groups(model, tokenizer, PROMPTS, G, max_new_tokens, temperature,
                                generators)


@pytest.fixture
def granted(monkeypatch):
    """[A]'s fast forms without their trial, which takes longer than most of what is shown here."""
    monkeypatch.setattr(sample, "why_refused", lambda model, form: None)


def trained(model, tokenizer, device, steps=3, gpu=None, **changes):
    """Steps that update weights in place -> masters, metrics; `gpu` counts their copies."""
    s = train.Settings(**{**dict(
        group_size=4, prompts_per_step=2, max_new_tokens=24, micro_batch_tokens=96, lr=1e-3,
        gradient_checkpointing=True, offload=False, device=device), **changes})
    optimizer = train.make_optimizer(model, s)
    if gpu:
        gpu.copies.clear()
    reference = copy.deepcopy(model).requires_grad_(False)
    addresses = None
    for step in range(steps):
        problems = tiny_problems()[2 * step:2 * step + 2]
        prompts = [train.chat_prompt(tokenizer, problem, "") for problem in problems]
        generators = [seeded(10 * step + j) for j in range(2)]
        metrics, _ = train.train_step(model, reference, optimizer, tokenizer,
                                      train.Batch(problems, prompts, generators), s)
        # The first rollout may put weights side by side; from then on they stay.
        addresses = addresses or [weight.data_ptr() for weight in model.parameters()]
    assert addresses == [weight.data_ptr() for weight in model.parameters()], "graphs read there"
    return optimizer.param_groups[0]["params"], metrics


CARDS = {"float32": (torch.float32, False), "bfloat16": (BF16, False),
         "bfloat16 on Hopper": (BF16, True)}
cards = pytest.mark.parametrize("dtype, hopper", CARDS.values(), ids=CARDS)


def random_policy(dtype=torch.float32, ends=(1, 20, 30, 40), architecture="qwen2", **changes):
    """A small random Qwen2 with the words of tests/tiny; its query heads share key heads."""
    model = small_model(architecture, **{"vocab_size": 57, **changes}).to(dtype)
    model.generation_config.eos_token_id = list(ends)
    return model


def same(a, b, tolerance):
    a, b = a.detach().double(), b.detach().double()
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm())


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny[1]


# --------------------------------------------------------------------------------------------------
# The stand-in refuses what CUDA refuses

def gpu_ones(*shape, **kwargs):
    return torch.ones(*shape, device="cuda", **kwargs)


def copying(to_host):
    """Pinned memory, the first half of which is on its way from or to the GPU."""
    there = torch.ones(8, pin_memory=True)
    ends = (there[:4], gpu_ones(4)) if to_host else (gpu_ones(4), there[:4])
    ends[0].copy_(ends[1], non_blocking=True)
    return there


def adamw_with_its_step_on_the_host():
    weight = torch.nn.Parameter(gpu_ones(3))
    weight.grad = gpu_ones(3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    optimizer.state[weight]["step"] = optimizer.state[weight]["step"].cpu()
    optimizer.step()


def ragged_in_float32():
    lengths = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    varlen_attn(*gpu_ones(3, 4, 2, 8), lengths, lengths, 4, 4)


OUTSIDE = {
    "AdamW with its step on the host": (adamw_with_its_step_on_the_host, "same device"),
    "the host's random numbers": (
        lambda: torch.rand(3, device="cuda", generator=seeded()), "'cuda' generator"),
    "the GPU's random numbers": (
        lambda: torch.rand(3, generator=torch.Generator("cuda")), "'cpu' generator"),
    "the GPU's, in place": (
        lambda: torch.ones(3).random_(generator=torch.Generator("cuda")), "'cpu' generator"),
    "a read of what has not arrived": (lambda: copying(True)[3] + 1, "reads memory"),
    "a write to what has not arrived": (lambda: copying(True)[3:].fill_(1), "writes memory"),
    "a write to what has not left": (lambda: copying(False)[3:].fill_(1), "writes memory"),
    "pinning the GPU's memory": (lambda: gpu_ones(3).pin_memory(), "cannot pin"),
    "numpy": (lambda: gpu_ones(3).numpy(), "numpy"),
    "a view of attention's result": (
        lambda: scaled_dot_product_attention(*gpu_ones(3, 1, 4, 2, 8)).view(1, 1, 64), "view size"),
    "flash attention in float32": (ragged_in_float32, "float32"),
}
CAPTURED = {
    "item": lambda x: x.sum().item(), "if": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(), "a copy to the host": lambda x: x.cpu(),
    "a copy from the host": lambda x: x.copy_(torch.ones(3)),
    "numbers from the host": lambda x: torch.tensor([1.0], device=x.device),
    "a mask as index": lambda x: x[x > 0],
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "synchronize": lambda x: torch.cuda.synchronize(),
}


def backward(x, gradient):
    (1 * x.requires_grad_()).backward(gradient)


def through_a_hook(x, factor):
    y = x.requires_grad_().exp()
    y.register_hook(lambda grad: grad * factor)
    y.sum().backward()


def of_a_function(x, gradient):
    class Twice(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: 2 * x)
        backward = staticmethod(lambda ctx, _: gradient)

    Twice.apply(x.requires_grad_()).sum().backward()
    return x.grad


# Tensors of ones on two devices, in both orders: a (of that shape) here, b there.
MIXED = {
    "operands": lambda a, b: a(3) + b(3), "product": lambda a, b: a(3, 3) @ b(3, 3),
    "addmm": lambda a, b: a(3, 3).addmm_(b(3, 3), b(3, 3)),
    "cat": lambda a, b: torch.cat((a(3), b(3))),
    "out": lambda a, b: torch.add(a(3), a(3), out=b(3)),
    "mask": lambda a, b: a(3).masked_fill(b(3) > 0, 0),
    "norm": lambda a, b: rms_norm(a(2, 3), (3,), b(3)),
    "condition": lambda a, b: torch.where(a(3) > 0, b(3), 0.0),
    "index_select": lambda a, b: a(3).index_select(0, b(2).long()),
    "index_copy": lambda a, b: a(3).index_copy_(0, b(2).long(), a(2)),
    "gather": lambda a, b: a(3).gather(0, b(2).long()),
    "scatter": lambda a, b: a(3).scatter_(0, a(2).long(), b(2)),
    "attention": lambda a, b: scaled_dot_product_attention(*[x(1, 1, 3, 8) for x in (a, b, a)]),
    "a gradient": lambda a, b: setattr(a(3), "grad", b(3)),
    "a root's gradient": lambda a, b: backward(a(3), b(3)),
    "a hook's": lambda a, b: through_a_hook(a(3), b(3)),
    "a function's": lambda a, b: of_a_function(a(3), b(3)),
    "into a scalar": lambda a, b: a().add_(b()),
}
# and b is the GPU
ONE_WAY = {
    "a host's tensor and a scalar": (lambda a, b: a(3) + b(), True),
    "a scalar, masked in": (lambda a, b: a(3).masked_fill(a(3) > 0, b()), True),
    "a host's tensor, an index": (lambda a, b: a(3)[b(2).long()], True),
    "a scalar, filled in": (lambda a, b: a(3).fill_(b()), True),
    "a scalar of the host": (lambda a, b: b(3) * a() + a(), False),
    "such a scalar in place": (lambda a, b: b(3).addcmul_(b(3), a()), False),
    "such a scalar by where": (lambda a, b: torch.where(b(3) > 0, a(), b(3)), False),
    "such a scalar by an index": (lambda a, b: b(3).index_fill_(0, b(2).long(), a()), False),
    "an index of the host": (lambda a, b: b(3)[a(2).long()], False),
    "copies": (lambda a, b: b(3).copy_(a(3)), False),
    "a gradient of its own": (lambda a, b: backward(b(3), b(3)), False),
}
# Only the kernel that reads an index asks where it lies.
UNCHECKED = {"a host's tensor, an index"}
CROSSED = {**{name: (f, True) for name, f in MIXED.items()}, **ONE_WAY,
           **{f"{name}, turned": (lambda a, b, f=f: f(b, a), True) for name, f in MIXED.items()
              if name != "into a scalar"}}         # there torch takes the host's


@pytest.mark.parametrize("name", CROSSED)
def test_devices_that_mix(name):
    """The stand-in refuses what torch refuses with CPU and meta tensors, real or fake ones."""
    attempt, refused = CROSSED[name]

    def refuses(device):
        try:
            attempt(*(lambda *shape, at=at: torch.ones(shape, device=at) for at in ("cpu", device)))
        except RuntimeError:
            return True
        return False

    with stand_in.machine():
        assert refuses("cuda") == refused
    with torch._functorch.config.patch(fake_tensor_allow_meta=True), FakeTensorMode():
        fake = refuses("meta")
    seen = fake or refused and refuses("meta")           # real ones also lack some kernels
    assert seen == (refused and name not in UNCHECKED)


@pytest.mark.parametrize("attempt, words", OUTSIDE.values(), ids=OUTSIDE)
def test_refused(attempt, words):
    with stand_in.machine(), pytest.raises((RuntimeError, TypeError), match=words):
        attempt()


@pytest.mark.parametrize("attempt", CAPTURED.values(), ids=CAPTURED)
def test_refused_in_a_capture(attempt):
    with stand_in.machine():
        x = gpu_ones(3)
        attempt(x)                                       # outside it is only a wait, or nothing
        with pytest.raises(CudaError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            attempt(x)


def test_a_capture_changes_nothing_and_a_replay_works_on_the_same_memory():
    """Also where a weight has got other memory since."""
    with stand_in.machine() as gpu:
        x, weight, graph = gpu_ones(3), torch.nn.Parameter(gpu_ones(3)), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            x += torch.zeros(3, device="cuda") + 1
            y = 2 * x
            z = weight + 1
        after_capture = x.tolist()
        weight.data = 5 * gpu_ones(3)
        graph.replay()
        graph.replay()
    assert after_capture == [1, 1, 1]
    assert x.tolist() == [3, 3, 3] and y.tolist() == [6, 6, 6] and z.tolist() == [2, 2, 2]
    assert graph.kernels == 5 and gpu.replays == 2       # zeros, + 1, +=, 2 *, + 1


def test_graphs_of_one_pool_overwrite_each_other():
    with stand_in.machine():
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            y = gpu_ones(3) + 1
        with torch.cuda.graph(second, pool=first.pool()):
            gpu_ones(3) + 2
        first.replay()
        before = y.tolist()
        second.replay()
    assert before == [2, 2, 2] and y.isnan().all()


def test_a_copy_that_does_not_block_arrives_when_something_waits():
    with stand_in.machine() as gpu:
        there, pageable = torch.empty(3, pin_memory=True), torch.empty(3)
        there.copy_(gpu_ones(3), non_blocking=True)
        with stand_in.unseen():
            before = there.isnan().all()                 # garbage, also for who does not ask torch
        torch.cuda.synchronize()
        pageable.copy_(gpu_ones(3), non_blocking=True)   # blocks all the same
    assert before and there.tolist() == pageable.tolist() == [1, 1, 1]
    assert [c.blocking for c in gpu.copies] == [False, True]
    assert gpu.waits == {"synchronize": 1, "copy_": 1}


@pytest.mark.parametrize("dtype, hopper, masked, kernel", [
    (torch.float32, False, False, "efficient"), (torch.float32, True, True, "efficient"),
    (BF16, False, False, "flash"), (BF16, False, True, "efficient"), (BF16, True, True, "cudnn")])
def test_attention_and_its_kernel(dtype, hopper, masked, kernel, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril(2) if masked else None
    arguments = [x.to(dtype) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*arguments, mask, is_causal=not masked, enable_gqa=True)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    with stand_in.machine(hopper) as gpu:
        there = [x.to("cuda") for x in (*arguments, *([mask] if masked else []))]
        out = scaled_dot_product_attention(*there, is_causal=not masked, enable_gqa=True)
    assert gpu.attention == {kernel: 1}
    assert same(out, expected, 1e-6 if dtype == torch.float32 else 1e-2)
    assert out.is_contiguous() == (kernel != "efficient")


# --------------------------------------------------------------------------------------------------
# [A] Sampling through captured and replayed graphs

def assert_drawn_from(model, rollout, tolerance, temperature=1.0):
    """The rollout's log-probs are those of the formula, by the model's own forward: mean error."""
    with torch.no_grad():
        logits = model(rollout.input_ids).logits[:, :-1].float() / temperature
    expected = logits.log_softmax(-1).gather(2, rollout.input_ids[:, 1:, None])[:, :, 0]
    mask = rollout.labels[:, 1:] != -100
    assert (rollout.logprobs - expected)[mask].abs().mean() <= tolerance


@cards
def test_sampling_through_graphs(tokenizer, dtype, hopper):
    model = random_policy(dtype)
    with stand_in.machine(hopper) as gpu:
        there = copy.deepcopy(model).to("cuda")
        assert all(sample.forms_of(there).values())
        rollouts, tried = {}, len(gpu.graphs)
        temperatures = (1.0, 0.0) if dtype == torch.float32 else (1.0,)
        for temperature in temperatures:
            replayed = gpu.replays
            rollout = rollouts[temperature] = drawn(there, tokenizer, 28, temperature)
            assert on_gpu(rollout.input_ids) and on_gpu(rollout.logprobs)
            assert gpu.replays - replayed >= (rollout.labels != -100).sum(dim=1).max() - 1
        # for several of 16, 8, 4, 2, 1 rows, at each temperature
        assert 2 <= (len(gpu.graphs) - tried) / len(temperatures) <= 5
    assert not gpu.attention["cudnn"], "a plan for every new shape, and open faults in bfloat16"
    for temperature, rollout in rollouts.items():
        lengths = (rollout.labels != -100).sum(dim=1)
        assert lengths.min() < 16 and lengths.max() > 20     # rows end at different times
        assert_drawn_from(model, rollout, 1e-5 if dtype == torch.float32 else 0.05)
        if dtype == torch.float32:                       # rounding moves a few draws of bfloat16
            expected = drawn(model, tokenizer, 28, temperature)
            assert torch.equal(rollout.labels, expected.labels)


def test_graphs_are_kept_and_see_weights_that_are_updated_in_place(granted, tokenizer):
    """Every weight for itself, those that lie in one storage too; every temperature has its own."""
    model = random_policy()
    heats = (1.0, 0.0, 0.5)
    captured, found = [], {}
    with stand_in.machine() as gpu:
        there = copy.deepcopy(model).to("cuda")
        for heat in heats:
            drawn(there, tokenizer, 20, heat)
        with torch.no_grad():
            for weight in itertools.chain(there.parameters(), model.parameters()):
                weight.view(-1).mul_(0.8)
        for heat in (*heats, 0.0, 1.0, 0.5):
            found[heat] = drawn(there, tokenizer, 20, heat).input_ids.cpu()
            captured.append(len(gpu.graphs))
    for heat in heats:
        assert torch.equal(found[heat], drawn(model, tokenizer, 20, heat).input_ids)
    assert len({str(ids.tolist()) for ids in found.values()}) == 3
    assert captured[2] and captured[2:] == captured[2:3] * 4


def test_rollouts_of_two_shapes_in_turn_share_their_graphs(granted, tokenizer, monkeypatch):
    """The kept step grows to hold both; its old cache is gone before the new one is made."""
    steps, held, captured = weakref.WeakSet(), [], []

    def counted(self, *args, real=sample.OwnStep.__init__):
        held.append(sum(layer.past.nbytes for step in steps for layer in step.layers))
        real(self, *args)
        steps.add(self)

    monkeypatch.setattr(sample.OwnStep, "__init__", counted)
    with stand_in.machine() as gpu:
        model = random_policy(ends=[56]).to("cuda")
        for _ in range(3):
            for prompts, T in ((PROMPTS, 20), (PROMPTS[:2], 300)):
                chance = sample.uniform_numbers(seeded(T), len(prompts), 4, T, model.device)
                ids = [tokenizer(text, add_special_tokens=False).input_ids for text in prompts]
                sample.write_answers(model, ids, chance, 1.0, [56])
                captured.append(len(gpu.graphs))
        assert held == [0, 0] and (kept := sample.KEPT[model]).N == 16 and kept.capacity >= 300
        assert captured[1] > captured[0] and captured[2] > 0
        assert captured[2:] == captured[2:3] * 4
        # cuBLAS's workspaces go with a graph of their stream
        assert len({id(graph.stream) for graph in gpu.graphs[captured[0]:]}) == 1
        assert gpu.graphs[0].stream is not gpu.graphs[-1].stream


def test_the_host_seldom_waits(granted, tokenizer, monkeypatch):
    """56 more rows cost a few waits, as they leave; who has ended is asked at every 8th token."""
    def waits(G, T):
        with stand_in.machine() as gpu:
            rollout = drawn(random_policy(ends=[56]).to("cuda"), tokenizer, T, G=G)
        assert (rollout.labels != -100).sum(dim=1).max() == T
        return sum(gpu.waits.values())

    assert waits(16, 2) - waits(2, 2) < 8
    assert waits(4, 72) - waits(4, 24) <= 48 / 8
    monkeypatch.setattr(sample.OwnStep, "__init__", None)            # one token needs no cache
    waits(4, 1)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_logits_leave_the_head_in_float32(dtype):
    """[A]'s, and those of [D]'s lean head."""
    torch.manual_seed(0)
    model = random_policy(dtype)
    hidden, targets = torch.randn(40, 32).to(dtype), torch.randint(57, (40,))
    expected = hidden.float() @ model.lm_head.weight.detach().float().T
    exact = (expected / 0.7).log_softmax(-1)
    with stand_in.machine(), torch.no_grad():
        there, hidden = copy.deepcopy(model).to("cuda"), hidden.to("cuda")
        logits = sample.OwnStep(there, 40, 8, False).logits(hidden)
        logprobs, entropy = logprob.LeanHead.apply(hidden, there.lm_head.weight, targets.to("cuda"),
                                                   0.7, True)
    assert logits.dtype == torch.float32 and same(logits, expected, 1e-6)
    assert same(logprobs, exact.gather(1, targets[:, None])[:, 0], 1e-6)
    assert same(entropy, -(exact.exp() * exact).sum(-1), 1e-6)


@pytest.mark.parametrize("vocab", [57, 4000], ids=["few words", "many words"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_launches_of_a_token(granted, tokenizer, dtype, vocab):
    """In a graph per layer, and outside of it; as the README's table has them."""
    inside = {}
    for layers in (1, 3):
        with stand_in.machine() as gpu:
            model = random_policy(dtype, num_hidden_layers=layers, vocab_size=vocab).to("cuda")
            counts = []
            for T in (8, 4, 8):                          # the first of them captures
                before = gpu.kernels
                drawn(model, tokenizer, T)
                counts.append(gpu.kernels - before)
        assert len(gpu.graphs) == 1 and (counts[2] - counts[1]) / 4 <= 8
        inside[layers] = gpu.graphs[-1].kernels
    per_layer = (inside[3] - inside[1]) / 2
    assert per_layer <= 14 and inside[1] - per_layer <= 38, inside


SHAPES = {                   # lengths of the prompts, group size, new tokens, what else
    "one prompt, a group of 2": ([5], 2, 12), "64 prompts": ([1 + n % 7 for n in range(64)], 2, 6),
    "1 new token": ([3, 5], 4, 1), "2 new tokens": ([3, 5], 4, 2),
    "every first token ends": ([3, 5], 4, 20, {"ends": range(57)}),
    "prompts of 1 to 900": ([1, 900, 257], 2, 6),
    "151,936 words": ([4, 9], 3, 5, {"vocab_size": 151_936}),
    **{f"a capacity of {P + 20}": ([P, 90], 2, 20) for P in (235, 236, 237)},
    "heads with norms": ([4, 9], 6, 20, {"architecture": "qwen3", "head_dim": 8}),
    "greedy": ([4, 9], 6, 20, {"temperature": 0}), "hot": ([4, 9], 6, 20, {"temperature": 1.7}),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_graphs_draw_what_the_plain_loop_draws(granted, shape):
    """In every shape, twice: the second time all graphs are there."""
    lengths, G, T, how = (*shape, {})[:4]
    how = {"ends": (1, 20, 30, 40), "temperature": 1.0, **how}
    ends, temperature = list(how.pop("ends")), how.pop("temperature")
    model = random_policy(ends=ends, max_position_embeddings=1024, **how)
    prompts = [torch.randint(2, 57, (length,)).tolist() for length in lengths]
    chance = sample.uniform_numbers(seeded(3), len(lengths), G, T, torch.device("cpu"))
    with torch.no_grad():
        plain = sample.decode(model, prompts, chance, temperature, ends, sample.PlainStep)
    expected = sample.cut_at_end(*plain, ends)
    with stand_in.machine() as gpu:
        how = (model.to("cuda"), prompts, chance.to("cuda"), temperature, ends)
        found = [sample.write_answers(*how) for _ in range(2)]
        replayed = gpu.replays
    for rows in found:
        assert [ids for ids, _ in rows] == [ids for ids, _ in expected]
        for (_, a), (_, b) in zip(rows, expected):
            assert a == pytest.approx(b, abs=1e-4)
    assert bool(replayed) == (max(len(ids) for ids, _ in expected) > 1)


def test_rows_are_uploaded_once():
    """The fields of a rollout that are on the GPU take the same rows, without a wait for each."""
    with stand_in.machine() as gpu:
        n = torch.arange(4, device="cuda")
        rollout = sample.Rollout(n.view(4, 1), n.view(4, 1), n.view(4, 1), list("abcd"), n, n,
                                 rewards=torch.arange(4.0), advantages=n)
        taken = rollout.take([2, 0])
        assert sum(gpu.waits.values()) == 1
        assert taken.rewards.tolist() == taken.advantages.tolist() == [2, 0]


def failing_after(calls, function, error=None):
    """The function, which fails at one call, and at every later one."""
    counter = itertools.count()

    def failing(*given, **options):
        if next(counter) >= calls:
            raise error or RuntimeError("CUDA error: an illegal instruction\nmore of it")
        return function(*given, **options)

    return failing


LATE = {                     # what fails in a rollout, and at which call
    "a capture": (sample.OwnStep, "step", 1), "a replay": (stand_in.Graph, "replay", 7),
    "what follows the draws": (sample, "cut_at_end", 0), "the cache": (sample.OwnStep, "filled", 0),
}


@pytest.mark.parametrize("owner, name, calls", LATE.values(), ids=LATE)
def test_a_rollout_that_falls_back_draws_what_the_plain_loop_draws(
        granted, monkeypatch, capsys, owner, name, calls):
    prompts = [[3, 4, 5], [6, 7]]
    with stand_in.machine() as gpu:
        model = random_policy(BF16).to("cuda")
        chance = sample.uniform_numbers(seeded(3), 2, 4, 20, model.device)
        how = (model, prompts, chance, 1.0, [1, 20])
        monkeypatch.setattr(sample, "PLAIN", "to compare")
        expected = sample.write_answers(*how)
        sample.PLAIN = None
        stream = torch.cuda.current_stream()
        real, fails = getattr(owner, name), failing_after(calls, getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *given: (real if sample.PLAIN else fails)(*given))
        assert sample.write_answers(*how) == expected
        assert torch.cuda.current_stream() is stream and model not in sample.KEPT
        replays = gpu.replays
        assert sample.write_answers(*how) == expected and gpu.replays == replays
    line = "fast sampling failed (CUDA error: an illegal instruction): from now on the plain loop\n"
    assert capsys.readouterr().err == line


def test_a_rollout_that_runs_out_of_memory_does_not_fall_back(granted, monkeypatch):
    with stand_in.machine():
        model = random_policy(BF16).to("cuda")
        chance = sample.uniform_numbers(None, 1, 2, 4, model.device)
        monkeypatch.setattr(stand_in, "capture", failing_after(0, None, NO_MEMORY[0]))
        with pytest.raises(type(NO_MEMORY[0])):
            sample.write_answers(model, [[3, 4]], chance, 1.0, [1])
    assert sample.PLAIN is None


def test_a_build_without_flash_attention_keeps_the_fast_forms(monkeypatch):
    """With masks in its place; one call has told both files."""
    assert logprob.flash_works is sample.flash_works
    assert logprob.out_of_memory is sample.out_of_memory
    for name in (torch.ops.aten._flash_attention_forward,
                 torch.ops.aten._flash_attention_forward.default):
        monkeypatch.setitem(stand_in.ANSWERS, name, failing_after(0, None))
    with stand_in.machine() as gpu:
        model = random_policy(BF16).to("cuda")
        assert all({**sample.forms_of(model), **logprob.forms_of(model)}.values())
        assert gpu.attention["efficient"] and not gpu.attention["ragged"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])      # with biases, and without
def test_weights_stay_what_they_are_in_one_storage(granted, tokenizer, tmp_path, architecture):
    def storages(model):
        """Bytes of all memory that the weights lie in, each piece counted once."""
        return sum({weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
                    for weight in model.parameters()}.values())

    model = small_model(architecture, vocab_size=57)
    with stand_in.machine():
        there = copy.deepcopy(model).to("cuda")
        drawn(there, tokenizer, 4)
        attention = there.model.layers[1].self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
        assert storages(there) == storages(model)                    # no more memory than before
        addresses = [weight.data_ptr() for weight in there.parameters()]
        sample.release(there)
        drawn(there, tokenizer, 4)                                   # again: they lie well
        assert addresses == [weight.data_ptr() for weight in there.parameters()]
        reference = copy.deepcopy(there)
        assert storages(reference) == storages(model)
        train.follow(reference, there)
        there.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in model.named_parameters():
        for found in (saved[name], there.get_parameter(name), reference.get_parameter(name)):
            assert torch.equal(found, weight) and found.is_contiguous()


@pytest.mark.parametrize("what", ["a projection with its neighbour", "two layers", "FSDP"])
def test_weights_that_share_memory_or_are_sharded_are_left_alone(monkeypatch, what):
    def only_of_graphs(model, form, plain=sample.why_refused):
        return plain(model, form) if isinstance(form, functools.partial) else None

    monkeypatch.setattr(sample, "why_refused", only_of_graphs)
    model = random_policy(BF16)
    first, second = model.model.layers
    if what == "two layers":
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
    elif what == "FSDP":
        model.unshard = None                                         # as it adds it
    else:
        second.self_attn.v_proj.weight = second.self_attn.k_proj.weight
    with stand_in.machine():
        model.to("cuda")
        addresses = [weight.data_ptr() for weight in model.parameters()]
        reason = "FSDP" if what == "FSDP" else "weights that share memory"
        assert reason in reasons(sample, model)["CUDA graphs"]
        if what == "FSDP":
            chance = sample.uniform_numbers(None, 1, 2, 4, model.device)
            sample.write_answers(model, [[3, 4]], chance, 1.0, [1])
            assert addresses == [weight.data_ptr() for weight in model.parameters()]


# --------------------------------------------------------------------------------------------------
# [D] [G] Log-probs, their gradients, and training steps

@pytest.mark.parametrize("grouped, checkpointed", [(False, False), (True, False), (True, True)],
                         ids=["padded", "grouped", "grouped, checkpointed"])
@cards
def test_logprobs_and_gradients(dtype, hopper, grouped, checkpointed):
    def run(model, ids, labels, weight):
        groups = (torch.arange(6) // 3).to(ids.device) if grouped else None
        with train.layers_checkpointed(model, checkpointed):
            values, entropy = logprob.token_logprobs(model, ids, labels, 0.9, True, groups)
            (values * weight).sum().backward()
        return [values, entropy, *(p.grad for p in model.parameters())]

    rows = answer_rows([(5, 15), (5, 4), (5, 1), (3, 14), (3, 1), (3, 17)], words=57)
    model = random_policy(dtype)
    there = copy.deepcopy(model)
    expected = run(model, *rows)
    with stand_in.machine(hopper) as gpu:
        there.to("cuda")
        assert all(logprob.forms_of(there).values())
        found = run(there, *(x.to("cuda") for x in rows))
        assert all(map(on_gpu, found))
    tolerance = 2e-5 if dtype == torch.float32 else 0.15
    assert all(same(a, b, tolerance) for a, b in zip(found, expected))
    assert not gpu.attention["cudnn"]


def test_steps_in_float32(granted, tiny):
    policy, tokenizer = tiny
    expected, on_cpu = trained(copy.deepcopy(policy), tokenizer, "cpu", updates_per_rollout=2)
    with stand_in.machine():
        there = copy.deepcopy(policy).to("cuda")
        masters, metrics = trained(there, tokenizer, "cuda", updates_per_rollout=2)
        assert all(map(on_gpu, masters))
    assert metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0
    for name in ("loss", "reward_mean", "approx_kl", "entropy", "grad_norm", "tokens"):
        assert metrics[name] == pytest.approx(on_cpu[name], rel=1e-3, abs=1e-5), name
    assert all(same(a, b, 1e-5) for a, b in zip(masters, expected))


@pytest.mark.parametrize("offload", [True, False])
def test_steps_in_bfloat16(granted, tiny, offload):
    """The weights are their masters, rounded, wherever these live."""
    policy, tokenizer = tiny
    with stand_in.machine(hopper=True) as gpu:
        model = copy.deepcopy(policy).to(BF16).to("cuda")
        masters, _ = trained(model, tokenizer, "cuda", 2, offload=offload, rounding="nearest")
        assert all(on_gpu(x) != offload and x.dtype == torch.float32 for x in masters)
    assert gpu.attention and not gpu.attention["cudnn"]
    for weight, master, start in zip(model.parameters(), masters, policy.parameters()):
        assert torch.equal(weight, master.to(BF16)) and not torch.equal(master, start)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("lora, offload, rounding", [(0, True, "threshold"), (0, False, "nearest"),
                                                     (2, True, "nearest"), (2, False, "nearest")])
def test_an_optimizers_step_on_fake_tensors(lora, offload, rounding, dtype):
    """torch itself is the second witness: only the reading of a value ends the step."""
    s = train.Settings(lora_rank=lora, offload=offload, rounding=rounding)
    policy = random_policy()
    with torch._functorch.config.patch(fake_tensor_allow_meta=True), FakeTensorMode():
        with torch.device("meta"):
            model = type(policy)._from_config(policy.config, dtype=dtype)
        optimizer = train.make_optimizer(model, s)
        for _ in range(2):
            sum(p.float().square().sum() for p in model.parameters()).backward()
        with pytest.raises(DataDependentOutputException):
            optimizer.step()
        assert {p.grad.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}


def test_gradients_go_to_the_host_once_per_update(granted, tiny, monkeypatch):
    """Pinned and without blocking; how many micro-batches there are makes no difference."""
    monkeypatch.setattr(train.MasterAdamW.beginnings, "__defaults__", (1,))   # the figure `arrived`
    policy, tokenizer = tiny
    sent = set()
    for tokens in (64, 4096):
        with stand_in.machine() as gpu:
            model = copy.deepcopy(policy).to(BF16).to("cuda")
            trained(model, tokenizer, "cuda", 1, gpu, micro_batch_tokens=tokens, offload=True)
        large = [c for c in gpu.copies if c.to_host and c.elements > 2000]
        assert large and not any(c.blocking for c in large)
        sent.add(sum(c.elements for c in large))
    assert len(sent) == 1


# --------------------------------------------------------------------------------------------------
# [H] The program, its resume, and what fails on its way

SHORT = [*FEW, "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=8", "--eval-limit=2",
         "--eval-every=2", "--device=cuda", "--save-every=2", "--steps=2"]


def flash_fails_backward(calls):
    def attention(*given, **how):
        out = varlen_attn(*given, **how)
        if out.requires_grad:
            out.register_hook(lambda grad: fail() or grad)
        return out

    fail = failing_after(calls, lambda: None)
    return attention


def pageable(*shape, pin_memory=False, real=torch.empty, **how):
    if pin_memory:
        raise RuntimeError("CUDA error: out of memory")
    return real(*shape, **how)


def a_little_off(*given, real=train.sample_groups):
    rollout = real(*given)
    rollout.logprobs -= 0.0 if sample.PLAIN else 0.2 * rollout.mask
    return rollout


def once_without_memory(real=train.grpo_loss):
    losses = itertools.chain([raises(NO_MEMORY[0])], itertools.repeat(real))
    return lambda *given, **how: next(losses)(*given, **how)


REPLAY = stand_in.Graph.replay
FAULTS = {                   # what fails, the line that tells it
    "a replay": (lambda: (stand_in.Graph, "replay", failing_after(9, REPLAY)),
                 "fast sampling failed (CUDA error: an illegal instruction)"),
    "flash attention's gradient": (lambda: (logprob, "varlen_attn", flash_fails_backward(3)),
                                   "fast forms given up: CUDA error: an illegal"),
    "pinned memory": (lambda: (torch, "empty", pageable), "no pinned memory (CUDA"),
    "log-probs": (lambda: (train, "sample_groups", a_little_off),
                  "given up: sampler and trainer differ by 0.2"),
    "empty_cache": (lambda: (train, "grpo_loss", once_without_memory()), "out of memory: --"),
}


@pytest.fixture
def fast(monkeypatch):
    for stage in (sample, logprob):
        monkeypatch.setattr(stage, "PLAIN", None)        # put back behind the run


def test_the_trial_runs_backward(monkeypatch):
    monkeypatch.setattr(logprob, "varlen_attn", flash_fails_backward(0))
    with stand_in.machine():
        why = reasons(logprob, random_policy(BF16).to("cuda"))
    assert "an illegal instruction" in why["grouped rows"] and why["lean head"] is None


def test_rounding_on_the_gpu_launches_few_kernels():
    """The same weights as on the host, where small pieces are faster."""
    master, here = torch.randn(2**20), torch.zeros(2**20, dtype=BF16)
    train.round_into(here, master, (0, 1))
    with stand_in.machine() as gpu:
        there, master = here.new_zeros(2**20).to("cuda"), master.to("cuda")
        gpu.kernels = 0
        train.round_into(there, master, (0, 1))
        assert gpu.kernels <= 8 and torch.equal(there.cpu(), here)


@pytest.mark.parametrize("fault, line", FAULTS.values(), ids=FAULTS)
def test_a_fault_after_the_trial_is_one_line(monkeypatch, capsys, tmp_path, fast, fault, line):
    """The run goes on to its end."""
    with stand_in.machine():
        monkeypatch.setattr(torch.cuda, "empty_cache", raises(RuntimeError("captures_underway")))
        monkeypatch.setattr(*fault())
        trains(f"--output={tmp_path}", *SHORT, *["--offload"] * line.startswith("no pinned"))
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2]
    out, err = capsys.readouterr()
    assert (out + err).count(line) == 1 and "Traceback" not in err
    told = "fast sampling failed|given up|no pinned|out of memory:"
    assert len(re.findall(told, out + err)) == 1


def test_plain_uses_no_fast_form(capsys, tmp_path, fast):
    with stand_in.machine() as gpu:
        trains(f"--output={tmp_path}", *SHORT, "--plain")
        assert not gpu.graphs and not gpu.attention["ragged"]
    assert capsys.readouterr().out.count("refused: --plain") == 4


@pytest.mark.parametrize("how", [(), ("--lora-rank=2",), ("--dtype=float16",)],
                         ids=["bfloat16", "LoRA", "float16"])
def test_the_program_and_its_resume(tmp_path, how):
    """Two steps in one go, and with a resume between them, wherever the masters live."""
    flags = [*SHORT, "--eval-every=1", "--save-every=1", "--updates-per-rollout=1", *how]
    whole, parts, moved = (tmp_path / name for name in ("whole", "parts", "moved"))
    with stand_in.machine():
        trains(f"--output={whole}", *flags, "--no-offload")
        trains(f"--output={parts}", *flags, "--steps=1", "--offload")
        shutil.copytree(parts, moved)
        trains(f"--resume={parts}", "--steps=2")
        trains(f"--resume={moved}", "--steps=2", "--no-offload")
    for folder in (parts, moved):
        assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2]
        assert same_tensors(checkpoint_of(folder), checkpoint_of(whole))
