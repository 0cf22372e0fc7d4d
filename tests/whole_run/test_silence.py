"""Nothing wrong goes on in silence: rewards that do not apply, code that leaves, runs that go on
otherwise, folders that hold something odd. Each input is one that somebody could give."""
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import pytest
import torch
from files import (FEW, ROOT, SHORT, TINY, checkpoint_of, counters_of, edit_json, edit_tensors,
                   lines_of, metrics_of, snapshot)
from runs import evaluates, refused, told, trained, trains
from steps import parts, rollout_of, whole_step
import reward
import sample
import train
from advantage import group_advantages
from reward import with_error

FLAGS = (*FEW, *SHORT)
WORDS = ["group", "leave-one-out", "max-rl", "batch-std", "gtpo", "grpo-s"]


def written(path, text):
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def own(tmp_path):
    """The file of a reward, in which this is the code."""
    return lambda text: written(tmp_path / "own.py", text)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model's folder, to be altered."""
    return shutil.copytree(TINY, tmp_path / "model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole") / "run", *FLAGS, "--save-every=100")


@pytest.fixture
def run_folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


# --- None is no 0 ---------------------------------------------------------------------------------
@pytest.mark.parametrize("word", WORDS)
def test_an_answer_without_a_reward_is_not_trained_on(word):
    """The update is that of its siblings alone: of other rewards in its place nothing changes."""
    unscored = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1]) > 0
    rewards = torch.tensor([1.0, 0.0, 9.0, 0.25, 2.0, 0.5, 0.0, 9.0])
    found = []
    for _ in range(2):
        p = parts(f"--advantage={word}")
        values = rewards.where(~unscored, math.nan).tolist()
        metrics, rollout, gradients = whole_step(p, lambda _, values=values: values)
        found.append(gradients[0])
        assert rollout.advantages.view(8, -1)[unscored].abs().sum() == 0
        assert rollout.advantages.view(8, -1)[~unscored].any(dim=1).sum() > 4
        assert not rollout.mask[unscored].any()
        assert metrics["reward_mean"] == pytest.approx(float(rewards[~unscored].mean()))
        assert metrics["tokens"] == rollout.mask.sum()
    assert torch.equal(*found) and found[0].any()


def test_its_siblings_advantages_and_the_loss_are_those_of_a_smaller_group():
    p = parts("--kl-coef=0", "--updates-per-rollout=1")
    rollout = rollout_of(p)
    values = [1.0, math.nan, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0]
    metrics, trained_on, _ = whole_step(p, lambda _: values, sampler=lambda *_: rollout)
    scored = [0, 2, 3]
    expected = group_advantages(torch.tensor(values)[scored], 3)
    assert trained_on.advantages[scored].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert metrics["loss"] == pytest.approx(0, abs=1e-6)  # of each group's scored answers, too


