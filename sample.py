"""[A] Group sampling: G answers to every prompt, drawn token by token from the policy itself.

    y_{j,i} ~ pi_old(. | x_j),   i = 1..G          one softmax draw a token, until the end token or the limit

Each prompt runs through the model once and its key/value cache is repeated G times: the G answers share the
prompt, and part ways at their first token, which each row draws for itself. A row that has ended leaves the
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
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

IGNORE = -100                                            # the label of a token that no loss speaks of


@dataclass
class Rollout:
    """N = B * G rows `[prompt][response][padding]`; row i answers prompt i // G."""

    input_ids: torch.Tensor      # (N, S) long
    labels: torch.Tensor         # (N, S) long: input_ids on the response, its end token included; else -100
    logprobs: torch.Tensor       # (N, S-1) float32: entry t is log pi(input_ids[t+1] | before), as drawn
    responses: list              # N strings: the response alone, special tokens stripped
    finished: torch.Tensor       # (N,) bool: False where max_new_tokens cut the answer
    group_ids: torch.Tensor      # (N,) long: i // G
    old_logprobs: torch.Tensor = None
    ref_logprobs: torch.Tensor = None
    entropies: torch.Tensor = None


def forms_of(model):
    return {}


@torch.no_grad()
def sample_groups(model, tokenizer, prompts, group_size=8, max_new_tokens=256, temperature=1.0,
                  generator=None):
    """Draw `group_size` answers to each of the B `prompts` (chat template already applied) -> Rollout.

    `temperature=0` is greedy decoding; its log-probs are those of temperature 1. `generator` is one for all, or
    a list of one a prompt: then an answer depends on nothing but its prompt, the policy and its own numbers.
    ValueError: nothing to sample, a prompt without tokens, a model and tokenizer without any end token.
    """
    if not prompts or min(group_size, max_new_tokens) < 1 or temperature < 0:
        raise ValueError(f"{len(prompts)} prompts, group_size {group_size}, max_new_tokens {max_new_tokens}, "
                         f"temperature {temperature}: nothing can be sampled")
    prompt_ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    ends = torch.tensor(end_token_ids(model, tokenizer), device=model.device)
    chance = uniform_numbers(generator, len(prompts), group_size, max_new_tokens, model.device)      # (N, T)
    cache, mask, logits = prefill(model, prompt_ids, group_size)

    N = len(logits)
    tokens = torch.full((N, max_new_tokens), int(ends[0]), device=model.device)
    logprobs = torch.zeros(N, max_new_tokens, device=model.device)
    decode = decode_graphs if model.device.type == "cuda" and can_decode_static(model, cache) else decode_plain
    decode(model, cache, mask, logits, chance, temperature, ends, tokens, logprobs)
    return to_rollout(tokenizer, prompt_ids, group_size, tokens, logprobs, ends)


def decode_plain(model, cache, mask, logits, chance, temperature, ends, tokens, logprobs):
    """Draw, write, run the drawn tokens, again: fills tokens and logprobs (N, T)."""
    make_room(cache)
    rows = torch.arange(len(tokens), device=tokens.device)                     # the rows still being written
    every = 16 if tokens.is_cuda else 1                                        # asking who has ended makes a GPU wait
    for t in range(tokens.shape[1]):
        drawn, logprobs[rows, t] = draw_fast(logits, temperature, chance[rows, t])     # as `draw` does, (n,)
        tokens[rows, t] = drawn
        if t + 1 == tokens.shape[1]:
            break
        if (t + 1) % every == 0:
            alive = close_up(~torch.isin(tokens[rows, t + 1 - every:t + 1], ends).any(dim=1))
            if len(alive) == 0:
                break
            if len(alive) < len(rows):                                         # finished rows leave the batch
                rows, mask, drawn = rows[alive], mask[alive], drawn[alive]
                cache.batch_select_indices(alive)
        mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)           # (n, P+t+1)
        logits = model(drawn[:, None], attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1,
                       past_key_values=cache, use_cache=True).logits[:, -1]


