r"""[G][H] train.py: the step, the loop, the flags, the files of a run."""
import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import train
from logprob import IGNORE, token_logprobs
from loss import grpo_loss
from sample import sample_groups

ROOT = Path(train.__file__).resolve().parent
SHARED = ROOT.parent / "shared"
KEYS = """step reward_mean reward_std accuracy format_rate zero_variance_groups response_length_mean
response_length_p95 truncated_fraction approx_kl clip_fraction ratio_mean entropy grad_norm loss
seconds_sampling seconds_training tokens_per_second""".split()


def settings(*flags):
    return train.parse(list(flags))[0]


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder):
    """The metrics without the clock's."""
    return [{k: v for k, v in m.items() if "second" not in k} for m in metrics_of(folder)]


def parts(*flags, dtype=torch.float32):
    """Policy, reference, optimizer, tokenizer, two prompts and their answers, settings: of the tiny default."""
    s = settings("--prompts-per-step=2", "--group-size=4", *flags)
    policy = AutoModelForCausalLM.from_pretrained(s.model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(s.model)
    reference = copy.deepcopy(policy).requires_grad_(False)
    problems = train.load_problems(s.data)[:2]
    prompts = [train.chat_prompt(tokenizer, p["question"], s.system_prompt) for p in problems]
    return policy, reference, train.make_optimizer(policy, s), tokenizer, prompts, [p["answer"] for p in problems], s


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# ----- [G] one step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
def test_gradient_does_not_depend_on_the_cut_into_micro_batches(aggregate, share):
    policy, reference, _, tokenizer, prompts, truths, _ = parts()
    with torch.no_grad():                                # a reference elsewhere, so that the KL has a gradient
        for p in reference.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=seeded(1)))
    rollout = sample_groups(policy, tokenizer, prompts, 4, 40, generator=seeded())
    advantages = torch.tensor([1.3, -0.2, -0.6, -0.5, 0.9, 0.9, -0.9, -0.9])
    three = next(t for t in range(10**4) if len(list(train.micro_batches(rollout, t, share))) == 3)
    found = {}
    for cut, tokens in (("one", 10**6), ("three", three), ("rows", 1)):
        s = settings(f"--micro-batch-tokens={tokens}", f"--aggregate={aggregate}", "--max-grad-norm=1e9",
                     "--share-prompts" if share else "--no-share-prompts")
        model = copy.deepcopy(policy)
        old, ref = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        metrics = train.update(s, model, reference, optimizer, rollout, advantages, old, ref, True)
        found[cut] = (gradient(model), metrics, len(list(train.micro_batches(rollout, tokens, share))))
    assert [found[cut][2] for cut in found] == [1, 3, 8]
    whole, metrics, _ = found["one"]
    for cut in ("three", "rows"):
        assert (found[cut][0] - whole).norm() <= 1e-6 * whole.norm()
        for name in metrics:
            assert found[cut][1][name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def fake_rollout(prompts, answers):
    """Row lengths only: prompts[n] + answers[n] tokens, two rows a group."""
    labels = torch.full((len(prompts), 40), IGNORE)
    for n, (P, L) in enumerate(zip(prompts, answers)):
        labels[n, P:P + L] = 1
    return SimpleNamespace(labels=labels, group_ids=torch.arange(len(prompts)) // 2)


def test_micro_batches_hold_every_row_once_within_the_budget():
    prompts, answers = [3, 3, 5, 5, 2, 2, 9, 9], [2, 6, 1, 4, 7, 5, 21, 1]
    for budget in (1, 15, 20, 40, 1000):
        cuts = list(train.micro_batches(fake_rollout(prompts, answers), budget, share_prompts=False))
        assert sorted(torch.cat([rows for rows, _ in cuts]).tolist()) == list(range(8))
        for rows, width in cuts:
            assert width == max(prompts[n] + answers[n] for n in rows)
            assert len(rows) * width <= budget or len(rows) == 1
        assert [width for _, width in cuts] == sorted((width for _, width in cuts), reverse=True)


def test_micro_batches_of_shared_prompts_pay_a_prompt_once():
    prompts, answers = [3, 3, 5, 5, 2, 2, 9, 9], [2, 6, 1, 4, 7, 5, 21, 1]
    cuts = list(train.micro_batches(fake_rollout(prompts, answers), 21, share_prompts=True))
    assert [rows.tolist() for rows, _ in cuts] == [[0, 1, 2, 3], [4, 5], [6], [7]]      # 3+2+6 + 5+1+4 = 21


def test_micro_batches_keep_a_group_whole_that_fits():
    prompts, answers = [3, 3, 5, 5, 2, 2, 9, 9], [2, 6, 1, 4, 7, 5, 21, 1]               # groups of 11, 10, 14, 31
    cuts = list(train.micro_batches(fake_rollout(prompts, answers), 31, share_prompts=True))
    assert [rows.tolist() for rows, _ in cuts] == [[0, 1, 2, 3], [4, 5], [6, 7]]        # row 4 alone would have fitted


def test_micro_batches_suit_the_device():
    def chosen(*flags):
        s, _ = train.parse(["--model=gpt2", *flags])     # a name: no recipe is looked for
        return s.micro_batch_tokens, s.gradient_checkpointing

    assert chosen("--device=cpu") == (1024, False)
    assert chosen("--device=cuda") == chosen("--device=mps") == (8192, True)
    assert chosen("--device=cuda", "--micro-batch-tokens=99") == (99, True)
    assert chosen("--device=cuda", "--no-gradient-checkpointing") == (8192, False)


def test_no_gradient_is_held_through_the_rollout():
    policy, reference, optimizer, tokenizer, prompts, truths, s = parts()
    train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, s)
    assert all(p.grad is None for p in policy.parameters())


def test_gradient_is_that_of_the_formula_on_full_logits():
    """One update against the loss written out on full log-softmax logits, padding and all, in one batch."""
    policy, reference, _, tokenizer, prompts, truths, s = parts("--max-grad-norm=1e9")
    rollout = sample_groups(policy, tokenizer, prompts, 4, 40, generator=seeded())
    advantages = torch.tensor([1.3, -0.2, -0.6, -0.5, 0.9, 0.9, -0.9, -0.9])
    model = copy.deepcopy(policy)
    old, ref = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
    train.update(s, model, reference, torch.optim.SGD(model.parameters(), lr=0.0), rollout, advantages, old, ref, True)

    mask = (rollout.labels[:, 1:] != IGNORE).double()
    logits = policy(rollout.input_ids).logits[:, :-1].double()
    logp = logits.log_softmax(-1).gather(-1, rollout.input_ids[:, 1:, None])[..., 0]
    w = (logp - logp.detach()).exp()                     # on-policy, reference = policy: ratio 1, KL gradient 0
    loss = -((w * advantages[:, None] * mask).sum(1) / mask.sum(1)).mean()
    loss.backward()
    assert (gradient(model) - gradient(policy)).norm() <= 1e-5 * gradient(policy).norm()


def test_first_step_is_honest():
    """Fresh rollout, one update: every ratio is 1, the KL against the untouched reference is 0."""
    policy, reference, optimizer, tokenizer, prompts, truths, s = parts("--updates-per-rollout=1")
    seen = {}
    before = copy.deepcopy(policy)
    metrics = train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, s, seeded(),
                               on_rollout=lambda rollout, *_: seen.update(rollout=rollout))
    assert abs(metrics["approx_kl"]) < 1e-9
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6) and metrics["clip_fraction"] == 0
    assert metrics["ratio_max_error"] < 1e-5
    assert metrics["sampler_ratio_error"] < 1e-4         # cached decoding against one pass: rounding
    # and not by construction alone: [D] on single rows, at another width, as the policy was
    rollout, mask = seen["rollout"], seen["rollout"].labels[:, 1:] != IGNORE
    with torch.no_grad():
        together = token_logprobs(before, rollout.input_ids, rollout.labels)
        alone = torch.cat([token_logprobs(before, rollout.input_ids[n:n + 1], rollout.labels[n:n + 1])
                           for n in range(len(mask))])
    assert float((together - alone).expm1().abs().max()) < 1e-5
    # a sampler at another temperature than the trainer's would be seen
    other = sample_groups(before, tokenizer, prompts, 4, 40, temperature=0.8, generator=seeded())
    with torch.no_grad():
        gap = (token_logprobs(before, other.input_ids, other.labels) - other.logprobs).expm1().abs().max()
    assert float(gap) > 0.05


