"""[D] logprob.py: values, entropies and gradients against the full log-softmax, memory, precision, the script."""
import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import ARCHITECTURES, SMALL, small_model
from torch.utils._python_dispatch import TorchDispatchMode

import logprob
from logprob import IGNORE, LeanHead, has_plain_head, selected_logprobs, sequence_logprob, token_logprobs

ROOT = Path(logprob.__file__).resolve().parent
V, PAD = SMALL["vocab_size"], SMALL["pad_token_id"]
PLAIN = {name: name not in ("gemma2", "granite", "cohere") for name in ARCHITECTURES}
GROUPS = torch.tensor([0, 0, 0, 1, 1])
SIZES = [(5, 14), (5, 1), (5, 7), (9, 3), (9, 11)]  # of the rows: the prompt's tokens, the response's


def batch(seed=0, pad=PAD):
    """Five random rows, two prompts: input_ids, labels (5, 20), and a random weight for every log-prob."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(V, (5, 20), generator=generator)
    input_ids[1:3, :5], input_ids[4, :9] = input_ids[0, :5], input_ids[3, :9]
    labels = input_ids.clone()
    for n, (prompt, response) in enumerate(SIZES):
        labels[n, :prompt] = labels[n, prompt + response:] = IGNORE
        input_ids[n, prompt + response:] = pad
    return input_ids, labels, torch.randn(5, 19, generator=generator)


def naive(model, input_ids, labels, temperature=1.0):
    """Every logit, in float64 -> log-probs, entropies (N, S-1)."""
    logp = (model(input_ids, use_cache=False).logits[:, :-1].double() / temperature).log_softmax(dim=-1)
    mask = labels[:, 1:] != IGNORE
    chosen = logp.gather(2, input_ids[:, 1:, None])[:, :, 0]
    return chosen.where(mask, 0), -(logp.exp() * logp).sum(dim=-1).where(mask, 0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, tolerance=1e-4):
    """Each within its own size, or far below the largest (a key's bias has a gradient of 0)."""
    largest = max(float(g.norm()) for g in expected.values())
    assert largest > 0 and actual.keys() == expected.keys()
    for name, g in expected.items():
        assert float((actual[name] - g).norm()) <= tolerance * max(float(g.norm()), 1e-3 * largest), name


def three_rows_a_chunk(monkeypatch):
    monkeypatch.setattr(logprob, "chunks", lambda M, V, device: [slice(m, m + 3) for m in range(0, M, 3)])


# ----- against the full log-softmax -------------------------------------------------------------------------


@pytest.mark.parametrize("group_ids", [None, GROUPS], ids=["rows", "groups"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_entropies_and_gradients(random_model, temperature, group_ids, monkeypatch):
    three_rows_a_chunk(monkeypatch)
    model, (input_ids, labels, weights) = copy.deepcopy(random_model), batch()
    exact = copy.deepcopy(random_model).double()
    expected, entropies = naive(exact, input_ids, labels, temperature)
    assert entropies[labels[:, 1:] != IGNORE].min().item() > 0.01  # none is a mere certainty

    actual, entropy = token_logprobs(model, input_ids, labels, temperature, with_entropy=True, group_ids=group_ids)
    assert actual.dtype == entropy.dtype == torch.float32 and actual.shape == entropy.shape == (5, 19)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), entropies, rtol=1e-5, atol=1e-4)
    assert not entropy.requires_grad
    assert_same_gradients(gradients(model, (actual * weights).sum()),
                          gradients(exact, (expected * weights).sum()))

    whole = sequence_logprob(model, input_ids, labels, temperature)
    torch.testing.assert_close(whole.double(), expected.sum(dim=1), rtol=1e-5, atol=1e-3)
    assert whole.shape == (5,) and whole.dtype == torch.float32
    assert_same_gradients(gradients(model, (whole * weights[:, 0]).sum()),
                          gradients(exact, (naive(exact, input_ids, labels, temperature)[0].sum(1)
                                            * weights[:, 0]).sum()))


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_tied_embeddings(tied):
    """It has two parts: from the table of tokens, and from the head."""
    model, (input_ids, labels, weights) = small_model("qwen2", tie_word_embeddings=tied), batch()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    exact = copy.deepcopy(model).double()
    actual = gradients(model, (token_logprobs(model, input_ids, labels) * weights).sum())
    expected = gradients(exact, (naive(exact, input_ids, labels)[0] * weights).sum())
    assert ("lm_head.weight" in actual) != tied
    assert_same_gradients(actual, expected)
    unused = torch.ones(V, dtype=torch.bool)
    unused[input_ids] = False  # a token that is not in the batch is moved by the head alone
    assert bool(actual["model.embed_tokens.weight"][unused].any()) == tied


def test_entropy_is_optional(random_model):
    input_ids, labels, _ = batch()
    alone = token_logprobs(random_model, input_ids, labels)
    assert torch.equal(alone, token_logprobs(random_model, input_ids, labels, with_entropy=True)[0])


def test_without_gradients(random_model):
    input_ids, labels, _ = batch()
    with torch.no_grad():
        silent = token_logprobs(random_model, input_ids, labels)
    assert not silent.requires_grad
    torch.testing.assert_close(silent, token_logprobs(random_model, input_ids, labels).detach())


def test_frozen_weights_pass_the_gradient_on():
    """A head that is not trained (adapters) still leads the gradient to the layers below."""
    model, (input_ids, labels, weights) = small_model("llama"), batch()
    expected = gradients(model, (token_logprobs(model, input_ids, labels) * weights).sum())
    model.lm_head.weight.requires_grad_(False)
    actual = gradients(model, (token_logprobs(model, input_ids, labels) * weights).sum())
    assert not actual.pop("lm_head.weight").any()
    assert_same_gradients(actual, {name: g for name, g in expected.items() if name in actual}, 1e-6)


def test_selected_logprobs_is_the_formula():
    logits = 5 * torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 8, 3, 3, 1, 7])
    expected = [float(logits[m, v].double() / 0.7 - (logits[m].double() / 0.7).exp().sum().log())
                for m, v in enumerate(targets)]
    assert selected_logprobs(logits, targets, 0.7).tolist() == pytest.approx(expected, abs=1e-5)
    assert selected_logprobs(logits.bfloat16(), targets).dtype == torch.float32


