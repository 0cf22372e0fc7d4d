"""[D] Log-probabilities of the tokens that were sampled, under the policy or the reference.

    log pi(y | x) = sum over t of log pi(y_t | x, y_<t)
    log pi(v | ...) = log_softmax(logits / T)[v]

Departures from the theory's code map:
- The map names `sequence_logprob` but does not show it. Here it follows from the definition.
- Every token keeps its own log-probability, because a ratio of whole sequences would explode.
- Only the response is labelled. The map scores prompt and padding too.

Rows are `[prompt][response][padding]`. Padding is on the right, where causal attention hides it
from every real token, so no attention mask is needed and positions are 0, 1, 2, ... Labels are -100
outside the response; the end token of the response is labelled. Entry t of a (N, S-1) tensor
belongs to token t+1, which is predicted from all tokens up to t.

    python logprob.py "prompt" "response"      # every token, its label mark, its log-prob
"""

import argparse
import math
import sys
import weakref
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path

import torch
import transformers
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

# cuDNN's attention is slow at each new shape and wrong in masked bfloat16 (pytorch 191612, 193893).
torch.backends.cuda.enable_cudnn_sdp(False)

IGNORE = -100                            # the label of a token outside the loss


def selected_logprobs(logits, targets, temperature=1.0):
    """The formula: logits (M, V), targets (M,) -> log softmax(logits / T)[target], (M,) float32."""
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)                 # (M, V)
    return logprobs.gather(1, targets[:, None])[:, 0]


def plain_logprobs(model, input_ids, labels, temperature=1.0):
    """The definition, word for word: (N, S) ids and labels -> (N, S-1) float32, in nats."""
    # It holds all N * S * V logits: 2.5 GB for 8 rows of 512 tokens and 151,936 words. That is its
    # only fault, and the rest of this file is checked against it.
    mask = labels[:, 1:] != IGNORE                                                # (N, S-1)
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]           # (N, S-1, V)
    targets = input_ids[:, 1:]                                                    # (N, S-1)
    logprobs = selected_logprobs(logits[mask], targets[mask], temperature)        # (M,)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, logprobs)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows is about speed and memory.
#
# The same numbers without all the logits: the body of the model runs on whole rows, its head on
# labelled tokens only, and rows that are equal run once.

def labelled_logprobs(model, input_ids, labels, temperature, with_entropy, group_ids, forms):
    """(U, S) ids and labels -> log-probs, entropies (0 without `with_entropy`), (U, S-1) each."""
    mask = labels[:, 1:] != IGNORE                                                # (U, S-1)
    targets = input_ids[:, 1:][mask]                                              # (M,)
    if forms["grouped rows"] and group_ids is not None and mask.any():
        output, hidden = grouped_hidden(model, input_ids, labels, group_ids)
    else:
        output = body_of(model)(input_ids=input_ids, use_cache=False)
        hidden = output.last_hidden_state[:, :-1][mask]                           # (M, H)
    # log pi(target) = its logit - logsumexp(logits), where logits = head(hidden) / T
    if forms["lean head"]:
        weight = model.get_output_embeddings().weight                             # (V, H)
        found = LeanHead.apply(hidden, weight, targets, temperature, with_entropy)
    else:
        found = own_logprobs(model, output, hidden, targets, temperature, with_entropy)
    blank = torch.zeros(mask.shape, device=mask.device)
    return [blank.masked_scatter(mask, x) for x in found]


def token_logprobs(model, input_ids, labels, temperature=1.0, with_entropy=False, group_ids=None,
                   forms=None):
    """plain_logprobs for a few labelled tokens at a time -> (N, S-1) float32, differentiable.

    `with_entropy` adds a second (N, S-1) tensor: the entropy in nats of the distribution that each
    token was drawn from, detached. `group_ids` (N,): rows with the same number share a prompt,
    which then runs once for all of them. `forms` says which fast forms are used, by default those
    that `forms_of` finds right. ValueError: as `forms_of`.
    """
    firsts = firsts_of_equal(torch.cat([input_ids, labels], dim=1))               # (N,)
    rows, copies = firsts.unique(return_inverse=True)                             # (U,), (N,)
    groups = None if group_ids is None else group_ids[rows]
    found = labelled_logprobs(model, input_ids[rows], labels[rows], temperature, with_entropy,
                              groups, forms or forms_of(model))
    logprobs, entropy = (x[copies] for x in found)
    return (logprobs, entropy) if with_entropy else logprobs                      # (N, S-1)


