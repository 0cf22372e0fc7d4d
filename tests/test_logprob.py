"""[D] logprob.py: values, entropies, gradients against the full log-softmax; forms; the script."""
# ruff: noqa: I001 - several names to a line
import copy
import functools
import math
import re
import runpy
import shutil
from types import SimpleNamespace

import pytest
import stand_in
import torch
from conftest import (
    NO_MEMORY, SMALL, TINY, answer_rows, edit_json, precisions, raises, reasons, seeded,
    small_model, value_error)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

import logprob
import sample
from logprob import (
    IGNORE, LeanHead, forms_of, layers_checkpointed, micro_batches, plain_logprobs,
    selected_logprobs, sequence_logprob, token_logprobs)

V = SMALL["vocab_size"]
GROUPS = torch.tensor([0, 0, 0, 1, 1])
# Of the rows: tokens of the prompt, of the response
SIZES = [(5, 14), (5, 1), (5, 7), (9, 3), (9, 11)]


batch = functools.partial(answer_rows, SIZES)
grouped_or_not = pytest.mark.parametrize("group_ids", [None, GROUPS], ids=["rows", "groups"])


def naive(model, input_ids, labels, temperature=1.0):
    """Every logit, in float64 -> log-probs, entropies (N, S-1)."""
    logits = model(input_ids, use_cache=False).logits[:, :-1].double()
    logp = (logits / temperature).log_softmax(dim=-1)
    mask = labels[:, 1:] != IGNORE
    chosen = logp.gather(2, input_ids[:, 1:, None])[:, :, 0]
    return chosen.where(mask, 0), -(logp.exp() * logp).sum(dim=-1).where(mask, 0)


def gradients(model, loss):
    names, weights = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, weights, materialize_grads=True)))


def assert_same_gradients(actual, expected, tolerance=1e-4):
    """Each within its own size, or far below the largest (a key's bias has a gradient of 0)."""
    largest = max(float(g.norm()) for g in expected.values())
    assert largest > 0 and actual.keys() == expected.keys()
    for name, g in expected.items():
        size = max(float(g.norm()), 1e-3 * largest)
        assert float((actual[name] - g).norm()) <= tolerance * size, name


def assert_same_pull(model, actual, exact, expected, weights, tolerance=1e-4):
    """The gradients of log-probs (N, S-1), each with a weight of its own."""
    found = gradients(model, (actual * weights).sum())
    assert_same_gradients(found, gradients(exact, (expected * weights).sum()), tolerance)


def rows_a_chunk(monkeypatch, rows):
    monkeypatch.setattr(logprob, "chunks", lambda M, V, device: [
        slice(m, m + rows) for m in range(0, M, rows)])


def tokens_run(model):
    """A list to which every pass through the model's body adds its number of tokens."""
    forms_of(model)  # tries a few rows of its own
    run = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, args: run.append(args[0].numel()))
    return run


class Shapes(TorchDispatchMode):
    """(name, shape) of every tensor that any operation returns, forward and backward."""
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.seen.append((function._schema.name.split("::")[1], tuple(x.shape)))
        return result


# --------------------------------------------------------------------------------------------------
# The formula, and all fast forms together against the full log-softmax

def test_the_definition(random_model):
    """The formula on logits; [D] word for word."""
    logits = 5 * torch.randn(6, 9, generator=seeded())
    targets = torch.tensor([0, 8, 3, 3, 1, 7])
    exact = logits.double() / 0.7
    expected = [float(exact[m, v] - exact[m].exp().sum().log()) for m, v in enumerate(targets)]
    assert selected_logprobs(logits, targets, 0.7).tolist() == pytest.approx(expected, abs=1e-5)
    assert selected_logprobs(logits.bfloat16(), targets).dtype == torch.float32

    input_ids, labels, _ = batch()
    actual = plain_logprobs(random_model, input_ids, labels, 0.7)
    expected, _ = naive(random_model, input_ids, labels, 0.7)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


