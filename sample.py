"""[A] Group sampling: G answers to every prompt, drawn token by token from the policy itself.

    y_{j,i} ~ pi_old(. | x_j),   i = 1..G      one draw from the softmax per token, until the end token or the limit

Each prompt runs through the model once and its key/value cache is repeated G times: the G answers share the
prompt and part ways at their first token, which each row draws for itself. A row that has ended leaves the
batch. Prompts of different lengths stand side by side, padded on the left of the cache only.

Departures from the theory's code map:
- The ids that were drawn are kept, and their log-probabilities with them. The map decodes to text and
  tokenises again: other ids than those sampled, with the prompt among the labels.
- The draw is the plain softmax at `temperature`, and [D] scores at the same one. `generate` lets a
  checkpoint's own top-k and top-p in silently (and the map samples at 0.8 what it scores at 1.0).
- `responses` hold the answer alone: a prompt that says "put it in \\boxed{}" earns nothing.

    python sample.py --group-size 4 "Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?"
"""

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

IGNORE = -100                    # the label of a token that no loss speaks of

# cuDNN's attention builds a plan for every new shape (tens of milliseconds each), and is known to be
# wrong for masked bfloat16 (pytorch issues 191612, 193893). The other kernels are as fast here.
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class Rollout:
    """N = B * G rows `[prompt][response][padding]`; row i answers prompt i // G."""

    input_ids: torch.Tensor      # (N, S) long
    labels: torch.Tensor         # (N, S) long: input_ids on the response, its end token included; else -100
    logprobs: torch.Tensor       # (N, S-1) float32: entry t is log pi(input_ids[t+1] | before), as drawn
    responses: list              # N strings: the response alone, without its end token
    finished: torch.Tensor       # (N,) bool: False where max_new_tokens cut the answer
    group_ids: torch.Tensor      # (N,) long: i // G

    # What [D] computes on the rollout before the first update, (N, S-1) float32. None until then.
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    entropies: torch.Tensor | None = None