# ----- masks and padding ------------------------------------------------------------------------------------


def test_zero_where_masked(random_model):
    input_ids, labels, _ = batch()
    logprobs, entropy = token_logprobs(random_model, input_ids, labels, with_entropy=True)
    for n, (prompt, response) in enumerate(SIZES):
        spoken = [prompt - 1 <= t < prompt - 1 + response for t in range(19)]  # entry t speaks of token t + 1
        assert (logprobs[n] != 0).tolist() == spoken == (entropy[n] != 0).tolist()
    assert bool((logprobs <= 0).all())


@pytest.mark.parametrize("group_ids", [None, GROUPS], ids=["rows", "groups"])
def test_what_stands_in_the_padding_does_not_matter(random_model, group_ids):
    model = copy.deepcopy(random_model)
    input_ids, labels, weights = batch()
    other_ids = input_ids.clone()
    for n, (prompt, response) in enumerate(SIZES):
        other_ids[n, prompt + response:] = (7 * torch.arange(20 - prompt - response) + n) % V
    assert not torch.equal(input_ids, other_ids)
    a, b = (token_logprobs(model, ids, labels, group_ids=group_ids) for ids in (input_ids, other_ids))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(model, (a * weights).sum()), gradients(model, (b * weights).sum()), 1e-6)


def test_labels_anywhere_in_the_row(random_model):
    """The mask is the labels': a hole in the response is not scored, but still read."""
    input_ids, labels, _ = batch()
    whole = token_logprobs(random_model, input_ids, labels)
    labels[0, 9], labels[3, 10], labels[2, 0] = IGNORE, IGNORE, input_ids[2, 0]  # nothing predicts token 0
    expected = whole.clone()
    expected[0, 8] = expected[3, 9] = 0
    torch.testing.assert_close(token_logprobs(random_model, input_ids, labels), expected)


def test_a_batch_without_labels(random_model):
    model, (input_ids, labels, _) = copy.deepcopy(random_model), batch()
    nothing = torch.full_like(labels, IGNORE)
    logprobs, entropy = token_logprobs(model, input_ids, nothing, with_entropy=True)
    assert torch.equal(logprobs, torch.zeros(5, 19)) and torch.equal(entropy, torch.zeros(5, 19))
    assert not any(g.any() for g in gradients(model, logprobs.sum()).values())  # and it can be asked for


