"""Flags, config files and defaults: what wins over what, and what they become."""
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from files import FEW, SHORT, TINY, edit_json, lines_of
import train


def test_the_help(run_here):
    out = run_here("train.py", "--help")
    for name in train.FIELDS:
        assert len(re.findall(rf"\n  {train.flag_of(name)}[ ,\n]", out)) == 1, name
    assert "_" not in "".join(re.findall(r"\n  --(\S+)", out))


# --- Settings: the defaults, over them a config file, over it the command line --------------------
def test_command_line_over_config_over_defaults(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "c.json").write_text(json.dumps(
        {"model": "Qwen/Qwen2.5-0.5B", "lr": 0.5, "scale_by_std": False, "data": "d.jsonl",
        "kl_coef": 0, "kl_band": [0.1, 0.2], "clip_eps_high": None, "reward": ["d.jsonl", "rule"]}))
    s = train.parse([f"--config={tmp_path / 'c.json'}", "--kl-coef=0.3"])
    assert (s.lr, s.scale_by_std, s.kl_coef, s.kl_band) == (0.5, False, 0.3, [0.1, 0.2])
    assert s.clip_eps_high is None and s.steps == 500 and s.system_prompt == train.BOXED
    assert s.data == str(tmp_path / "d.jsonl")            # from the folder of the file
    assert s.reward == [str(tmp_path / "d.jsonl"), "rule"] and s.model == "Qwen/Qwen2.5-0.5B"


def test_the_tiny_policy_alone_brings_its_config(tmp_path):
    own = json.loads((TINY / "grpo.json").read_text())
    s = train.parse([])
    assert (s.steps, s.lr, s.system_prompt) == (own["steps"], own["lr"], "")
    assert s.eval_data == str(TINY / "test.jsonl") and s.config == str(TINY / "grpo.json")
    assert train.parse([f"--model={TINY}"]).steps == 500
    (tmp_path / "c.json").write_text('{"lr": 0.5}')       # without a model: over the tiny policy's
    s = train.parse([f"--config={tmp_path / 'c.json'}"])
    assert (s.lr, s.steps) == (0.5, own["steps"]) and s.config == str(tmp_path / "c.json")


def test_what_flags_become(monkeypatch, tmp_path):
    """Paths are absolute, so that a resumed run finds them."""
    monkeypatch.chdir(tmp_path)
    for name in ("d.jsonl", "e.jsonl", "r.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "m").mkdir()
    s = train.parse(["--model=m", "--data=d.jsonl", "--eval-data=e.jsonl", "--reward=r.py:f"])
    assert (s.model, s.data, s.eval_data) == tuple(
        str(tmp_path / name) for name in ("m", "d.jsonl", "e.jsonl"))
    assert s.reward == [f"{tmp_path / 'r.py'}:f"]
    assert train.parse(["--model=Qwen/Qwen2.5-0.5B", "--data=gsm8k"]).data == "gsm8k"
    # A switch is on, off, or left to the program; a list has several values
    assert [train.parse(flags).offload for flags in ([], ["--offload"], ["--no-offload"])] == [
        None, True, False]
    # Rewards and their weights that are given twice are added; of all others the last counts
    s = train.parse("--reward rule --reward think rule --reward-weights=1 --reward-weights 2 -0.5 "
                    "--steps=3 --lr=0.1 --steps 4".split())
    assert (s.reward, s.reward_weights, s.steps) == (["rule", "think", "rule"], [1, 2, -0.5], 4)
    # A learning rate for all weights is none for LoRA's factors
    assert train.parse(["--model=x", "--lora-rank=4"]).learning_rate == 1e-4
    assert train.parse(["--lora-rank=4", "--lr=1e-5"]).learning_rate == 1e-5
    # Held-out problems of a config do not judge another data set
    (tmp_path / "c.json").write_text('{"data": "d.jsonl"}')
    assert train.parse(["--data=d.jsonl"]).eval_data == ""
    assert train.parse(["--config=c.json"]).eval_data == ""
    assert train.parse(["--data=x", "--eval-data=y"]).eval_data == "y"


def test_the_default_limit_of_an_answer_leaves_half_of_the_positions(tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    for positions, limit in ((128, 64), (4096, 512)):
        edit_json(model / "config.json", max_position_embeddings=positions)
        s = train.plan_memory(train.parse(["--model", model, "--device=cpu"]))
        assert s.max_new_tokens == limit


def test_the_command_that_goes_on_is_the_one_that_began(monkeypatch):
    assert train.command("train.py", "--resume", "x").startswith(f"{sys.executable} ")
    monkeypatch.setattr(train, "WORLD_SIZE", 2)
    assert train.command("train.py", "--resume", "x").startswith("torchrun --nproc-per-node=2 /")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")           # of two nodes
    assert train.command("train.py").startswith("torchrun --nproc-per-node=1 /")


def test_template_arguments_stay_with_the_run(capsys, run_here, tmp_path):
    """Begun from Python, with numbers and paths; they reach prompts, config.json and sample.py."""
    model = shutil.copytree(TINY, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if hint %} Ben {% endif %}")
    folder = tmp_path / "run"
    flags = [*FEW, *SHORT, "--steps", 1, "--eval-limit", 2, "--model", model, "--output", folder,
             f"--config={TINY / 'grpo.json'}", '--template-args={"hint": true}']
    with ThreadPoolExecutor() as threads:
        assert threads.submit(train.main, flags).result() == 0
    prompts = [record["prompt"] for record in lines_of(folder / "samples.jsonl")]
    assert all(prompt.endswith("<|assistant|> Ben ") for prompt in prompts) and prompts
    assert train.parse([f"--config={folder / 'config.json'}"]).template_args == {"hint": True}
    capsys.readouterr()
    for more in ([], ["--template-args", '{"hint": 0}']):
        first = run_here("sample.py", "--model", folder, "Bob ?", *more).splitlines()[0]
        assert first.endswith("<|assistant|> Ben ") == (not more)
