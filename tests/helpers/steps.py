"""One step of train.py, and the loop, on the tiny policy."""
import contextlib
import copy
import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock, patch

import torch
from checks import seeded
from files import TINY
from models import opened

import sample
import train
from advantage import group_advantages
from reward import load_rewards

PROBLEMS = train.reward.load_problems(str(TINY / "train.jsonl"))  # it is trained on these

# Rewards in place of the rule's: by these, half of the eight answers are worth something.
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 0.0, 1.0])


def settings(*flags):
    return train.plan_memory(train.parse(flags))


def parts(*flags, dtype=torch.float32, noise=0.05):
    """What train_step takes: two prompts, four answers each; the reference a little apart."""
    s = settings("--prompts-per-step=2", "--group-size=4", *flags)
    policy, tokenizer = copy.deepcopy(opened(s.model, dtype=dtype))
    reference = copy.deepcopy(policy).requires_grad_(False)
    generator = seeded(1)
    for p in reference.parameters():
        p.add_(noise * torch.randn(p.shape, generator=generator))
    problems = PROBLEMS[:2]
    prompts = [train.chat_prompt(tokenizer, problem, s.system_prompt) for problem in problems]
    return SimpleNamespace(
        policy_model=policy, ref_model=reference, optimizer=train.make_optimizer(policy, s),
        tokenizer=tokenizer, problems=problems, eval_problems=problems, reward_of=None,
        sampler=sample.sample_groups, reward_model=None, twin=None,
        prompts=prompts, settings=s)


def parts_of(p, problems, **changes):
    """The same with other problems: what train_grpo and evaluate take."""
    changes = {"problems": problems, "eval_problems": problems, **changes}
    return SimpleNamespace(**{**vars(p), **changes})


def rollout_of(p):
    return sample.sample_groups(p.policy_model, p.tokenizer, p.prompts, 4, 40, 1.0, seeded())


def whole_step(p, reward_of=lambda *_: REWARDS, **how):
    """One step -> its metrics, its Rollout, the gradient of each update."""
    found = []
    p.optimizer.register_step_pre_hook(lambda *_: found.append(all_gradients(p.policy_model)))
    given = parts_of(p, p.problems, reward_of=reward_of, **how)
    return *step_on(given, p.settings, p.problems, p.prompts, seeded()), found


def step_on(given, s, problems, prompts, generators=None):
    """train_step on these problems, asked by these prompts."""
    return train.train_step(given, train.Batch(problems, prompts, generators), s)


def updated(p, model, optimizer, rollout, measure=True, **changes):
    """One update on a copy of the rollout, with the advantages of REWARDS -> its metrics."""
    rollout = dataclasses.replace(rollout, advantages=group_advantages(REWARDS, 4))
    given = parts_of(p, p.problems, policy_model=model, optimizer=optimizer)
    s = dataclasses.replace(p.settings, **changes)
    return train.gradient_step(given, rollout, s, measure)


def all_gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def run_in(folder):
    """A Run that writes there; on rank 0 alone, as ever."""
    run = train.Run()
    run.folder = folder
    return run


def log(run, metrics):
    """Log a step of these metrics alone."""
    with patch.object(train, "samples_of", lambda *_: []):
        run.log_step(metrics, SimpleNamespace(responses=[""]), 4)


class Watched(train.Run):
    """A Run that keeps what it logs, and the steps at which it saves."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.samples, self.checkpoints, self.rates = [], [], []

    @contextlib.contextmanager
    def watching(self, replacing=train.replacing):
        """Around train_grpo."""
        def watched(path):
            if path.name == train.CHECKPOINT:
                self.checkpoints.append(self.step)
            return replacing(path)

        def samples_of(*given):
            self.samples.append(given)
            return []
        with (patch.object(train, "replacing", watched),
              patch.object(train, "samples_of", samples_of)):
            yield


def loop(folder, *flags, problems=PROBLEMS[:8], sampler=sample.sample_groups, reward_of=None):
    """train_grpo on the tiny policy -> its Watched run, with the rates that it learned by."""
    p = parts("--steps=5", "--group-size=2", "--max-new-tokens=8", "--lr=0.004", *flags)
    run = Watched(folder)
    rate = p.optimizer.param_groups[0]
    p.optimizer.register_step_pre_hook(lambda *_: run.rates.append(rate["lr"]))
    given = parts_of(p, problems, sampler=sampler, reward_of=reward_of)
    given.eval_problems = problems[:3]
    with run.watching():
        train.train_grpo(given, p.settings, run)
    return run


def own_rewards(s):
    return load_rewards(s.reward, s.reward_weights, s.step_reward)


NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]


def raises(error):
    """A function that takes anything and raises this."""
    return Mock(side_effect=error)