@grouped_or_not
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_entropies_and_gradients(random_model, temperature, group_ids, monkeypatch):
    rows_a_chunk(monkeypatch, 3)
    model, (input_ids, labels, weights) = copy.deepcopy(random_model), batch()
    exact = copy.deepcopy(random_model).double()
    expected, entropies = naive(exact, input_ids, labels, temperature)
    assert entropies[labels[:, 1:] != IGNORE].min().item() > 0.01  # none is a mere certainty

    actual, entropy = token_logprobs(model, input_ids, labels, temperature, with_entropy=True,
                                     group_ids=group_ids)
    assert actual.dtype == entropy.dtype == torch.float32
    assert actual.shape == entropy.shape == (5, 19)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), entropies, rtol=1e-5, atol=1e-4)
    assert not entropy.requires_grad
    assert_same_pull(model, actual, exact, expected, weights)
    whole = sequence_logprob(model, input_ids, labels, temperature)
    assert whole.shape == (5,) and whole.dtype == torch.float32
    sums = naive(exact, input_ids, labels, temperature)[0].sum(dim=1)
    torch.testing.assert_close(whole.double(), sums, rtol=1e-5, atol=1e-3)
    assert_same_pull(model, whole, exact, sums, weights[:, 0])


def test_without_entropies_gradients_or_labels(some_model):
    model, (input_ids, labels, _) = copy.deepcopy(some_model), batch()
    expected = token_logprobs(model, input_ids, labels, with_entropy=True)[0]
    assert torch.equal(token_logprobs(model, input_ids, labels), expected)
    with torch.no_grad():
        silent = token_logprobs(model, input_ids, labels)
    assert not silent.requires_grad
    torch.testing.assert_close(silent, expected.detach())
    nothing = torch.full_like(labels, IGNORE)
    for values in token_logprobs(model, input_ids, nothing, with_entropy=True):
        assert torch.equal(values, torch.zeros(5, 19))
    logprobs = token_logprobs(model, input_ids, nothing)
    assert not any(g.any() for g in gradients(model, logprobs.sum()).values())


# --------------------------------------------------------------------------------------------------
# Masks and padding, shared prompts, equal rows

@grouped_or_not
def test_what_stands_in_the_padding_does_not_matter(some_model, group_ids):
    model = copy.deepcopy(some_model)
    input_ids, labels, weights = batch()
    other_ids = input_ids.clone()
    for n, (prompt, response) in enumerate(SIZES):
        other_ids[n, prompt + response :] = (7 * torch.arange(20 - prompt - response) + n + 1) % V
    a = token_logprobs(model, input_ids, labels, group_ids=group_ids)
    b = token_logprobs(model, other_ids, labels, group_ids=group_ids)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert_same_pull(model, a, model, b, weights, 1e-6)


@grouped_or_not
def test_labels_anywhere_in_the_row(some_model, group_ids):
    """The mask is the labels': a hole in the response is not scored, but still read."""
    input_ids, labels, _ = batch()
    whole = token_logprobs(some_model, input_ids, labels)
    labels[0, 5] = labels[0, 9] = labels[3, 10] = IGNORE
    labels[2, 0] = input_ids[2, 0]  # nothing predicts token 0
    expected = whole.clone()
    expected[0, 4] = expected[0, 8] = expected[3, 9] = 0
    actual = token_logprobs(some_model, input_ids, labels, group_ids=group_ids)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_rows_without_labels_cost_nothing(some_model):
    model, (input_ids, labels, _) = copy.deepcopy(some_model), batch()
    labels[0] = labels[3] = labels[4] = IGNORE
    run = tokens_run(model)
    actual = token_logprobs(model, input_ids, labels, group_ids=GROUPS)
    grouped = forms_of(model)["grouped rows"]
    assert run == [5 + 6 if grouped else input_ids.numel()]
    expected, _ = naive(model, input_ids, labels)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


@grouped_or_not
def test_equal_rows_run_once(some_model, group_ids):
    """Each keeps its own weight in the gradient; rows of a group may stand apart."""
    model = copy.deepcopy(some_model)
    order = torch.tensor([0, 1, 0, 3, 4, 1, 0, 4, 2])
    input_ids, labels, _ = (x[order] for x in batch())
    labels[4, 12] = IGNORE
    weights = torch.randn(9, 19, generator=seeded(1))
    exact = copy.deepcopy(model).double()
    expected, entropies = naive(exact, input_ids, labels, 0.7)
    run = tokens_run(model)
    groups = None if group_ids is None else group_ids[order] + 7
    actual, entropy = token_logprobs(model, input_ids, labels, 0.7, True, groups)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), entropies, rtol=1e-5, atol=1e-4)
    assert_same_pull(model, actual, exact, expected, weights)
    # Rows 0, 1, 2 and 3 of the batch, and row 4 with two kinds of labels
    lengths = [14, 1, 7, 3, 11, 11]
    grouped = groups is not None and forms_of(model)["grouped rows"]
    assert run == [5 + 9 + sum(L - 1 for L in lengths) if grouped else 6 * 20]
    pairs = torch.tensor([[3, 1], [1, 3], [3, 1], [3, 3], [1, 3], [3, 1]])
    assert logprob.firsts_of_equal(pairs).tolist() == [0, 1, 0, 3, 1, 0]
    assert logprob.firsts_of_equal(pairs[:0]).tolist() == []


