"""Is each plain function right? `python -m pytest -m lesson` asks them from [A] to [G].

In a folder that tests/tools/exercise.py wrote they are your own. All numbers are worked out by
hand. A stand-in takes the place of every other function that is to be written. A failure begins
with a sentence: the rule that was broken.
"""
import math
from types import SimpleNamespace
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
CHANCES = [[0.2, 0.5, 0.3],               # of the tokens 0, 1, 2 after token 0
           [0.7, 0.2, 0.1],               # after token 1
           [0.1, 0.1, 0.8]]               # after token 2


class Table(torch.nn.Module):
    """A policy that is a table: its logits are the logarithms of the chances."""
    device = torch.device("cpu")

    def __init__(self, chances):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(chances).log())

    def forward(self, input_ids, **how):
        return SimpleNamespace(logits=self.logits[input_ids])


def logs(*chances):
    return [math.log(p) for p in chances]


def close(found, expected, sentence):
    __tracebackhide__ = True
    found = torch.as_tensor(found).tolist()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), sentence


def test_a_plain_answer():
    def drawn(u, prompt, temperature=1.0, ends=(), chances=CHANCES):
        u = torch.tensor(u, dtype=torch.float64)
        return sample.plain_answer(Table(chances), prompt, u, temperature, list(ends))

    ids, _ = drawn([0.6], [1, 0])
    assert len(ids) == 1, "The prompt is no part of the answer."
    ids, _ = drawn([0.95], [1])           # the running sums are 0.7, 0.9, 1
    assert ids == [2], "Rare tokens are drawn, too: no top-k and no top-p cuts them off."
    ids, logprobs = drawn([0.9, 0.9], [0], ends=[2])
    assert ids == [2], "The end token belongs to the answer, and nothing follows it."
    close(logprobs, logs(0.3), "The end token has its log-prob, as any other.")
    ids, _ = drawn([0.0], [0], chances=[[0.0, 0.5, 0.5]])
    assert ids == [1], "The first sum that exceeds u, not one equal to it (<=): token 0 has p = 0."
    # At temperature 0.5 chances are squared: 0.04, 0.25, 0.09 over 0.38; the sums 0.11, 0.76, 1
    ids, logprobs = drawn([0.15], [0], temperature=0.5)
    assert ids == [1], "The logits are divided by the temperature before the draw."
    close(logprobs, logs(0.25 / 0.38), "Log-probs are those of the distribution that drew.")
    # The running sums after 0 are 0.2, 0.7, 1; after 1 they are 0.7, 0.9, 1
    ids, logprobs = drawn([0.6, 0.8, 0.05, 0.95], [1, 0])
    assert ids == [1, 1, 0, 2], "After all before it: the first token whose running sum exceeds u."
    close(logprobs, logs(0.5, 0.2, 0.7, 0.3), "Each log-prob is log p of its token.")


def test_b_extract_boxed():
    boxed = reward.extract_boxed
    assert boxed("It must be 63.") is None, "Without a box there is no answer."
    found = boxed(r"\boxed{50}? No, \boxed{63}")
    assert found == "63", "The last box counts: a model that corrects itself means its last word."
    found = boxed(r"So \boxed{\frac{126}{2}}.")
    assert found == r"\frac{126}{2}", "A box ends where its braces balance, not at the first brace."
    assert boxed(r"\boxed{5} so \boxed{7") == "5", "A box that is cut does not count."
    assert boxed(r"\boxed{5} so \boxed{ }") == "5", "A box that is empty does not count."


def test_b_rule_reward():
    """16 eggs a day, 3 are eaten and 4 go into a cake: 9 * 7 = 63 are left in a week."""
    def box_of(text):                     # in place of extract_boxed
        return text.split("{")[1].split("}")[0] if "{" in text else None

    with patch.object(reward, "extract_boxed", box_of):
        score = reward.rule_reward
        assert score("It must be 63.", "63") == 0, "Without a box an answer earns nothing."
        assert score(r"Some \boxed{50}.", "63") == 0.5, "A box earns 0.5, right or wrong."
        assert score(r"So \boxed{63}.", "63") == 1.5, "A right box earns 1.0 more."
        assert score(r"So \boxed{63.0}.", "63") == 1.5, "Numbers are compared, not texts."
        assert score(r"So \boxed{62.995}.", "63") == 0.5, "Nearly is not equal."


