"""[A] Group sampling: G answers to every prompt, drawn token by token from the policy itself.

    y_{j,i} ~ pi_old(. | x_j),   i = 1..G     one softmax draw per token, until the end or the limit

Each prompt runs through the model once and its key/value cache is repeated G times: the G answers
share the prompt and part ways at their first token, which each row draws for itself. A row that has
ended leaves the batch. Prompts of different lengths stand side by side, padded on the left of the
cache only.

Departures from the theory's code map:
- The ids that were drawn are kept, and their log-probabilities with them. The map decodes to text
  and tokenises again: other ids than those sampled, with the prompt among the labels.
- The draw is the plain softmax at `temperature`, and [D] scores at the same one. `generate` lets a
  checkpoint's own top-k and top-p in silently (and the map samples at 0.8 what it scores at 1.0).
- `responses` hold the answer alone: a prompt that says "put it in \\boxed{}" earns nothing.

    python sample.py --group-size 4 "Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?"
"""

import argparse
import json
import math
import sys
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

IGNORE = -100                    # the label of a token that no loss speaks of

# cuDNN's attention builds a plan for every new shape, tens of milliseconds each, and is known to be
# wrong for masked bfloat16 (pytorch issues 191612, 193893).
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class Rollout:
    """N = B * G rows `[prompt][response][padding]`; row i answers prompt i // G."""

    input_ids: torch.Tensor      # (N, S) long
    labels: torch.Tensor         # (N, S) long: input_ids on the response and its end; else -100
    logprobs: torch.Tensor       # (N, S-1) float32: entry t is log pi(input_ids[t+1] | ids before)
    responses: list              # N strings: the response alone, without its end token
    finished: torch.Tensor       # (N,) bool: False where max_new_tokens cut the answer
    group_ids: torch.Tensor      # (N,) long: i // G

    # Computed by [D] before the first update, (N, S-1) float32; None until then.
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    entropies: torch.Tensor | None = None