# --------------------------------------------------------------------------------------------------
# The lean head

def lean_head_inputs(M, dtype):
    """hidden (M, 6), weight (13, 6), targets and a gradient (M,)."""
    generator = seeded()
    shapes = ((M, 6), (13, 6), (M,))
    hidden, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    targets = torch.randint(13, (M,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, grad


@pytest.mark.parametrize("rows", [1, 3, 300, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("amx", [False, True])
def test_lean_head(monkeypatch, rows, temperature, dtype, grad_dtype, amx):
    """No rounding but that of the factors and the results; with AMX, that of d to bfloat16."""
    taken = precisions(monkeypatch, amx)
    if rows:
        rows_a_chunk(monkeypatch, rows)
    hidden, weight, targets, grad = lean_head_inputs(300, dtype)
    weight.grad_dtype = grad_dtype or dtype
    logprobs, entropy = LeanHead.apply(hidden, weight, targets, temperature, True)
    logprobs.backward(grad)
    assert not entropy.requires_grad
    without = LeanHead.apply(hidden, weight, targets, temperature, False)
    assert torch.equal(without[0], logprobs) and not without[1].any()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = (exact[0] @ exact[1].T / temperature).log_softmax(dim=1)
    expected = logp[torch.arange(300), targets]
    expected.backward(grad.double())
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    exact_entropy = -(logp.exp() * logp).sum(dim=1)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    for x, e in zip((hidden, weight), exact):
        rounded = torch.bfloat16 in (x.grad.dtype, dtype if amx else None)
        assert (x.grad.double() - e.grad).norm() <= (3e-3 if rounded else 1e-6) * e.grad.norm()
    assert hidden.grad.dtype == dtype and weight.grad.dtype == weight.grad_dtype
    assert taken == {"bf16" if amx and dtype == torch.bfloat16 else None}


def test_lean_head_works_in_place_and_with_large_logits():
    """Only entropies need a copy of the logits; the largest logit is taken out of exponentials."""
    hidden, weight, targets, _ = lean_head_inputs(5, torch.float32)

    def made(work, *given):
        """-> operations that return all logits of the chunk in memory of their own; the result."""
        with Shapes() as shapes:
            out = work(*given)
        return [name for name, x in shapes.seen if x == (5, 13) and not name.endswith("_")], out

    for with_entropy, expected in ((False, ["mm"]), (True, ["mm", "exp"])):
        names, (logprobs, _) = made(LeanHead.apply, hidden, weight, targets, 1.0, with_entropy)
        assert names == expected and made(logprobs.sum().backward)[0] == ["mm"]
    hidden = torch.eye(3, requires_grad=True)
    weight = torch.tensor([[500.0, -500, 0], [-500, 500, 0], [0, 0, 0]])
    logprobs, entropy = LeanHead.apply(hidden, weight, torch.tensor([0, 0, 1]), 1.0, True)
    assert logprobs.tolist() == pytest.approx([0.0, -1000.0, -1.0986123], abs=1e-4)
    assert entropy.tolist() == pytest.approx([0.0, 0.0, 1.0986123], abs=1e-4)
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].isfinite().all()


@pytest.mark.parametrize("M, words", [
    (1, 151_936), (4_096, 151_936), (5, 2**30), (1000, 57), (0, 57)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_cover_every_row_once(M, words, device):
    slices = logprob.chunks(M, words, torch.device(device))
    assert [m for rows in slices for m in range(M)[rows]] == list(range(M))
    largest = max((len(range(M)[rows]) for rows in slices), default=0)
    assert min(M, 128) <= largest <= max(128, 2**30 / 4 / words)  # 1 GB of float32, or 128 rows
    if M > 128 and M * words > 2**30:
        assert len(slices) > 1


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])
def test_the_logits_are_never_held(architecture, monkeypatch):
    rows_a_chunk(monkeypatch, 3)
    words, width = 101, 32
    model, (input_ids, labels, _) = small_model(architecture, vocab_size=words), batch()
    assert int((labels != IGNORE).sum()) not in (words, width)
    forms_of(model)  # tries a few rows of its own
    saved = []

    # A tensor as wide as the vocabulary: how many rows? The weight has `width`.
    def rows_of(shapes):
        return {torch.Size(shape).numel() // words for shape in shapes if words in shape} - {width}

    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.shape) or x, lambda x: x)
    with Shapes() as shapes, hooks:
        logprobs = token_logprobs(model, input_ids, labels, with_entropy=True)[0]
        forward = len(shapes.seen)
        logprobs.sum().backward()
    seen = [shape for _, shape in shapes.seen]
    for part in (seen[:forward], seen[forward:]):
        assert {2, 3} & rows_of(part) and max(rows_of(part)) == 3
    assert saved and not rows_of(saved)


# --------------------------------------------------------------------------------------------------
# Which forms a model takes

WINDOW, CAP = "a sliding window", "a cap or a scale on the logits"
FORMS = {  # architecture -> why its lean head and its grouped rows are refused
    "qwen2": (None, None), "qwen3": (None, None), "llama": (None, None), "mistral": (None, WINDOW),
    "gemma2": (CAP, WINDOW), "gpt2": (None, None), "granite": (CAP, None), "cohere": (CAP, None),
    "phi": ("a bias in the head", None),
}


@pytest.mark.parametrize("std", [0.0, 0.3])  # as initialised, and far from it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", FORMS)
def test_forms(architecture, dtype, std):
    model = small_model(architecture, std).to(dtype)
    lean, grouped = FORMS[architecture]
    attention = model.config._attn_implementation
    assert reasons(logprob, model) == {"lean head": lean, "grouped rows": grouped}
    assert model.config._attn_implementation == (attention if grouped else "grouped")


def test_forms_are_found_once(monkeypatch):
    tried = []
    plain = logprob.plain_logprobs
    monkeypatch.setattr(logprob, "plain_logprobs", lambda *a: tried.append(a[0]) or plain(*a))
    model = small_model("llama")
    other = copy.deepcopy(model)
    assert forms_of(model) is forms_of(model)
    forms_of(other)
    assert tried == [model] * 5 + [other] * 5


def test_looking_changes_nothing(some_model):
    """Neither the trial of the forms, nor grouped rows."""
    model, (input_ids, labels, _) = copy.deepcopy(some_model), batch()
    expected = model(input_ids).logits
    how = dict(do_sample=False, max_new_tokens=8)
    written = model.generate(input_ids[:1, :5], **how)
    state = torch.get_rng_state()
    for group_ids in (None, GROUPS):
        token_logprobs(model, input_ids, labels, group_ids=group_ids)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model(input_ids).logits, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(model.generate(input_ids[:1, :5], **how), written)
    assert "forward" not in vars(model) and "forward" not in vars(logprob.body_of(model))


GROUPED_HIDDEN = logprob.grouped_hidden


@pytest.mark.parametrize("form, reason", [
    (raises(TypeError("no such\nargument")), "TypeError: no such argument"),
    (lambda *args: (None, GROUPED_HIDDEN(*args)[1].roll(1, dims=0)), "off by .* nats"),
    (lambda *args: (None, GROUPED_HIDDEN(*args)[1] * math.nan), "off by nan nats"),
])
def test_a_form_that_fails_is_refused_with_its_reason(monkeypatch, form, reason):
    monkeypatch.setattr(logprob, "grouped_hidden", form)
    model, (input_ids, labels, _) = small_model("llama"), batch()
    why = reasons(logprob, model)
    assert re.fullmatch(reason, why["grouped rows"]) and why["lean head"] is None
    assert model.config._attn_implementation == "sdpa"
    actual = token_logprobs(model, input_ids, labels, group_ids=GROUPS)
    expected, _ = naive(model, input_ids, labels)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["grouped_hidden", "own_head", "plain_logprobs"])
@pytest.mark.parametrize("error", NO_MEMORY)
def test_memory_that_runs_out_is_not_a_reason(monkeypatch, form, error):
    monkeypatch.setattr(logprob, form, raises(error))
    with pytest.raises(type(error), match="memory"):
        forms_of(small_model("llama"))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_model_that_disagrees_or_fails_is_refused(monkeypatch, architecture):
    """Where the body's hidden states or the head are not those of the forward pass."""
    own_head = logprob.own_head
    monkeypatch.setattr(logprob, "own_head", lambda *args: 1.02 * own_head(*args))
    with value_error(rf"{architecture}: .* are off by [\d.e-]+ nats"):
        token_logprobs(small_model(architecture), *batch()[:2])
    monkeypatch.setattr(logprob, "body_of", raises(AttributeError("no body\nhere")))
    with value_error(rf"{architecture}: .* fail \(AttributeError: no body here\)"):
        forms_of(small_model(architecture))


# --------------------------------------------------------------------------------------------------
# Attention in a grouped row

ROWS = {
    "one group": [(7, 3, 5)],
    "answers of one token, and of none": [(4, 1, 0, 1), (1, 1, 1)],
    "no answer": [(5,), (3, 0)],
    "many lengths": [(30, 1, 2, 9, 16, 17, 33, 40), (5, 25, 3), (18, 8, 8, 8)],
}


def tree(groups):
    """Who sees whom in the row, one token at a time."""
    owner = [(g, n, t) for g, group in enumerate(groups)  # its group, piece (0: prompt), place
             for n, length in enumerate(group) for t in range(length)]

    def sees(a, b):
        return a[0] == b[0] and (b[1] == 0 < a[1] or a[1] == b[1] and b[2] <= a[2])

    return torch.tensor([[sees(a, b) for b in owner] for a in owner])


def tensors(T, heads, key_heads, width, value_width, dtype=torch.float32):
    generator = seeded()
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width))
    return [torch.randn(1, n, T, w, generator=generator).to(dtype).requires_grad_()
            for n, w in sizes]


