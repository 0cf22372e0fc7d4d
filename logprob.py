"""[D] Log-probabilities of the tokens that were sampled, under any model: the policy or the reference.

    log pi(y | x) = sum over t of log pi(y_t | x, y_<t),    log pi(v | ...) = log_softmax(logits / T)[v]

The theory's code map names this function and does not show it. What the stages hand round is the row
`[prompt][response][padding]`: the padding stands on the right, where causal attention cannot see it from a
real token, so there is no attention mask to get wrong and positions are 0, 1, 2, ... Labels are -100 outside
the response: the prompt and the padding have no log-probability here, the end token has one.

Entry t of a (N, S-1) tensor speaks of token t+1. The logits of a step are as large as the vocabulary
(8 rows of 512 tokens, 151,936 words: 2.5 GB), so they are made for labelled positions only, a few at a time.

    python logprob.py "prompt" "response"      # every token, its label mark, its log-prob
"""

import argparse
import sys
import weakref
import math
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

IGNORE = -100                                            # the label of a token that no loss speaks of


def selected_logprobs(logits, targets, temperature=1.0):
    """The formula itself: logits (M, V), targets (M,) -> log softmax(logits / T)[target], (M,) float32."""
    return (logits.float() / temperature).log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def token_logprobs(model, input_ids, labels, temperature=1.0, with_entropy=False, group_ids=None):
    """log pi(input_ids[n, t+1] | input_ids[n, :t+1]) at temperature T -> (N, S-1) float32, differentiable.

    input_ids, labels: (N, S); 0 where labels[:, 1:] is -100. In nats. With `with_entropy` a second (N, S-1)
    tensor follows: the entropy of the distribution each token was drawn from, detached. With `group_ids`
    (N,) rows of the same number share their prompt, and it is run once for all of them, see below.
    """
    mask = labels[:, 1:] != IGNORE                                                       # (N, S-1)
    if group_ids is None or not can_group(model) or not mask.any():
        hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state    # (N, S, H)
        hidden = hidden[:, :-1][mask]                                                    # (M, H)
    else:
        hidden = grouped_hidden(model, input_ids, labels, group_ids)
    targets = input_ids[:, 1:][mask]                                                     # (M,)
    logprobs, entropy = head_logprobs(model, hidden, targets, temperature, with_entropy)
    blank = torch.zeros(mask.shape, device=mask.device)
    logprobs = blank.masked_scatter(mask, logprobs)
    return (logprobs, blank.masked_scatter(mask, entropy)) if with_entropy else logprobs


def sequence_logprob(model, input_ids, labels, temperature=1.0):
    """log pi(y | x) of each row, (N,): the sum over its response tokens."""
    return token_logprobs(model, input_ids, labels, temperature).sum(dim=1)


# ---------------------------------------------------------------------------------------------------------
# The same numbers without the logits. Nearly every model ends in one matrix product, and then the gradient
# of log softmax is known in closed form, onehot(target) - softmax: a chunk of logits is made, used and
# dropped in the forward pass, and made again in the backward pass, instead of being kept.