def close_up(alive):
    """Indices of the rows that live on, (n,) bool -> (m,): the last of them take the places of those that ended."""
    kept = alive.nonzero()[:, 0]
    order = torch.arange(len(kept), device=alive.device)
    order[~alive[:len(kept)]] = kept[kept >= len(kept)]
    return order


def prefill(model, prompt_ids, group_size):
    """Every prompt once, then G copies of its cache -> cache, mask (N, P), logits of the next token (N, V)."""
    if not all(prompt_ids):
        raise ValueError(f"prompt {prompt_ids.index([])} has no tokens")
    P = max(map(len, prompt_ids))
    ids = torch.tensor([[0] * (P - len(p)) + p for p in prompt_ids], device=model.device)    # (B, P)
    mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompt_ids], device=model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    out.past_key_values.batch_repeat_interleave(group_size)
    repeat = torch.arange(len(prompt_ids), device=model.device).repeat_interleave(group_size)     # (N,)
    return out.past_key_values, mask[repeat], out.logits[repeat, -1]


def draw(logits, temperature=1.0, generator=None):
    """One token a row from softmax(logits / temperature), and its log-prob: (n, V) -> (n,), (n,) float32."""
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        token = logprobs.argmax(dim=-1)
    else:
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
    return token, logprobs.gather(1, token[:, None])[:, 0]


# ---------------------------------------------------------------------------------------------------------
# The same draw, ten times faster on 152k words: one exp and one sum instead of a softmax, a log and a race

def draw_fast(logits, temperature, u, block=128):
    """Inverse CDF on two levels: u (n,) in [0, 1) picks a block of words by its mass, then a word inside it.

    A float32 running sum over the whole vocabulary stands still at words below 6e-8, and would never draw
    them. Sums of 128 words do not, and the few block masses are added up in float64.
    """
    if temperature == 0:
        return draw(logits, 0)
    logits = logits.float() if temperature == 1 else logits.float() / temperature        # (n, V)
    peak = logits.amax(dim=-1, keepdim=True)
    p = (logits - peak).exp_()
    if p.shape[1] % block:
        p = torch.nn.functional.pad(p, (0, -p.shape[1] % block))
    p = p.unflatten(1, (-1, block))                                            # (n, V / block, block)
    mass = p.sum(dim=-1).to(u.dtype)                                           # (n, V / block)
    cdf = mass.cumsum(dim=-1)
    total = cdf[:, -1:]
    u = u[:, None] * total
    b = torch.searchsorted(cdf, u, right=True).clamp_(max=cdf.shape[1] - 1)    # (n, 1), the first cdf above u
    inner = p.take_along_dim(b[:, :, None], dim=1)[:, 0].to(u.dtype).cumsum(dim=-1)      # (n, block)
    rest = (u - (cdf - mass).gather(1, b)) / mass.gather(1, b) * inner[:, -1:]
    token = b * block + torch.searchsorted(inner, rest, right=True).clamp_(max=block - 1)
    token.clamp_(max=logits.shape[1] - 1)
    return token[:, 0], (logits.gather(1, token) - peak - total.log())[:, 0].float()


def uniform_numbers(generator, B, group_size, T, device):
    """The chance of all draws, (N, T): float64, drawn where the generator lives. MPS knows float32 only."""
    generators = generator if isinstance(generator, list) else [generator] * B
    numbers = torch.cat([torch.rand(group_size, T, dtype=torch.float64, generator=g, device=g and g.device)
                         for g in generators])
    return numbers.to(device, torch.float32 if device.type == "mps" else torch.float64)


# ---------------------------------------------------------------------------------------------------------
# The same cache with room for the tokens to come: transformers' own copies all its keys and values at every token