def sequence_logprob(model, input_ids, labels, temperature=1.0):
    """log pi(y | x) of each row, (N,): the sum over its response tokens."""
    return token_logprobs(model, input_ids, labels, temperature).sum(dim=1)


def firsts_of_equal(rows):
    """rows (N, K) -> (N,): the first row that equals each. A confident policy repeats itself."""
    numbers = {}
    firsts = [numbers.setdefault(row.tobytes(), n) for n, row in enumerate(rows.cpu().numpy())]
    return torch.tensor(firsts, dtype=torch.long, device=rows.device)


def body_of(model):
    """The part of the model that returns hidden states; OPT, for one, has it a module deeper."""
    body = model.get_decoder()
    return model.base_model.model if body is model else body         # Llama 4 returns itself


def chunks(M, V, device):
    """Slices of M rows: their logits (m, V) are just large enough to keep the device busy."""
    # An eighth of them, at most 1 GB in float32; or what fits a CPU's cache, 1 MB
    values = min(2**28, M * V // 8) if device.type == "cuda" else 2**18
    step = max(128, values // V)             # on a CPU a product of 32 rows has half the speed
    return [slice(start, start + step) for start in range(0, M, step)]


# --------------------------------------------------------------------------------------------------
# Lean head. Nearly every model ends in one matrix product, and then the gradient of log softmax is
# known: onehot(target) - softmax. A chunk of logits is made, used in place and dropped in the
# forward pass, and made again in the backward pass.

class LeanHead(torch.autograd.Function):
    """selected_logprobs(hidden @ weight.T, targets, T) and the entropies, (M,) each."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy):
        # hidden (M, H), weight (V, H), targets (M,); without `with_entropy` the entropies are 0
        lse, logprobs, entropy = torch.zeros(3, len(hidden), device=hidden.device)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        wide = weight if weight.is_cuda else weight.float()
        for rows in chunks(len(hidden), len(weight), hidden.device):
            logits = logits_of(hidden[rows], wide, temperature)                   # (m, V)
            top = logits.amax(dim=-1)                                             # (m,)
            logits.sub_(top[:, None])
            chosen = logits.gather(1, targets[rows, None])[:, 0]
            exps = logits.exp() if with_entropy else logits.exp_()
            Z = exps.sum(dim=-1)
            lse[rows] = top + Z.log()
            logprobs[rows] = chosen - Z.log()
            if with_entropy:
                # H = log Z - sum of p * (logit - top): two terms >= 0, so no digits cancel
                entropy[rows] = Z.log() - exps.mul_(logits).sum(dim=-1) / Z
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed in float32, then converted by autograd. A frozen weight gets no gradient.
        learns = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        grad = grad / ctx.temperature                                             # (M,)
        wide = weight if weight.is_cuda else weight.float()
        factor = weight if has_amx(weight) else wide
        for rows in chunks(len(hidden), len(weight), hidden.device):
            logits = logits_of(hidden[rows], wide, ctx.temperature)
            d = logits.sub_(lse[rows, None]).exp_().mul_(-grad[rows, None])       # -g * softmax
            d.scatter_add_(1, targets[rows, None], grad[rows, None])              # +g at the target
            d = d.to(wide.dtype)
            grad_hidden[rows] = d.to(factor.dtype) @ factor
            if learns and wide.dtype == torch.float32:
                with exact_products(weight):                     # of d rounded, as on CUDA
                    grad_weight.addmm_(d.T, hidden[rows].float())
            elif learns:
                grad_weight += d.T @ hidden[rows]
        return grad_hidden, grad_weight, None, None, None


def logits_of(hidden, weight, temperature):
    """Logits / T (m, V) in float32: bfloat16 would round a logit of 16 by up to 0.06."""
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        with exact_products(hidden):
            logits = hidden.float() @ weight.T
    return logits if temperature == 1 else logits.div_(temperature)


def has_amx(x):
    """Is it bfloat16, on a CPU that multiplies that in hardware?"""
    amx = torch.cpu.get_capabilities().get("amx_bf16", False)
    return amx and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def exact_products(x):
    """A context: float32 products of what were such numbers are taken so, with float32 sums."""
    return torch.backends.mkldnn.flags(None, None, None, "bf16" if has_amx(x) else None)


# Own head. Gemma 2 caps its logits, Granite and Cohere scale them, Phi adds a bias. Their heads run
# as the model itself runs them, chunk by chunk.

def own_logprobs(model, output, hidden, targets, temperature, with_entropy):
    """hidden (M, H), targets (M,), the body's output -> log-probs (M,), entropies (M,)."""
    def part(hidden, targets):
        logits = own_head(model, output, hidden).float() / temperature            # (m, V)
        logprobs = selected_logprobs(logits, targets)
        if not with_entropy:
            return logprobs, torch.zeros_like(logprobs)
        logp = logits.detach().log_softmax(dim=-1)
        # p log p must be 0 where p is 0, and not 0 * -inf
        return logprobs, -(logp.exp() * logp.clamp(min=-1e4)).sum(dim=-1)

    words = model.config.get_text_config().vocab_size
    # At least one chunk, even if it is empty: a batch without labels needs a gradient, too
    parts = [checkpoint(part, hidden[rows], targets[rows], use_reentrant=False)
             for rows in chunks(max(len(hidden), 1), words, hidden.device)]
    return tuple(torch.cat(values) for values in zip(*parts))


def own_head(model, output, hidden):
    """Logits (M, V) of hidden states (M, H), by the model's whole forward."""
    # For this call the body only returns `hidden`. Its output has the real body's class, because
    # mixtures of experts look there for their routers' logits.
    answer = type(output)(last_hidden_state=hidden[None])
    body = body_of(model)
    body.forward = lambda *args, **kwargs: answer
    try:
        return model(inputs_embeds=hidden[None], use_cache=False).logits[0]
    finally:
        del body.forward                                 # the class's own forward again


# --------------------------------------------------------------------------------------------------
# Grouped rows. All groups of a micro-batch become one row: each prompt runs once instead of G
# times, and there is no padding. Every answer's positions continue its prompt's. Only attention
# mixes the tokens of a row: a query sees its prompt (#), and its own piece up to itself (\).
#                                                            key  x  y1 y2 x' y1'
#     x  y1  y1  .                                    query  x    \
#     x  y2  y2  y2   ->   x y1 y1 y2 y2 y2 x' y1'           y1   #  \
#     x' y1' .   .                                           y2   #     \
#                                                            x'            \
#     12 tokens            8 tokens                          y1'           #  \

def grouped_hidden(model, input_ids, labels, group_ids):
    """The body's output, and hidden states (M, H) that predict labelled tokens, in mask order."""
    S = labels.shape[1]
    mask = labels.cpu()[:, 1:] != IGNORE                                          # (N, S-1)
    first = (mask.int().argmax(dim=1) + 1).tolist()      # labelled tokens of each row
    last = (mask * torch.arange(1, S)).amax(dim=1).tolist()
    members = {}
    for n, g in enumerate(group_ids.tolist()):
        if last[n]:
            members.setdefault(g, []).append(n)
    groups = []                             # (P, L_1, ..., L_G) each
    taken = []                              # the row's tokens: places in the flat input_ids
    places = torch.zeros(labels.shape, dtype=torch.long) # each token's place in the row
    for rows in members.values():
        P = min(first[n] for n in rows)
        places[rows, :P] = torch.arange(len(taken), len(taken) + P)
        taken += range(rows[0] * S, rows[0] * S + P)
        for n in rows:
            places[n, P:last[n]] = torch.arange(len(taken), len(taken) + last[n] - P)
            taken += range(n * S + P, n * S + last[n])   # the last token predicts nothing
        groups.append((P, *(last[n] - P for n in rows)))
    taken = torch.tensor(taken, device=labels.device)                             # (T,)
    # An attention mask of one entry keeps transformers from making one of its own
    unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=labels.device)
    output = body_of(model)(input_ids=input_ids.flatten()[taken][None], attention_mask=unused,
                            position_ids=(taken % S)[None], use_cache=False, groups=tuple(groups))
    return output, output.last_hidden_state[0, places[:, :-1][mask].to(labels.device)]


def grouped_attention(module, query, key, value, mask, scaling=None, groups=None, **kwargs):
    """transformers' own attention; with `groups` ((P, L_1, ..., L_G), ...) that of grouped rows."""
    # query (1, Hq, T, D), key (1, Hkv, T, D), value (1, Hkv, T, Dv) -> (1, T, Hq, Dv)
    if groups is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} in its attention")
    groups = tuple(map(tuple, groups))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))                 # (T, H, D)
    heads = q.shape[1] // k.shape[1]                     # query heads that share a key head
    if takes_flash(query, value):
        keys, *lengths = flash_call(groups, query.device)
        # torch 2.11 and 2.12 need as many key heads as query heads
        k, v = (x[keys].repeat_interleave(heads, dim=1) for x in (k, v))          # (Tk, Hq, D)
        return varlen_attn(q, k, v, *lengths, scale=scaling, window_size=(-1, 0))[None], None
    # Query heads that share a key head become more queries of that head: no key is copied
    q = q.unflatten(1, (-1, heads))                                               # (T, Hkv, g, D)
    calls, places = attention_calls(groups, heads, query.device)
    out = []
    for queries, keys, mask in calls:
        # Heads first: (n, Hkv, L * g, D), and (n, Hkv, K, D), (n, Hkv, K, Dv)
        queries = q[queries].transpose(1, 2).flatten(2, 3)
        seen_k, seen_v = (x[keys].transpose(1, 2) for x in (k, v))
        if has_amx(q):                       # torch's own takes three times as long backward
            o = PlainBackward.apply(queries, seen_k, seen_v, mask, scaling)
        else:
            o = scaled_dot_product_attention(queries, seen_k, seen_v, mask, scale=scaling)
        o = o.unflatten(2, (-1, heads)).transpose(1, 2)                         # (n, L, Hkv, g, Dv)
        out.append(o.flatten(2, 3).flatten(0, 1))                               # (n * L, Hq, Dv)
    return torch.cat(out)[places][None], None