def sample_groups(model, tokenizer, prompts, group_size=8, max_new_tokens=256, temperature=1.0,
                  generator=None):
    """Draw `group_size` answers to each of the B `prompts` (chat template already applied) -> Rollout.

    `temperature=0` is greedy decoding; its log-probs are those of temperature 1. `generator` is one for all,
    or a list of one per prompt: then an answer depends on its prompt, the policy and its own numbers only.
    ValueError: nothing to sample, a prompt without tokens, no end token known, a model that `forms_of` refuses.
    """
    check_request(prompts, group_size, max_new_tokens, temperature)
    prompt_ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    ends = end_token_ids(model, tokenizer)
    chance = uniform_numbers(generator, len(prompts), group_size, max_new_tokens, model.device)  # (N, T)
    answers = write_answers(model, prompt_ids, chance, temperature, ends)
    asked = [(torch.tensor(ids, device=model.device), None) for ids in prompt_ids]
    rows = [[asked[n // group_size], answer] for n, answer in enumerate(answers)]
    return to_rollout(tokenizer, rows, ends, group_size)


@torch.no_grad()
def write_answers(model, prompt_ids, chance, temperature, ends):
    """B prompts and the chance of N * T draws, (N, T) in [0, 1) -> N pairs (token ids, their log-probs)."""
    forms = forms_of(model)
    decode_n_tokens = decode
    if forms["own decode step"] is None:
        decode_n_tokens = partial(decode_fast, graphs=forms.get("CUDA graphs", "CPU") is None)
    prefilled = prefill(model, prompt_ids)
    tokens, logprobs = decode_n_tokens(model, *prefilled, chance, temperature, ends)    # (N, T) each
    return cut_at_end(tokens, logprobs, ends)


def prefill(model, prompt_ids):
    """Every prompt once -> its keys and values, mask (B, P), logits of the next token (B, V)."""
    if not all(prompt_ids):
        raise ValueError(f"prompt {prompt_ids.index([])} has no tokens")
    P = max(len(prompt) for prompt in prompt_ids)
    padded = [[0] * (P - len(prompt)) + prompt for prompt in prompt_ids]
    mask = [[0] * (P - len(prompt)) + [1] * len(prompt) for prompt in prompt_ids]
    padded = torch.tensor(padded, device=model.device)                      # (B, P)
    mask = torch.tensor(mask, device=model.device)                          # (B, P)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    out = model(padded, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    return out.past_key_values, mask, out.logits[:, -1]


def decode(model, cache, mask, logits, chance, temperature, ends):
    """The plain loop: draw a token for each row, run the model on it, again -> tokens, logprobs (N, T)."""
    N, T = chance.shape
    G = N // len(mask)
    cache.batch_repeat_interleave(G)                                        # B prompts -> N rows
    mask, logits = mask.repeat_interleave(G, dim=0), logits.repeat_interleave(G, dim=0)
    tokens = torch.full((N, T), int(ends[0]), device=mask.device)
    logprobs = torch.zeros(N, T, device=mask.device)
    rows = torch.arange(N, device=mask.device)                              # those still being written
    for t in range(T):
        token, logprobs[rows, t] = draw(logits, temperature, chance[rows, t])
        tokens[rows, t] = token
        alive = ~torch.isin(token, ends)
        if t + 1 == T or not alive.any():
            break
        if not alive.all():                                                 # a row that has ended leaves the batch
            rows, mask, token = rows[alive], mask[alive], token[alive]
            cache.batch_select_indices(alive)
        mask = F.pad(mask, (0, 1), value=1)                                 # (n, P + t + 1)
        logits = model(token[:, None], attention_mask=mask, position_ids=mask.sum(dim=1, keepdim=True) - 1,
                       past_key_values=cache, use_cache=True).logits[:, -1]
    return tokens, logprobs


def draw(logits, temperature, u):
    """One token per row from softmax(logits / temperature), and its log-prob: (n, V) -> (n,), (n,) float32.

    The inverse of the cumulative distribution: a token whose running sum of probabilities is the first above
    u, (n,) in [0, 1). The sum is taken in u's float64: float32 stands still at words rarer than 6e-8.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)  # (n, V)
    if temperature == 0:
        token = logprobs.argmax(dim=-1, keepdim=True)
    else:
        cdf = logprobs.exp().to(u.dtype).cumsum(dim=-1)
        token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        token.clamp_(max=logits.shape[1] - 1)
    return token[:, 0], logprobs.gather(1, token)[:, 0]


# --------------------------------------------------------------------------------------------------
# The same draw, several times faster on 152k words: one exp and one sum over them, in float32.

def draw_fast(logits, temperature, u, block=128):
    """`draw` on two levels: u picks a block of words by its mass, then a word inside the block.

    Sums of 128 words lose none of them, and the few block masses are added up in float64.
    """
    if temperature == 0 or logits.shape[1] <= 1024:                         # too few words to gain anything
        return draw(logits, temperature, u)
    logits = logits.float() if temperature == 1 else logits.float() / temperature       # (n, V)
    peak = logits.amax(dim=-1, keepdim=True)
    p = (logits - peak).exp_()
    if p.shape[1] % block:
        p = F.pad(p, (0, -p.shape[1] % block))
    p = p.unflatten(1, (-1, block))                                         # (n, V / block, block)
    mass = p.sum(dim=-1).to(u.dtype)                                        # (n, V / block)
    cdf = mass.cumsum(dim=-1)
    total = cdf[:, -1:]
    u = u[:, None] * total
    b = torch.searchsorted(cdf, u, right=True).clamp_(max=cdf.shape[1] - 1)             # (n, 1)
    inner = p.take_along_dim(b[:, :, None], dim=1)[:, 0].to(u.dtype).cumsum(dim=-1)     # (n, block)
    rest = (u - (cdf - mass).gather(1, b)) / mass.gather(1, b) * inner[:, -1:]
    token = b * block + torch.searchsorted(inner, rest, right=True).clamp_(max=block - 1)
    token.clamp_(max=logits.shape[1] - 1)
    return token[:, 0], (logits.gather(1, token) - peak - total.log())[:, 0].float()


# --------------------------------------------------------------------------------------------------
# The same loop, several times faster. One decode step is written out for the family that Qwen2, Qwen3,
# Llama, Mistral and SmolLM share, with a cache in which every tensor keeps its place: on CUDA a step
# can then be captured once as a graph and replayed, instead of launching 500 small kernels per token.

def decode_fast(model, cache, mask, logits, chance, temperature, ends, graphs=False):
    """`decode` on the step below: the same tokens for the same chance, rounding apart."""
    (B, P), (N, T), device = mask.shape, chance.shape, mask.device
    decoder = decoder_for(model, N, P + T, graphs)
    n = decoder.rung(N)                                                     # N, or more: places left empty
    decoder.fill(cache, mask, N)
    decoder.token.fill_(int(ends[0]))                                       # an empty place has ended
    decoder.token[:N], decoder.logprob[:N] = draw_fast(
        logits.repeat_interleave(N // B, dim=0), temperature, chance[:, 0])
    chance = F.pad(chance, (0, 0, 0, n - N))                                # (n, T)
    tokens = torch.zeros(n, T, dtype=torch.long, device=device)
    logprobs = torch.zeros(n, T, device=device)
    rows = torch.arange(n, device=device)                                   # whose row stands in each place
    every = 1 if device.type == "cpu" else 16                               # asking makes a GPU wait
    for t in range(T):
        tokens[rows, t], logprobs[rows, t] = decoder.token[:n], decoder.logprob[:n]
        if t + 1 == T:
            break
        if t % every == 0:
            alive = ~torch.isin(tokens[rows, :t + 1], ends).any(dim=1)      # (n,)
            living = int(alive.sum())
            if living == 0:
                break
            if decoder.rung(living) < n:                                    # the living close ranks
                n = decoder.rung(living)
                free, late = close_up(alive, n)
                decoder.move(free, late)
                rows[free] = rows[late]
                rows = rows[:n]
        decoder.u[:n] = chance[rows, t + 1]
        decoder.run(model, n, temperature)
    return tokens[:N], logprobs[:N]


def close_up(alive, n):
    """alive (m,) bool -> free places among the first n, and the later living rows that move there, (k,) each."""
    late = alive[n:].nonzero()[:, 0] + n
    free = (~alive[:n]).nonzero()[:, 0][:len(late)]
    return free, late


class Decoder:
    """The decode step of the Llama family, and all that it reads and writes except the weights."""

    def __init__(self, model, N, capacity, graphs):
        refuse_relatives(model)
        attention, device, dtype = model.base_model.layers[0].self_attn, model.device, model.dtype
        self.D = attention.head_dim
        self.Hq, self.Hkv = (p.out_features // self.D for p in (attention.q_proj, attention.k_proj))
        self.N, self.capacity, self.graphs = N, capacity, {} if graphs else None
        self.flash = (device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
                      and self.D % 8 == 0 and torch.cuda.get_device_capability(device)[0] >= 8)

        def room():
            if self.flash:                       # it reads (tokens, heads, D): a token's heads side by side
                return torch.empty(N, capacity, self.Hkv, self.D, device=device, dtype=dtype).transpose(1, 2)
            return torch.empty(N, self.Hkv, capacity, self.D, device=device, dtype=dtype)

        self.keys = [room() for _ in model.base_model.layers]               # (N, Hkv, capacity, D) each
        self.values = [room() for _ in model.base_model.layers]
        self.bias = torch.zeros(N, 1, 1, capacity, device=device, dtype=dtype)
        every = torch.arange(capacity, device=device)
        cos, sin = model.base_model.rotary_emb(self.keys[0], every[None])   # (1, capacity, D)
        self.cos = cos[0, :, None]                                          # (capacity, 1, D)
        self.sin = torch.cat((-sin[0, :, None, :self.D // 2], sin[0, :, None, self.D // 2:]), dim=-1)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)         # where all rows write next
        self.token = torch.zeros(N, dtype=torch.long, device=device)        # drawn and not yet run
        self.position = torch.zeros(N, dtype=torch.long, device=device)     # of that token in its row
        self.logprob = torch.zeros(N, device=device)
        self.u = torch.zeros(N, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
        self.starts_q = torch.arange(N + 1, dtype=torch.int32, device=device)
        self.starts_k = self.starts_q * capacity                            # where each row's keys begin
        self.addresses = addresses(model)

    def fill(self, cache, mask, N):
        """Take over the keys and values of B prompts, (B, Hkv, P, D) per layer, each for N / B rows."""
        B, P = mask.shape
        mask = mask.repeat_interleave(N // B, dim=0)                        # (N, P)
        for keys, values, layer in zip(self.keys, self.values, cache.layers):
            for whole, prompt in ((keys, layer.keys), (values, layer.values)):
                whole[:N, :, :P].unflatten(0, (B, N // B)).copy_(prompt[:, None])
                if self.graphs is not None:      # what an earlier rollout left could be NaN: 0 * NaN is NaN
                    whole[:, :, P:] = 0
            layer.keys = layer.values = None
        self.bias.fill_(0.0 if self.graphs is None else -torch.inf)
        self.bias[:N, 0, 0, :P] = torch.where(mask.bool(), 0.0, -torch.inf)
        self.position.zero_()
        self.position[:N] = mask.sum(dim=1)
        if self.flash:
            self.starts_k[:-1] = self.starts_q[:-1] * self.capacity
            self.starts_k[:N] += P - self.position[:N]
        self.slot.fill_(P)
        self.length = P if self.graphs is None else self.capacity           # a graph's shapes are fixed

    def move(self, free, late):
        """Rows in the places `late` move to the places `free`."""
        for whole in (*self.keys, *self.values):
            whole = whole[:, :, :self.length]
            whole[free] = whole[late]
        for whole in (self.bias, self.token, self.position):
            whole[free] = whole[late]
        if self.flash:
            self.starts_k[free] = self.starts_k[late] + ((free - late) * self.capacity).int()

    def rung(self, n):
        """How many places to run for n rows: n itself, or the next of N, N/2, N/4, ... that has a graph."""
        if self.graphs is None:
            return n
        rung = self.N
        while n <= rung // 2:
            rung //= 2
        return rung

    def run(self, model, n, temperature):
        if self.graphs is None:
            self.length += 1
            return self.step(model, n, temperature)
        if (n, temperature) not in self.graphs:
            self.graphs[n, temperature] = self.capture(model, n, temperature)
        self.graphs[n, temperature].replay()

    def step(self, model, n, temperature):
        """Run the last token of the first n rows, draw the next. Reads and writes in place only."""
        position = self.position[:n]
        used = (position + 1).int() if self.flash else None                 # how many keys each row has
        if self.graphs is not None and not self.flash:
            self.bias[:n].index_fill_(3, self.slot, 0.0)
        cos, sin = self.cos[position], self.sin[position]                   # (n, 1, D)
        x = model.base_model.embed_tokens(self.token[:n])                   # (n, H)
        for layer, keys, values in zip(model.base_model.layers, self.keys, self.values):
            attention, mlp = layer.self_attn, layer.mlp
            h = rms_norm(x, layer.input_layernorm)
            q, k, v = attention.q_proj(h), attention.k_proj(h), attention.v_proj(h)
            if hasattr(attention, "q_norm"):
                q = rms_norm(q.view(n, -1, self.D), attention.q_norm).flatten(1)
                k = rms_norm(k.view(n, -1, self.D), attention.k_norm).flatten(1)
            if getattr(attention, "use_rope", True):
                qk = torch.cat((q, k), dim=1).view(n, -1, self.D)           # (n, Hq + Hkv, D)
                qk = torch.addcmul(qk * cos, qk.roll(self.D // 2, dims=-1), sin)
                q, k = qk.split((self.Hq, self.Hkv), dim=1)
            keys[:n].index_copy_(2, self.slot, k.view(n, self.Hkv, 1, self.D))
            values[:n].index_copy_(2, self.slot, v.view(n, self.Hkv, 1, self.D))
            o = self.attend(q.view(n, self.Hq, self.D), keys, values, used, attention.scaling)
            add_linear(x, o, attention.o_proj)
            h = rms_norm(x, layer.post_attention_layernorm)
            add_linear(x, mlp.act_fn(mlp.gate_proj(h)) * mlp.up_proj(h), mlp.down_proj)
        logits = model.get_output_embeddings()(rms_norm(x, model.base_model.norm))      # (n, V)
        self.token[:n], self.logprob[:n] = draw_fast(logits, temperature, self.u[:n])
        self.position[:n] += 1
        self.slot += 1

    def attend(self, q, keys, values, used, scale):
        """One query per row and head, (n, Hq, D), on the row's own keys -> (n, Hq * D)."""
        n = len(q)
        if self.flash:                           # splits over the keys, packs the heads that share them, no mask
            keys, values = (x.transpose(1, 2).view(-1, self.Hkv, self.D) for x in (keys, values))
            return torch.ops.aten._flash_attention_forward(
                q, keys, values, self.starts_q[:n + 1], self.starts_k[:n + 1], 1, self.capacity, 0.0, False,
                False, scale=scale, seqused_k=used)[0].reshape(n, -1)
        q = q.view(n, self.Hkv, -1, self.D)      # heads that share a key head become queries of it: no copy
        keys, values = keys[:n, :, :self.length], values[:n, :, :self.length]
        out = F.scaled_dot_product_attention(q, keys, values, self.bias[:n, :, :, :self.length], scale=scale)
        return out.reshape(n, -1)                # CUDA's kernel returns it transposed: a view would raise

    def capture(self, model, n, temperature):
        """`step` as a CUDA graph. It is run twice to warm up, on a stream of its own; state is put back after."""
        state = (self.token, self.position, self.slot, self.logprob)
        before = [x.clone() for x in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step(model, n, temperature)
                for x, old in zip(state, before):
                    x.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):                            # recorded, not run
            self.step(model, n, temperature)
        return graph


def rms_norm(x, norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, one kernel."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def add_linear(x, h, layer):
    """x += layer(h), the sum inside the matrix product."""
    x.addmm_(h, layer.weight.T)
    if layer.bias is not None:
        x += layer.bias


def refuse_relatives(model):
    """ValueError for what the step does not compute, and a few tokens would not show."""
    config, body = model.config.get_text_config(), model.base_model
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) and getattr(config, f"use_{name}", True):
            raise ValueError(name.replace("_", " "))
    if body.rotary_emb.rope_type in ("dynamic", "longrope"):
        raise ValueError(f"positions rescaled as the text grows ({body.rotary_emb.rope_type})")
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                       mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if type(linear) is not torch.nn.Linear:                         # an adapter, a quantised matrix
                raise ValueError(f"{type(linear).__name__} in place of Linear")


DECODERS = WeakKeyDictionary()   # model -> its Decoder with graphs, kept from rollout to rollout


def decoder_for(model, N, capacity, graphs):
    """The model's decoder with room for N rows of `capacity` tokens; one with graphs is kept."""
    kept = DECODERS.get(model)
    if graphs and kept and N <= kept.N and capacity <= kept.capacity and kept.addresses == addresses(model):
        return kept
    release(model)                               # its memory first
    if not graphs:
        return Decoder(model, N, capacity, graphs)
    DECODERS[model] = Decoder(model, N, -(-capacity // 256) * 256, graphs)      # longer prompts may follow
    return DECODERS[model]


def release(model):
    """Free the cache and the graphs kept for this model; the next rollout makes them again."""
    DECODERS.pop(model, None)


def addresses(model):
    """Where the weights lie: a graph reads them there. Updates in place keep them, a new tensor does not."""
    return [weight.data_ptr() for weight in model.parameters()]


# --------------------------------------------------------------------------------------------------
# The check, once per model: every form above against the model's plain forward pass, on a few tokens.

FORMS = WeakKeyDictionary()      # model -> (its device and dtype, what forms_of found)


@torch.no_grad()
def forms_of(model):
    """Which fast forms the model takes -> {name: None, or why it was refused in a few words}.

    "own decode step", and on CUDA "CUDA graphs". ValueError in one line: not even the plain loop gives the
    log-probs of the plain forward pass. Under FSDP the weights have to be gathered. Memory that runs out is
    nobody's fault here, and is raised.
    """
    where = (model.device, model.dtype)
    if model not in FORMS or FORMS[model][0] != where:
        FORMS[model] = where, try_forms(model)
    return FORMS[model][1]


def try_forms(model):
    kind = model.config.model_type
    never = torch.tensor([-1], device=model.device)
    try:
        tokens, _ = trial(model, decode, never)
        ends = tokens[0, 2:3]                                               # so row 0 ends early
        error = gap(model, *trial(model, decode, ends), ends)
    except Exception as failure:
        raise_if_memory(failure)
        raise ValueError(f"{kind}: cannot be sampled from with its cache ({one_line(failure)})") from failure
    if not error <= tolerance(model):
        raise ValueError(f"{kind}: decoding with its cache is off by {error:.2g} nats from its plain forward pass")
    forms = {"own decode step": partial(decode_fast, graphs=False)}
    if model.device.type == "cuda":
        forms["CUDA graphs"] = partial(decode_fast, graphs=True)
    return {name: refusal(model, name, form, ends) for name, form in forms.items()}


def refusal(model, name, form, ends):
    """None where the form gives the plain forward pass's log-probs, else why not."""
    if name == "CUDA graphs" and hasattr(model, "unshard"):
        return "FSDP's gathered weights may move"
    try:
        error = gap(model, *trial(model, form, ends), ends)
    except Exception as failure:
        raise_if_memory(failure)
        return one_line(failure)
    finally:
        release(model)                                                      # its few rows are not worth keeping
    return None if error <= tolerance(model) else f"off by {error:.2g} nats"


TRIAL = [[3, 1, 4, 1, 5], [2, 6, 5]]                                        # prompts; ids that any model has


def trial(model, form, ends, group_size=2, T=8):
    """Prefill and decode of 2 prompts by 2 rows in this form -> tokens, logprobs (4, T)."""
    chance = (torch.arange(1, 4 * T + 1, dtype=torch.float64) * 0.618034 % 1).view(4, T)
    dtype = torch.float32 if model.device.type == "mps" else torch.float64
    return form(model, *prefill(model, TRIAL), chance.to(model.device, dtype), 1.0, ends)


def gap(model, tokens, logprobs, ends):
    """Mean |log-prob - that of the plain forward pass on the whole row|, in nats, over all drawn tokens."""
    errors = []
    for n, (answer, drawn) in enumerate(cut_at_end(tokens, logprobs, ends)):
        prompt = torch.tensor(TRIAL[n * len(TRIAL) // len(tokens)], device=model.device)
        row = torch.cat((prompt, answer))[None]                             # (1, S)
        logits = model(row, use_cache=False).logits[0, len(prompt) - 1:-1].float()     # (length, V)
        plain = logits.log_softmax(dim=-1).gather(1, answer[:, None])[:, 0]
        errors.append((plain - drawn).abs())
    return float(torch.cat(errors).mean())


def tolerance(model):
    """Rounding alone gives 1e-6 in float32 and 0.02 in bfloat16; a wrong form is off by more than 0.1."""
    return 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1


def raise_if_memory(failure):
    if isinstance(failure, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(failure):
        raise failure


def one_line(failure):
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:100]


# --------------------------------------------------------------------------------------------------
# Ids in, rows out

def check_request(prompts, group_size, max_new_tokens, temperature):
    if not prompts or min(group_size, max_new_tokens) < 1 or not temperature >= 0:
        raise ValueError(f"{len(prompts)} prompts, group_size {group_size}, max_new_tokens {max_new_tokens}, "
                         f"temperature {temperature}: nothing can be sampled")


def end_token_ids(model, tokenizer):
    """Every end token of the model's generation config (it may name several), else the tokenizer's own."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None or ends == [] else ends
    if ends is None:
        raise ValueError("neither the model's generation config nor the tokenizer names an end token")
    return torch.tensor([ends] if isinstance(ends, int) else list(ends), device=model.device)


def uniform_numbers(generator, B, group_size, T, device):
    """The chance of all draws, (N, T) in [0, 1): float64, drawn where the generator lives. MPS knows float32 only."""
    generators = generator if isinstance(generator, list) else [generator] * B
    numbers = torch.cat([torch.rand(group_size, T, dtype=torch.float64, generator=g, device=g and g.device)
                         for g in generators])
    if device.type == "mps":
        return numbers.float().clamp(max=1 - 2**-24).to(device)             # rounding may not make it 1
    return numbers.to(device)


def cut_at_end(tokens, logprobs, ends):
    """(N, T) each -> N pairs (token ids, log-probs), (length,) each: up to a row's first end token, with it."""
    is_end = torch.isin(tokens, ends)
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, tokens.shape[1]).tolist()
    return [(ids[:length], drawn[:length]) for ids, drawn, length in zip(tokens, logprobs, lengths)]


def to_rollout(tokenizer, rows, ends, group_size):
    """N rows, each a list of pieces (token ids, log-probs; None for what the policy did not write) -> Rollout."""
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = int(ends[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    input_ids, labels, logprobs, answers = [], [], [], []
    for pieces in rows:
        input_ids.append(torch.cat([ids for ids, _ in pieces]))
        labels.append(torch.cat([torch.full_like(ids, IGNORE) if drawn is None else ids for ids, drawn in pieces]))
        logprobs.append(torch.cat([torch.zeros(len(ids), device=ids.device) if drawn is None else drawn
                                   for ids, drawn in pieces])[1:])          # entry t speaks of token t + 1
        answers.append(torch.cat([ids for ids, drawn in pieces if drawn is not None]).tolist())
    pad_to_longest = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ends = ends.tolist()
    finished = [answer[-1] in ends for answer in answers]
    texts = [answer[:-1] if done else answer for answer, done in zip(answers, finished)]
    device = input_ids[0].device
    return Rollout(
        pad_to_longest(input_ids, padding_value=pad), pad_to_longest(labels, padding_value=IGNORE),
        pad_to_longest(logprobs), tokenizer.batch_decode(texts, skip_special_tokens=False),
        torch.tensor(finished, device=device), torch.arange(len(rows), device=device) // group_size)


# --------------------------------------------------------------------------------------------------
# One group from a model folder, or from a run's final/ with the settings it was trained with

def recipe_of(folder):
    """The settings in a model folder's recipe.json that concern sampling; ValueError for other types."""
    path = Path(folder, "recipe.json")
    recipe = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = {}
    for flag, kind in (("system-prompt", str), ("max-new-tokens", int), ("temperature", (int, float))):
        if flag in recipe:
            if not isinstance(recipe[flag], kind):
                raise ValueError(f"{path}: {flag} is {recipe[flag]!r}")
            found[flag.replace("-", "_")] = recipe[flag]
    return found


def main():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
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
    args = parser.parse_args()                                              # the command line wins
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, use_safetensors=True).eval().to(args.device)
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    prompt = tokenizer.apply_chat_template([*system, {"role": "user", "content": args.question}],
                                           tokenize=False, add_generation_prompt=True)
    rollout = sample_groups(model, tokenizer, [prompt], args.group_size, args.max_new_tokens,
                            args.temperature, torch.Generator().manual_seed(args.seed))
    print(prompt)
    for n, response in enumerate(rollout.responses):
        length, total = int((rollout.labels[n] != IGNORE).sum()), float(rollout.logprobs[n].sum())
        cut = "" if rollout.finished[n] else ", cut at the limit"
        print(f"\n[{n}] {length} tokens, log-prob {total:.2f}{cut}\n{response}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        print(f"sample.py: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