def test_later_updates_measure_the_ratio_from_the_first():
    policy, reference, _, tokenizer, prompts, truths, s = parts("--max-grad-norm=1e9", "--micro-batch-tokens=100")
    rollout = sample_groups(policy, tokenizer, prompts, 4, 40, generator=seeded())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    old, ref = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
    advantages = torch.tensor([1.0, -1.0] * 4)
    with torch.no_grad():
        fresh = token_logprobs(policy, rollout.input_ids, rollout.labels)
    train.update(s, policy, reference, optimizer, rollout, advantages, old, ref, True)
    assert torch.allclose(old, fresh, atol=1e-5) and torch.allclose(ref, fresh, atol=1e-5)
    kept = old.clone()
    with torch.no_grad():
        moved = token_logprobs(policy, rollout.input_ids, rollout.labels)
    _, expected = grpo_loss(moved, kept, ref, advantages, rollout.labels[:, 1:] != IGNORE, kl_coef=s.kl_coef)
    metrics = train.update(s, policy, reference, optimizer, rollout, advantages, old, ref, False)
    assert torch.equal(old, kept)
    assert metrics["approx_kl"] > 1e-6
    w = (moved - kept).exp()[rollout.labels[:, 1:] != IGNORE]
    assert metrics["ratio_max_error"] == pytest.approx(float((w - 1).abs().max()), rel=1e-3) and float(w.std()) > 0
    for name in ("loss", "approx_kl", "ratio_mean", "clip_fraction"):
        assert metrics[name] == pytest.approx(float(expected[name]), rel=1e-4, abs=1e-6)