def assert_same_attention(groups, inputs, tolerance):
    """It is torch's, with the whole mask and in float64 -> its result."""
    out, _ = logprob.grouped_attention(None, *inputs, None, scaling=0.3, groups=groups)
    mask = tree(groups).to(out.device)
    expected = scaled_dot_product_attention(
        *(x.double() for x in inputs), mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    assert out.shape == expected.shape
    weights = torch.randn(out.shape, generator=seeded(1)).to(out.device)
    actual_grads = torch.autograd.grad(out, inputs, weights.to(out.dtype))
    expected_grads = torch.autograd.grad(expected, inputs, weights.double())
    for a, e in zip((out, *actual_grads), (expected, *expected_grads)):
        assert (a.double() - e).norm() <= tolerance * e.double().norm()
    return out


@pytest.mark.parametrize("heads, key_heads, value_width", [(4, 4, 6), (6, 2, 6), (4, 1, 3)])
@pytest.mark.parametrize("groups", ROWS.values(), ids=ROWS)
def test_grouped_attention(monkeypatch, groups, heads, key_heads, value_width):
    """In bfloat16 with AMX and without: the same result, and gradients as good as torch's own."""
    sizes = sum(map(sum, groups)), heads, key_heads, 6, value_width
    assert_same_attention(groups, tensors(*sizes), 1e-5)
    found, plain = [], []
    apply = logprob.PlainBackward.apply
    monkeypatch.setattr(logprob.PlainBackward, "apply", lambda *a: plain.append(1) or apply(*a))
    for amx in (False, True):
        precisions(monkeypatch, amx)
        found.append(assert_same_attention(groups, tensors(*sizes, torch.bfloat16), 6e-3))
        assert bool(plain) == amx
    assert torch.equal(*found)


def test_pieces_of_like_length_share_a_call_and_only_plain_attention_does():
    groups = ((20, *range(1, 65)), (25, *range(1, 65)))
    calls, _ = logprob.attention_calls(groups, 2, torch.device("cpu"))
    assert len(calls) == 1 + 3  # prompts; answers of up to 16, 32, 64 tokens
    assert sum(places.numel() for places, _, _ in calls) <= 1.5 * sum(map(sum, groups))
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=name):
            logprob.grouped_attention(None, *tensors(8, 2, 2, 4, 4), None, groups=[[5, 3]],
                                      **{name: 2})


