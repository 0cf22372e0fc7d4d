"""[D] logprob.py: log-probabilities of the tokens that were sampled.

It promises that `plain_logprobs` is the log-softmax of every logit, read where a label comes next;
that `token_logprobs` is the same with its gradient, in every family and however rows are grouped
and cut; that it never holds all logits; and that the entropies are those of the same distributions.
"""
import copy
import functools
import re
from types import SimpleNamespace
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer
from checks import pairwise, same, seeded
from files import TINY
from models import answer_rows, logprobs_on_full_logits, small_model
import logprob
import sample
from logprob import (IGNORE, LeanHead, checkpoint_layers, cut_rows, plain_logprobs,
                     sequence_logprob, token_logprobs)


class ThreeLogits(torch.nn.Module):
    """After token 0 the logits are 0, 1, 2; after any other 3, 0, 0."""

    device = "cpu"

    def forward(self, input_ids, **how):
        table = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
        return SimpleNamespace(logits=table[input_ids])


def test_by_hand():
    """A prompt 1 0, the answer 2 0: each token is predicted by the one before it."""
    input_ids = torch.tensor([[1, 0, 2, 0]])
    labels = torch.tensor([[-100, -100, 2, 0]])
    found = plain_logprobs(ThreeLogits(), input_ids, labels)
    # log(e^0 + e^1 + e^2) = 2.40761, and 2 - 2.40761 = -0.40761; 3 - log(e^3 + 2) = -0.09492
    assert found[0].tolist() == pytest.approx([0, -0.40761, -0.09492], abs=1e-5)
    assert found.sum() == pytest.approx(-0.50253, abs=1e-5)           # log pi(y | x)
    # At temperature 0.5 the logits are 0, 2, 4 and 6, 0, 0
    found = plain_logprobs(ThreeLogits(), input_ids, labels, 0.5)
    assert found[0].tolist() == pytest.approx([0, -0.14293, -0.00494], abs=1e-5)


# --------------------------------------------------------------------------------------------------
# A reader may stop here. What follows: gradients, groups of rows, lean head, forms, micro-batches.

# Of the rows: tokens of the prompt, of the response
SIZES = [(5, 14), (5, 1), (5, 7), (9, 3), (9, 11)]
batch = functools.partial(answer_rows, SIZES)


def naive(model, input_ids, labels, temperature=1.0):
    """Every logit, in float64 -> log-probs, entropies (N, S-1)."""
    rows = SimpleNamespace(input_ids=input_ids)
    found = logprobs_on_full_logits(model, rows, temperature)
    return [x.where(labels[:, 1:] != IGNORE, 0) for x in found]


def assert_same_pull(model, actual, exact, expected, weights, tolerance=1e-4):
    """The gradients of log-probs (N, S-1), each with a weight of its own."""
    found, wanted = (
        torch.autograd.grad((logprobs * weights).sum(), of.parameters(), materialize_grads=True)
        for logprobs, of in ((actual, model), (expected, exact)))
    largest = max(g.norm() for g in wanted)
    assert largest > 0
    for a, g in zip(found, wanted, strict=True):
        # Each within its own size, or far below the largest: a key's bias has a gradient of 0.
        assert (a - g).norm() <= tolerance * max(g.norm(), 1e-3 * largest)


def rows_a_chunk(monkeypatch, rows):
    monkeypatch.setattr(logprob, "chunks", lambda hidden, weight: [
        slice(m, m + rows) for m in range(0, max(len(hidden), 1), rows)])


class Shapes(TorchDispatchMode):
    """The shape of every tensor that any operation returns, forward and backward."""
    seen = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        self.seen += tuple(x.shape for x in tensors if isinstance(x, torch.Tensor))
        return result


# test_families.py has the others. Of these two are fast, one caps its logits, one scales them.
@pytest.fixture(scope="module", params=["qwen2", "gpt2", "gemma2", "granite"])
def random_model(request):
    return small_model(request.param)


