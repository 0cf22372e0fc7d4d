"""Small tokenizers with the marks and templates of known families, and a real one."""
import functools
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

QWEN = Path(__file__).parents[3] / "shared" / "models" / "qwen2.5-tokenizer"  # beside the checkout

EACH = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}"
# name: the special tokens, the end token first; tokens that are only added; marks in plain text;
# the template, shortened
FAMILIES = {
    "llama 3": (
        "<|eot_id|> <|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> "
        "<|python_tag|>", "", "",
        f"<|begin_of_text|>{EACH}<|start_header_id|>{{{{ m.role }}}}<|end_header_id|>\n\n"
        f"{{{{ m.content | trim }}}}<|eot_id|>{END}<|start_header_id|>assistant<|end_header_id|>"
        "\n\n{% endif %}"),
    "gemma": (
        "<end_of_turn> <bos> <eos> <start_of_turn>", "<b> </b> <table>", "",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        f"<bos>{EACH}<start_of_turn>{{{{ 'model' if m.role == 'assistant' else m.role }}}}\n"
        f"{{{{ m.content | trim }}}}<end_of_turn>\n{END}<start_of_turn>model\n{{% endif %}}"),
    "phi": (
        "<|end|> <|endoftext|> <|user|> <|assistant|> <|system|>", "", "",
        f"{EACH}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}<|end|>\n{END}<|assistant|>\n"
        "{% endif %}"),
    "mistral": (
        "</s> <s> <unk>", "", "[INST] [/INST]",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        f"<s>{EACH}{{% if m.role == 'user' %}}[INST] {{{{ m.content }}}}[/INST]"
        f"{{% elif m.role == 'assistant' %}} {{{{ m.content }}}}</s>{{% endif %}}{END}"
        "{% endif %}"),
    "llama 2": (
        "</s> <s> <unk>", "", "[INST] [/INST] <<SYS>> <</SYS>>",
        f"{EACH}{{% if m.role == 'system' %}}<s>[INST] <<SYS>>\n{{{{ m.content }}}}\n<</SYS>>\n\n"
        "{% elif m.role == 'user' %}{% if messages[0].role == 'user' or not loop.index0 == 1 %}"
        "<s>[INST] {% endif %}{{ m.content | trim }} [/INST]"
        f"{{% else %}} {{{{ m.content | trim }}}} </s>{{% endif %}}{END}{{% endif %}}"),
    "deepseek": (
        "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜> <think> </think>", "",
        f"<｜begin▁of▁sentence｜>{EACH}{{% if m.role == 'user' %}}<｜User｜>{{{{ m.content }}}}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
        f"<｜end▁of▁sentence｜>{{% else %}}{{{{ m.content }}}}{{% endif %}}{END}"
        "<｜Assistant｜><think>\n{% endif %}"),
    "qwen 3": (
        "<|im_end|> <|im_start|> <|endoftext|>", "<think> </think> <tool_call> </tool_call>", "",
        f"{EACH}<|im_start|>{{{{ m.role }}}}\n{{% if m.reasoning_content %}}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
        "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call | tojson }}\n</tool_call>"
        f"{{% endfor %}}<|im_end|>\n{END}<|im_start|>assistant\n{{% endif %}}"),
    "zephyr": (
        "</s> <s> <unk>", "", "<|system|> <|user|> <|assistant|>",
        f"{EACH}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}</s>\n{END}<|assistant|>\n{{% endif %}}"),
}


@functools.cache
def qwen():
    return AutoTokenizer.from_pretrained(QWEN) if QWEN.is_dir() else pytest.skip("not there")


def family(name):
    """Bytes for words, the family's own tokens and template; "qwen" is Qwen2.5's as it is."""
    if name == "qwen":
        return qwen()
    special, added, plain, template = FAMILIES[name]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special.split())
    backend.add_tokens([AddedToken(word, normalized=False) for word in added.split()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special.split()[0],
                                        chat_template=template, clean_up_tokenization_spaces=False)
    tokenizer.plain = plain.split()
    return tokenizer