def test_a_non_finite_gradient_skips_the_update_and_is_counted():
    policy, reference, optimizer, tokenizer, prompts, truths, s = parts()
    before = copy.deepcopy(policy.state_dict())
    hook = policy.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    metrics = train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, s, seeded(), lambda p, r:
                               torch.arange(len(r)).float())
    assert metrics["skipped_updates"] == s.updates_per_rollout == 2
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    hook.remove()
    metrics = train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, s, seeded(), lambda p, r:
                               torch.arange(len(r)).float())
    assert metrics["skipped_updates"] == 0
    assert not all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_gradient_is_clipped_and_its_own_norm_reported():
    policy, reference, _, tokenizer, prompts, truths, s = parts("--max-grad-norm=0.001")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    rollout = sample_groups(policy, tokenizer, prompts, 4, 40, generator=seeded())
    old, ref = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
    metrics = train.update(s, policy, reference, optimizer, rollout, torch.tensor([1.0, -1.0] * 4), old, ref, True)
    assert metrics["grad_norm"] > 0.01
    assert float(gradient(policy).norm()) == pytest.approx(0.001, rel=1e-3)


def test_reference_must_have_tensors_of_its_own_and_stand_still():
    policy, reference, *_ = parts()
    train.assert_own_frozen_tensors(reference, policy)
    train.assert_own_frozen_tensors(None, policy)
    with pytest.raises(AssertionError, match="shares"):
        train.assert_own_frozen_tensors(policy, policy)
    with pytest.raises(AssertionError, match="frozen"):
        train.assert_own_frozen_tensors(copy.deepcopy(policy), policy)


def test_reference_stands_still_while_the_policy_moves():
    policy, reference, optimizer, tokenizer, prompts, truths, s = parts()
    before = copy.deepcopy(reference.state_dict())
    train.train_step(policy, reference, optimizer, tokenizer, prompts, truths, s, seeded(), lambda p, r:
                     torch.arange(len(r)).float())
    assert all(torch.equal(before[name], value) for name, value in reference.state_dict().items())


# ----- weights ----------------------------------------------------------------------------------------------


def moved(before, after):
    return sum(int((a != b).sum()) for a, b in zip(before, after)) / sum(b.numel() for b in before)


