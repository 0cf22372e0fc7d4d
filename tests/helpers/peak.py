"""What a rank holds while a model is sharded; rank 0 has it whole before that.

Run by tests/test_ranks.py on several ranks.
"""
import sys

# The classes of the model are imported before anything is measured.
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: F401

import train

settings = train.parse([f"--model={sys.argv[1]}", "--device=cpu", "--dtype=float32"])
train.join_ranks()
whole = AutoModelForCausalLM.from_pretrained(sys.argv[1]) if train.rank() == 0 else None
for weight in whole.parameters() if whole else ():
    weight.sum()                                          # read from the file that is mapped
if whole:
    train.logprob.forms_of(whole)                         # as train.load does, before it shards


def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1e3 for line in file if line.startswith("VmHWM"))


with open("/proc/self/clear_refs", "w") as file:
    file.write("5")                                       # forget the peak so far
before = peak()
train.shard(whole, settings)
grew = peak() - before
with open(f"{sys.argv[2]}/grew_{train.rank()}", "w") as file:   # ranks' lines can mix in a pipe
    file.write(f"{grew:.0f}")
train.dist.barrier()
