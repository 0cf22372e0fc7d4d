"""[D] Log-probabilities of the tokens that were sampled, under the policy or the reference.

    log pi(y | x) = sum over t of log pi(y_t | x, y_<t)
    log pi(v | ...) = log_softmax(logits / temperature)[v]

Common mistakes that this avoids:
- Scoring prompt and padding too. Only the answer's tokens count.
- Keeping only the sum over the answer: a ratio of whole answers would explode.

Rows are `[prompt][response][padding]`; the response is the answer. Padding is on the right, where
causal attention hides it from every real token, so no attention mask is needed and positions are
0, 1, 2, ... Labels are -100 outside the answer; its end token is labelled. Entry t of a (N, S-1)
tensor belongs to token t+1, which is predicted from all tokens up to t.

    python logprob.py "prompt" "answer"        # every token, and log-probs of the answer's
"""

import argparse
import sys
from functools import partial
from inspect import signature
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

IGNORE = -100                            # the label of a token outside the loss


def plain_logprobs(model, input_ids, labels, temperature=1.0):
    """The definition, word for word: (N, S) ids and labels -> (N, S-1) float32, in nats."""
    # It holds all N * S * V logits: 2.5 GB for 8 rows of 512 tokens and 151,936 words. The rest of
    # this file needs less memory, and is checked against this function.
    ids = input_ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits                         # (N, S, V)
    logits = logits[:, :-1].float() / temperature        # (N, S-1, V): the last predicts nothing
    logprobs = logits.log_softmax(dim=2)                                          # (N, S-1, V)
    chosen = logprobs.gather(2, ids[:, 1:, None])                                 # (N, S-1, 1)
    is_label = labels[:, 1:] != IGNORE                                            # (N, S-1)
    return chosen.squeeze(2).to(labels.device).where(is_label, 0)


def token_logprobs(model, input_ids, labels, temperature=1.0, measure=False):
    """plain_logprobs without all the logits -> (N, S-1) float32, differentiable; and entropies.

    Those are (N, S-1), in nats, of the distribution that each token was drawn from, detached; they
    are 0 without `measure`. What rows begin with in common runs once.
    """
    tree = prefix_tree(input_ids, labels)                # with M labels that differ
    hidden = hidden_states(model, tree)                  # (M, H): before each of them
    targets = tree.ids.flatten()[tree.label_places]                               # (M,)
    targets, = to_device(model.device, targets)
    logprobs, entropy = head_logprobs(model, hidden, targets, temperature, measure)
    return in_rows(tree, logprobs), in_rows(tree, entropy)


def sequence_logprob(model, input_ids, labels, temperature=1.0):
    """log pi(y | x) of each row, (N,): the sum over the answer's tokens."""
    return token_logprobs(model, input_ids, labels, temperature)[0].sum(dim=1)


# --------------------------------------------------------------------------------------------------
# A reader of the theory may stop here. What follows: speed, memory, the command.

def entropy_of(logp):
    """The entropy of each token's distribution, log-probs (m, V) -> (m,), in nats."""
    p = logp.exp()
    return -(p * logp).sum(dim=1)


def has_long_rows(model):
    """Whether it takes long rows and the lean head, as sample.py's make_fast has decided."""
    fast = getattr(model, "fast", None)          # it has not seen every model
    return fast and fast.has_long_rows


def to_device(device, *tensors):
    """A CPU's tensors on `device`, copied from pinned memory, so that the CPU does not wait."""
    if device.type == "cuda":
        tensors = [x.pin_memory() for x in tensors]
    return [x.to(device, non_blocking=True) for x in tensors]