def test_masters_move_where_bfloat16_weights_stand_still():
    """lr 1e-6: AdamW on bare bfloat16 moves hardly a weight; on float32 masters it moves nearly every one."""
    def one_step(optimizer, model, tokenizer, prompts, truths, s):
        train.train_step(model, None, optimizer, tokenizer, prompts, truths, s, seeded(),
                         lambda p, r: torch.arange(len(r)).float())

    flags = ("--lr=1e-6", "--kl-coef=0")
    policy, _, optimizer, *rest = parts(*flags, dtype=torch.bfloat16)
    masters = optimizer.param_groups[0]["params"]
    before = [m.detach().clone() for m in masters]
    one_step(optimizer, policy, *rest)
    assert all(m.dtype == torch.float32 for m in masters)
    assert moved(before, masters) > 0.85                 # words that no answer used have no gradient
    assert all(torch.equal(w, m.bfloat16()) for w, m in zip(policy.parameters(), masters))

    policy, _, _, *rest = parts(*flags, dtype=torch.bfloat16)
    before = [p.detach().clone() for p in policy.parameters()]
    one_step(torch.optim.AdamW(policy.parameters(), 1e-6, weight_decay=0.0), policy, *rest)
    assert moved(before, list(policy.parameters())) < 0.05


def test_masters_of_float32_weights_are_the_weights():
    policy, _, optimizer, *_ = parts()
    assert all(p is m for p, m in zip(policy.parameters(), optimizer.param_groups[0]["params"]))


def test_masters_gather_the_gradient_of_all_micro_batches():
    """bfloat16 gradients are added up in float32, and are those of the bfloat16 model."""
    policy, _, optimizer, tokenizer, prompts, truths, s = parts("--max-grad-norm=1e9", "--kl-coef=0",
                                                              dtype=torch.bfloat16)
    rollout = sample_groups(policy, tokenizer, prompts, 4, 40, generator=seeded())
    sums = []
    for tokens in (10**6, 1):
        s.micro_batch_tokens, old = tokens, torch.zeros_like(rollout.logprobs)
        optimizer.step = lambda: None
        train.update(s, policy, None, optimizer, rollout, torch.tensor([1.0, -1.0] * 4), old, None, True)
        sums.append(torch.cat([m.grad.flatten() for m in optimizer.param_groups[0]["params"]]))
        assert all(p.grad is None for p in policy.parameters())
    assert (sums[0] - sums[1]).norm() < 0.02 * sums[0].norm()


# ----- [H] the loop -----------------------------------------------------------------------------------------


def test_problems_of_a_step_make_epochs_without_repetition():
    s, problems = settings("--prompts-per-step=4"), list(range(18))
    def asked_in(step, s=s):
        return train.problems_of_step(problems, step, s)[0]

    epochs = [[asked_in(step) for step in range(1 + 4 * e, 5 + 4 * e)] for e in range(2)]
    for epoch in epochs:
        asked = sum(epoch, [])
        assert len(asked) == len(set(asked)) == 16
    assert epochs[0] != epochs[1]
    assert asked_in(3) == epochs[0][2]
    assert asked_in(3, settings("--prompts-per-step=4", "--seed=1")) != epochs[0][2]


ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run_program(*flags, ok=True):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *map(str, flags)], capture_output=True, text=True,
                          env=ENVIRONMENT)
    assert not ok or done.returncode == 0, done.stderr
    return done


SMALL = ("--steps=3", "--prompts-per-step=4", "--group-size=4", "--eval-limit=8", "--eval-every=2", "--warmup-steps=2")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, run_program(*SMALL, f"--output={folder}")


def test_a_run_leaves_the_files_of_the_contract(finished_run):
    folder, done = finished_run
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) == [
        "checkpoint", "config.json", "final", "metrics.jsonl", "samples.jsonl"]
    metrics = metrics_of(folder)
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert all(key in m for m in metrics[1:] for key in KEYS)
    assert [m["step"] for m in metrics if "eval_accuracy" in m] == [0, 2, 3]
    assert [m["lr"] for m in metrics[1:]] == pytest.approx([1.5e-4, 3e-4, 3e-4])         # warm-up of two steps
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["lr"] == 3e-4 and config["recipe"]["lr"] == 3e-4           # taken from recipe.json
    assert config["settings"]["steps"] == 3 and config["recipe"]["steps"] != 3           # the command line won
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert len(sample["responses"]) == len(sample["rewards"]) == len(sample["advantages"]) == 4
    for word in ("before", "after", "truth", "held-out accuracy", "recipe.json", str(folder)):
        assert word in done.stdout
    for word in ("reward", "accuracy", "length", "KL", "flat groups"):
        assert word in done.stderr                       # the bar