@pytest.mark.parametrize("groups", ROWS.values(), ids=ROWS)
def test_flash_attention_gets_the_pieces(groups):
    inputs = tensors(sum(map(sum, groups)), 6, 2, 8, 8, torch.bfloat16)
    with stand_in.machine() as gpu:
        there = [x.detach().to("cuda").requires_grad_() for x in inputs]
        assert_same_attention(groups, there, 2e-2)
    assert gpu.attention["ragged"] and not gpu.attention["flash"]


def test_flash_attention_needs_no_more_than_its_keys():
    """A mask over 9000 queries and keys would have 81 million entries."""
    groups = ((9000, 500, 700),)
    with Shapes() as shapes:
        keys = logprob.flash_call(groups, torch.device("cpu"))[0]
    assert len(keys) == 9000 + 9500 + 9700
    assert max(math.prod(shape) for _, shape in shapes.seen) == len(keys)


@pytest.mark.parametrize("dtype, width, value_width, works, takes", [
    (torch.bfloat16, 64, 64, True, True), (torch.float16, 256, 256, True, True),
    (torch.float32, 64, 64, True, False), (torch.bfloat16, 96, 64, True, False),
    (torch.bfloat16, 320, 320, True, False), (torch.bfloat16, 64, 64, False, False),
])
def test_where_flash_attention_runs(monkeypatch, dtype, width, value_width, works, takes):
    assert not logprob.flash_works(torch.device("cpu"))
    monkeypatch.setattr(logprob, "flash_works", lambda _: works)
    query, value = (SimpleNamespace(dtype=dtype, shape=(1, 2, 9, w), device="cuda")
                    for w in (width, value_width))
    assert logprob.takes_flash(query, value) == takes
    torch.backends.cuda.enable_cudnn_sdp(True)
    runpy.run_path(logprob.__file__)                      # switches it off
    logprob.AttentionInterface.register("grouped", logprob.grouped_attention)   # not the copy's
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --------------------------------------------------------------------------------------------------
# Micro-batches and lengths