class PlainBackward(torch.autograd.Function):
    """scaled_dot_product_attention with the gradients of the formula, which runs again for them."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        # (n, H, L, D), (n, H, K, D), (n, H, K, Dv), (n, 1, L, K) -> (n, H, L, Dv)
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return scaled_dot_product_attention(q, k, v, mask, scale=scale)

    @staticmethod
    @torch.enable_grad()
    def backward(ctx, grad):
        *inputs, mask = ctx.saved_tensors
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        scores = ctx.scale * q.float() @ k.float().mT                             # (n, H, L, K)
        o = (scores + mask.log()).softmax(dim=-1).to(v.dtype) @ v
        return *torch.autograd.grad(o, (q, k, v), grad), None, None


@lru_cache(maxsize=8)
def attention_calls(groups, heads, device):
    """Pieces of similar length in one call -> [(queries, keys, mask)], places."""
    # queries (n, L) and keys (n, K) are places in the long row. For the answers in the picture:
    #     y1   y1    (y1)             x    y1   y1    (y1)
    #     y2   y2    y2               x    y2   y2    y2
    #     y1'  (y1') (y1')            x'   y1'  (y1') (y1')
    # A short piece repeats its last token, with the same result. The mask (n, 1, L * g, K) lets a
    # token see its prompt, and its piece up to itself. places (T,): where each token's result is.
    def kind(piece):
        # Lengths between two powers of 2: few calls, and at most half of each is padding.
        before, own = piece
        return len(before) > 0, max(len(own) - 1, 8).bit_length()

    calls = []
    for _, pieces in groupby(sorted(pieces_of(groups), key=kind), key=kind):
        sizes = [(before.start, len(before), own.start, len(own)) for before, own in pieces]
        prompt, P, start, L = torch.tensor(sizes).T[:, :, None]                   # (n, 1) each
        t = torch.arange(int(L.max())).clamp(max=L - 1)                           # (n, L)
        seen = torch.arange(int((P + L).max()))                                   # (K,)
        own = start + (seen - P).clamp(max=L - 1)                                 # (n, K)
        keys = torch.where(seen < P, prompt + seen, own)
        sees = seen <= (P + t)[:, :, None]                                        # (n, L, K)
        calls.append((start + t, keys, sees.repeat_interleave(heads, dim=1)[:, None]))
    queries = torch.cat([queries.flatten() for queries, _, _ in calls])
    places = torch.zeros(sum(map(sum, groups)), dtype=torch.long)                 # (T,)
    places[queries] = torch.arange(len(queries))
    return [[x.to(device) for x in call] for call in calls], places.to(device)


def pieces_of(groups):
    """Prompts and answers in the row's order: (the prompt before it, its own tokens), as ranges."""
    start = 0
    for P, *answers in groups:
        prompt = range(start, start + P)
        yield range(0), prompt
        start += P
        for L in answers:
            if L:
                yield prompt, range(start, start + L)
            start += L


