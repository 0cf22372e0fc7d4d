"""What the tests share: the stage files on the path, one thread, no network, and the models."""
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=1,
             pad_token_id=0)
ARCHITECTURES = {  # what each family adds to that; the sliding windows are smaller than the tests' rows
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False, head_dim=8),
    "llama": dict(tie_word_embeddings=False),
    "mistral": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8),
    "gemma2": dict(tie_word_embeddings=False, head_dim=8, sliding_window=8, query_pre_attn_scalar=8,
                   final_logit_softcapping=4.0),
    "gpt2": dict(tie_word_embeddings=True),
    "granite": dict(tie_word_embeddings=False, logits_scaling=2.0),
    "cohere": dict(tie_word_embeddings=True, logit_scale=0.25),
}


def small_model(architecture, std=0.3, **changes):
    """Two random layers, with weights large enough for each of them to shape the answers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**SMALL, **ARCHITECTURES.get(architecture, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=std)
    return model


@pytest.fixture(scope="session", params=ARCHITECTURES)
def random_model(request):
    """A `small_model` of each family in turn."""
    return small_model(request.param)


@pytest.fixture(scope="session")
def tiny():
    """The policy of tests/tiny: (model, tokenizer)."""
    folder = Path(__file__).parent / "tiny"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