def chunks(hidden, weight):
    """Slices of the M rows: their logits (m, V) are just large enough to keep the device busy."""
    M, V = hidden.shape[0], weight.shape[0]
    values = 2**18                           # on a CPU 1 MB in float32, which fits its cache
    if hidden.is_cuda:
        values = min(2**28, M * V // 8)      # an eighth of them, at most 1 GB in float32
    step = max(256, values // V)             # fewer rows make a CPU's products slower
    # Without rows there is still one, empty slice.
    return [slice(start, start + step) for start in range(0, M or 1, step)]


# --------------------------------------------------------------------------------------------------
# Lean head. All M * V logits would fill the memory, and autograd would keep them for the backward
# pass. But if they are one matrix product, then the gradient of log p(target) with respect to them
# is known: onehot(target) - p. So the forward pass takes a few rows at a time. It makes their
# logits, reads the log-probs, multiplies the gradient by the head's weight, and drops the logits.
# The backward pass makes them once more only if the head itself is trained.

class LeanHead(torch.autograd.Function):
    """Log-probs of the targets, (M,), where logits = hidden @ weight.T / temperature; entropies."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, measure):
        # hidden (M, H), weight (V, H), targets (M,)
        scored = []
        slopes = []      # temperature * gradient of -log p(target) with respect to hidden
        for _, target, logp in log_softmaxes(hidden, weight, targets, temperature):
            chosen = logp.gather(1, target)[:, 0]                                 # (m,)
            entropy = entropy_of(logp) if measure else torch.zeros_like(chosen)
            scored.append((chosen, entropy))
            if ctx.needs_input_grad[0]:
                error = p_minus_onehot(logp, target, weight.dtype)                # (m, V)
                slopes.append(torch.mm(error, weight, **in_float32(weight)))      # (m, H)
                del error                        # it is freed before the next chunk is made
        slope = torch.cat(slopes or [hidden])    # a frozen body needs none
        ctx.save_for_backward(hidden, weight, targets, slope)
        ctx.temperature = temperature
        logprobs, entropy = map(torch.cat, zip(*scored))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, slope = ctx.saved_tensors
        grad = -grad[:, None] / ctx.temperature                                   # (M, 1)
        grad_weight = None                       # a frozen weight gets none
        if ctx.needs_input_grad[1]:              # summed in float32, then converted by autograd
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            dtype = weight.dtype if weight.is_cuda else torch.float32
            for rows, target, logp in log_softmaxes(hidden, weight, targets, ctx.temperature):
                error = p_minus_onehot(logp, target, dtype)                       # (m, V)
                states = (grad[rows] * hidden[rows]).to(dtype)                    # (m, H)
                torch.addmm(grad_weight, error.T, states, out=grad_weight, **in_float32(weight))
                del error
        return grad * slope, grad_weight, None, None, None


def log_softmaxes(hidden, weight, targets, temperature):
    """Yield each chunk of rows: its slice, its targets (m, 1), its log-probs (m, V) in float32."""
    if not weight.is_cuda:                       # CUDA sums half precision in float32 anyway
        weight = weight.float()
    usual = torch.get_float32_matmul_precision()
    for rows in chunks(hidden, weight):
        if hidden.dtype == torch.bfloat16 and not hidden.is_cuda:
            # This lets a CPU use its units for bfloat16, which take such numbers as they are and
            # sum in float32. It is not left on: a rotation's angles need all their digits.
            torch.set_float32_matmul_precision("medium")
        logits = torch.mm(hidden[rows].to(weight.dtype), weight.T, **in_float32(weight))
        torch.set_float32_matmul_precision(usual)
        if temperature != 1:
            logits.div_(temperature)
        yield rows, targets[rows, None], logits.log_softmax(dim=1)


def p_minus_onehot(logp, target, dtype):
    """The gradient of -log p(target) with respect to the logits: (m, V)."""
    # In one pass from float32 to `dtype`; expm1 keeps the digits of p - 1.
    p = logp.new_empty(0, dtype=dtype)
    torch.exp(logp, out=p)
    chosen = logp.gather(1, target)                                               # (m, 1)
    return p.scatter_(1, target, chosen.expm1().to(dtype))


def in_float32(x):
    """For products on CUDA, in half precision too: bfloat16 rounds a logit of 16 by up to 0.06."""
    return {"out_dtype": torch.float32} if x.is_cuda else {}


def head_logprobs(model, hidden, targets, temperature, measure):
    """hidden (M, H), targets (M,) -> log-probs (M,); entropies (M,), 0 without `measure`."""
    head = model.get_output_embeddings()
    if has_long_rows(model):
        return LeanHead.apply(hidden, head.weight, targets, temperature, measure)
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1                # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1            # Granite
    cap = getattr(config, "final_logit_softcapping", None)           # Gemma

    def score(hidden, targets):
        logits = head(hidden).float() * scale                                     # (m, V)
        if cap:
            logits = cap * (logits / cap).tanh()
        logp = (logits / temperature).log_softmax(dim=1)
        chosen = logp.gather(1, targets[:, None])[:, 0]                           # (m,)
        if not measure:
            return chosen, torch.zeros_like(chosen)
        # p log p is 0 where p is 0; a log-prob of -inf would make it NaN.
        return chosen, entropy_of(logp.detach().clamp(min=-1e9))

    scored = [checkpoint(score, hidden[rows], targets[rows], use_reentrant=False)
              for rows in chunks(hidden, head.weight)]
    return map(torch.cat, zip(*scored))


# --------------------------------------------------------------------------------------------------
# The answers of a group follow the same prompt, and need not run it again. So rows are sorted, and
# each shares the tokens with which the row above it begins: together they are a tree. A fast family
# runs each token of the tree once, in one long row of T tokens. The last token of a row predicts
# nothing, and does not run. An example: a prompt 7 has the answer 2, and a prompt 8 8 has the
# answers 3 4 and 3 5 6. The long row is  7 | 8 8 3 | 5:
#
#   row        place           first_place  label_places  runs_here  lengths  in_long_row
#   7 2        0  1            0 1          1             1 0        1        0
#   8 8 3 4    5  6  7  8      5 6 7 8      7 8           1 1 1 0    3        1 2 3
#   8 8 3 5 6  10 11 12 13 14  5 6 7 13 14  13 14         0 0 0 1 0  4        1 2 3 4
#
# A token's position is its column. Only attention mixes tokens: each sees those of the row in which
# it runs, up to itself.

AFTER_LABELS = 2**40                     # the code of what follows the last label; it sorts last


class Tree(NamedTuple):
    """U different rows of S tokens, sorted. Places count the tokens of all rows, row after row.

    Rows share tokens as long as ids and labels are the same. All is in host memory.
    """

    ids: torch.Tensor                    # (U, S) long
    first_place: torch.Tensor            # (U, S) long: the place where a token stands first
    label_places: torch.Tensor           # (M,) long: where the M labels stand first
    runs_here: torch.Tensor              # (U, S) bool: it stands here first, and predicts one
    lengths: torch.Tensor                # (U,) long: how many tokens of a row predict one
    in_long_row: torch.Tensor            # (U, S) long: which token of the long row it is
    row_of: torch.Tensor                 # (N,) long: which of the U rows each given row is


def prefix_tree(input_ids, labels):
    """N rows of S tokens -> their Tree."""
    input_ids, labels = input_ids.cpu(), labels.cpu()    # FSDP moves them to its card
    is_label = pad(labels[:, 1:] != IGNORE, (1, 0))      # (N, S); nothing predicts the first token
    column = torch.arange(labels.shape[1])
    last_label = (is_label * column).amax(dim=1, keepdim=True)                    # (N, 1)
    last_label = last_label.clamp(min=1)
    # Id and label are one number, 2 id + 1 of a label and 2 id of another token.
    codes = (2 * input_ids + is_label).where(column <= last_label, AFTER_LABELS)  # (N, S)
    codes, row_of = codes.unique(dim=0, return_inverse=True)                      # (U, S)
    lengths = (codes < AFTER_LABELS).sum(dim=1) - 1
    place = torch.arange(codes.numel()).view_as(codes)
    change = codes.diff(dim=0, prepend=codes[:1] - 1)    # (U, S); all of the first row is new
    is_new = (change != 0).cummax(dim=1).values          # as is all behind a token that is new
    first_place = place.where(is_new, 0).cummax(dim=0).values
    label_places = place[is_new & (codes % 2 == 1)]
    runs_here = is_new & (column < lengths[:, None])
    in_long_row = runs_here.flatten().cumsum(dim=0)[first_place] - 1
    ids = codes % AFTER_LABELS // 2
    return Tree(ids, first_place, label_places, runs_here, lengths, in_long_row, row_of)


def in_rows(tree, values):
    """Values of the M labels -> (N, S-1), 0 where no label is."""
    places = tree.first_place[tree.row_of, 1:]                                    # (N, S-1)
    label_places, places = to_device(values.device, tree.label_places, places)
    of_places = values.new_zeros(tree.ids.numel())
    return of_places.scatter(0, label_places, values)[places]


def hidden_states(model, tree):
    """Run the body on the rows of a Tree -> its hidden state before each of the M labels, (M, H).

    A model of a fast family runs one long row, any other the padded rows.
    """
    ids = tree.ids
    before = tree.label_places - 1                       # among the tokens of all rows
    options = {}
    if has_long_rows(model):
        ids = ids[tree.runs_here][None]                                           # (1, T)
        before = tree.in_long_row.flatten()[before]      # among those of the long row
        positions = tree.runs_here.nonzero()[None, :, 1]                          # (1, T)
        positions, = to_device(model.device, positions)
        attention = block_attention
        if (model.device.type == "cuda" and model.dtype.itemsize == 2
                and torch.cuda.get_device_capability(model.device) >= (8, 0)):
            attention = flash_attention
        options = dict(
            position_ids=positions,
            # `attend` reads no mask, but a model that gets none makes one.
            attention_mask=positions[None, None],
            attend=attention(model, tree))               # every layer's attention gets it
    ids, before = to_device(model.device, ids, before)
    body = model.get_decoder()                           # it returns hidden states
    if body is model:                                    # so says Llama 4
        body = model.base_model.model
    hidden = body(input_ids=ids, use_cache=False, **options).last_hidden_state
    return hidden.flatten(0, 1)[before]


def flash_attention(model, tree):
    """-> attention of the long row by flash attention: the tokens that run in a row are its
    queries, and all its tokens are its keys."""
    column = torch.arange(tree.ids.shape[1])                                      # (S,)
    keys = tree.in_long_row[column < tree.lengths[:, None]]      # of all rows, one behind another
    queries_each = tree.runs_here.sum(dim=1)                                      # (U,)
    counts = torch.stack((queries_each, tree.lengths))           # of queries and of keys: (2, U)
    longest = counts.amax(dim=1).tolist()
    # Where the queries and keys of each row begin: (2, U + 1)
    bounds = pad(counts.cumsum(dim=1), (1, 0)).int()
    keys, bounds = to_device(model.device, keys, bounds)
    options = {"window_size": (-1, 0)}                           # causal
    if "enable_gqa" in signature(varlen_attn).parameters:        # torch 2.11 shares key heads, too
        options["enable_gqa"] = True

    def attend(q, k, v, scaling):
        both = torch.cat((k, v), dim=1)                  # one gather is faster than two
        k, v = both[keys].chunk(2, dim=1)
        return varlen_attn(q, k, v, *bounds, *longest, scale=scaling, **options)

    return attend


def block_attention(model, tree):
    """-> attention of the long row without flash attention: its T tokens in n blocks of queries.

    The keys of a block are the tokens that some query of it sees, K at most; a mask hides from each
    query those that only others see.
    """
    # In a large block most keys are hidden from most queries, and are multiplied for nothing; with
    # small blocks the same keys are copied for each of them. Of 16, 32 and 64 a CPU is fastest with
    # 32. A GPU needs large products to be busy.
    size = 32 if model.device.type == "cpu" else 512
    row, column = tree.runs_here.nonzero(as_tuple=True)                           # (T,) each
    T = len(row)
    queries = pad(torch.arange(T), (0, -T % size)).view(-1, size)                 # (n, size)
    # A token sees its row up to itself; the columns behind that name the token itself again.
    columns = torch.arange(tree.ids.shape[1]).minimum(column[:, None])            # (T, S)
    visible = tree.in_long_row[row].gather(1, columns)                            # (T, S)
    seen = visible[queries].flatten(1)                   # by the queries of a block: (n, size * S)
    queries, seen = to_device(model.device, queries, seen)
    n = len(seen)
    is_key = seen.new_zeros(n, T).scatter_(1, seen, 1)
    number = is_key.cumsum(dim=1).gather(1, seen) - 1    # 0 for a block's first key, 1, 2, ...
    K = int(number.max()) + 1
    keys = seen.new_zeros(n, K).scatter_(1, number, seen)
    mask = seen.new_full((n, size, K), -torch.inf, dtype=model.dtype)
    mask = mask.scatter_(2, number.view(n, size, -1), 0)[:, None]                 # (n, 1, size, K)

    def of_blocks(x, tokens):                            # (T, H, D), (n, m) -> (n, H, m, D)
        x = x.index_select(0, tokens.flatten())          # its gradient is faster than that of x[]
        return x.unflatten(0, tokens.shape).transpose(1, 2)

    def attend(q, k, v, scaling):
        if q.is_cuda:
            # With fewer key heads than query heads CUDA takes a slow kernel that holds all scores.
            repeats = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(repeats, dim=1)                               # (T, Hq, D)
            v = v.repeat_interleave(repeats, dim=1)
        q = of_blocks(q, queries)
        k, v = of_blocks(k, keys), of_blocks(v, keys)
        out = scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[:T]                              # (T, Hq, D)

    return attend


# --------------------------------------------------------------------------------------------------
# Memory: micro-batches within a token budget, layers that run twice

def cut_rows(input_ids, labels, token_budget, share):
    """Cut N rows into micro-batches -> [(row indices (n,), width of the longest), ...].

    Each is filled up to `token_budget` tokens, or is a single row. With `share` what a row has in
    common with the one above it counts once. Else rows are padded, and sorted by length: so there
    is little padding. Rows that are equal run once, count once and stay together.
    """
    tree = prefix_tree(input_ids, labels)
    lengths = tree.lengths.tolist()                      # the tokens that a row runs alone
    new = tree.runs_here.sum(dim=1).tolist()             # those that the row above has not run
    order = range(len(lengths))
    if not share:
        order = sorted(order, key=lengths.__getitem__, reverse=True)
    cuts = []
    width, room = 0, -1                                  # of the last cut
    for row in order:
        tokens = new[row] if share else width
        if tokens > room:
            cuts.append([])
            width = tokens = lengths[row]
            room = token_budget
        cuts[-1].append(row)
        room -= tokens
    micro_batches = []
    for cut in cuts:
        is_chosen = torch.isin(tree.row_of, torch.tensor(cut))                    # (N,)
        width = max(lengths[row] for row in cut) + 1
        micro_batches.append((is_chosen.nonzero().flatten(), width))
    return micro_batches


def checkpoint_layers(model):
    """From now on a layer keeps only its input, and the backward pass computes the layer again."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # without dropout nothing is random
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False,
                                    preserve_rng_state=False)


# --------------------------------------------------------------------------------------------------
# The command: one answer, token by token

def main():
    parser = argparse.ArgumentParser(description="Score one answer, token by token.")
    parser.add_argument("prompt", nargs="?",
                        default="Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?")
    parser.add_argument("response", nargs="?",
                        default="9 - 4 = 5 , 5 - 2 = 3 , 3 + 7 = 10 , \\boxed{ 10 }")
    parser.add_argument("--model", default=f"{Path(__file__).parent}/tests/tiny",
                        help="a hub name or a model's folder")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, use_safetensors=True)
    messages = [{"role": "user", "content": args.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    answer = args.response + (tokenizer.eos_token or "")
    response = tokenizer(answer, add_special_tokens=False).input_ids
    ids = prompt + response
    labels = [IGNORE] * len(prompt) + response
    logprobs = plain_logprobs(model, torch.tensor([ids]), torch.tensor([labels]))[0]
    print(" row   label  log-prob  token")
    for t, token in enumerate(ids):
        shown = "     ."
        if labels[t] != IGNORE:
            shown = f" label  {logprobs[t - 1]:+8.4f}"
        print(f"{t:4}  {shown:16}  {tokenizer.decode([token])!r}")
    print(f"log pi(y | x) = {logprobs.sum():+.4f} over {len(response)} tokens")


if __name__ == "__main__":
    try:
        main()
    except (OSError, TypeError, ValueError, RuntimeError) as error:  # also: out of memory
        print(f"logprob.py: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