def takes_flash(query, value):
    """In half precision on CUDA, one call takes pieces of any length and needs no mask."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] == value.shape[-1] <= 256
    return half and fits and flash_works(query.device)


@lru_cache(maxsize=8)
def flash_call(groups, device):
    """The keys of all pieces (Tk,), the ends of their queries and keys, the longest of each."""
    pieces = list(pieces_of(groups))
    keys = [t for before, own in pieces for t in (*before, *own)]
    L = torch.tensor([0] + [len(own) for _, own in pieces])
    K = torch.tensor([0] + [len(before) + len(own) for before, own in pieces])
    ends = [lengths.cumsum(0).int().to(device) for lengths in (L, K)]
    return torch.tensor(keys, device=device), *ends, int(L.max()), int(K.max())


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


# --------------------------------------------------------------------------------------------------
# Memory: micro-batches within a token budget, and layers that the backward pass computes again

def micro_batches(labels, group_ids, token_budget, share_prompts):
    """Cut N rows into micro-batches -> [(row indices (n,), width of the longest), ...].

    Each has at most `token_budget` tokens, unless it is a single row; equal rows count once. Padded
    rows are sorted, the longest first: there is little padding, and the first micro-batch needs the
    most memory. With `share_prompts` there is no padding, and a group's prompt counts once: groups
    stay in order, and whole if the budget allows it.
    """
    is_label = labels != IGNORE                                                   # (N, S)
    after = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    ends = (is_label * after).amax(dim=1).tolist()                                # row lengths
    answers = is_label.sum(dim=1).tolist()
    groups = group_ids.tolist()
    firsts = firsts_of_equal(torch.cat([group_ids[:, None], labels], dim=1))      # (N,)
    distinct = firsts.unique().tolist()

    def price(rows):
        if not share_prompts:
            return len(rows) * max(ends[n] for n in rows)
        prompts = {groups[n]: ends[n] - answers[n] for n in rows}
        return sum(prompts.values()) + sum(answers[n] for n in rows)

    parts = [[n] for n in sorted(distinct, key=lambda n: -ends[n])]
    if share_prompts:
        parts = [list(rows) for _, rows in groupby(distinct, key=groups.__getitem__)]
    cuts = [[]]
    for part in parts:
        # A group that is too large is split into rows.
        for rows in [part] if price(part) <= token_budget else [[n] for n in part]:
            if cuts[-1] and price(cuts[-1] + rows) > token_budget:
                cuts.append([])
            cuts[-1] += rows
    # Rows that equal a row of a cut join that cut.
    return [(torch.isin(firsts, torch.tensor(rows, device=firsts.device)).nonzero()[:, 0],
             max(ends[n] for n in rows)) for rows in cuts]


@contextmanager
def layers_checkpointed(model, on):
    """While `on`, a layer keeps only its input, and the backward pass computes the layer again."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if on else []
    for layer in layers:
        layer.training = True
        layer.gradient_checkpointing = True
        # No layer draws random numbers: dropout is off
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False,
                                                     preserve_rng_state=False)
    try:
        yield
    finally:
        # In training mode a layer makes no key/value cache, but the next rollout needs one.
        for layer in layers:
            layer.training = False


