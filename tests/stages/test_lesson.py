"""Is each plain function right? `python -m pytest -m lesson` asks them from [A] to [G].

In a folder that tests/tools/exercise.py wrote they are your own, and a stand-in takes the place of
every other function that is to be written. A failure begins with a sentence: the mistake that gives
what was found, or else the rule that was broken. Right numbers are worked out by hand.
"""
import inspect
import json
import math
import signal
from pathlib import Path
from unittest.mock import Mock, patch
import pytest
import torch
import advantage
import logprob
import loss
import reward
import sample
import train

pytestmark = pytest.mark.lesson
PATIENCE = 10                             # seconds for one call
# {what is asked: {what a mistake gives: its sentence}}; a reward has its text, truth and right too
KNOWN = json.loads(Path(__file__).with_name("known_mistakes.json").read_text(encoding="utf-8"))
CHANCES = [[0.2, 0.5, 0.3],               # of the tokens 0, 1, 2 where those before add up to 0
           [0.7, 0.2, 0.1],               # where they add up to 1, 4, 7 ...
           [0.1, 0.1, 0.8]]               # where they add up to 2, 5, 8 ...


class Table(torch.nn.Module):
    """A policy that is a table. The sum of all tokens before tells the row of the next one."""
    device = torch.device("cpu")

    def __init__(self, chances=CHANCES):
        super().__init__()
        # A logit may differ from its log-prob: here it is larger by 1.
        self.logits = torch.nn.Parameter(1 + torch.tensor(chances).log())

    def forward(self, input_ids, **how):
        self.fed = input_ids[0]
        return Mock(logits=self.logits[input_ids.cumsum(dim=1) % 3])


def logs(*chances):
    return [math.log(p) for p in chances]