def test_c_plain_advantages():
    def advantages(*rewards, G):
        rewards = torch.tensor(rewards, dtype=torch.float64)
        return advantage.plain_advantages(rewards, G)

    for r in (0.0, 0.5, 1.5):             # those of the rule
        close(advantages(r, r, r, G=3), [0, 0, 0], "Equal rewards give 0, and 1e-8 prevents 0 / 0.")
    close(advantages(3.0, 1.0, G=2), [1, -1], "The std divides by G, not by G - 1 as torch.std.")
    # mean and std are 0.5e-8, and 0.5 / (0.5 + 1) is a third
    found = advantages(1e-8, 0.0, G=2)
    close(found, [1 / 3, -1 / 3], "A std below 1e-8 does not say that rewards are equal.")
    # mean 0.625, std 0.649519; mean 0.45, std 0.384057
    close(advantages(1.5, 1.0, 0.0, 0.0, 0.9, 0.3, -0.1, 0.7, G=4),
          [1.34715, 0.57735, -0.96225, -0.96225, 1.17170, -0.39057, -1.43208, 0.65094],
          "An answer is compared with its own siblings: r minus their mean, over their std.")


def test_d_plain_logprobs():
    """A prompt 1 0 and the answer 2 1, then padding; a prompt 0 and the answer 2 0 1 2."""
    ids = torch.tensor([[1, 0, 2, 1, 0], [0, 2, 0, 1, 2]])
    labels = torch.tensor([[-100, -100, 2, 1, -100], [-100, 2, 0, 1, 2]])
    policy = Table(CHANCES)
    found = logprob.plain_logprobs(policy, ids, labels)
    assert found.shape == (2, 4), "Every token keeps its log-prob, (N, S-1): no sum of an answer."
    close(found[0, [0, 3]], [0, 0], "Prompt and padding are not scored: their entries are 0.")
    close(found[0, 1:3], logs(0.3, 0.1), "Entry t is of token t + 1, by the logits at t.")
    close(found[1], logs(0.3, 0.1, 0.5, 0.1), "Every token of an answer is scored, its end too.")
    squared = logprob.plain_logprobs(policy, ids, labels, temperature=0.5)[0, 1:3]
    close(squared, logs(0.09 / 0.38, 0.01 / 0.66), "The logits are divided by the temperature.")
    assert found.requires_grad, "A gradient flows through the log-probs."


def loss_of(log_ratios, advantages, d=0.0, mask=None, kl_coef=0.0):
    """plain_loss, given log-ratios log pi - log pi_old and d = log pi_ref - log pi."""
    log_ratios, advantages, d = (torch.tensor(x).double() for x in (log_ratios, advantages, d))
    mask = torch.ones_like(log_ratios) if mask is None else torch.tensor(mask)
    old = torch.full_like(log_ratios, -2.0)
    logp = old + log_ratios
    return loss.plain_loss(logp, old, logp + d, advantages, mask.bool(), 0.2, kl_coef)


