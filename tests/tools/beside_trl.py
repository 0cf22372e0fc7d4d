"""An hour of TRL's GRPOTrainer with peft, for a run of ours: the same model, problems and limits.

    pip install trl peft  # into an environment that has this project's packages
    python tests/tools/beside_trl.py RUN/config.json --output runs/trl --minutes 65 --steps 8
    python tests/real/real_qwen.py --measure runs/trl

train.py's flags come from the config.json of RUN (or follow here, as they do there): the problems
in train.py's order, the limit of an answer, LoRA's rank and alpha, clip, rate, its fall to 0 at
--steps, and the rule. TRL begins without a warm-up, because its first step of one moves nothing.
The weights have the run's dtype; peft makes its factors float32. All answers of a step are sampled
at once and trained on in micro-batches of --rows. There are no evaluations, logs or checkpoints,
and the clock starts when training does. No step begins that would end after --minutes.

--output holds config.json, metrics.jsonl and final/ then, as a run of train.py does.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train  # noqa: E402
from reward import is_right, load_problems, rule_reward, truths_of  # noqa: E402


def train_by_trl(args, flags):
    """GRPOTrainer with the settings of args.config -> the folder args.output."""
    from trl import GRPOTrainer

    s = train.parse(["--config", str(args.config), "--steps", str(args.steps), *flags])
    model = AutoModelForCausalLM.from_pretrained(s.model, dtype=getattr(torch, s.dtype))
    tokenizer = AutoTokenizer.from_pretrained(s.model)
    args.output.mkdir(parents=True)
    shutil.copy(args.config, args.output / "config.json")
    found = {}  # of the step that is under way

    def reward(completions, truth, **_):
        rewards = torch.tensor([rule_reward(*pair) for pair in zip(completions, truth)])
        found.update(reward_mean=rewards.mean().item(),
                     accuracy=is_right(rewards).float().mean().item())
        return rewards.tolist()

    trainer = GRPOTrainer(
        model, reward, grpo_config(args, s), processing_class=tokenizer, peft_config=lora_config(s),
        train_dataset=rows_of(s, tokenizer), callbacks=[clock(args, found)])
    trainer.train()
    final = args.output / "final"
    trainer.model.merge_and_unload().to(torch.bfloat16).save_pretrained(final)
    tokenizer.save_pretrained(final)


def grpo_config(args, s):
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(args.output / "trl"), seed=s.seed, max_steps=args.steps,
        num_generations=s.group_size, per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=s.prompts_per_step * s.group_size // args.rows,
        max_completion_length=s.max_new_tokens, temperature=s.temperature, top_k=0, top_p=1.0,
        loss_type="grpo", epsilon=s.clip_eps, beta=s.kl_coef, learning_rate=s.learning_rate,
        lr_scheduler_type="linear", weight_decay=0.0, max_grad_norm=s.max_grad_norm,
        optim="adamw_torch_fused", bf16=False, gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(), use_vllm=False, shuffle_dataset=False,
        dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="no")


def lora_config(s):
    from peft import LoraConfig

    return LoraConfig(r=s.lora_rank, lora_alpha=s.lora_alpha or 2 * s.lora_rank,
                      target_modules="all-linear")


def rows_of(s, tokenizer):
    """The problems of every step, in train.py's order."""
    from datasets import Dataset

    parts = SimpleNamespace(tokenizer=tokenizer, problems=load_problems(s.data))
    batches = [train.batch_of_step(parts, step, s) for step in range(1, s.steps + 1)]
    return Dataset.from_list([{"prompt": prompt, "truth": truth} for batch in batches
                              for prompt, truth in zip(batch.prompts, truths_of(batch.problems))])


def clock(args, found):
    """A callback that writes a line of metrics.jsonl per step, and ends in time."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, _, state, control, **__):
            minutes = (time.perf_counter() - self.start) / 60
            line = json.dumps({"step": state.global_step, "minutes": minutes, **found})
            print(line, flush=True)
            with open(args.output / "metrics.jsonl", "a", encoding="utf-8") as file:
                print(line, file=file)
            steps_by_then = 1 + 1 / state.global_step
            control.should_training_stop |= minutes * steps_by_then > args.minutes

    return Clock()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="config.json with train.py's flags")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--minutes", type=float, default=65)
    parser.add_argument("--steps", type=int, default=8, help="until the rate is 0 [%(default)s]")
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch [%(default)s]")
    args, flags = parser.parse_known_args()
    train_by_trl(args, flags)


if __name__ == "__main__":
    main()