def asked(function, *given, read=lambda found: found, **options):
    """What a function gives, as `read` reads it. An error and ten silent seconds get a sentence."""
    __tracebackhide__ = True
    name = function.__name__

    def ring(*_):                         # `except Exception` does not catch this
        pytest.fail(f"{name} does not end: a loop goes on for ever.")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        found = function(*given, **options)
    except AssertionError:                # the sentence of a stand-in
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        means = [meaning for words, meaning in KNOWN["an error"].items() if words in said]
        raise AssertionError(f"{(means or [name + ' stops with an error.'])[0]}\n{said}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert found is not None, f"{name} returns nothing."
    try:
        return read(found)
    except Exception as error:
        raise AssertionError(f"{name} returns something else than was asked for.") from error


def recognise(found, mistakes):
    """Fail if this is what a known mistake gives, {value: sentence}."""
    __tracebackhide__ = True
    for value, sentence in mistakes.items():
        if isinstance(found, float):
            value = pytest.approx(float(value), rel=1e-4, abs=1e-6)
        assert found != value, sentence


def close(found, right, sentence):
    __tracebackhide__ = True
    assert torch.as_tensor(found).tolist() == pytest.approx(right, rel=1e-4, abs=1e-5), sentence


def test_a_plain_answer():
    def drawn(*u, prompt=(0, 2), temperature=1.0, ends=(), chances=CHANCES):
        """The ids and what was fed, each put together as a word, and the log-probs."""
        __tracebackhide__ = True
        policy, given = Table(chances), list(prompt)
        u = torch.tensor(u, dtype=torch.float64)
        found = asked(sample.plain_answer, policy, given, u, temperature, list(ends),
                      read=lambda found: [[float(x) for x in part] for part in found])
        assert len(found) == 2, "Not two things are returned: the ids, and a log-prob for each."
        assert given == list(prompt), "The prompt itself is changed."
        assert all(x == int(x) for x in found[0]), "Ids and log-probs have changed places."
        ids, fed = ("".join(f"{x:.0f}" for x in row) for row in (found[0], policy.fed))
        return ids, fed, found[1]

    even = [[1 / 3] * 3] * 3
    assert len({drawn(*[0.5] * 9, chances=even)[0] for _ in range(3)}) == 1, (
        "The same u gives another answer: the draw takes other random numbers.")
    u = 0.02, 0.04, 0.04, 0.41, 0.97, 0.61, 0.16
    ids, fed, logprobs = drawn(*u, prompt=[1, 1], temperature=0.5)
    recognise(ids, KNOWN["ids"])
    assert len(ids) <= 7, "The answer is longer than u."
    assert "-" not in ids, "Ids are one too small: -1 is no token."
    assert drawn(0.2, chances=[[0.1, 0.2, 0.7]] * 3)[0] == "1", (
        "The running sum does not take the tokens in their order.")
    assert drawn(0.98, chances=[[0.9, 0.07, 0.03]] * 3)[0] == "2", (
        "Rare tokens are never drawn: a top-k or top-p cuts them off.")
    assert drawn(0.0, chances=[[0.0, 0.5, 0.5]] * 3)[0] == "1", (
        "A token of chance 0 is drawn: a running sum equal to u does not exceed it.")
    assert drawn(0.5, chances=[[0.5, 1e-9, 0.5]] * 3)[0] == "1", (
        "A token of chance 1e-9 is never drawn: float32 has lost it.")
    ended, _, its = drawn(0.9, 0.8, 0.5, ends=[1])
    recognise(ended, KNOWN["ids with an end token"])
    assert len(its) == len(ended), "There are not as many log-probs as ids."
    recognise(drawn(0.9, 0.8, 0.5, ends=[7, 1, 8])[0], {
        "212": "Of several end tokens only one ends the answer."})
    recognise(drawn(0.9, 0.8, ends=[0])[0], {"2": "An end token in the prompt ends the answer."})
    assert ids == "1001120", "Other tokens are drawn than u and the running sums tell."
    assert fed == "11100112", "What is fed is not the prompt, and the answer so far behind it."
    recognise(logprobs[0], KNOWN["log-prob of the first id"])
    # At temperature 0.5 chances are squared, and divided by their sum.
    close(logprobs, logs(0.01 / 0.66, 0.04 / 0.38, 0.04 / 0.38, 0.25 / 0.38, 0.04 / 0.54,
                         0.64 / 0.66, 0.49 / 0.54), "Some log-probs are not those of the ids.")


def test_b_rule_reward():
    """16 eggs a day, 3 are eaten and 4 go into a cake: 9 * 7 = 63 are left in a week."""
    for text, truth, right, mistakes in KNOWN["reward of this text, by this truth"]:
        found = asked(reward.rule_reward, text, truth, read=lambda x: float(torch.as_tensor(x)))
        recognise(found, mistakes)
        assert found == right, f"{text} earns {found}: that is none of the rule's sums."


def test_c_plain_advantages():
    def advantages(*rewards, G, dtype=torch.float64):
        __tracebackhide__ = True
        given = torch.tensor(rewards, dtype=dtype)
        kept = given.clone()
        found = asked(advantage.plain_advantages, given, G, read=torch.as_tensor)
        assert torch.equal(given, kept), "The rewards themselves are changed."
        assert found.shape == given.shape, "The advantages have another shape than the rewards."
        return found

    # mean 0.625, std 0.649519; mean 0.45, std 0.384057; mean 0.575, std 0.334477
    found = advantages(1.5, 1.0, 0.0, 0.0, 0.9, 0.3, -0.1, 0.7, 1.1, 0.6, 0.4, 0.2, G=4)
    recognise(found[5].item(), KNOWN["advantage of answer 5"])
    for r in (0.0, 0.5, 1.5):             # those of the rule
        equal = advantages(r, r, r, G=3)
        assert not equal.isnan().any(), "Equal rewards give 0 / 0: nothing is added to the std."
        close(equal, [0, 0, 0], "Equal rewards give something else than 0.")
    # mean and std are 0.5e-8, and 0.5 / (0.5 + 1) is a third
    tiny = advantages(1e-8, 0.0, G=2)
    recognise(tiny[0].item(), KNOWN["advantage of a reward of 1e-8"])
    recognise(advantages(2e-4, 0.0, G=2)[0].item(), KNOWN["advantage of a reward of 2e-4"])
    close(advantages(*[0.7] * 7, G=7, dtype=torch.float32), [0] * 7,
          "Seven rewards of 0.7 give something else than 0: rounding is taken for a difference.")
    close(tiny, [1 / 3, -1 / 3], "Something else than 1e-8 is added to the std.")
    close(found, [1.34715, 0.57735, -0.96225, -0.96225, 1.17170, -0.39057, -1.43208, 0.65094,
                  1.56961, 0.07474, -0.52321, -1.12115],
          "An answer's advantage is not its distance from its siblings' mean, in their stds.")


def test_d_plain_logprobs():
    """A prompt 1 0 and the answer 2 1, then padding; a prompt 1 and the answer 1 0 2 1."""
    ids = torch.tensor([[1, 0, 2, 1, 0], [1, 1, 0, 2, 1]])
    labels = torch.tensor([[-100, -100, 2, 1, -100], [-100, 1, 0, 2, 1]])
    policy = Table()
    found = asked(logprob.plain_logprobs, policy, ids, labels, read=torch.as_tensor)
    recognise(str([*found.shape]), KNOWN["shape of log-probs"])
    assert found.shape == (2, 4), "The log-probs have another shape than (N, S-1)."
    assert found.requires_grad, "The log-probs carry no gradient."
    assert found.isfinite().all(), "Some log-probs are infinite, or no numbers."
    zeros = "".join(f"{t}" for t, x in enumerate(found.flatten()) if x == 0)
    recognise(zeros, KNOWN["entries that are 0"])
    recognise(found[1].sum().item(), KNOWN["log-probs of row 1, added up"])
    close(found[0, :1], [0], "A prompt token has an entry that is not 0.")
    close(found[0, 3:], [0], "Padding has an entry that is not 0.")
    close(found.flatten(), [0, *logs(0.1, 0.5), 0, *logs(0.2, 0.1, 0.8, 0.2)],
          "An answer is not scored by its tokens' chances.")
    hot = asked(logprob.plain_logprobs, policy, ids, labels, temperature=0.5)
    recognise(hot[1].sum().item(), KNOWN["the same at temperature 0.5"])
    close(hot[0, 1:3], logs(0.01 / 0.54, 0.25 / 0.38), "The temperature does something else.")
    assert asked(logprob.plain_logprobs, policy.bfloat16(), ids, labels).dtype == torch.float32, (
        "The log-probs of a bfloat16 model are computed in bfloat16.")


def loss_of(log_ratios, advantages, d=0.0, mask=None, kl_coef=0.0, dtype=torch.float64):
    """plain_loss, given log pi - log pi_old and d = log pi_ref - log pi -> it, and its gradient."""
    __tracebackhide__ = True
    log_ratios, advantages, d = (torch.tensor(x, dtype=dtype) for x in (log_ratios, advantages, d))
    mask = torch.ones_like(log_ratios) if mask is None else torch.tensor(mask)
    old = -torch.arange(1, 1 + log_ratios.numel(), dtype=dtype).view_as(log_ratios)
    logp = (old + log_ratios).requires_grad_()
    found = asked(loss.plain_loss, logp, old, (logp + d).detach(), advantages, mask.bool(), 0.3,
                  kl_coef)
    assert isinstance(found, torch.Tensor), "The loss is a plain number, which has no gradient."
    assert found.ndim == 0, "The loss is not one number."
    assert found.requires_grad, "The loss carries no gradient."
    return found.item(), torch.autograd.grad(found, logp)[0]


def test_ef_plain_loss():
    # Ratios 1.6487 0.8187 -, 1.4918 0.5488 1.1052, 0.6065 - -; clipped they are in 0.7 to 1.3
    found, slopes = loss_of([[0.5, -0.2, 0.9], [0.4, -0.6, 0.1], [-0.5, 0.3, -0.8]],
                            [1.2, -1.5, 0.5],
                            d=[[0.3, -0.4, 0.7], [0.2, 0.5, -0.1], [-0.6, 0.4, 0.2]],
                            mask=[[1, 1, 0], [1, 1, 1], [1, 0, 0]], kl_coef=0.1)
    recognise(found, KNOWN["loss"])
    recognise(slopes[0, 1].item(), KNOWN["gradient of the second token"])
    close(loss_of([[0.0]], [1.0])[0], -1, "Of one token with ratio 1 and A = 1 the loss is not -1.")
    close(loss_of([[0.1]], [1.0])[0], -1.10517, "The ratio is not what the log-probs say.")
    close(loss_of([[0.25]], [1.0])[0], -1.28403, "A ratio within 1 - eps and 1 + eps is changed.")
    close(loss_of([[0.5], [-0.5]], [1.0, -1.0])[0], -0.3, "The clip is not at 1 - eps and 1 + eps.")
    close(loss_of([[0.5], [-0.5]], [-1.0, 1.0])[0], (1.64872 - 0.60653) / 2,
          "The clip hides a change for the worse.")
    close(loss_of([[0.0]], [0.0], d=0.5, kl_coef=1.0)[0], 0.148721, "The KL is not k3.")
    close(loss_of([[0.0, 0.5]], [1.0], d=[[0.0, 1.0]], mask=[[1, 0]], kl_coef=1.0)[0], -1,
          "What stands outside of the mask counts.")
    close(loss_of([[0.0] * 3] * 2, [1.0, -1.0], mask=[[1, 0, 0], [1, 1, 1]])[0], 0,
          "A long answer and a short one do not count the same.")
    close(found, 0.0335721, "The loss is none of what was tried, and not right.")
    close(slopes.flatten(), [-0.005831, -0.158251, 0, 0.246177, -0.007208, 0.185253,
                             -0.086049, 0, 0], "The loss is right, but its gradient is not.")
    found, _ = loss_of([[0.0]], [0.0], d=1e-4, kl_coef=1.0, dtype=torch.float32)   # d * d / 2
    assert 4.9e-9 < found < 5.1e-9, "In float32 the KL of d = 1e-4 is nothing but rounding."


# Two questions and two answers to each, their padding behind them
IDS = torch.tensor([[0, 2, 1, 0], [0, 2, 2, 1], [1, 0, 2, 0], [1, 0, 1, 1]])
LABELS = torch.tensor([[-100, -100, 1, -100], [-100, -100, 2, 1], [-100, -100, 2, -100],
                       [-100, -100, 1, 1]])
MASK = LABELS[:, 1:] != -100
PAID = {("b", "1"): 1.5, ("cb", "1"): 0.5, ("c", "2"): 0.0, ("bb", "2"): 1.5}
ANSWERS = [response for response, _ in PAID]
REWARDS, A = torch.tensor([[1.5, 0.5, 0.0, 1.5], [1.0, -1.0, -0.5, 0.5]])


class Rows(torch.nn.Module):
    """A policy that gives each token of these rows a log-prob of its own."""
    def __init__(self, first):
        super().__init__()
        self.logp = torch.nn.Parameter((first - torch.arange(12.0).view(4, 3) / 10) * MASK)


def same(found, *tables):
    return any(found.shape == table.shape and torch.allclose(found, table) for table in tables)


def stepped(updates):
    """plain_step with a stand-in for every other stage, which looks at what it is given."""
    policy, reference = Rows(-1.0), Rows(-3.0).requires_grad_(False)
    first = policy.logp.detach().clone()
    drawn, terms, done = [], [], []                       # rollouts, losses, updates

    def sample_groups(*given, **how):
        call = inspect.signature(sample.sample_groups).bind(*given, **how)
        call.apply_defaults()
        assert not drawn, "The answers are drawn anew within one step."
        right = dict(model=policy, prompts=["x", "y"], group_size=2, max_new_tokens=5,
                     temperature=1, generator=["g", "h"], plain=True)
        for name, value in right.items():
            assert call.arguments[name] == value, f"sample_groups is asked with another {name}."
        drawn.append(sample.Rollout(IDS, LABELS, first.clone(), ANSWERS, MASK.any(dim=1)))
        return drawn[0]

    def rule_reward(response, truth):
        assert response in ANSWERS, "Something else is scored than what the policy wrote."
        assert (response, truth) in PAID, "An answer is scored by the truth of another question."
        return PAID[response, truth]

    def plain_advantages(rewards, group_size, eps=1e-8):
        assert same(rewards, REWARDS), "Something else is compared than the rewards."
        assert group_size == 2, "Other answers are compared than the G to one question."
        return A.clone()

    def plain_logprobs(model, input_ids, labels, temperature=1.0):
        rows = [n for row in input_ids for n in range(4) if torch.equal(row, IDS[n])]
        assert len(rows) == len(input_ids), "Other ids are scored than those that were sampled."
        assert torch.equal(labels, LABELS[rows]), "Other labels are used than the rollout's."
        assert temperature == 1, "The tokens are scored at another temperature than 1."
        return model.logp[rows] * 1

    def plain_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2,
                   kl_coef=0.04):
        assert (clip_eps, kl_coef) != (0.01, 0.3), "clip_eps and kl_coef have changed places."
        assert (clip_eps, kl_coef) == (0.3, 0.01), "clip_eps or kl_coef does not arrive."
        assert not old_logprobs.requires_grad, "A gradient flows through pi_old, which is past."
        assert not same(advantages, REWARDS), "The rewards take the place of the advantages."
        terms.append((logprobs, old_logprobs, ref_logprobs, advantages, mask))
        found = -(advantages[:, None] * logprobs * mask).sum(dim=1).mean()
        assert found.requires_grad, "The log-probs of the policy carry no gradient."
        return found

    def look(*_):
        """Before each update: what the loss was made of, and its gradient."""
        assert terms, "An update is made before there is a loss."
        now, away = policy.logp.detach(), reference.logp
        logp, old, ref, given, mask = (torch.cat(parts).detach() for parts in zip(*terms))
        assert len(logp) >= 4, "The loss is not of all answers."
        assert len(logp) == 4, "The loss is computed again without an update."
        assert not (same(old, away) and same(ref, first)), "pi_old and ref have changed places."
        assert not same(logp, away), "The reference is trained in place of the policy."
        assert same(logp, now), "The log-probs are not those of the policy as it is now."
        assert not same(old, away), "The reference takes the place of pi_old."
        assert same(old, first), "pi_old is asked again after an update, but it is past."
        assert not same(ref, now, first), "The policy takes the place of the reference."
        assert same(ref, away), "ref is not what the reference says."
        assert same(given, A), "Other advantages are used than those of plain_advantages."
        mask = mask.bool()
        assert not mask.all(), "The mask holds prompt and padding, too."
        assert not same(mask, LABELS[:, :-1] != -100), "The mask is one place too late."
        assert not same(mask, IDS[:, 1:] != 0), "The mask tells padding by its id, and has prompts."
        assert same(mask, MASK), "The mask is not the rollout's."
        right = -A[:, None] * MASK / 4
        grad = torch.zeros(4, 3) if policy.logp.grad is None else policy.logp.grad
        assert grad.any(), "There is no gradient: never asked for, or emptied before the step."
        assert not same(grad, -right), "The gradient points the wrong way."
        if done:
            assert not same(grad, 2 * right), "The gradient of the last update is still in it."
        whole = len(terms) == 1
        assert same(grad, right) or whole, "Parts of the batch do not count by their sizes."
        assert same(grad, right), "The gradient is not that of the loss."
        done.append(whole)
        terms.clear()

    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(look)
    no_text = AssertionError("A text is tokenised: its ids may be others than were sampled.")
    with (patch.multiple(train, sample_groups=sample_groups, plain_advantages=plain_advantages,
                         plain_logprobs=plain_logprobs, plain_loss=plain_loss),
          patch.object(reward, "rule_reward", rule_reward)):
        found = asked(train.plain_step, policy, reference, optimizer, Mock(side_effect=no_text),
                      ["x", "y"], ["1", "2"], G=2, T=5, generators=["g", "h"], updates=updates,
                      clip_eps=0.3, kl_coef=0.01, read=torch.as_tensor)
    assert done, "No update is made: the policy stays as it is."
    assert len(done) == updates, "There are not as many updates as were asked for."
    assert same(found, REWARDS), "Something else is returned than the rewards."


def test_g_plain_step():
    stepped(updates=1)
    stepped(updates=3)