def sample_groups(model, tokenizer, prompts, group_size=8, max_new_tokens=256, temperature=1.0,
                  generator=None):
    """Draw `group_size` answers to each of B `prompts` (chat template already applied) -> Rollout.

    `temperature=0` is greedy decoding; its log-probs are those of temperature 1. `generator` is one
    for all, or a list of one per prompt: then an answer depends on nothing but its prompt, the
    policy and its own numbers. ValueError: nothing to sample, a prompt without tokens, no end token
    known, a model that `forms_of` refuses.
    """
    prompt_ids, ends, chance = prepare(model, tokenizer, prompts, group_size, max_new_tokens,
                                       temperature, generator)
    answers = write_answers(model, prompt_ids, chance, temperature, ends)
    rows = [[(prompt_ids[n // group_size], None), answer] for n, answer in enumerate(answers)]
    return to_rollout(tokenizer, rows, ends, group_size)


@torch.no_grad()
def write_answers(model, prompt_ids, chance, temperature, ends):
    """B prompts, and chance (N, T) in [0, 1) for all draws -> N pairs (token ids, log-probs)."""
    decode_n_tokens = fastest_form(model)        # `decode` below, or a faster form of it
    cache, mask, logits = prefill(model, prompt_ids)
    tokens, logprobs = decode_n_tokens(model, cache, mask, logits, chance, temperature, ends)
    return cut_at_end(tokens, logprobs, ends)


def prefill(model, prompt_ids):
    """Every prompt once -> its keys and values, mask (B, P), logits of the next token (B, V)."""
    ids, mask = padded_left(prompt_ids, model.device)                # (B, P) each; mask 0 or 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    return out.past_key_values, mask, out.logits[:, -1]


def decode(model, cache, mask, logits, chance, temperature, ends):
    """The plain loop: draw a token per row, run the model on it, again -> ids, log-probs (N, T)."""
    N, T = chance.shape
    G = N // len(mask)
    cache.batch_repeat_interleave(G)                                 # B prompts become N rows
    mask = mask.repeat_interleave(G, dim=0)
    logits = logits.repeat_interleave(G, dim=0)
    tokens = mask.new_zeros(N, T)
    logprobs = torch.zeros(N, T, device=mask.device)
    rows = torch.arange(N, device=mask.device)                       # those still being written
    for t in range(T):
        token, logprobs[rows, t] = draw(logits, temperature, chance[rows, t])
        tokens[rows, t] = token
        alive = ~torch.isin(token, ends)
        if t + 1 == T or not alive.any():
            break
        if not alive.all():                                          # finished rows leave the batch
            rows = rows[alive]
            mask = mask[alive]
            token = token[alive]
            cache.batch_select_indices(alive)
        mask = F.pad(mask, (0, 1), value=1)                          # (n, P + t + 1)
        positions = mask.sum(dim=1, keepdim=True) - 1
        logits = model(token[:, None], attention_mask=mask, position_ids=positions,
                       past_key_values=cache, use_cache=True).logits[:, -1]
    return tokens, logprobs


def draw(logits, temperature, u):
    """One token per row from softmax(logits / temperature): (n, V) -> tokens, log-probs (n,).

    Inverse CDF: the first token whose running sum of probabilities is above u, (n,) in [0, 1). The
    sum is taken in u's float64, since float32's stands still at words rarer than 6e-8.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)      # (n, V)
    if temperature == 0:
        token = logprobs.argmax(dim=-1, keepdim=True)
    else:
        cdf = logprobs.exp().to(u.dtype).cumsum(dim=-1)
        token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        token.clamp_(max=logits.shape[1] - 1)
    return token[:, 0], logprobs.gather(1, token)[:, 0]


# --------------------------------------------------------------------------------------------------
# The same draw, several times faster on 152k words: one exp and one sum over all of them.

def draw_fast(logits, temperature, u, block=128, few=1024):
    """`draw` on two levels: u picks a block of words by its mass, then a word inside the block.

    A float32 sum of 128 words loses none of them, and the few block masses are added in float64.
    """
    if temperature == 0 or logits.shape[1] <= few:                   # nothing to gain
        return draw(logits, temperature, u)
    logits = logits.float() if temperature == 1 else logits.float() / temperature        # (n, V)
    peak = logits.amax(dim=-1, keepdim=True)
    p = (logits - peak).exp_()
    if p.shape[1] % block:
        p = F.pad(p, (0, -p.shape[1] % block))
    p = p.unflatten(1, (-1, block))                                  # (n, V / block, block)
    mass = p.sum(dim=-1).to(u.dtype)                                 # (n, V / block)
    cdf = mass.cumsum(dim=-1)
    total = cdf[:, -1:]
    u = u[:, None] * total
    b = torch.searchsorted(cdf, u, right=True).clamp_(max=cdf.shape[1] - 1)              # (n, 1)
    inner = p.take_along_dim(b[:, :, None], dim=1)[:, 0].to(u.dtype).cumsum(dim=-1)     # (n, block)
    rest = (u - (cdf - mass).gather(1, b)) / mass.gather(1, b) * inner[:, -1:]
    token = b * block + torch.searchsorted(inner, rest, right=True).clamp_(max=block - 1)
    token.clamp_(max=logits.shape[1] - 1)
    return token[:, 0], (logits.gather(1, token) - peak - total.log())[:, 0].float()


# --------------------------------------------------------------------------------------------------
# The same loop, faster: the decode step of the family that Qwen2, Qwen3, Llama, Mistral and SmolLM
# share, written out, with a cache in which every tensor keeps its place. On CUDA such a step can be
# captured as a graph and replayed, where transformers' launches more than a thousand small kernels.

def decode_fast(model, cache, mask, logits, chance, temperature, ends, graphs=False):
    """`decode` on the step below: the same tokens from the same chance, rounding apart.

    Rows that have ended leave when a smaller step will do; until then nobody reads what they draw.
    """
    N, T = chance.shape
    G = N // len(mask)
    decoder = decoder_for(model, N, mask.shape[1] + T, graphs)
    decoder.fill(cache, mask.repeat_interleave(G, dim=0), G)
    logits = logits.repeat_interleave(G, dim=0)
    tokens = mask.new_zeros(N, T)
    logprobs = torch.zeros(N, T, device=mask.device)
    rows = torch.arange(N, device=mask.device)                       # whose row is in each place
    ended = torch.zeros_like(rows, dtype=torch.bool)
    every = 1 if mask.device.type == "cpu" else 16                   # asking makes a GPU wait
    for t in range(T):
        # Outside the step: its graphs serve every temperature, and a run again changes nothing.
        token, logprobs[rows, t] = draw_fast(logits, temperature, chance[rows, t])
        tokens[rows, t] = token
        if t + 1 == T:
            break
        if t % every == 0:
            since = max(0, t + 1 - every)
            ended |= torch.isin(tokens[rows, since:t + 1], ends).any(dim=1)
            living = len(rows) - int(ended.sum())
            if living == 0:
                break
            if decoder.size(living) < decoder.size(len(rows)):
                places = decoder.close_up(ended, living)
                rows = rows[places]
                token = token[places]
                ended = ended[places]
        logits = decoder.run(token)
    return tokens, logprobs


class Decoder:
    """The decode step for N places of `capacity` slots, and all that it reads and writes.

    Prompts end in the same slot, so all places write to the same slot next.
    """

    def __init__(self, model, N, capacity, graphs):
        body = model.base_model
        device = model.device
        self.N = N
        self.capacity = capacity
        self.graphs = {} if graphs else None
        self.layers = [tensors_of(layer) for layer in body.layers]
        self.embed = body.embed_tokens
        self.last_norm = body.norm.weight.shape, body.norm.weight, body.norm.variance_epsilon
        self.head = model.get_output_embeddings()
        self.D = body.layers[0].self_attn.head_dim
        weight = self.layers[0].k_proj[0]        # its dtype is what the cache holds
        Hkv = len(weight) // self.D
        self.flash = (device.type == "cuda" and weight.dtype in (torch.float16, torch.bfloat16)
                      and self.D % 8 == 0 and torch.cuda.get_device_capability(device)[0] >= 8)
        for layer in self.layers:                # keys and values (2, N, Hkv, capacity, D)
            if self.flash:                       # it wants a token's heads side by side
                layer.past = weight.new_zeros(2, N, capacity, Hkv, self.D).transpose(2, 3)
            else:
                layer.past = weight.new_zeros(2, N, Hkv, capacity, self.D)
        slots = torch.arange(capacity, device=device)
        cos, sin = body.rotary_emb(weight, slots[None])              # (1, capacity, D) each
        left, right = sin[0, :, None].chunk(2, dim=-1)
        self.cos = cos[0, :, None]                                   # (capacity, 1, D)
        self.sin = torch.cat((-left, right), dim=-1)                 # as x is rolled by D / 2
        self.slot = slots[:1].clone()                                # where all places write next
        self.token = slots.new_zeros(N)                              # what they run next
        self.bias = weight.new_zeros(N, 1, 1, capacity)              # 0, or -inf: another's slot
        # Flash attention asks where each query begins, 0, 1, ..., and where the last one ends.
        self.first = torch.arange(N + 1, dtype=torch.int32, device=device)
        self.padding = torch.zeros_like(self.first)                  # slots before the prompt

    def fill(self, cache, mask, G):
        """Take over the prompts' keys and values, (n / G, Hkv, P, D) per layer; mask (n, P)."""
        n, self.length = mask.shape
        for layer, prompt in zip(self.layers, cache.layers):
            if self.graphs is not None:          # they read all slots, and 0 * NaN is NaN
                layer.past.zero_()
            past = torch.stack((prompt.keys, prompt.values))[:, :, None]
            prompt.keys = prompt.values = None   # one layer's copy at a time
            layer.past[:, :n, :, :self.length].unflatten(1, (-1, G)).copy_(past)
        mask = F.pad(mask, (0, self.capacity - self.length, 0, self.N - n))      # (N, capacity)
        self.bias[:, 0, 0] = torch.where(mask.bool(), 0.0, -torch.inf)
        self.padding[:n] = self.length - mask[:n].sum(dim=1)

    def close_up(self, ended, n):
        """The n living close ranks: those behind move to free places -> who stands where, (n,)."""
        late = (~ended[n:]).nonzero()[:, 0] + n
        free = ended[:n].nonzero()[:, 0]
        for layer in self.layers:
            layer.past[:, free, :, :self.length] = layer.past[:, late, :, :self.length]
        self.bias[free] = self.bias[late]
        self.padding[free] = self.padding[late]
        places = torch.arange(n, device=ended.device)
        places[free] = late
        return places

    def size(self, n):
        """How many places run for n rows: n, or the least of N, N/2, N/4, ... that hold them."""
        size = n if self.graphs is None else self.N
        while n <= size // 2:
            size //= 2
        return size

    def run(self, token):
        """The tokens of the first n places (n,) -> logits of the next (n, V)."""
        n = len(token)
        self.token[:n] = token
        self.slot.fill_(self.length)
        self.length += 1
        if self.graphs is None:
            return self.step(n, self.length)
        size = self.size(n)
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits[:n]

    def capture(self, n):
        """`step` as a CUDA graph -> the graph, and where it leaves the logits."""
        self.step(n, self.capacity)              # outside: libraries make themselves ready
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self.graphs.values()), None)   # one for all
        with torch.cuda.graph(graph, pool=pool):                     # recorded, not run
            logits = self.step(n, self.capacity)
        return graph, logits

    def step(self, n, length):
        """The last tokens of n places -> the next logits, (n, V).

        As a graph wants it: it works in place and never waits. Run again, it does the same again.
        """
        position = self.slot - self.padding[:n]
        if self.flash:                           # where each row's keys begin, how many they are
            starts = self.first[:n + 1] * self.capacity + self.padding[:n + 1]
            own = starts, (position + 1).int()
        else:
            own = self.bias[:n].index_fill_(3, self.slot, 0.0)[..., :length]     # (n, 1, 1, length)
        cos = self.cos[position]                                     # (n, 1, D)
        sin = self.sin[position]
        x = self.embed(self.token[:n])                               # (n, H)
        for layer in self.layers:
            h = F.rms_norm(x, *layer.input_layernorm)
            q, k, v = (F.linear(h, *projection).view(n, -1, self.D)  # (n, Hq or Hkv, D)
                       for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
            if layer.q_norm:                                         # Qwen3
                q = F.rms_norm(q, *layer.q_norm)
                k = F.rms_norm(k, *layer.k_norm)
            if layer.rotates:                                        # not all of SmolLM3 do
                qk = torch.cat((q, k), dim=1)                        # (n, Hq + Hkv, D)
                qk = torch.addcmul(qk * cos, qk.roll(self.D // 2, dims=-1), sin)
                q, k = qk[:, :q.shape[1]], qk[:, q.shape[1]:]
            keys, values = layer.past[:, :n]                         # (n, Hkv, capacity, D)
            keys.index_copy_(2, self.slot, k[:, :, None])
            values.index_copy_(2, self.slot, v[:, :, None])
            o = self.attend(q, keys, values, own, layer.scale)       # (n, Hq * D)
            add_linear(x, o, *layer.o_proj)
            h = F.rms_norm(x, *layer.post_attention_layernorm)
            h = layer.act(F.linear(h, *layer.gate_proj)) * F.linear(h, *layer.up_proj)
            add_linear(x, h, *layer.down_proj)
        return self.head(F.rms_norm(x, *self.last_norm))             # (n, V)

    def attend(self, q, keys, values, own, scale):
        """One query per row and head, (n, Hq, D), over the row's own keys -> (n, Hq * D)."""
        if self.flash:                           # splits over the keys, packs heads, needs no mask
            starts, counts = own
            keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
            return torch.ops.aten._flash_attention_forward(
                q, keys, values, self.first[:len(starts)], starts, 1, self.capacity, 0.0, False,
                False, scale=scale, seqused_k=counts)[0].flatten(1)
        n, Hkv = keys.shape[:2]
        q = q.unflatten(1, (Hkv, -1))            # heads that share keys: queries of one head
        keys, values = (x[:, :, :own.shape[3]] for x in (keys, values))
        if q.is_cuda or own.shape[3] > 64:
            return F.scaled_dot_product_attention(q, keys, values, own, scale=scale).flatten(1)
        # With few keys a CPU is faster if it does the two products itself.
        own = own[:, 0].repeat_interleave(Hkv, dim=0)                # (n * Hkv, 1, length)
        q, keys, values = (x.flatten(0, 1) for x in (q, keys, values))
        scores = torch.baddbmm(own, q, keys.mT, alpha=scale)
        return torch.bmm(scores.softmax(dim=-1), values).view(n, -1)


def tensors_of(layer):
    """What the step reads of a layer, by name: of its parts what F.linear and F.rms_norm take.

    Found once, because on a CPU looking them up for every token takes as long as a few kernels.
    """
    attention = layer.self_attn
    found = SimpleNamespace(scale=attention.scaling, rotates=getattr(attention, "use_rope", True),
                            act=layer.mlp.act_fn, q_norm=None)
    for name, part in layer.named_modules():
        name = name.rpartition(".")[2]
        if hasattr(part, "variance_epsilon"):
            setattr(found, name, (part.weight.shape, part.weight, part.variance_epsilon))
        elif type(part) is torch.nn.Linear:
            setattr(found, name, (part.weight, part.bias))
        elif hasattr(part, "in_features"):       # an adapter, 8 bits: more than a product
            raise ValueError(f"{type(part).__name__} for Linear")
    return found


def add_linear(x, h, weight, bias):
    """x += linear(h), the sum inside the matrix product."""
    x.addmm_(h, weight.T)
    if bias is not None:
        x += bias


DECODERS = WeakKeyDictionary()   # model -> its Decoder with graphs, kept from rollout to rollout


def decoder_for(model, N, capacity, graphs):
    """A decoder with room for N rows of `capacity` tokens; the one with graphs is kept."""
    if not graphs:
        return Decoder(model, N, capacity, graphs)
    addresses = [weight.data_ptr() for weight in model.parameters()]             # graphs read there
    kept = DECODERS.get(model)
    if not kept or kept.addresses != addresses or N > kept.N or capacity > kept.capacity:
        release(model)                           # its memory first
        kept = Decoder(model, N, -(-capacity // 256) * 256, graphs)              # prompts may grow
        kept.addresses = addresses
        DECODERS[model] = kept
    return kept


def release(model):
    """Free the cache and the graphs kept for this model; the next rollout makes them again."""
    DECODERS.pop(model, None)


# --------------------------------------------------------------------------------------------------
# The check, once per model: each form of the loop against the model's plain forward pass.

FORMS = WeakKeyDictionary()      # model -> (its device and dtype, what forms_of found)


@torch.no_grad()
def forms_of(model):
    """Which fast forms the model takes -> {name: None, or in a few words why it was refused}.

    "own decode step", and on CUDA "CUDA graphs". ValueError in one line where not even the plain
    loop gives the plain forward pass's log-probs. Weights that FSDP sharded are gathered first.
    """
    where = model.device, model.dtype
    if model in FORMS and FORMS[model][0] == where:
        return FORMS[model][1]
    if reason := refusal(model, decode):
        kind = model.config.model_type
        raise ValueError(f"{kind} cannot be sampled from with its cache: {reason}")
    found = {"own decode step": refusal(model, decode_fast)}
    if model.device.type == "cuda":
        moving = "FSDP's gathered weights may move" if hasattr(model, "unshard") else None
        found["CUDA graphs"] = moving or refusal(model, partial(decode_fast, graphs=True))
    release(model)                               # four rows are not worth keeping
    FORMS[model] = where, found
    return found


def fastest_form(model):
    """The fastest form of `decode` that `forms_of` found right."""
    found = forms_of(model)
    if found["own decode step"]:
        return decode
    return partial(decode_fast, graphs=found.get("CUDA graphs", "not on CUDA") is None)


def refusal(model, form):
    """None where this form draws tokens with the plain forward pass's log-probs, else why not.

    Two prompts of different length, two rows each, and end tokens that two rows are known to draw.
    What is too slight to notice is rounding: 1e-6 nats in float32, 0.02 in bfloat16.
    """
    T = 8 if model.device.type == "cpu" else 20                      # there, rows leave every 16th
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    prompts = [[3, 1, 4, 1, 5], [2, 6, 5]]
    errors = []
    chance = uniform_numbers(torch.Generator().manual_seed(0), 2, 2, T, model.device)
    never = torch.tensor([-1], device=model.device)
    try:
        if form is not decode:
            refuse_relatives(model)
        tokens, _ = decode(model, *prefill(model, prompts), chance, 1.0, never)
        ends = tokens[:2, 2]                                         # so these two leave the batch
        tokens, logprobs = form(model, *prefill(model, prompts), chance, 1.0, ends)
        for n, (ids, drawn) in enumerate(cut_at_end(tokens, logprobs, ends)):
            row = torch.tensor([prompts[n // 2] + ids], device=model.device)     # (1, S)
            logits = model(row, use_cache=False).logits[0, :-1].float()
            plain = logits.log_softmax(dim=-1).gather(1, row[0, 1:, None])[-len(ids):, 0]
            errors += (plain.cpu() - torch.tensor(drawn)).abs().tolist()
    except Exception as failure:
        no_memory = isinstance(failure, (torch.OutOfMemoryError, MemoryError))
        if no_memory or "allocate memory" in str(failure):           # no fault of the form
            raise
        return first_line(failure)
    error = sum(errors) / len(errors)
    return None if error <= tolerance else f"off by {error:.2g} nats"


def refuse_relatives(model):
    """ValueError for what our step does not compute, and what a few tokens would not show."""
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, name, None) and getattr(config, f"use_{name}", True):
            raise ValueError("a " + name.replace("_", " "))
    positions = model.base_model.rotary_emb.rope_type
    if positions in ("dynamic", "longrope"):
        raise ValueError(f"positions that change as the text grows ({positions})")


# --------------------------------------------------------------------------------------------------
# Text in: the chat template around a problem

def chat_prompt(tokenizer, problem, system_prompt):
    """The text that the policy continues: the model's own chat template around the problem.

    `problem` holds "messages" or a "question". ValueError: the template fails or yields nothing.
    """
    messages = problem.get("messages") or [{"role": "user", "content": problem["question"]}]
    messages = [{**m, "content": as_text(tokenizer, m["content"])} for m in messages]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    try:
        prompt = tokenizer.apply_chat_template(
            system + messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:                   # a template is foreign code
        if not system_prompt:
            raise ValueError(f"the chat template fails ({first_line(error)})") from None
        # Gemma's, for one, refuses a system message: then it opens the first turn.
        first = {**messages[0], "content": f"{system_prompt}\n\n{messages[0]['content']}"}
        return chat_prompt(tokenizer, {"messages": [first, *messages[1:]]}, "")
    if not prompt.strip():
        raise ValueError("the chat template makes an empty prompt")
    return prompt


def as_text(tokenizer, text):
    """Text from a file stays text: an `<|im_end|>` in a question must not end the user's turn.

    A blank inside a special token makes plain characters of it.
    """
    for token in tokenizer.all_special_tokens:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def first_line(error):
    return str(error).split("\n")[0][:100] or type(error).__name__


# --------------------------------------------------------------------------------------------------
# Ids in, rows out

def prepare(model, tokenizer, prompts, group_size, T, temperature, generator):
    """-> ids of each prompt, end tokens, chance (N, T); ValueError for what cannot be sampled."""
    if not prompts or min(group_size, T) < 1 or not temperature >= 0:
        raise ValueError(f"{len(prompts)} prompts, group_size {group_size}, max_new_tokens {T}, "
                         f"temperature {temperature}: nothing can be sampled")
    prompt_ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    if not all(prompt_ids):
        raise ValueError(f"prompt {prompt_ids.index([])} has no tokens")
    ends = end_token_ids(model, tokenizer)
    return prompt_ids, ends, uniform_numbers(generator, len(prompts), group_size, T, model.device)


def padded_left(rows, device):
    """B lists of ids -> ids and mask (B, P), so that all of them end in the last column."""
    P = max(len(row) for row in rows)
    ids = [[0] * (P - len(row)) + row for row in rows]
    mask = [[0] * (P - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def end_token_ids(model, tokenizer):
    """Every end token in the generation config (it may name several), else the tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None or ends == [] else ends
    if ends is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return torch.tensor([ends] if isinstance(ends, int) else list(ends), device=model.device)


def uniform_numbers(generator, B, group_size, T, device):
    """The chance of all draws, (N, T) in [0, 1), drawn where the generator lives."""
    generators = generator if isinstance(generator, list) else [generator] * B
    numbers = torch.cat([torch.rand(group_size, T, dtype=torch.float64, generator=g,
                                    device=g and g.device) for g in generators])
    if device.type == "mps":                     # it has no float64; rounding may not make it 1
        numbers = numbers.float().clamp(max=1 - 2**-24)
    return numbers.to(device)


def cut_at_end(tokens, logprobs, ends):
    """(N, T) each -> N pairs of lists (ids, log-probs): a row as far as its first end token."""
    is_end = torch.isin(tokens, ends)
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, tokens.shape[1])
    return [(ids[:length], drawn[:length]) for ids, drawn, length
            in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist())]


def to_rollout(tokenizer, rows, ends, group_size):
    """N rows, each of pieces (ids, log-probs; None where others wrote them) -> Rollout."""
    pieces = [piece for row in rows for piece in row]
    ids = torch.tensor([token for ids, _ in pieces for token in ids])
    drawn = torch.tensor([logprob for _, drawn in pieces for logprob in drawn or ()])
    counts = torch.tensor([len(ids) for ids, _ in pieces])
    own = torch.tensor([drawn is not None for _, drawn in pieces]).repeat_interleave(counts)
    lengths = torch.tensor([sum(len(ids) for ids, _ in row) for row in rows])
    written = torch.arange(int(lengths.max())) < lengths[:, None]    # (N, S): all but the padding
    response = torch.zeros_like(written).masked_scatter(written, own)
    pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, int(ends[0]))
               if token is not None)
    input_ids = torch.full(written.shape, pad).masked_scatter(written, ids)
    labels = input_ids.where(response, IGNORE)
    logprobs = torch.zeros(written.shape).masked_scatter(response, drawn)
    answers = [[piece for piece in row if piece[1]] for row in rows]
    device = ends.device
    return Rollout(
        input_ids.to(device), labels.to(device),
        logprobs[:, 1:].contiguous().to(device),                     # entry t speaks of t + 1
        responses=["\n".join(texts_of(tokenizer, own, ends)) for own in answers],
        finished=torch.isin(torch.tensor([own[-1][0][-1] for own in answers], device=device), ends),
        group_ids=torch.arange(len(rows), device=device) // group_size)


def texts_of(tokenizer, answers, ends):
    """What answers (ids, log-probs) say, end tokens left out; other special tokens are seen."""
    ends = ends.tolist()
    texts = [ids[:-1] if ids[-1] in ends else ids for ids, _ in answers]
    return tokenizer.batch_decode(texts, skip_special_tokens=False)


# --------------------------------------------------------------------------------------------------
# Variants, called as `sample_groups` is: half of a group branches off its best; several turns.

def sample_around(model, tokenizer, prompts, group_size=8, max_new_tokens=256, temperature=1.0,
                  generator=None, *, rewards_of, best=1, cut=0.5):
    """Coarse, then fine: half of each group is drawn freely, the other half branches off its best.

    `rewards_of(prompts, responses)` gives the rewards of the first half, (B * group_size / 2,). The
    `best` of each group keep the first `cut` of their tokens, the second half goes on from there.
    All that the policy wrote is labelled; but the second half is not drawn from pi(. | prompt): its
    prefixes were chosen. ValueError: halves that `best` does not divide; as `sample_groups`.
    """
    half = group_size // 2
    if group_size % 2 or not 1 <= best <= half or half % best or not 0 <= cut < 1:
        raise ValueError(f"a group of {group_size} has no half for {best} prefixes cut at {cut}")
    prompt_ids, ends, chance = prepare(model, tokenizer, prompts, group_size, max_new_tokens,
                                       temperature, generator)
    coarse, fine = chance.unflatten(0, (len(prompts), 2, half)).unbind(dim=1)    # (B, G / 2, T)
    answers = write_answers(model, prompt_ids, coarse.flatten(0, 1), temperature, ends)
    texts = texts_of(tokenizer, answers, ends)
    ranked = rewards_of(prompts, texts).view(-1, half).argsort(dim=1, descending=True, stable=True)
    stems = []                                                       # B * best (ids, log-probs)
    for b, order in enumerate(ranked[:, :best].tolist()):
        for ids, drawn in (answers[b * half + place] for place in order):
            kept = int(len(ids) * cut)
            stems.append((ids[:kept], drawn[:kept]))
    starts = [prompt_ids[n // best] + ids for n, (ids, _) in enumerate(stems)]
    branches = write_answers(model, starts, fine.flatten(0, 1), temperature, ends)
    for n, branch in enumerate(branches):                            # stem and branch, one answer
        stem = stems[n * best // half]
        branches[n] = [(a + b)[:max_new_tokens] for a, b in zip(stem, branch)]
    rows = []
    for b, prompt in enumerate(prompt_ids):
        group = slice(b * half, (b + 1) * half)
        rows += [[(prompt, None), answer] for answer in answers[group] + branches[group]]
    return to_rollout(tokenizer, rows, ends, group_size)


@torch.no_grad()
def sample_conversations(model, tokenizer, prompts, group_size=8, max_new_tokens=256,
                         temperature=1.0, generator=None, *, reply, max_turns=4):
    """B prompts, each a conversation of up to `max_turns` answers, `group_size` times -> Rollout.

    After each answer but the last `reply(prompt, turns)` is the user's next message (a tool's
    result, a checker's remark, a second player's move), or None where the conversation is over;
    `turns` are the strings so far: answer, reply, ..., answer. Only the policy's tokens are
    labelled; `responses` joins its turns with line breaks; a turn has up to `max_new_tokens`. A
    conversation also ends where the model's positions leave no room for another answer.
    ValueError: a reply that fails or is no text; as `sample_groups`.
    """
    if max_turns < 1:
        raise ValueError(f"a conversation of {max_turns} turns")
    prompt_ids, ends, chance = prepare(model, tokenizer, prompts, group_size, max_new_tokens,
                                       temperature, generator)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    N = len(chance)
    rows = [[(prompt_ids[n // group_size], None)] for n in range(N)]
    turns = [[] for _ in range(N)]
    talking = list(range(N))                                         # rows whose turn comes now
    decode_n_tokens = fastest_form(model)
    cache, mask, logits = prefill(model, prompt_ids)
    for turn in range(1, max_turns + 1):
        kept = copy(cache)                       # decoding uses up its layers, not these tensors
        kept.layers = [copy(layer) for layer in cache.layers]
        answers = cut_at_end(*decode_n_tokens(model, cache, mask, logits, chance[talking],
                                              temperature, ends), ends)
        heard = []                                                   # places of the rows that go on
        for place, text in enumerate(texts_of(tokenizer, answers, ends)):
            n = talking[place]
            rows[n].append(answers[place])
            turns[n].append(text)
            if turn == max_turns:
                continue
            said = reply_to(reply, prompts[n // group_size], turns[n], n)
            if said is None:
                continue
            between = ids_between_turns(tokenizer, said, answers[place][0][-1], ends)
            length = sum(len(ids) for ids, _ in rows[n]) + len(between)
            if length + max_new_tokens <= limit:                     # room for another answer
                turns[n].append(said)
                rows[n].append((between, None))
                heard.append(place)
        if not heard:
            break
        once = len(talking) // len(mask)         # a prompt's cache served all rows of its group
        places = torch.tensor(heard, device=model.device) // once
        talking = [talking[place] for place in heard]
        cache, mask, logits = next_turn(model, kept, mask, places, [rows[n] for n in talking])
        chance = uniform_numbers(generator, len(prompts), group_size, max_new_tokens, model.device)
    return to_rollout(tokenizer, rows, ends, group_size)


def next_turn(model, cache, mask, places, rows):
    """`prefill` for rows that go on: only an answer and what follows it are run, (n, E) tokens.

    `places` (n,): where the row stands in cache and mask, which know it up to that answer. A window
    or a slope may count slots of the cache, gaps included, and a state has all of the past in it:
    such models run their rows from the start.
    """
    from transformers.cache_utils import DynamicLayer

    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    if not plain or not hasattr(model.base_model, "rotary_emb"):
        return prefill(model, [sum((ids for ids, _ in pieces), []) for pieces in rows])
    cache.batch_select_indices(places)
    ids, new = padded_left([pieces[-2][0] + pieces[-1][0] for pieces in rows], model.device)
    mask = torch.cat((mask[places], new), dim=1)                     # (n, P + E), with gaps
    positions = mask.cumsum(dim=1)[:, -ids.shape[1]:] - 1            # (n, E)
    out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                use_cache=True, logits_to_keep=1)
    # Keys have their rotation already and may move: all padding to the left, what all have is cut.
    order = mask.argsort(dim=1, stable=True)[:, -int(mask.sum(dim=1).max()):]
    for layer in cache.layers:
        layer.keys = layer.keys.take_along_dim(order[:, None, :, None], dim=2)
        layer.values = layer.values.take_along_dim(order[:, None, :, None], dim=2)
    return cache, mask.gather(1, order), out.logits[:, -1]


def reply_to(reply, prompt, turns, n):
    """The user's next message to row n, or None."""
    try:
        said = reply(prompt, list(turns))
    except (Exception, SystemExit) as error:     # sys.exit() is a failing reply, too
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"the reply to row {n} fails ({fault})") from error
    if not isinstance(said, str | None):
        kind = type(said).__name__
        raise ValueError(f"the reply to row {n} is of type {kind}, neither text nor None")
    return said


def ids_between_turns(tokenizer, said, last, ends):
    """What the chat template puts between an answer whose last id is `last` and the next answer."""
    mark = "ANSWER"                              # any answer: what follows it is the same for all
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark},
                {"role": "user", "content": said}]
    between = chat_prompt(tokenizer, {"messages": messages}, "").partition(mark)[2]
    ids = tokenizer(between, add_special_tokens=False).input_ids
    if not ids:
        raise ValueError("the chat template puts nothing between two answers")
    return ids[1:] if last in ends and ids[0] in ends else ids       # it ended already


# --------------------------------------------------------------------------------------------------
# One group from a model folder, or from a run's final/ with the settings that it was trained with

def recipe_of(folder):
    """What a model folder's recipe.json says about sampling -> {argument: value}."""
    path = Path(folder, "recipe.json")
    try:
        recipe = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: not an object of flags and values")
    kinds = {"system-prompt": str, "max-new-tokens": int, "temperature": (int, float)}
    for flag in kinds.keys() & recipe.keys():
        if not isinstance(recipe[flag], kinds[flag]):
            raise ValueError(f"{path}: {flag} is {recipe[flag]!r}")
    return {flag.replace("-", "_"): recipe[flag] for flag in kinds if flag in recipe}


def main():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description="Draw one group of answers.")
    parser.add_argument("question", nargs="?",
                        default="Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?")
    parser.add_argument("--model", default=str(Path(__file__).parent / "tests" / "tiny"),
                        help="a hub name or a folder; its recipe.json gives the next three")
    parser.add_argument("--system-prompt", default="")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(**recipe_of(parser.parse_args().model))
    args = parser.parse_args()                                       # the command line wins
    flag = f"--model {args.model}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, use_safetensors=True)
        flag = f"--device {args.device}"
        model = model.eval().to(args.device)
    except Exception as error:                   # foreign files can be wrong in any way
        raise ValueError(f"{flag}: cannot be used ({first_line(error)})") from None
    prompt = chat_prompt(tokenizer, {"question": args.question}, args.system_prompt)
    rollout = sample_groups(model, tokenizer, [prompt], args.group_size, args.max_new_tokens,
                            args.temperature, torch.Generator().manual_seed(args.seed))
    print(prompt)
    for n, response in enumerate(rollout.responses):
        length = int((rollout.labels[n] != IGNORE).sum())
        total = float(rollout.logprobs[n].sum())
        cut = "" if rollout.finished[n] else ", cut at the limit"
        print(f"\n[{n}] {length} tokens, log-prob {total:.2f}{cut}\n{response}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, RuntimeError) as error:             # also: out of memory
        print(f"sample.py: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