# --- The formula, and all fast forms together against the full log-softmax ------------------------
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_entropies_and_gradients(random_model, temperature, monkeypatch):
    rows_a_chunk(monkeypatch, 3)
    model, (input_ids, labels, weights) = copy.deepcopy(random_model), batch()
    exact = copy.deepcopy(random_model).double()
    expected, entropies = naive(exact, input_ids, labels, temperature)
    assert entropies[labels[:, 1:] != IGNORE].min().item() > 1e-3  # none is a mere certainty
    plain = plain_logprobs(exact, input_ids, labels, temperature)
    torch.testing.assert_close(plain.double(), expected, rtol=1e-6, atol=1e-6)
    assert_same_pull(exact, plain, exact, naive(exact, input_ids, labels, temperature)[0], weights)
    actual, entropy = token_logprobs(model, input_ids, labels, temperature, measure=True)
    for found in (plain, actual, entropy):
        assert found.dtype == torch.float32 and found.shape == (5, 19)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), entropies, rtol=1e-5, atol=1e-4)
    assert not entropy.requires_grad
    assert_same_pull(model, actual, exact, expected, weights)
    whole = sequence_logprob(model, input_ids, labels, temperature)
    assert whole.shape == (5,) and whole.dtype == torch.float32
    sums = naive(exact, input_ids, labels, temperature)[0].sum(dim=1)
    torch.testing.assert_close(whole.double(), sums, rtol=1e-5, atol=1e-3)
    assert_same_pull(model, whole, exact, sums, weights[:, 0])


def test_without_entropies_gradients_or_labels(random_model):
    model, (input_ids, labels, _) = random_model, batch()
    expected, _ = token_logprobs(model, input_ids, labels, measure=True)
    with torch.no_grad():
        actual, entropy = token_logprobs(model, input_ids, labels)
    torch.testing.assert_close(actual, expected.detach())
    assert not entropy.any() and not actual.requires_grad
    nothing = torch.full_like(labels, IGNORE)
    logprobs, entropy = token_logprobs(model, input_ids, nothing, measure=True)
    for values in (logprobs, entropy):
        same(values, torch.zeros(5, 19))
    for g in torch.autograd.grad(logprobs.sum(), model.parameters(), materialize_grads=True):
        assert not g.any()


# --- Masks, and what rows have in common; test_families.py has rows with and without padding ------
# Rows of one letter a token; capitals are labels, and a dot is padding. -> Tokens that run
ALIKE = {
    "nothing in common": ("abCD. bcDEF", 3 + 4),
    "a prompt": ("abCDE abFG. abHIJ", 2 + 2 + 1 + 2),
    "two prompts that begin alike": ("abcDEF abcGH. abdEF. abdGH.", 3 + 2 + 1 + 1 + 1 + 1),
    "an answer's first words": ("abCDE abCDF abCDG abCHI", 2 + 2 + 0 + 0 + 1),
    "equal rows": ("abCDE abCDE abCDE abFFF abCDE", 2 + 2 + 2),
    "a row that begins another": ("abCDEF abCD.. abC... abCDEG", 2 + 3 + 0 + 0 + 0),
    "other labels of equal tokens": ("abCDEFG abCDeFG abcDEFG abCDEfg", 6 + 2 + 4 + 0),
    "other labels, one row longer": ("abCDE abCd.", 4 + 0),
    "a first label that nothing predicts": ("ABCDE aBcDE", 0),
    "everything": ("abCDEF abCDEF abCDEG bbCDEF abCD.. a..... aB.... abcDEF abC..C abcdef", 0)}


def rows_of(text):
    """-> ids, labels (N, S), weights (N, S-1)."""
    letters = [list(row) for row in text.split()]
    ids = torch.tensor([[ord(x.lower()) % 32 for x in row] for row in letters])
    is_label = torch.tensor([[x.isupper() for x in row] for row in letters])
    labels = ids.where(is_label, IGNORE)
    return ids, labels, torch.randn(len(ids), ids.shape[1] - 1, generator=seeded(1))