def test_final_opens_and_is_the_trained_policy(finished_run):
    folder, _ = finished_run
    final = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    policy, _, optimizer, _, prompts, _, _ = parts()
    run = train.Run(folder)
    run.load_checkpoint(policy, optimizer)               # the checkpoint's weights: those of the last step
    assert run.step == 3
    rollout = sample_groups(final, tokenizer, prompts, 4, 40, generator=seeded())
    with torch.no_grad():
        a, b = (token_logprobs(m, rollout.input_ids, rollout.labels) for m in (final, policy))
    assert torch.equal(a, b)
    start = AutoModelForCausalLM.from_pretrained(train.TINY).state_dict()
    assert any(not torch.equal(start[name], value) for name, value in final.state_dict().items())


def test_eval_only_prints_the_figures(finished_run):
    out = run_program("--eval-only", "--eval-limit=8", "--group-size=4").stdout
    assert "greedy accuracy" in out and "pass@1" in out and "maj@4" in out


def test_same_seed_same_run_other_seed_other_run(finished_run, tmp_path):
    run_program(*SMALL, f"--output={tmp_path / 'same'}")
    run_program(*SMALL, f"--output={tmp_path / 'other'}", "--seed=1")
    assert curve(tmp_path / "same") == curve(finished_run[0])
    assert curve(tmp_path / "other") != curve(finished_run[0])


def test_no_reference_without_kl(tmp_path):
    run_program(*SMALL, "--kl-coef=0", f"--output={tmp_path / 'run'}")
    assert all(m["approx_kl"] is None for m in metrics_of(tmp_path / "run")[1:])


def test_a_reward_of_ones_own(tmp_path):
    (tmp_path / "my.py").write_text(
        "def shorter(prompts, completions, answer, question, **columns):\n"
        "    assert len(prompts) == len(completions) == len(answer) == len(question) in (4, 16)\n"
        "    assert all(q in p for p, q in zip(prompts, question))\n"
        "    return [-float(len(c)) for c in completions]\n")
    run_program(*SMALL, f"--reward={tmp_path / 'my.py'}:shorter", f"--output={tmp_path / 'run'}")
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["rewards"] == [-len(r) for r in sample["responses"]]


# ----- real input -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (SHARED / "models" / "qwen2.5-tokenizer").is_dir(), reason="the real tokenizer is not here")
def test_a_qwen2_of_random_weights_trains_on_gsm8k(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "qwen2.5-tokenizer")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=151936, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = SHARED / "data" / "gsm8k"
    run_program(f"--model={tmp_path / 'model'}", f"--data={data / 'train.jsonl'}", f"--eval-data={data / 'test.jsonl'}",
                "--steps=1", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=8", "--eval-limit=2",
                f"--output={tmp_path / 'run'}")
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert "<|im_start|>user" in sample["prompt"] and "\\boxed{}" in sample["prompt"]
    assert sample["prompt"].endswith("<|im_start|>assistant\n")
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")


# ----- flags and bad input ----------------------------------------------------------------------------------