def test_the_rows_do_not_see_each_other(random_model):
    input_ids, labels, _ = batch()
    together = token_logprobs(random_model, input_ids, labels)
    alone = torch.cat([token_logprobs(random_model, input_ids[n:n + 1], labels[n:n + 1]) for n in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


# ----- shared prompts ---------------------------------------------------------------------------------------


def test_rows_of_a_group_may_stand_apart(random_model):
    input_ids, labels, _ = batch()
    order = torch.tensor([3, 0, 4, 2, 1])
    expected = token_logprobs(random_model, input_ids, labels)[order]
    for group_ids in (GROUPS[order], GROUPS[order] + 7):
        actual = token_logprobs(random_model, input_ids[order], labels[order], group_ids=group_ids)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("architecture, shared", [("qwen2", True), ("qwen3", True), ("llama", True),
                                                  ("mistral", False), ("gemma2", False)])
def test_a_shared_prompt_runs_once(architecture, shared):
    """And no padding does. A sliding window or a soft cap inside the attention is left to the padded rows."""
    model, (input_ids, labels, _) = small_model(architecture), batch()
    token_logprobs(model, input_ids, labels, group_ids=GROUPS)  # tries it out
    run = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: run.append(args[0].numel()))
    token_logprobs(model, input_ids, labels, group_ids=GROUPS)
    assert run == [5 + 9 + sum(response - 1 for _, response in SIZES) if shared else input_ids.numel()]


def test_groups_leave_the_model_as_it_was(random_model):
    model, (input_ids, labels, _) = copy.deepcopy(random_model), batch()
    expected = model(input_ids).logits
    written = model.generate(input_ids[:1, :5], do_sample=False, max_new_tokens=8)
    token_logprobs(model, input_ids, labels, group_ids=GROUPS)
    torch.testing.assert_close(model(input_ids).logits, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(model.generate(input_ids[:1, :5], do_sample=False, max_new_tokens=8), written)


# ----- the lean head ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 10, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_lean_head(monkeypatch, rows, temperature):
    if rows:
        monkeypatch.setattr(logprob, "chunks", lambda M, V, device: [slice(m, m + rows) for m in range(0, M, rows)])
    generator = torch.Generator().manual_seed(0)
    hidden, weight, grad = (torch.randn(shape, generator=generator) for shape in ((10, 6), (13, 6), (10,)))
    targets = torch.tensor([3, 3, 0, 12, 5, 7, 12, 1, 0, 3])
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = LeanHead.apply(hidden, weight, targets, temperature, True)
    actual = torch.autograd.grad(logprobs, (hidden, weight), grad)

    hidden64, weight64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logp = (hidden64 @ weight64.T / temperature).log_softmax(dim=1)
    expected = torch.autograd.grad(logp[torch.arange(10), targets], (hidden64, weight64), grad.double())
    torch.testing.assert_close(logprobs.double(), logp[torch.arange(10), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(dim=1), rtol=1e-5, atol=1e-5)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)
    assert logprobs.requires_grad and not entropy.requires_grad


def test_lean_head_with_large_logits():
    """The largest logit is taken out before any exponential."""
    hidden, weight = torch.eye(3, requires_grad=True), torch.tensor([[500.0, -500, 0], [-500, 500, 0], [0, 0, 0]])
    logprobs, entropy = LeanHead.apply(hidden, weight, torch.tensor([0, 0, 1]), 1.0, True)
    assert logprobs.tolist() == pytest.approx([0.0, -1000.0, -1.0986123], abs=1e-4)
    assert entropy.tolist() == pytest.approx([0.0, 0.0, 1.0986123], abs=1e-4)
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].isfinite().all()


@pytest.mark.parametrize("M, words", [(1, 151_936), (4_096, 151_936), (5, 2**30), (1000, 57), (0, 57)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_cover_every_row_once(M, words, device):
    slices = logprob.chunks(M, words, torch.device(device))
    assert [m for rows in slices for m in range(M)[rows]] == list(range(M))
    largest = max((len(range(M)[rows]) for rows in slices), default=1)
    assert 1 <= largest <= max(32, 2**30 / 4 / words)  # at most 1 GB of float32, or 32 rows
    if M > 32 and M * words > 2**30:
        assert len(slices) > 1


# ----- heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.0, 0.3])  # as initialised, and far from it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_that_do_more_are_noticed(architecture, dtype, std):
    model = small_model(architecture, std).to(dtype)
    assert has_plain_head(model) == PLAIN[architecture]


def test_a_head_with_a_bias():
    model, (input_ids, labels, weights) = small_model("phi"), batch()
    assert model.lm_head.bias.any() and not has_plain_head(model)
    exact = copy.deepcopy(model).double()
    expected, _ = naive(exact, input_ids, labels)
    actual = token_logprobs(model, input_ids, labels)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    assert_same_gradients(gradients(model, (actual * weights).sum()),
                          gradients(exact, (expected * weights).sum()))


def test_looking_at_the_head_changes_nothing(random_model):
    model, (input_ids, labels, _) = copy.deepcopy(random_model), batch()
    expected = model(input_ids).logits
    has_plain_head(model)
    token_logprobs(model, input_ids, labels)
    assert torch.equal(model(input_ids).logits, expected)
    assert "forward" not in vars(model) and "forward" not in vars(model.base_model)


# ----- precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "granite"])
def test_bfloat16_logits_meet_a_float32_softmax(architecture):
    model, (input_ids, labels, _) = small_model(architecture).bfloat16(), batch()
    mask = labels[:, 1:] != IGNORE
    with torch.no_grad():
        logits, actual = model(input_ids).logits[:, :-1], token_logprobs(model, input_ids, labels, 0.7)
    assert logits.dtype == torch.bfloat16 and actual.dtype == torch.float32

    def error(values):  # the mean one: a bfloat16 logit may round the other way in a product of another shape
        chosen = values.gather(2, input_ids[:, 1:, None])[:, :, 0]
        return float((actual - chosen)[mask].abs().mean())

    assert error((logits.float() / 0.7).log_softmax(dim=-1)) < 1e-3
    assert error((logits / 0.7).log_softmax(dim=-1)) > 4e-3


# ----- memory -----------------------------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that any operation returns, forward and backward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.seen.append(tuple(x.shape))
        return result


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])
def test_the_logits_are_never_held(architecture, monkeypatch):
    three_rows_a_chunk(monkeypatch)
    words, width = 101, 32
    model, (input_ids, labels, _) = small_model(architecture, vocab_size=words), batch()
    assert int((labels != IGNORE).sum()) not in (words, width)
    has_plain_head(model)  # tries a few rows of its own
    saved = []

    def rows_of(shapes):  # a tensor as wide as the vocabulary: how many rows? the weight has `width`
        return {torch.Size(shape).numel() // words for shape in shapes if words in shape} - {width}

    def keep(x):
        saved.append(tuple(x.shape))
        return x

    with Shapes() as shapes, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs = token_logprobs(model, input_ids, labels, with_entropy=True)[0]
        forward = len(shapes.seen)
        logprobs.sum().backward()
    for part in (shapes.seen[:forward], shapes.seen[forward:]):
        assert {2, 3} & rows_of(part) and max(rows_of(part)) == 3
    assert saved and not rows_of(saved)


# ----- script -----------------------------------------------------------------------------------------------


def run_script(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["logprob.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "logprob.py"), run_name="__main__")
    assert not stop.value.code
    return capsys.readouterr().out.splitlines()


def test_script_marks_the_response(monkeypatch, capsys, tiny):
    tokenizer = tiny[1]
    words = [tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids][:6]
    _, *rows, total = run_script(monkeypatch, capsys, " ".join(words[:3]), " ".join(words[2:]))
    rows = [row.split(maxsplit=3) for row in rows]
    response = [row for row in rows if row[1] == "label"]
    prompt = rows[:-len(response)]
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert len(prompt) >= 3 and all(row[1] == "." and row[2].startswith("'") for row in prompt)  # no log-prob
    assert [row[3] for row in response] == [repr(word) for word in [*words[2:], tokenizer.eos_token]]
    assert rows[-len(response):] == response  # the response and its end token, and nothing behind them
    value = sum(float(row[2]) for row in response)
    assert float(total.split(" = ")[1].split()[0]) == pytest.approx(value, abs=1e-3)
    assert f"over {len(response)} tokens" in total


def test_script_takes_the_temperature(monkeypatch, capsys, tiny):
    model, tokenizer = tiny
    totals = [float(run_script(monkeypatch, capsys, f"--temperature={T}")[-1].split(" = ")[1].split()[0])
              for T in (1.0, 0.5)]
    assert totals[0] != totals[1]