@pytest.mark.parametrize("rows, tokens", ALIKE.values(), ids=ALIKE)
def test_what_rows_begin_with_runs_once(random_model, rows, tokens):
    """Whatever it is; each row keeps its own weights in the gradient, in any order of the rows."""
    model = copy.deepcopy(random_model)
    exact = copy.deepcopy(random_model).double()
    run = []                                              # the tokens of each pass
    model.get_input_embeddings().register_forward_pre_hook(lambda _, x: run.append(x[0].numel()))
    input_ids, labels, weights = rows_of(rows)
    for order in (torch.arange(len(labels)), torch.randperm(len(labels), generator=seeded(2))):
        rows = [x[order] for x in (input_ids, labels)]
        expected, entropies = naive(exact, *rows, 0.7)
        actual, entropy = token_logprobs(model, *rows, 0.7, measure=True)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(entropy.double(), entropies, rtol=1e-5, atol=1e-4)
        assert_same_pull(model, actual, exact, expected, weights)
    if model.fast.has_long_rows:
        assert tokens == 0 or run == 2 * [tokens]


def test_long_rows_that_begin_alike():
    """Longer than what one call of attention takes of a row."""
    lengths = [(300, 150), (300, 10), (300, 299), (130, 1), (130, 300), (7, 128), (7, 129)]
    input_ids, labels, weights = answer_rows(lengths, width=600)
    input_ids[:, :5] = 3                                  # all begin alike
    input_ids[2, 300:420] = input_ids[0, 300:420]
    labels[2, 300:420] = labels[0, 300:420]
    model = small_model("qwen2")
    exact = copy.deepcopy(model).double()
    expected, _ = naive(exact, input_ids, labels)
    actual, _ = token_logprobs(model, input_ids, labels)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    assert_same_pull(model, actual, exact, expected, weights)


# --- The lean head --------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, temperature, dtype, grad_dtype", pairwise(
    [1, 3, 300, None], [1.0, 0.7], [torch.float32, torch.bfloat16], [None, torch.float32]))
def test_lean_head(monkeypatch, rows, temperature, dtype, grad_dtype):
    """No rounding but that of the factors and the results; a frozen head gets no gradient."""
    if rows:
        rows_a_chunk(monkeypatch, rows)
    generator = seeded()
    hidden, weight, grad = (torch.randn(shape, generator=generator)
                            for shape in ((300, 6), (13, 6), (300,)))
    targets = torch.randint(13, (300,), generator=generator)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    weight.grad_dtype = grad_dtype or dtype
    logprobs, entropy = LeanHead.apply(hidden, weight, targets, temperature, True)
    logprobs.backward(grad)
    assert hidden.grad.dtype == dtype and weight.grad.dtype == weight.grad_dtype
    other, frozen = hidden.detach().requires_grad_(), weight.detach()
    without, nothing = LeanHead.apply(other, frozen, targets, temperature, False)
    without.backward(grad)
    same([without, other.grad, nothing], [logprobs, hidden.grad, torch.zeros(300)])
    head = weight.detach().requires_grad_()               # trained alone
    head.grad_dtype = weight.grad_dtype
    LeanHead.apply(hidden.detach(), head, targets, temperature, False)[0].backward(grad)
    same(head.grad, weight.grad)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = (exact[0] @ exact[1].T / temperature).log_softmax(dim=1)
    expected = logp[torch.arange(300), targets]
    expected.backward(grad.double())
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    exact_entropy = -(logp.exp() * logp).sum(dim=1)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    for x, e in zip((hidden, weight), exact):
        rounded = x.grad.dtype == torch.bfloat16
        assert (x.grad.double() - e.grad).norm() <= (3e-3 if rounded else 1e-6) * e.grad.norm()