class LeanHead(torch.autograd.Function):
    """selected_logprobs(hidden @ weight.T, targets, T) and the entropy: hidden (M, H), weight (V, H)."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy):
        lse, logprobs, entropy = torch.zeros(3, len(hidden), device=hidden.device)
        for rows in chunks(len(hidden), len(weight), hidden.device):
            logits = (hidden[rows] @ weight.T).float().div_(temperature)                 # (m, V)
            lse[rows] = logits.logsumexp(dim=-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - lse[rows]
            if with_entropy:                                     # H = -sum p log p = lse - sum p * logit
                p = (logits - lse[rows, None]).exp_()
                entropy[rows] = lse[rows] - torch.linalg.vecdot(p, logits)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):                                                          # (M,)
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad = grad / ctx.temperature
        for rows in chunks(len(hidden), len(weight), hidden.device):
            logits = (hidden[rows] @ weight.T).float().div_(ctx.temperature)
            d = logits.sub_(lse[rows, None]).exp_().mul_(-grad[rows, None])              # -g * softmax
            d.scatter_add_(1, targets[rows, None], grad[rows, None])                     # +g at the target
            d = d.to(weight.dtype)
            grad_hidden[rows] = d @ weight
            grad_weight.addmm_(d.T, hidden[rows])
        return grad_hidden, grad_weight, None, None, None


def chunks(M, V, device):
    """Slices of M rows whose logits (m, V) are large enough to keep the device busy, and no larger."""
    step = max(32, (2**28 if device.type == "cuda" else 2**18) // V)     # 1 GB; 1 MB, or 32 rows
    return [slice(start, start + step) for start in range(0, M, step)]


# ---------------------------------------------------------------------------------------------------------
# The same hidden states from one row for whole groups: [prompt | y_1 | ... | y_G | prompt | y_1 | ...]. The
# prompt runs once instead of G times and no padding runs at all; positions restart behind the prompt. Every
# layer treats its tokens one by one, but for attention: there each y_i sees its prompt and itself.

def grouped_hidden(model, input_ids, labels, group_ids):
    """Hidden states (M, H) that predict the labelled tokens, in the order of labels[:, 1:] != -100."""
    positions, is_label = torch.arange(labels.shape[1], device=labels.device), labels != IGNORE
    first = is_label.int().argmax(dim=1).where(is_label.any(dim=1), labels.shape[1]).tolist()
    last = (positions * is_label).amax(dim=1).tolist()           # the last label is predicted, not read
    row_of_groups, groups, T = [], [], 0
    index = labels.new_zeros(len(labels), labels.shape[1] - 1)   # where in the row entry (n, t) is predicted
    for g in dict.fromkeys(group_ids.tolist()):
        members = (group_ids == g).nonzero()[:, 0].tolist()
        P = min(first[n] for n in members)                       # the prompt's length
        row_of_groups.append((members[0], slice(0, P)))
        prompt_end, T, sizes = T + P - 1, T + P, [P]
        for n in members:
            L = max(last[n] - P, 0)
            row_of_groups.append((n, slice(P, P + L)))
            index[n, P - 1], index[n, P:P + L] = prompt_end, torch.arange(T, T + L)
            T, sizes = T + L, [*sizes, L]
        groups.append(sizes)
    ids = torch.cat([input_ids[n, part] for n, part in row_of_groups])[None]             # (1, T)
    restarting = torch.cat([positions[part] for _, part in row_of_groups])[None]
    unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)     # keeps transformers from making a mask
    hidden = model.base_model(input_ids=ids, position_ids=restarting, attention_mask=unused, use_cache=False,
                              groups=groups).last_hidden_state[0]                        # (T, H)
    return hidden[index[is_label[:, 1:]]]


def grouped_attention(module, query, key, value, attention_mask, scaling=None, groups=None, **kwargs):
    """query (1, Hq, T, D), key and value (1, Hkv, T, D), groups [[P, L_1, ..., L_G], ...] -> (1, T, Hq, D)."""
    if groups is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    shared = query.shape[1] // key.shape[1]                      # query heads that share a key head
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    q, k, v = (iter(x.split([L for sizes in groups for L in sizes], dim=2)) for x in (query, key, value))
    out = []
    for P, *answers in groups:
        prompt_k, prompt_v = next(k), next(v)
        out.append(scaled_dot_product_attention(next(q), prompt_k, prompt_v, is_causal=True, scale=scaling))
        for L in answers:
            q_y, k_y, v_y = next(q), torch.cat((prompt_k, next(k)), dim=2), torch.cat((prompt_v, next(v)), dim=2)
            out.append(scaled_dot_product_attention(q_y, k_y, v_y, prompt_and_past(P, L, q_y.device), scale=scaling)
                       if L else q_y)
    return torch.cat(out, dim=2).transpose(1, 2), None


@lru_cache(maxsize=256)
def prompt_and_past(P, L, device):
    """Answer token t sees the prompt and the answer up to t: (L, P+L), lower right. CUDA's kernel knows the form."""
    if device.type == "cuda":
        return causal_lower_right(L, P + L)
    return torch.ones(L, P + L, dtype=torch.bool, device=device).tril(P)


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


# ---------------------------------------------------------------------------------------------------------
# Heads that do more than one matrix product: Gemma 2 soft-caps its logits, Granite and Cohere scale them,
# Phi adds a bias. They are found by trying, and then the model's own head is run, chunk by chunk.

def head_logprobs(model, hidden, targets, temperature, with_entropy):
    """hidden (M, H), targets (M,) -> log-probs (M,), entropies (M,)."""
    if has_plain_head(model):
        weight = model.get_output_embeddings().weight
        return LeanHead.apply(hidden, weight, targets, temperature, with_entropy)

    def scored(hidden, targets):
        logits = own_head(model, hidden).float() / temperature
        p = logits.detach().softmax(dim=-1)
        return selected_logprobs(logits, targets), -(p * p.log().clamp(min=-1e4)).sum(dim=-1)

    parts = [checkpoint(scored, hidden[rows], targets[rows], use_reentrant=False)
             for rows in chunks(len(hidden), model.config.get_text_config().vocab_size, hidden.device)]
    return tuple(torch.cat(part) for part in zip(*parts)) if parts else (hidden.sum(1), hidden.sum(1))


def own_head(model, hidden):
    """The model's whole forward, its body put aside for one that answers `hidden` (M, H): logits (M, V)."""
    body, answer = model.base_model, BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden[None])
    body.forward = lambda *args, **kwargs: answer
    try:
        return model(inputs_embeds=hidden[None]).logits[0]
    finally:
        del body.forward                                         # the class's own forward is back in force