def test_ef_plain_loss():
    close(loss_of([[0.0]], [1.0]), -1, "The loss is minus the objective, which shall grow.")
    # e^0.1 and e^-0.1 are 1.10517 and 0.90484; of the whole answer it would be e^0
    found = loss_of([[0.1, -0.1]], [1.0])
    close(found, -1.00500, "The ratio is taken token by token, not of the whole answer.")
    found = loss_of([[0.0, 0.1]], [1.0], mask=[[1, 0]])
    close(found, -1, "Only the answer's tokens count.")
    found = loss_of([[0.25]], [-1.0])     # e^0.25 is 1.28403; clipped it would be 1.2
    close(found, 1.28403, "The minimum counts: clipping never hides a change for the worse.")
    found = loss_of([[0.25], [-0.3]], [1.0, -1.0])                   # e^-0.3 is 0.74082
    close(found, -(1.2 - 0.8) / 2, "The ratio is clipped to 1 - eps and 1 + eps.")
    found = loss_of([[0.0]], [0.0], d=0.5, kl_coef=1.0)
    assert found > 0, "beta KL makes the loss larger."
    close(found, 0.148721, "KL is exp(d) - d - 1 with d = log ref - log pi, not the reverse.")
    logp, ref = torch.tensor([[-1e-4]]), torch.tensor([[0.0]])       # d is 1e-4, d²/2 is 5e-9
    found = loss.plain_loss(logp, logp, ref, torch.zeros(1), logp < 0, 0.2, 1.0)
    assert 4.9e-9 < found < 5.1e-9, "exp(d) - d - 1 is 0 in float32; expm1(d) - d is exact."
    found = loss_of([[0.0] * 3] * 2, [1.0, -1.0], mask=[[1, 0, 0], [1, 1, 1]])
    close(found, 0, "First an answer's mean, then that of answers: each counts the same.")
    # Ratios 1.28403 0.74082, times A -1.83886 -1.06093; clipped -1.71852 -1.14568
    close(loss_of([[0.25, -0.3]], [-1.4321], d=[[0.5, -0.5]], kl_coef=0.04),
          (1.83886 + 1.14568) / 2 + 0.04 * (0.148721 + 0.106531) / 2,
          "The loss is minus the mean of min(w A, clip(w) A) - beta KL.")


PAIRS = torch.tensor([[0, 1], [0, 2], [1, 0], [1, 2]])               # a prompt and its answer
ANSWERS = ["b", "c", "a", "c"]
REWARDS, A = torch.tensor([[1.5, 0.5, 0.0, 1.5], [1, -1, -1, 1]])


def stepped(updates):
    """How far plain_step moves these pairs' logits, with stand-ins for the other stages."""
    compared = []

    def sample_groups(*given, plain=False, **how):
        assert plain, "The answers are drawn by plain_answer: plain=True."
        mask = torch.ones(4, 1, dtype=bool)
        return SimpleNamespace(input_ids=PAIRS, labels=PAIRS, responses=ANSWERS, mask=mask)

    def score_responses(responses, *given, **how):
        assert responses == ANSWERS, "What the policy wrote is scored, and not its prompt."
        return REWARDS

    def plain_logprobs(model, input_ids, labels, temperature=1.0):   # log p, until logits move
        return model.logits[input_ids[:, :-1], input_ids[:, 1:]]

    def plain_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps, kl_coef):
        assert not old_logprobs.requires_grad, "pi_old stands still: no gradient flows through it."
        compared.append((old_logprobs, ref_logprobs))
        return -(advantages[:, None] * logprobs * mask).sum(dim=1).mean()

    no_text = AssertionError("Training takes the ids that were sampled, and tokenises no text.")
    policy, reference = Table(CHANCES), Table(CHANCES[::-1]).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with patch.multiple(train, sample_groups=sample_groups, score_responses=score_responses,
                        plain_advantages=lambda *given, **how: A, plain_loss=plain_loss,
                        plain_logprobs=plain_logprobs):
        rewards = train.plain_step(policy, reference, optimizer, Mock(side_effect=no_text),
                                   ["x", "y"], ["1", "2"], G=2, updates=updates)
    assert torch.equal(rewards, REWARDS), "The rewards are returned."
    old, ref = (torch.cat(found)[:, 0] for found in zip(*compared))
    close(old, updates * logs(0.5, 0.3, 0.7, 0.1), "pi_old is asked once, before the first update.")
    close(ref, updates * logs(0.1, 0.8, 0.7, 0.1), "ref is of the reference, not of the policy.")
    return (policy.logits - Table(CHANCES).logits)[PAIRS[:, 0], PAIRS[:, 1]]


def test_g_plain_step():
    # The gradient of -mean(A logit) is -A / 4, and an update goes against it by the rate 0.1.
    way = [0.025, -0.025, -0.025, 0.025]
    close(stepped(1), way, "The gradient is of the whole batch: parts of it count by their sizes.")
    close(stepped(3), [3 * x for x in way], "zero_grad() empties the gradient of the last update.")
