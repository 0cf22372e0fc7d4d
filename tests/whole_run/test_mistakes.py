"""A mistake in one of the six files shows its own place: a traceback, never a line of bad input."""
from types import FunctionType
import pytest
from files import FEW
import advantage
import logprob
import loss
import reward
import sample
import train

FLAGS = (*FEW, "--steps=1", "--prompts-per-step=2", "--group-size=4", "--max-new-tokens=16",
         "--eval-limit=2", "--lr=1e-4")


@pytest.mark.parametrize("module, name, flags", [
    (sample, "draw", ""), (sample, "plain_answer", "--plain"), (sample, "decode", "--no-fast"),
    (sample, "chat_prompt", ""),
    (reward, "read_problem", ""), (reward, "is_equal", "--reward rule"), (advantage, "is_flat", ""),
    (logprob, "token_logprobs", ""), (loss, "kl_estimate", ""), (train, "backward", ""),
    (train, "make_optimizer", ""), (train, "curves_of", "")])
def test_a_typo_has_its_traceback(monkeypatch, tmp_path, module, name, flags):
    # a function that stands in that file and names what is not defined
    code = compile("def function(*given, **how):\n    return not_defined", module.__file__, "exec")
    typo, found = FunctionType(code.co_consts[0], {}), getattr(module, name)
    for stage in (sample, reward, advantage, logprob, loss, train):  # where it is imported, too
        if vars(stage).get(name) is found:
            monkeypatch.setattr(stage, name, typo)
    with pytest.raises(NameError, match="not_defined") as caught:
        train.main([*FLAGS, *flags.split(), f"--output={tmp_path / 'run'}"])
    *_, last = caught.traceback
    assert str(last.path) == module.__file__
    begun = (tmp_path / "run" / "checkpoint.safetensors").exists()
    notes = getattr(caught.value, "__notes__", [])
    assert any("--resume" in note for note in notes) == begun
    is_fast = begun and (module is logprob or name in ("draw", "decode"))
    assert any("--no-fast" in note for note in notes) == is_fast


def test_only_what_is_wrong_with_input_is_one_line():
    with pytest.raises(reward.BadInput, match="^--model x: of somebody else$"):
        with reward.blame("--model x:"):
            raise OSError("of somebody\nelse")
    with pytest.raises(TypeError), reward.blame("--data:"):
        raise TypeError("of ours")