# --------------------------------------------------------------------------------------------------
# Which of these forms fit a model? Each is tried once per model, on a few rows, and compared with
# the model's own forward pass on each row alone.

FORMS = weakref.WeakKeyDictionary()      # model -> {form: True where it is used}
REFUSED = weakref.WeakKeyDictionary()    # model -> {form: why it is not used}
PLAIN = None                             # why no fast form is used any more: one failed, or --plain
# Questions that sample.py answers. No stage imports another: train.py puts the functions here.
flash_works = out_of_memory = lambda device_or_error: False
# The trial's rows, (prompt tokens, answer tokens): two prompts, answers of one token and more
TRIAL = ((5, 6), (5, 1), (5, 4), (9, 7), (9, 1))


@torch.no_grad()
def forms_of(model):
    """{"lean head": True, "grouped rows": True}, False for a form that does not fit the model.

    The first call for a model finds this and keeps it: call it before FSDP shards the model. A
    model that takes grouped rows keeps the attention "grouped", which is transformers' own if no
    groups are passed. ValueError: even padded rows and the model's own head do not give the
    log-probs of its forward pass.
    """
    if model in FORMS:
        return dict.fromkeys(FORMS[model], False) if PLAIN else FORMS[model]
    config = model.config.get_text_config()
    ids = torch.randint(config.vocab_size, (5, 17), generator=torch.Generator().manual_seed(0))
    ids[1:3, :5] = ids[0, :5]                            # rows of a group share their prompt
    ids[4, :9] = ids[3, :9]
    P, L = torch.tensor(TRIAL).T[:, :, None]                                      # (5, 1) each
    t = torch.arange(17)
    # The padding has random ids, too: they must not matter
    labels = ids.where((P <= t) & (t < P + L), IGNORE)                            # (5, 17)
    ids, labels, group_ids = (x.to(model.device) for x in (ids, labels, P[:, 0]))
    eps = torch.finfo(model.dtype).eps
    root = math.sqrt(eps)                                # 3e-4 in float32, 0.09 in bfloat16
    claim = f"{model.config.model_type}: the log-probs of its body and its own head"
    forms = {"lean head": False, "grouped rows": False}

    # A kernel's backward pass has limits of its own: it is run, to a parameter that is small.
    small = [p for p in model.parameters() if p.requires_grad and p.ndim == 1][:1]

    def error():
        with torch.set_grad_enabled(bool(small)):
            logprobs = token_logprobs(model, ids, labels, group_ids=group_ids, forms=forms)
            if small:
                torch.autograd.grad(logprobs.sum(), small)
        return float((logprobs[labels[:, 1:] != IGNORE] - expected).square().mean().sqrt())

    # The plain form must be right. Its rounding error sets the tolerance for the fast forms.
    try:
        alone = [plain_logprobs(model, ids[n:n + 1, :P + L], labels[n:n + 1, :P + L])[0, P - 1:]
                 for n, (P, L) in enumerate(TRIAL)]      # each row without its padding
        expected = torch.cat(alone)                                               # (M,)
        noise = error()
    except Exception as problem:
        if out_of_memory(problem):
            raise
        raise ValueError(f"{claim} fail ({words_of(problem)})") from None
    largest = float(expected.abs().max())
    if not math.isfinite(largest):
        raise ValueError(f"{config.model_type}: its log-probs are not finite in {model.dtype}, its "
                         "activations may be too large for it: --dtype bfloat16 or float32")
    if not noise <= root * (1 + largest):
        raise ValueError(f"{claim} are off by {noise:.2g} nats from its forward pass")

    attention = model.config._attn_implementation
    refused = {}
    for form in forms:
        forms[form] = True
        try:
            why = PLAIN or unseen_in_a_trial(model, form, ids)
            if form == "grouped rows":
                model.set_attn_implementation("grouped")
            distance = 0 if why else error()
            # The model rounds its logits to its own dtype, the lean head does not
            if not distance <= root / 4 + 4 * noise + eps * largest:
                why = f"off by {distance:.2g} nats"
        except Exception as problem:
            if out_of_memory(problem):                   # not the form's fault
                raise
            why = words_of(problem)
        forms[form] = not why
        refused[form] = why
    if not forms["grouped rows"]:
        model.set_attn_implementation(attention)
    FORMS[model] = forms
    REFUSED[model] = refused
    return forms