PROMPTS = [3, 3, 5, 5, 2, 2, 9, 9]
ANSWERS = [2, 6, 1, 4, 7, 5, 21, 1]


def cuts_of(budget, share_prompts):
    """Rows of PROMPTS[n] + ANSWERS[n] tokens, two rows in a group -> rows, widths."""
    _, labels, _ = answer_rows(list(zip(PROMPTS, ANSWERS)), width=40)
    cuts = micro_batches(labels, torch.arange(8) // 2, budget, share_prompts)
    return zip(*[(rows.tolist(), width) for rows, width in cuts])


def test_micro_batches_hold_every_row_once_within_the_budget():
    for budget in (1, 15, 20, 40, 1000):
        cuts, widths = cuts_of(budget, share_prompts=False)
        assert sorted(sum(cuts, [])) == list(range(8))
        for rows, width in zip(cuts, widths):
            assert width == max(PROMPTS[n] + ANSWERS[n] for n in rows)
            assert len(rows) * width <= budget or len(rows) == 1
        assert list(widths) == sorted(widths, reverse=True)
    assert len(cuts) == 1


def test_micro_batches_of_shared_prompts():
    # A prompt is paid once: 3 + 2 + 6 and 5 + 1 + 4 are 21
    cuts, widths = cuts_of(21, share_prompts=True)
    assert cuts == ([0, 1, 2, 3], [4, 5], [6], [7]) and widths == (9, 9, 30, 10)
    # A group that fits stays whole: of 11, 10, 14 and 31, where row 4 alone would have fitted
    assert next(cuts_of(31, share_prompts=True)) == ([0, 1, 2, 3], [4, 5], [6, 7])


@pytest.mark.parametrize("share_prompts", [False, True])
def test_micro_batches_pay_equal_rows_once(share_prompts):
    answers = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 3], [1, 2, 3], [9, IGNORE, IGNORE]]
    labels = torch.tensor([[IGNORE] * 4 + ids for ids in answers])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])

    def cuts(budget):
        cut = micro_batches(labels, groups, budget, share_prompts)
        return [(sorted(rows.tolist()), width) for rows, width in cut]

    # Group 0 costs 4 + 3 + 3, or two rows of 7; an equal answer of group 1 is another row.
    first = 10 if share_prompts else 14
    everything = first + (4 + 3 + 1 if share_prompts else 14)
    assert cuts(everything) == [([0, 1, 2, 3, 4, 5], 7)]
    assert cuts(first) == [([0, 1, 2, 3], 7), ([4, 5], 7)]
    assert cuts(7)[0] == ([0, 2, 3], 7)


