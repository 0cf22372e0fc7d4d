"""Small models and tokenizers, rows of tokens, and [D] by the formula."""
import functools

import torch
from checks import seeded
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import sample

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             bos_token_id=None, eos_token_id=1, pad_token_id=0)

# What each family adds to that; the sliding windows are smaller than the tests' rows.
ARCHITECTURES = {
    "qwen2": dict(tie_word_embeddings=True), "qwen3": dict(head_dim=8), "llama": {}, "gpt2": {},
    "mistral": dict(head_dim=8, sliding_window=8), "granite": dict(logits_scaling=2.0),
    "gemma2": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8,
                   query_pre_attn_scalar=8, final_logit_softcapping=4.0),
    "cohere": dict(logit_scale=0.25)}


def small_model(architecture, std=0.3, kind=AutoModelForCausalLM, fast=True, dropout=None,
                **changes):
    """Two random layers, with weights large enough for each of them to shape the answers."""
    options = {**SHAPE, **ARCHITECTURES.get(architecture, {}), **changes}
    config = AutoConfig.for_model(architecture, **options)
    for part in (config, config.get_text_config()):
        for key, value in vars(part).items():
            if dropout is not None and isinstance(value, float) and "drop" in key:
                setattr(part, key, dropout)
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=std)
    if fast:
        sample.make_fast(model)
    return model


opened = functools.cache(sample.open_policy)


def make_tokenizer(**special):
    """A word a token, w3 .. w63; without being told not to, it puts <start> in front."""
    words = ["<pad>", "<end>", "<start>", *(f"w{i}" for i in range(3, SHAPE["vocab_size"]))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start = [("<start>", 2)]
    backend.post_processor = processors.TemplateProcessing("<start> $A", special_tokens=start)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<start>",
                                   clean_up_tokenization_spaces=False, **special)


def answer_rows(sizes, seed=0, width=20, words=SHAPE["vocab_size"]):
    """Rows of such (prompt, answer) lengths -> ids, labels (N, S), weights (N, S-1)."""
    generator = seeded(seed)
    input_ids = torch.randint(2, words, (len(sizes), width), generator=generator)
    labels = torch.full_like(input_ids, -100)
    first = {}                                            # prompts of one length are the same
    for n, (prompt, answer) in enumerate(sizes):
        input_ids[n, :prompt] = input_ids[first.setdefault(prompt, n), :prompt]
        labels[n, prompt:prompt + answer] = input_ids[n, prompt:prompt + answer]
        input_ids[n, prompt + answer:] = SHAPE["pad_token_id"]
    return input_ids, labels, torch.randn(len(sizes), width - 1, generator=generator)


def logprobs_on_full_logits(model, rollout, temperature):
    """The formula in float64: log-probs of the next token and entropies, (N, S-1) each."""
    logits = model(rollout.input_ids).logits[:, :-1].double() / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, rollout.input_ids[:, 1:, None])[..., 0], entropy