def unseen_in_a_trial(model, form, ids):
    """Why to refuse a form although a few short rows may come out right, or None."""
    config = model.config.get_text_config()
    if form == "grouped rows":
        attention = model.config._attn_implementation
        if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
            return "a sliding window"
        return None if attention in ("sdpa", "grouped") else f"{attention} attention"
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        return "a bias in the head"
    output = body_of(model)(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state[0]                                          # (S, H)
    # Logits as large as 1000 reveal a cap
    hidden = hidden * (1000 / (hidden @ head.weight.T).abs().max())
    error = (own_head(model, output, hidden) - hidden @ head.weight.T).abs().max()
    return None if error <= 10 else "a cap or a scale on the logits"


def words_of(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:100]


# --------------------------------------------------------------------------------------------------
# The command: one answer, token by token

def main():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description="Score one answer, token by token.")
    parser.add_argument("prompt", nargs="?",
                        default="Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?")
    parser.add_argument("response", nargs="?",
                        default="9 - 4 = 5 , 5 - 2 = 3 , 3 + 7 = 10 , \\boxed{ 10 }")
    parser.add_argument("--model", default=str(Path(__file__).parent / "tests" / "tiny"),
                        help="a hub name, a model's folder, or a run's folder (for its final/)")
    parser.add_argument("--system-prompt", default="")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not args.temperature > 0:
        raise ValueError(f"--temperature {args.temperature}: must be above 0")
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages.append({"role": "user", "content": args.prompt})
    final = Path(args.model, "final")
    source = str(final) if final.is_dir() else args.model
    flag = f"--model {args.model}"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
        model = transformers.AutoModelForCausalLM.from_pretrained(source, use_safetensors=True)
        flag = f"--device {args.device}"
        model = model.eval().to(args.device)
    except Exception as error:                           # a foreign file may hold anything
        raise ValueError(f"{flag}: cannot be used ({words_of(error)})") from None
    response_ids = tokenizer(args.response, add_special_tokens=False).input_ids
    if tokenizer.eos_token_id is not None:
        response_ids.append(tokenizer.eos_token_id)
    input_ids = torch.tensor([prompt_ids + response_ids], device=model.device)    # (1, S)
    labels = torch.tensor([[IGNORE] * len(prompt_ids) + response_ids], device=model.device)
    with torch.no_grad():
        logprobs = token_logprobs(model, input_ids, labels, args.temperature)[0]  # (S-1,)
    print(" row   label  log-prob  token")
    for t, token in enumerate(prompt_ids + response_ids):
        is_label = labels[0, t] != IGNORE
        value = f"{logprobs[t - 1]:+.4f}" if is_label else ""
        label = "label" if is_label else "."
        print(f"{t:4}  {label:>6}  {value:>8}  {tokenizer.decode([token])!r}")
    print(f"log pi(y | x) = {logprobs.sum():+.4f} over {len(response_ids)} tokens")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, RuntimeError) as error:             # also: out of memory
        print(f"logprob.py: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