def test_length_limit():
    def limit(kind, **changes):
        return sample.length_limit(AutoConfig.for_model(kind, **changes))

    assert limit("gpt2", n_positions=512) == 512
    assert limit("bloom") == float("inf")
    long = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi3 = dict(max_position_embeddings=8192, original_max_position_embeddings=4096)
    assert limit("phi3", **phi3, rope_parameters=long) == 4096
    assert limit("phi3", max_position_embeddings=8192) == 8192
    assert limit("gemma3_text", max_position_embeddings=8192) == 8192  # a set per kind of layer


def test_checkpointed_layers_run_once_more(some_model):
    """test_families.py has their gradients."""
    model, (input_ids, labels, _) = copy.deepcopy(some_model), batch()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    forms_of(model)
    run = []
    # Not a hook of the layer itself: checkpointing stands between that and the layer's forward.
    next(layers[0].children()).register_forward_hook(lambda *args: run.append(args[0]))
    for on in (True, False):
        run.clear()
        with layers_checkpointed(model, on):
            logprobs = token_logprobs(model, input_ids, labels, group_ids=GROUPS)
            assert all(layer.training == on for layer in layers) and len(run) == 1
            logprobs.sum().backward()
        assert len(run) == 1 + on and not any(layer.training for layer in layers)
    with pytest.raises(ValueError, match="out"), layers_checkpointed(model, True):
        raise ValueError("out")
    assert not any(module.training for module in model.modules())  # after an error, too


# --------------------------------------------------------------------------------------------------
# The command

def test_script_marks_the_response(run_here, tiny):
    words = ["Anna", "has", "9", "books", "loses", "4"]
    printed = run_here("logprob.py", " ".join(words[:3]), " ".join(words[2:]))
    _, *rows, _ = lines = printed.splitlines()
    rows = [row.split(maxsplit=3) for row in rows]
    prompt, response = rows[:-5], rows[-5:]               # four words and the end token
    assert [int(row[0]) for row in rows] == list(range(len(rows))) and len(prompt) >= 3
    assert all(row[1] == "." and row[2].startswith("'") for row in prompt)  # no log-prob
    assert {row[1] for row in response} == {"label"}
    assert [row[3] for row in response] == [repr(w) for w in [*words[2:], tiny[1].eos_token]]
    (found,) = re.findall(r" = (\S+)", lines[-1])
    assert float(found) == pytest.approx(sum(float(row[2]) for row in response), abs=1e-3)
    assert "over 5 tokens" in lines[-1]


def test_script_takes_a_run_and_its_flags(run_here, tiny, tmp_path):
    """--model RUN is the model that the run left in RUN/final."""
    final = shutil.copytree(TINY, tmp_path / "final")
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (final / "chat_template.jinja").write_text(template)
    plain = run_here("logprob.py", f"--model={final}").splitlines()
    run = f"--model={tmp_path}"
    assert run_here("logprob.py", run).splitlines() == plain
    cold = run_here("logprob.py", run, "--temperature=0.5", "--device=cpu").splitlines()
    assert plain[-1] != cold[-1] and len(plain) == len(cold)
    told = run_here("logprob.py", run, "--system-prompt=books books").splitlines()
    assert len(told) == len(plain) + 2 and "books" in told[1] and "books" in told[2]
    edit_json(final / "tokenizer_config.json", eos_token=None)
    said = run_here("logprob.py", run).splitlines()
    assert said[:-1] == plain[:-2] and len(plain) == len(said) + 1  # all but the end token's line


@pytest.mark.parametrize("file, text", [
    ("model.safetensors", "torn"), ("tokenizer.json", "{}"), ("config.json", '{"model_type": 3}'),
])
def test_script_refuses_in_one_line(run_here, tmp_path, file, text):
    """The other faults of a model's folder stand in test_bad_input.py."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / file).write_text(text)
    for program, flag, words in (
            ("logprob.py", f"--model={folder}", f"--model {folder}: cannot be used ("),
            ("sample.py", f"--model={folder}", f"--model {folder}: cannot be loaded: "),
            ("logprob.py", "--device=foo", "--device foo: cannot be used ("),
            ("logprob.py", "--temperature=0", "--temperature 0.0: must be above 0")):
        (line,) = run_here(program, flag, status=2).splitlines()
        assert line.startswith(f"{program}: {words}")