@pytest.mark.parametrize("M, words, device", [
    (1, 151936, "cuda"), (4096, 151936, "cpu"), (4096, 151936, "cuda"), (5, 2**30, "cpu"),
    (1000, 57, "cuda"), (0, 57, "cpu")])
def test_chunks_cover_every_row_once(M, words, device):
    hidden = SimpleNamespace(shape=(M, 8), is_cuda=device == "cuda")
    slices = logprob.chunks(hidden, SimpleNamespace(shape=(words, 8)))
    assert [m for rows in slices for m in range(M)[rows]] == list(range(M))
    largest = max((len(range(M)[rows]) for rows in slices), default=0)
    assert min(M, 256) <= largest <= max(256, 2**30 / 4 / words)  # 1 GB of float32, or 256 rows
    assert device == "cpu" or largest <= max(256, M // 8)  # an eighth of all logits


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])
def test_the_logits_are_never_held(architecture, monkeypatch):
    rows_a_chunk(monkeypatch, 3)
    words, width = 101, 32
    model, (input_ids, labels, _) = small_model(architecture, vocab_size=words), batch()
    assert int((labels != IGNORE).sum()) not in (words, width)
    with Shapes() as shapes:
        logprobs = token_logprobs(model, input_ids, labels, measure=True)[0]
        forward = len(shapes.seen)
        logprobs.sum().backward()
    for part in (shapes.seen[:forward], shapes.seen[forward:]):
        # A tensor as wide as the vocabulary: how many rows? The weight has `width`.
        rows = {shape.numel() // words for shape in part if words in shape} - {width}
        assert {2, 3} & rows and max(rows) == 3


# --- Which forms a model takes --------------------------------------------------------------------
@pytest.mark.parametrize("kind, changes", [
    ("mistral", {"sliding_window": 8}), ("phi3", {"sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}}),
    ("llama", {"attn_implementation": "eager"}), ("llama", {"bias": True})])
def test_what_a_config_rules_out(kind, changes):
    assert small_model(kind, **{"sliding_window": None}).fast.has_long_rows
    model = small_model(kind, fast=False, **{"sliding_window": None, **changes})
    if "bias" in changes:                    # of the head
        model.lm_head.bias = torch.nn.Parameter(model.lm_head.weight[:, 0].detach().clone())
    sample.make_fast(model)
    assert not model.fast.has_long_rows
    input_ids, labels, _ = batch()
    actual, _ = token_logprobs(model, input_ids, labels)
    torch.testing.assert_close(actual.double(), naive(model, input_ids, labels)[0],
                               rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("architecture, norms", [("qwen2", 5), ("qwen3", 9), ("gemma2", 0)])
def test_fused_norms(architecture, norms):
    """A copy's norms read the copy's weights; test_families.py: gradients."""
    model, (input_ids, labels, _) = small_model(architecture, fast=False).bfloat16(), batch()
    before = plain_logprobs(model, input_ids, labels)
    sample.make_fast(model)
    fused = copy.deepcopy(model)
    assert fused.fast.has_long_rows == (norms > 0)
    assert sum(isinstance(m, torch.nn.RMSNorm) for m in fused.modules()) == norms
    assert (plain_logprobs(fused, input_ids, labels) - before).abs().mean() < 0.1


# --- Micro-batches and lengths --------------------------------------------------------------------
PROMPTS = [3, 3, 5, 5, 2, 2, 9, 9]
ANSWERS = [2, 6, 1, 4, 7, 5, 21, 1]


def rows_to_cut(common=0):
    """Rows of PROMPTS[n] + ANSWERS[n] tokens, two to a prompt; all may begin alike."""
    input_ids, labels, _ = answer_rows(list(zip(PROMPTS, ANSWERS)), width=40)
    input_ids[:, :common] = 3
    return input_ids, labels


def cuts_of(input_ids, labels, budget, share):
    found = cut_rows(input_ids, labels, budget, share)
    cuts = [rows.tolist() for rows, _ in found]
    assert sorted(sum(cuts, [])) == list(range(len(labels)))
    last = (labels != IGNORE).int() * torch.arange(labels.shape[1])
    assert [width for _, width in found] == [int(last[rows].max()) + 1 for rows in cuts]
    return cuts, [width for _, width in found]


def test_micro_batches_of_padded_rows():
    for budget in (1, 15, 20, 40, 1000):
        cuts, widths = cuts_of(*rows_to_cut(), budget, share=False)
        for rows, width in zip(cuts, widths):
            assert len(rows) * (width - 1) <= budget or len(rows) == 1
        assert widths == sorted(widths, reverse=True)
    assert len(cuts) == 1


def tokens_of(input_ids, labels, rows):
    """How many tokens run for these rows: beginnings of different rows, without their last."""
    beginnings = set()
    for n in rows:
        end = int(labels[n].ne(IGNORE).nonzero().max())
        beginnings |= {tuple(input_ids[n, :t + 1].tolist()) for t in range(end)}
    return len(beginnings)


@pytest.mark.parametrize("common", [0, 1, 2])
def test_micro_batches_are_filled_up_to_the_budget(common):
    """In the order of the sorted rows; the next row would have been too many."""
    rows = rows_to_cut(common)
    for budget in (1, 17, 27, 29, 33, 40, 1000):
        cuts, _ = cuts_of(*rows, budget, share=True)
        for cut, following in zip(cuts, [*cuts[1:], []]):
            assert tokens_of(*rows, cut) <= budget or len(cut) == 1
            first = min(following, key=lambda n: rows[0][n].tolist(), default=None)
            assert first is None or tokens_of(*rows, [*cut, first]) > budget
    assert len(cuts) == 1


def test_rows_stay_together_as_there_is_room():
    input_ids, labels, _ = answer_rows([(9, 3)] * 5)
    cuts, _ = cuts_of(input_ids, labels, 14, share=True)
    assert sorted(map(len, cuts)) == [1, 2, 2]
    # Rows that are equal run once: they count once, and stay together
    input_ids[3], labels[3] = input_ids[0], labels[0]
    for share in (True, False):
        assert [0, 3] in cuts_of(input_ids, labels, 11, share)[0]


def test_checkpointed_layers_run_once_more(random_model):
    model, (input_ids, labels, _) = copy.deepcopy(random_model), batch()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    run = []
    # Not a hook of the layer itself: the second run calls the layer's forward alone.
    next(layers[0].children()).register_forward_hook(lambda *args: run.append(args[0]))
    for on in (False, True):
        run.clear()
        if on:
            checkpoint_layers(model)
            model = copy.deepcopy(model)                  # a copy's layers are the copy's
            layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            assert all(layer.forward.args[0].__self__ is layer for layer in layers)
        logprobs, _ = token_logprobs(model, input_ids, labels)
        logprobs.sum().backward()
        assert len(run) == 1 + on
    with torch.no_grad():
        token_logprobs(model, input_ids, labels)
    assert len(run) == 3                                  # nothing is kept or run again


# --- The command ----------------------------------------------------------------------------------
def test_script_marks_the_response(run_here):
    run_here("logprob.py", "half a \udc80", status=2)
    command = "logprob.py", "Anna has 9", "9 books loses 4"
    _, *rows, last = run_here(*command).splitlines()
    rows = [row.split(maxsplit=3) for row in rows]
    prompt, response = rows[:-5], rows[-5:]               # four words and the end token
    assert [int(row[0]) for row in rows] == list(range(len(rows))) and len(prompt) >= 3
    assert all(row[1] == "." and row[2].startswith("'") for row in prompt)  # no log-prob
    assert [row[3] for row in response[:4]] == ["'9'", "'books'", "'loses'", "'4'"]
    (found,) = re.findall(r" = (\S+)", last)
    assert float(found) == pytest.approx(sum(float(row[2]) for row in response), abs=1e-3)
    assert run_here(*command, f"--model={TINY}").splitlines()[-1] == last