def bad(capsys, *flags):
    """train.py on these flags: exit status 2 and one line on standard error, which is returned."""
    assert train.main(list(map(str, flags))) == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize("flags, words", [
    (["--lr=0"], "--lr 0.0: must be above 0"),
    (["--lr=nan"], "--lr nan: not a finite number"),
    (["--group-size=1"], "--group-size 1: must be at least 2"),
    (["--steps=0"], "--steps 0"),
    (["--temperature=0"], "--temperature 0.0"),
    (["--clip-eps=1.5"], "--clip-eps 1.5: must be at most 1"),
    (["--kl-coef=-1"], "--kl-coef -1.0"),
    (["--kl-estimator=k4"], "--kl-estimator"),
    (["--steps=many"], "--steps"),
    (["--nonsense=1"], "--nonsense"),
    (["--device=abacus"], "--device abacus"),
    (["--data=nowhere.jsonl"], "--data: nowhere.jsonl"),
    (["--eval-data=nowhere.jsonl"], "--eval-data: nowhere.jsonl"),
    (["--model=./no/such/folder"], "--model ./no/such/folder"),
    (["--reward=nowhere.py:f"], "--reward nowhere.py:f"),
    (["--prompts-per-step=100000"], "--prompts-per-step 100000"),
    (["--max-new-tokens=100000"], "--max-new-tokens 100000"),
    (["--resume"], "--resume: needs --output"),
])
def test_bad_flags(capsys, monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    assert words in bad(capsys, *flags)
    assert list(tmp_path.iterdir()) == []                # nothing half made is left behind


@pytest.mark.parametrize("recipe, words", [
    ('{"lr": "fast"}', "--lr"), ('{"lr": -1}', "--lr -1.0"), ('{"nonsense": 1}', "--nonsense"),
    ("[1]", "not an object"),
    ('{"lr": ', "recipe.json"),
])
def test_bad_recipe(capsys, tmp_path, recipe, words):
    (tmp_path / "recipe.json").write_text(recipe)
    message = bad(capsys, f"--model={tmp_path}")
    assert words in message and "recipe.json" in message


def test_recipe_yields_to_the_command_line(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "recipe.json").write_text('{"lr": 0.5, "scale-by-std": false, "data": "d.jsonl", "kl_coef": 0}')
    s, recipe = train.parse([f"--model={tmp_path}", "--kl-coef=0.3"])
    assert (s.lr, s.scale_by_std, s.kl_coef) == (0.5, False, 0.3)
    assert s.data == str(tmp_path / "d.jsonl") and recipe["kl-coef"] == 0


# ----- memory -----------------------------------------------------------------------------------------------


def test_checkpointed_layers_change_no_gradient():
    policy, reference, _, tokenizer, prompts, truths, s = parts("--max-grad-norm=1e9")
    rollout = sample_groups(policy, tokenizer, prompts, 4, 40, generator=seeded())
    found, counts = [], []
    for on in (False, True):
        model, calls = copy.deepcopy(policy), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        old, ref = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
        with train.layers_checkpointed(model, on):
            train.update(s, model, reference, torch.optim.SGD(model.parameters(), lr=0.0), rollout,
                         torch.tensor([1.0, -1.0] * 4), old, ref, True)
        found.append(gradient(model))
        counts.append(len(calls))
        assert not any(module.training for module in model.modules())
    assert counts[1] == counts[0] + len(list(train.micro_batches(rollout, s.micro_batch_tokens, True)))  # it runs again
    assert (found[0] - found[1]).norm() <= 1e-6 * found[0].norm()


def test_dry_run_counts_from_the_configuration_alone(capsys, tmp_path):
    config = json.loads((train.TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))                # no weights, no tokenizer
    assert train.main([f"--model={tmp_path}", "--dry-run", "--device=cuda"]) == 0
    out = capsys.readouterr().out
    n = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(train.TINY).parameters())
    assert f"{n:,} weights in torch.bfloat16" in out
    for words in ("reference", "two moments", "key/value cache", "backward", "in the rollout", "host"):
        assert words in out
    big = json.dumps({**config, "hidden_size": 1024, "intermediate_size": 4096})
    (tmp_path / "config.json").write_text(big)
    assert train.main([f"--model={tmp_path}", "--dry-run", "--device=cuda", "--kl-coef=0", "--no-offload"]) == 0
    lines = dict(line[9:].rsplit("  ", 1) for line in capsys.readouterr().out.splitlines() if line.endswith(" GB"))
    sizes = {name.strip(): float(size.split()[0]) for name, size in lines.items()}
    assert sizes["reference, frozen"] == 0
    assert sizes["AdamW's two moments, float32"] == pytest.approx(4 * sizes["policy, weights that compute"], abs=2e-3)
    assert train.main([f"--model={tmp_path / 'none'}", "--dry-run"]) == 2
    assert train.main([f"--model={tmp_path}", "--dry-run", "--device=abacus"]) == 2
    assert all(line.startswith("train.py: --") for line in capsys.readouterr().err.splitlines())


def test_activations_are_those_a_real_pass_keeps():
    """The count on the meta device against the saved tensors of a pass with storage."""
    s = settings("--micro-batch-tokens=200", "--max-new-tokens=20")
    model = AutoModelForCausalLM.from_pretrained(train.TINY)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(model.config)
    kept, groups = {}, [[24] + [20] * 8]
    model.set_attn_implementation("grouped")

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in model.parameters()}:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(1, 184, dtype=torch.long)
        hidden = model.base_model(input_ids=ids, position_ids=ids, use_cache=False, groups=groups,
                                  attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)).last_hidden_state
    assert train.activations(meta.eval(), s, 24, False) == pytest.approx(sum(kept.values()) + hidden.nbytes, rel=0.1)