def test_all_none_is_said_in_the_first_step(own, tmp_path):
    file = own("def judge(completions, **columns):\n    return [None for _ in completions]\n")
    folder = tmp_path / "run"
    _, err = told(*FLAGS, "--steps=1", f"--reward={file}:judge", f"--output={folder}")
    assert re.search("step 1: the reward was None", err)
    line = metrics_of(folder)[1]
    assert line["reward_mean"] is None and line["tokens"] == 0 and "0" not in str(line["accuracy"])
    weights, start = (checkpoint_of(folder), sample.open_policy(str(TINY))[0].state_dict())
    assert all(torch.equal(weights[f"weight/{name}"], start[name]) for name in
               ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"))
    assert not (folder / "best").exists()


def test_half_a_judge_counts_for_half(own, tmp_path):
    """It knows answers that have a 1; others are in no figure of an evaluation."""
    file = own("""
        def judge(completions, **columns):
            return [-3e7 + ("=" in text) if "1" in text else None for text in completions]
        """)
    folder = trained(tmp_path / "run", *FLAGS, f"--reward={file}:judge", "--eval-limit=16")
    rows = lines_of(folder / "evaluations.jsonl")[0]["answers"]
    known = [row for row in rows if "1" in row["answer"]]
    assert 0 < len(known) < len(rows)
    for row in rows:
        assert (row["reward"] is None) == (row not in known) == ("tokens" not in row)
    values = [row["reward"] for row in known]
    assert metrics_of(folder)[0]["eval_reward"] == pytest.approx(sum(values) / len(values))
    logged = lines_of(folder / "samples.jsonl")[0]
    assert logged["reward/judge"] == logged["rewards"] and len(logged["rewards"]) == 4


# --- Ways out of a user's code --------------------------------------------------------------------
WAYS = {"sys.exit(3)": "SystemExit", "raise GeneratorExit": "GeneratorExit",
        "raise asyncio.CancelledError": "CancelledError", "quit()": "SystemExit",
        "raise KeyboardInterrupt": "KeyboardInterrupt"}


@pytest.mark.parametrize("kind", ["reward", "step-reward", "reply"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_is_an_error_that_costs_no_step(own, tmp_path, kind, way):
    file = own(f"""
        import asyncio, sys
        calls = 0
        def leaves(*given, **columns):
            global calls
            calls += 1
            if calls == {30 if kind == "reply" else 4}:
                {way}
            if given:
                return "How many ?"
            return [{"[]" if kind == "step-reward" else "1.0"} for _ in columns["completions"]]
        """)
    folder = tmp_path / "run"
    with pytest.raises(reward.ForeignError, match=WAYS[way]) as caught:
        train.main([*FLAGS, f"--{kind}={file}:leaves", "--save-every=100", "--max-turns=2",
                    f"--output={folder}"])
    assert str(file) in str(caught.getrepr(abspath=True))  # its file, and its line
    assert counters_of(folder)["step"] == len(metrics_of(folder)) - 1 > 0
    note, = caught.value.__notes__
    assert train.command("train.py", "--resume", str(folder)) in note and "no-fast" not in note


def test_a_file_that_leaves_while_it_loads(own):
    file = own("""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--mine", required=True)
        parser.parse_args([])
        """)
    with pytest.raises(RuntimeError, match="SystemExit"):
        train.main([*FLAGS, f"--reward={file}:score"])


def test_gradients_that_a_file_turns_off_are_on_again(own, tmp_path):
    """When it is loaded, and in each call."""
    file = own("""
        import torch
        torch.autograd.set_grad_enabled(False)
        def lengths(completions, **columns):
            torch._C._set_grad_enabled(False)
            return [len(text) for text in completions]
        """)
    trains(*FLAGS, f"--reward={file}:lengths", f"--output={tmp_path / 'run'}")
    assert torch.is_grad_enabled()


def test_ranks_are_those_of_the_beginning(own, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")                     # is put back behind the test
        monkeypatch.delenv(name)
    file = own("""
        import os
        os.environ.update(RANK="1", WORLD_SIZE="2")
        def score(completions, **columns):
            return [1.0 for _ in completions]
        """)
    trains(*FLAGS, f"--reward={file}:score", f"--output={tmp_path / 'run'}")
    assert (train.RANK, train.WORLD_SIZE) == (0, 1) and (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("value", ["dict.fromkeys(completions, 1.0)", "set(completions)",
                                   "'1' * len(completions)"])
def test_a_reward_that_is_no_list_is_refused(capsys, own, tmp_path, value):
    file = own(f"def score(completions, **columns):\n    return {value}\n")
    assert "--reward score" in refused(capsys, *FLAGS, f"--reward={file}:score",
                                       f"--output={tmp_path / 'run'}", begun=True)


# --- A run that goes on ---------------------------------------------------------------------------
def test_what_is_not_as_it_began_is_named(run_folder, model, tmp_path):
    def changed(*flags):
        out, _ = told("--resume", str(run_folder), *flags)
        return re.findall("not as when the run began: (.*)", out)

    assert changed("--steps=5") == []                     # more steps are no change
    assert changed("--steps=6", "--kl-coef=0.5", "--temperature=0.75") == [
        "--temperature, --kl-coef"]
    edit_json(run_folder / "config.json", kl_coef=0.02, temperature=1.0, model=str(model))
    assert changed("--steps=7") == ["--model"]            # another folder of the same weights
    edit_tensors(model / "model.safetensors", lambda tensors: {
        name: tensor * 1.25 if "norm" in name else tensor for name, tensor in tensors.items()})
    assert changed("--steps=8") == ["--model, the weights of --model"]
    data = tmp_path / "few.jsonl"
    data.write_text("".join(sorted((TINY / "few.jsonl").read_text().splitlines(True))))
    assert changed("--steps=9", f"--data={data}") == [
        "--model, --data, the weights of --model, the problems of --data"]


def test_fewer_steps_than_are_done_are_nothing_to_do(run_folder):
    before = snapshot(run_folder)
    out, err = told("--resume", str(run_folder), "--steps=3", "--lr=0.5")
    assert "already at step 4: nothing to do" in out and "question" not in out and not err
    assert snapshot(run_folder) == before


def test_a_checkpoint_is_written_once_a_save(monkeypatch, tmp_path):
    """Also where a signal stops the run at a step that is saved, and where all steps are done."""
    written_at = []

    def save_file(tensors, path, real=train.save_file):
        written_at.append(int(json.loads(bytes(tensors["counters"].tolist()))["step"]))
        real(tensors, path)

    monkeypatch.setattr(train, "save_file", save_file)
    folder = tmp_path / "run"

    def update_bar(bar, run, real=train.update_bar):
        real(bar, run)
        train.RECEIVED.extend([15] * (run.step == 2))

    with monkeypatch.context() as patch:
        patch.setattr(train, "update_bar", update_bar)
        assert train.main([*FLAGS, "--save-every=2", f"--output={folder}"]) == 143
    trains("--resume", str(folder))
    trains("--resume", str(folder))
    assert written_at == [0, 2, 4]


# --- The last lines -------------------------------------------------------------------------------
def test_a_part_that_fell_while_the_sum_rose_is_told(own, tmp_path):
    """Shorter answers pay, and working the sum out does not."""
    file = own("""
        def worked(completions, **columns):
            return [float("=" in text) for text in completions]
        def brief(completions, **columns):
            return [max(0, 40 - len(text)) / 4 for text in completions]
        """)
    first = [{"reward": float(n), "reward/worked": 1.0} for n in range(8)]
    last = [{"reward": n + 1.0, "reward/worked": float(n > 0)} for n in range(8)]
    assert "fell while the sum rose" in train.change_of("eval_reward/worked", first, last)
    for metric, before, after in (("eval_reward", first, last), ("eval_reward/worked", last, first),
                                  ("eval_reward/worked", first, first)):
        assert "fell" not in train.change_of(metric, before, after)
    folder = tmp_path / "run"
    both = "--reward", f"{file}:worked", f"{file}:brief"
    out, _ = told(*FLAGS, *both, "--reward-weights", "0.125", "1", f"--output={folder}")
    lines = metrics_of(folder)
    for name in ("worked", "brief"):
        assert {f"eval_reward/{name}", "eval_reward"} < lines[0].keys()
        assert re.search(rf"\nheld-out reward/{name} .*\n +\d\.\d+[ ,]", out)
    assert "the one that gained most" in out
    import page
    text = page.main(folder).read_text(encoding="utf-8")
    assert "held-out reward/worked" in text and "held-out reward/brief" in text
    logged = lines_of(folder / "samples.jsonl")[0]
    assert len(logged["reward/worked"]) == len(logged["reward/brief"]) == 4
    out, _ = told(folder, *both, by=evaluates)
    for k in (1, 2, 4):
        for name in ("reward", "reward/worked", "reward/brief"):
            assert re.search(rf"\n{name}, best of {k} +\d+\.\d+(,| ±| \[)", out), (name, k)


def test_equal_rewards_are_no_certainty():
    graded = torch.full((7,), 1.3, dtype=torch.float64)
    assert "all equal" in with_error(graded) and "±" not in with_error(graded)
    assert "±" in with_error(torch.tensor([1.3, 1.2]))


# --- A reward model, conversations ----------------------------------------------------------------
def test_a_conversation_that_breaks_off_is_not_finished(tiny):
    """Because its first answer is cut, or because no room is left for the next one."""
    prompt = train.chat_prompt(tiny[1], parts().problems[0], "")

    def finished(tokens, reply, turns):
        rollout = sample.sample_conversations(*tiny, [prompt], 8, tokens, 1.0, None, reply=reply,
                                              max_turns=turns)
        return rollout.finished, rollout.turns

    torch.manual_seed(0)
    ended, turns = finished(20, lambda *_: " ".join(100 * ["9"]), 2)     # 128 positions in all
    assert not ended.any() and all(len(texts) == 1 for texts in turns)
    torch.manual_seed(0)
    alone, _ = finished(6, lambda *_: None, 2)
    torch.manual_seed(0)
    ended, _ = finished(6, lambda prompt, texts: "How many ?", 2)
    assert 0 < alone.sum() < 8 and not (ended & ~alone).any()


# --- Loading --------------------------------------------------------------------------------------
def test_a_word_that_the_model_lacks_is_named_at_loading(capsys, model, tmp_path):
    """The tokenizer has grown by a word that one question holds."""
    words = json.loads((model / "tokenizer.json").read_text())
    words["model"]["vocab"]["walrus"] = len(words["model"]["vocab"]) + 7
    (model / "tokenizer.json").write_text(json.dumps(words))
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "walrus 9 ?", "answer": "9"}) + "\n"
                    + (TINY / "few.jsonl").read_text())
    line = refused(capsys, *FLAGS, f"--model={model}", f"--data={data}")
    assert "d.jsonl, problem 1" in line and "the model lacks" in line


@pytest.mark.parametrize("setting", [{"_attn_implementation": "flash_attention_3"},
                                     {"output_router_logits": True}])
def test_settings_of_a_folder_that_cannot_be_kept_are_not(model, tmp_path, setting):
    edit_json(model / "config.json", **setting)
    assert not sample.checked_config(str(model)).to_dict().get("output_router_logits")
    trains(*FLAGS, "--steps=1", f"--model={model}", f"--output={tmp_path / 'run'}")


def test_weights_that_are_no_numbers_are_the_models(capsys, model, tmp_path):
    edit_tensors(model / "model.safetensors", lambda tensors: {
        name: tensor / 0 if "norm" in name else tensor for name, tensor in tensors.items()})
    line = refused(capsys, *FLAGS, f"--model={model}", f"--output={tmp_path / 'run'}", begun=True)
    assert "--model" in line and "--lr" not in line


def test_a_base_model_gets_its_template_by_a_flag(capsys, model, tmp_path):
    (model / "chat_template.jinja").unlink()
    edit_json(model / "tokenizer_config.json", chat_template=None)
    line = refused(capsys, *FLAGS, f"--model={model}", f"--output={tmp_path / 'run'}")
    assert "--template-args" in line and "chat_template" in line
    template = "{{ messages[-1].content }} ?"
    folder = trained(tmp_path / "run", *FLAGS, "--steps=1", f"--model={model}",
                     "--template-args", json.dumps({"chat_template": template}))
    assert lines_of(folder / "samples.jsonl")[0]["prompt"].endswith("? ?")


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    s = train.parse(["--output=~/a", "--model=~/m", "--data=~/d.jsonl"])
    assert (s.output, s.model, s.data) == tuple(str(tmp_path / name)
                                                for name in ("a", "m", "d.jsonl"))


def test_a_buffer_above_the_limit_is_refused(capsys):
    assert "--overlong-buffer 17" in refused(capsys, *FLAGS, "--overlong-buffer=17")


def test_problems_that_differ_in_case_and_space_alone_are_one_for_the_split():
    problems = [{"question": f"{name} has  {n}\nbooks ?", "answer": "1"}
                for n in range(30) for name in ("Anna", "ANNA", "anna ")]
    training, held_out = reward.hold_out(problems)
    bare = [{"".join(p["question"].split()).lower() for p in each} for each in (training, held_out)]
    assert not bare[0] & bare[1] and all(bare)


def test_the_first_lines_say_how_many_weights_are_trained(tmp_path):
    out, _ = told(*FLAGS, "--steps=1", "--lora-rank=2", f"--output={tmp_path / 'run'}")
    counts = re.search(r"([\d,]+) parameters, ([\d,]+) are trained", out).groups()
    weights, factors = (int(count.replace(",", "")) for count in counts)
    policy = sample.open_policy(str(TINY))[0]
    linears = [module for name, module in policy.named_modules()
               if type(module) is torch.nn.Linear and name != "lm_head"]
    assert weights == policy.num_parameters()
    assert factors == sum(2 * sum(linear.weight.shape) for linear in linears)


# --- Small ----------------------------------------------------------------------------------------
def test_eval_every_0_is_never_between(tmp_path):
    folder = trained(tmp_path / "run", *FLAGS, "--eval-every=0")
    assert [m["step"] for m in metrics_of(folder) if "eval_accuracy" in m] == [0, 4]


def test_branches_of_the_best_are_no_free_draws():
    p = parts("--around-best=1", "--group-size=8")
    metrics, rollout, _ = whole_step(p, reward_of=None)
    free = rollout.rewards.view(2, 2, 4)[:, 0]
    assert metrics["reward_mean"] == pytest.approx(float(free.mean()))
    p = parts("--around-best=1", "--group-size=2")        # half of a pair is no group
    metrics, rollout, _ = whole_step(p, reward_of=None)
    assert metrics["reward_mean"] == pytest.approx(float(rollout.rewards.mean()))


def test_into_a_file_a_bar_writes_lines(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "train.py", *FLAGS, f"--output={tmp_path}/run"],
                          capture_output=True, check=True)
    assert b"\r" not in done.stderr and 0 < done.stderr.count(b"GRPO") < 4


def test_ctrl_c_while_torch_is_imported_ends_in_silence(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run([sys.executable, ROOT / "train.py"], capture_output=True, text=True,
                          env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    # The folder of the script comes first, and has no torch: this one is found before the real one.
    assert done.returncode == -2 and done.stderr == ""


# --- The first look, and what stands at the end ---------------------------------------------------
def test_the_first_group_is_shown_before_a_weight_moves(own, tmp_path):
    """The prompt as the policy gets it, and answers with their rewards; not when resumed."""
    file = own("""
        def flat(completions, **columns):
            return [0.25] * len(completions)
        def other(completions, **columns):
            return [1.0] * len(completions)
        """)
    folder = tmp_path / "run"
    both = ("--reward", f"{file}:flat", f"{file}:other", "--system-prompt=Be \x1b brief.")
    out, err = told(*FLAGS, *both, f"--output={folder}")
    first = lines_of(folder / "samples.jsonl")[0]
    assert out.count("as the policy gets it") == 1
    assert first["prompt"].replace("\x1b", "‹001B›") in out and "\x1b" not in out
    assert out.count("reward 1.25, reward/flat 0.25, reward/other 1") == 4
    last = out[out.index("the one that gained most"):]
    for text in err, last:                                # the warning stands at the end once more
        assert "flat, other may not see what you think" in text and "have a" not in text
    assert "gets it" not in told("--resume", str(folder), "--steps=5")[0]


@pytest.mark.parametrize("flags, asks", [
    ("", True), ("--reward rule", True), ("--reward think", True), ("--reward f.py:f rule", True),
    ("--reward f.py:f", False), ("--step-reward f.py:f", False), ("--reward-model m", False)])
def test_only_for_the_rules_reward_a_box_is_asked_for(flags, asks):
    s = train.parse(["--model=m", *flags.split()])
    assert s.system_prompt == (train.BOXED if asks else "")
    assert train.parse(["--model=m", *flags.split(), "--system-prompt=x"]).system_prompt == "x"


def test_the_template_that_was_trained_with_is_saved(capsys, tmp_path):
    """And a run's policy that is asked otherwise says so, whatever flags its run has had."""
    template = (TINY / "chat_template.jinja").read_text().replace("<|user|>", "<|user|> :")
    folder, other = tmp_path / "run", tmp_path / "other"
    told(*FLAGS, f"--output={folder}", "--template-args", json.dumps({"chat_template": template}))
    for policy in folder / "final", folder / "best":
        if policy.exists():
            assert (policy / "chat_template.jinja").read_text() == template
    asked = ("--max-new-tokens=8", "--model", str(folder))
    config = folder / "config.json"
    edit_json(config, a_flag_of_old=1)
    out, _ = told(*FEW, *SHORT[:3], *asked, f"--output={other}")
    assert "its run had 16" in out and "--max-new-tokens 8" in out
    config.write_text("{")
    assert str(config) in refused(capsys, *FEW, *asked, begun=True)


def test_a_folder_that_is_taken_away_ends_the_run_in_a_line(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "run"

    def update_bar(bar, run, real=train.update_bar):
        real(bar, run)
        if run.step == 2:
            folder.rename(tmp_path / "moved")

    monkeypatch.setattr(train, "update_bar", update_bar)
    assert train.main([*FLAGS, "--save-every=2", f"--output={folder}"]) == 2
    line = capsys.readouterr().err.rpartition("train.py: ")[2]
    assert str(folder) in line and "continue with" not in line
    monkeypatch.undo()
    told("--resume", str(tmp_path / "moved"))