# ---------------------------------------------------------------------------------------------------------
# Which of these forms a model allows is tried out, once a model

def once_a_model(probe):
    known = weakref.WeakKeyDictionary()                          # model -> bool

    def answer(model):
        if model not in known:
            with torch.no_grad():
                known[model] = probe(model)
        return known[model]
    return answer


@once_a_model
def has_plain_head(model):
    """Is this model's head `hidden @ weight.T` and nothing else? Large hidden states would show a cap."""
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        return False
    weight = head.weight
    hidden = 30 * torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    return torch.allclose(own_head(model, hidden), hidden @ weight.T, rtol=1e-3, atol=1e-3)


@once_a_model
def can_group(model):
    """Does this model's attention, run over a row of groups, give what padded rows give?"""
    config = model.config.get_text_config()
    windowed = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if windowed or model.config._attn_implementation not in ("sdpa", "grouped"):
        return False
    input_ids = torch.arange(12, device=model.device).view(2, 6) % 7
    input_ids[1, :3] = input_ids[0, :3]                          # a prompt of 3, answers of 3 and of 2 tokens
    unlabelled = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 1]], dtype=torch.bool, device=model.device)
    labels = input_ids.masked_fill(unlabelled, IGNORE)
    padded = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    padded = padded[labels[:, 1:] != IGNORE].float()
    model.set_attn_implementation("grouped")
    try:
        grouped = grouped_hidden(model, input_ids, labels, torch.zeros(2)).float()
        same = bool((grouped - padded).norm() < 0.03 * padded.norm())
    except Exception:                                            # a model whose layers pass nothing on
        same = False
    if not same:
        model.set_attn_implementation("sdpa")
    return same

def micro_batches(labels, group_ids, token_budget, share_prompts):
    """Cut the rows into micro-batches of at most `token_budget` tokens -> (row indices, width of the longest).

    Rows are sorted by length, so that little padding is computed, the longest first, so that memory runs out at
    once or not at all. Where a prompt is shared there is no padding: groups stay in order, whole where the budget
    allows it, and pay for their prompt once in each micro-batch. A row too long for the budget stands alone.
    """
    labelled, device = labels != IGNORE, labels.device
    ends = (labelled * torch.arange(1, labelled.shape[1] + 1, device=device)).amax(dim=1).tolist()   # row lengths
    answers, groups = labelled.sum(dim=1).tolist(), group_ids.tolist()

    def cost(rows):
        if share_prompts:
            return sum(answers[n] for n in rows) + sum({groups[n]: ends[n] - answers[n] for n in rows}.values())
        return len(rows) * ends[rows[0]]

    parts = [[n] for n in sorted(range(len(ends)), key=lambda n: -ends[n])]
    if share_prompts:
        whole = [list(rows) for _, rows in groupby(range(len(ends)), key=groups.__getitem__)]
        parts = [part for rows in whole for part in ([rows] if cost(rows) <= token_budget else [[n] for n in rows])]
    cut = []
    for part in parts:
        if cut and cost(cut + part) > token_budget:
            yield torch.tensor(cut, device=device), max(ends[n] for n in cut)
            cut = []
        cut = cut + part
    yield torch.tensor(cut, device=device), max(ends[n] for n in cut)


def forms_of(model):
    can_group(model), has_plain_head(model)
    return {}


def length_limit(config):
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def main():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    parser = argparse.ArgumentParser(description="Score one answer, token by token.")
    parser.add_argument("prompt", nargs="?",
                        default="Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?")
    parser.add_argument("response", nargs="?", default="9 - 4 = 5 , 5 - 2 = 3 , 3 + 7 = 10 , \\boxed{ 10 }")
    parser.add_argument("--model", default=str(Path(__file__).parent / "tests" / "tiny"))
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, use_safetensors=True).eval()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}],
                                           tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    response_ids = tokenizer(args.response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    input_ids = torch.tensor([prompt_ids + response_ids])                                # (1, S)
    labels = torch.tensor([[IGNORE] * len(prompt_ids) + response_ids])
    with torch.no_grad():
        logprobs = token_logprobs(model, input_ids, labels, args.temperature)[0]         # (S-1,)
    print(" row   label  log-prob  token")
    for t, token in enumerate(input_ids[0].tolist()):
        label = "." if labels[0, t] == IGNORE else "label"
        value = "" if labels[0, t] == IGNORE else f"{logprobs[t - 1]:+.4f}"
        print(f"{t:4}  {label:>6}  {value:>8}  {tokenizer.decode([token])!r}")
    print(f"log pi(y | x) = {logprobs.sum():+.4f} over {len(response_ids)} tokens")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        print(f"logprob.py: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