class RoomyLayer(DynamicLayer):
    """A layer of the cache that copies what it has once in 64 tokens."""

    def update(self, key, value, *_, **__):                                    # (n, Hkv, 1, D)
        start, end = self.keys.shape[2], self.keys.shape[2] + key.shape[2]
        if self.room is None or end > self.room[0].shape[2]:
            self.room = [torch.cat((x, x.new_empty(*x.shape[:2], 64, x.shape[3])), dim=2)
                         for x in (self.keys, self.values)]
        for x, new in zip(self.room, (key, value)):
            x[:len(new), :, start:end] = new
        self.keys, self.values = (x[:len(key), :, :end] for x in self.room)
        return self.keys, self.values

    def batch_select_indices(self, rows):
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for x in (self.keys, self.values):
            x[moved] = x[rows[moved]]                                          # few rows are copied, see close_up
        self.keys, self.values = self.keys[:len(rows)], self.values[:len(rows)]


def make_room(cache):
    for layer in cache.layers:
        if type(layer) is DynamicLayer:                                        # a sliding window throws away as it goes
            layer.__class__, layer.room = RoomyLayer, None


# ---------------------------------------------------------------------------------------------------------
# The same loop on CUDA, where launching a thousand small kernels a token costs more than running them: every
# tensor keeps its place, so that a step can be captured once as a CUDA graph and replayed. Written for a GPU and
# never run on one: its steps are tested on the CPU, uncaptured, against the plain loop; its speed is not measured.

class StaticCache:
    """Keys and values (N, Hkv, capacity, D) a layer, written at one slot for all rows: prompts end together."""

    def __init__(self, cache, capacity):
        def roomy(x):                                                          # (N, Hkv, P, D)
            return torch.cat((x, x.new_zeros(*x.shape[:2], capacity - x.shape[2], x.shape[3])), dim=2)
        self.slot = torch.tensor([cache.get_seq_length()], device=cache.layers[0].keys.device)
        self.layers = []
        for layer in cache.layers:
            self.layers.append((roomy(layer.keys), roomy(layer.values)))
            layer.keys = layer.values = None                                   # one layer's copy at a time
        self.n, self.length = len(self.layers[0][0]), capacity

    def update(self, key, value, layer, *_, **__):
        for whole, new in zip(self.layers[layer], (key, value)):
            whole[:self.n].index_copy_(2, self.slot, new)
        return tuple(whole[:self.n, :, :self.length] for whole in self.layers[layer])

    def get_seq_length(self, *_):
        return 0                                                               # positions and masks are given

    def keep(self, alive):
        for layer in self.layers:
            for whole in layer:
                whole[:len(alive)] = whole[alive]
        self.n = len(alive)


def decode_graphs(model, cache, mask, logits, chance, temperature, ends, tokens, logprobs, check_every=16, bucket=512):
    """decode_plain in buckets: n rows (halved when half of them have ended) by cache length (512, 1024, ...).

    Every 16th token the host asks who has ended, and waits for the answer; till then ended rows draw on, and what
    they draw is cut off. Graphs share one memory pool and are gone when this returns.
    """
    (N, P), T, device = mask.shape, tokens.shape[1], mask.device
    cache = StaticCache(cache, P + T)
    seen = torch.zeros(N, 1, 1, P + T, dtype=torch.bool, device=device)
    seen[:, 0, 0, :P] = mask.bool()
    position, drawn, u = mask.sum(dim=1, keepdim=True) - 1, torch.zeros_like(mask[:, :1]), chance[:, 0].clone()
    logprob = torch.zeros(N, device=device)

    def choose(logits, n):
        token, logprob[:n] = draw_fast(logits, temperature, u[:n])
        drawn[:n, 0] = token

    def step():                                                                # reads and writes in place only
        n = cache.n
        seen[:n].index_fill_(3, cache.slot, True)
        position[:n] += 1
        choose(model(drawn[:n], attention_mask=seen[:n, :, :, :cache.length], position_ids=position[:n],
                     past_key_values=cache, use_cache=True).logits[:, -1], n)
        cache.slot += 1

    attention = model.config._attn_implementation
    model.set_attn_implementation("decode")
    try:
        choose(logits, N)
        rows, run, graphs, pool = torch.arange(N, device=device), step, {}, None
        for t in range(T):
            tokens[rows, t], logprobs[rows, t] = drawn[:cache.n, 0], logprob[:cache.n]
            if t + 1 == T:
                break
            if t % check_every == 0:
                alive = (~torch.isin(tokens[rows, :t + 1], ends).any(dim=1)).nonzero()[:, 0]
                if len(alive) == 0:
                    break
                if 2 * len(alive) <= cache.n:
                    for state in (seen, position, drawn):
                        state[:len(alive)] = state[alive]
                    rows = rows[alive]
                    cache.keep(alive)
            cache.length = min(-(-(P + t + 1) // bucket) * bucket, P + T)
            u[:cache.n] = chance[rows, t + 1]
            if device.type == "cuda":
                if (shape := (cache.n, cache.length)) not in graphs:
                    graphs[shape] = capture(step, (seen, position, drawn, logprob, cache.slot), pool)
                    pool = graphs[shape].pool()
                run = graphs[shape].replay
            run()
    finally:
        model.set_attn_implementation(attention)


def capture(step, state, pool):
    """`step` as a CUDA graph. It is run twice to warm up, on a stream of its own; `state` is put back after."""
    before = [x.clone() for x in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
            for x, old in zip(state, before):
                x.copy_(old)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):                                   # recorded, not run
        step()
    return graph


def decode_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """One query a row, (N, Hq, 1, D): query heads that share a key head become queries of it; no key is copied."""
    N, Hq, _, D = query.shape
    packed = query.view(N, key.shape[1], Hq // key.shape[1], D)                # (N, Hkv, g, D)
    out = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attention_mask, scale=scaling)
    return out.view(N, 1, Hq, D), None


AttentionInterface.register("decode", decode_attention)


def can_decode_static(model, cache):
    """Plain full attention in every layer; no soft cap on its scores, no experts, no FSDP hooks."""
    config = model.config.get_text_config()
    special = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "num_experts", "num_local_experts")
    if hasattr(model, "unshard") or any(getattr(config, name, None) for name in special):
        return False
    return all(hasattr(layer, "keys") and layer.keys.shape == layer.values.shape for layer in cache.layers)


# ---------------------------------------------------------------------------------------------------------
# Ids in, rows out

def end_token_ids(model, tokenizer):
    """Every end token of the model's generation config (it may name several), else the tokenizer's own."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    if ends is None:
        raise ValueError("neither the model's generation config nor the tokenizer names an end token")
    return [ends] if isinstance(ends, int) else list(ends)


def to_rollout(tokenizer, prompt_ids, group_size, tokens, logprobs, ends):
    """tokens, logprobs (N, T), anything after a row's first end token ignored -> Rollout."""
    N, T = tokens.shape
    is_end = torch.isin(tokens, ends)
    finished = is_end.any(dim=1)
    lengths = torch.where(finished, is_end.int().argmax(dim=1) + 1, T).tolist()      # the end token counts
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    S = max(len(prompt_ids[n // group_size]) + lengths[n] for n in range(N))
    input_ids = tokens.new_full((N, S), int(ends[0]) if pad is None else pad)
    labels, out_logprobs = tokens.new_full((N, S), IGNORE), logprobs.new_zeros(N, S - 1)
    for n, length in enumerate(lengths):
        prompt = prompt_ids[n // group_size]
        a, b = len(prompt), len(prompt) + length
        input_ids[n, :a] = tokens.new_tensor(prompt)
        input_ids[n, a:b] = labels[n, a:b] = tokens[n, :length]
        out_logprobs[n, a - 1:b - 1] = logprobs[n, :length]      # entry t speaks of token t + 1
    answers = [row[:length] for row, length in zip(tokens.tolist(), lengths)]
    return Rollout(input_ids, labels, out_logprobs, tokenizer.batch_decode(answers, skip_special_tokens=True),
                   finished, torch.arange(N, device=tokens.device) // group_size)


def main():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    parser = argparse.ArgumentParser(description="Draw one group of answers.")
    parser.add_argument("question", nargs="?",
                        default="Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?")
    parser.add_argument("--model", default=str(Path(__file__).parent / "tests" / "tiny"))
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, use_safetensors=True).eval()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": args.question}],
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
