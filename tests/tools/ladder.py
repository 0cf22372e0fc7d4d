"""A ladder of ten small worlds: each asks a question about GRPO. Guess, then look.

    python tests/tools/ladder.py           # prints what each rung shows, and writes ladder.html
    python tests/tools/ladder.py 4         # asks the fourth question, waits for Enter, then shows
    python tests/tools/ladder.py --tiny    # 1, 4 and 10 on the tiny policy, too: three minutes

A world is a table of logits, so its true reward is an exact sum. plain_advantages, plain_logprobs
and plain_loss train it, from this file's folder or one above. Beside yours it judges yours.
"""
import argparse
import inspect
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = next(x for x in Path(__file__).resolve().parents if (x / "loss.py").is_file())
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tools")]
import advantage  # noqa: E402
from advantage import plain_advantages  # noqa: E402
from logprob import plain_logprobs  # noqa: E402
from loss import KL_ESTIMATORS, grpo_loss, plain_loss  # noqa: E402

SEEDS, OFF = 20, 1e9                        # questions side by side; a clip_eps that never clips
centred = partial(advantage.group_advantages, scale_by_std=False)


class Table(torch.nn.Module):
    """A language model whose next token depends on the last one alone: a row of logits for each."""
    device = torch.device("cpu")

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())

    def forward(self, input_ids, **options):
        return SimpleNamespace(logits=self.logits[input_ids])

    def p(self, temperature=1.0):
        """Its probabilities; all are equal where a seed has diverged."""
        p = (self.logits.detach() / temperature).softmax(dim=1)
        return p.nan_to_num(1 / p.shape[1])


def rows(question, answers):
    """(N,) and (N, T) -> ids and labels (N, 1 + T): the question's id, then the answer's."""
    ids = torch.cat([question[:, None], answers], dim=1)
    return ids, torch.cat([torch.full_like(question, -100)[:, None], answers], dim=1)


def update(policy, optimizer, ids, labels, A, old=None, ref=None, loss=plain_loss, **options):
    """One gradient step. Without `old` pi_old is pi, and every ratio is 1."""
    logp = plain_logprobs(policy, ids, labels)                                     # [D] (N, S-1)
    old = logp.detach() if old is None else old
    ref = logp.detach() if ref is None else ref
    value = loss(logp, old, ref, A, labels[:, 1:] != -100, **{"kl_coef": 0.0} | options)  # [E] [F]
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def trained(start, worth, advantages=plain_advantages, steps=100, lr=0.5, G=8, updates=1,
            drawn_at=1.0, old_at=1.0, fresh=True, ratio=True, coin=False, **options):
    """V answers, log-probs at the start and rewards (V,) -> probabilities (steps + 1, SEEDS, V)."""
    V = len(start)
    torch.manual_seed(torch.initial_seed())                       # every arm draws the same numbers
    first, policy = (Table(start.expand(max(SEEDS, V), V)) for _ in range(2))
    optimizer = torch.optim.SGD(policy.parameters(), lr * SEEDS)   # the loss is a mean of questions
    question = torch.arange(SEEDS).repeat_interleave(G)
    history = [policy.p()[:SEEDS]]
    for _ in range(steps):
        sampler = policy if fresh else first
        answer = torch.multinomial(sampler.p(drawn_at)[:SEEDS], G, True).flatten()  # [A] (N,)
        rewards = torch.bernoulli(worth[answer]) if coin else worth[answer]        # [B]
        A = advantages(rewards, G)                                                 # [C]
        ids, labels = rows(question, answer[:, None])
        with torch.no_grad():
            old = plain_logprobs(sampler, ids, labels, old_at) if ratio else None
            ref = plain_logprobs(first, ids, labels) if "kl_coef" in options else None
        for _ in range(updates):
            update(policy, optimizer, ids, labels, A, old, ref, **options)
        history.append(policy.p()[:SEEDS])
    return torch.stack(history)


# --------------------------------------------------------------------------------------------------
# Ten rungs; their questions and lessons stand in ladder.md. Each returns its curves, {arm: (steps,
# seeds)}, then what the ends of the arms must be, and perhaps more numbers.

def a_baseline():
    """Twelve answers, one of them right; then every reward gets 10 more."""
    worth, start, runs = torch.eye(12)[3], torch.zeros(12), {}
    runs["r"] = trained(start, worth, lambda r, G: r, 150)[..., 3]
    runs["r + 10"] = trained(start, worth + 10, lambda r, G: r, 150)[..., 3]
    runs["r + 10, GRPO"] = trained(start, worth + 10, plain_advantages, 150)[..., 3]
    # Seen?
    gradients = [(worth - b)[:, None] * (torch.eye(12) - 1 / 12) for b in (0, -10, 1 / 12)]
    noise = [g.var(dim=0, correction=0).sum().sqrt() / g.mean(dim=0).norm() for g in gradients]
    exact = "noise / signal of a gradient: r {:.1f}, r + 10 {:.0f}, r - mean {:.1f}".format(*noise)
    return runs, lambda _, raw, grpo: raw < 0.5 < 0.9 < grpo, exact


def the_std():
    """Four right answers, of which the last earns more: a point, or 1/64."""
    runs = {}
    for more in (1, 1 / 64):
        for name, advantages in (("r - mean", centred), ("with the std", plain_advantages)):
            p = trained(torch.zeros(4), 1 + more * torch.eye(4)[3], advantages, lr=0.2)
            runs[f"{name}, {more:.2g} more"] = p[..., 3]
    # Seen?
    k = torch.arange(1, 8)                                                         # of 8 are right
    right = (torch.arange(8) < k[:, None]).float()                                 # (7, 8)
    pushes = []
    for advantages in (centred, plain_advantages):
        push = (advantages(right.flatten(), 8).view(7, 8) * right).mean(dim=1)     # (7,)
        for p in torch.tensor([0.05, 0.5, 0.95]):
            pushes.append(torch.distributions.Binomial(8, p).log_prob(k).exp() @ push)  # exactly
    exact = "pushes {:.2f}, {:.2f}, {:.2f}, with the std {:.2f}, {:.2f}, {:.2f}".format(*pushes)
    return runs, lambda one, same, r, std: r < 0.4 < 0.9 < std and 0.46 < pushes[4] < 0.47, exact


def old_answers():
    """A usual answer pays 0.6, a rare one 1, a bad one nothing; the untrained policy draws them."""
    start, worth = torch.tensor([0.55, 0.04, 0.41]).log(), torch.tensor([0.6, 1.0, 0.0])
    arms = {"fresh": {}, "old, no ratio": dict(fresh=False, ratio=False),
            "old, ratio": dict(fresh=False, clip_eps=OFF), "old, ratio, clip": dict(fresh=False)}
    runs = {arm: trained(start, worth, centred, 300, 1.0, 16, **how)[..., 1]
            for arm, how in arms.items()}
    # Seen?
    return runs, lambda _, none, ratio, clipped: none < 0.01 < clipped < 0.1 < 0.9 < ratio


def the_clip():
    """Twelve answers pay by a coin, in 0.1 to 0.8 of all cases; 30 rollouts of 8 answers."""
    worth, runs = torch.linspace(0.1, 0.8, 12), {}
    for arm, clip_eps in (("clip 0.2", 0.2), ("no clip", OFF)):
        ps = [trained(torch.zeros(12), worth, steps=30, lr=1.0, updates=updates, clip_eps=clip_eps,
                      coin=True)[-1] for updates in (1, 2, 4, 8, 16, 32)]
        runs[arm] = torch.stack(ps) @ worth                                        # (6, SEEDS)
    # Seen?
    return runs, lambda clipped, free: clipped > free + 0.05


def beta_and_k1_k2_k3():
    """Six answers: the better one pays, the rarer it is. beta is 0.5."""
    start, worth = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.07, 0.03]).log(), torch.linspace(0, 1, 6)
    arms = {"beta 0": {}, "k3": dict(kl_coef=0.5)}
    for k in ("k1", "k2"):
        loss = lambda *x, k=k, **options: grpo_loss(*x, kl_estimator=k, **options)[0]  # noqa: E731
        arms[k] = dict(kl_coef=0.5, loss=loss)
    ps = {arm: trained(start, worth, advantage.leave_one_out_advantages, 400, 1.0, 16, **how)
          for arm, how in arms.items()}
    runs = {arm: (p * (p.log() - start)).sum(dim=2) for arm, p in ps.items()}
    # Seen?
    stds = []
    for p in torch.tensor([[0.6, 0.4], [0.999, 0.001]]):                           # ref: 0.5, 0.5
        for k in (KL_ESTIMATORS[name]((0.5 / p).log(), 1) for name in ("k1", "k3")):
            stds.append((p @ (k - p @ k).square()).sqrt())
    exact = "stds of k1, k3 at KL 0.02: {:.2f}, {:.3f}; at 0.69: {:.2f}, {:.0f}".format(*stds)
    c = worth + 0.5 * start.exp() / ps["k3"][-100:].mean(dim=(0, 1))    # one number, by the rule
    return runs, lambda _, k3, k1, k2: k1 > 2 * k3 and c.max() - c.min() < 0.03, exact


def temperature():
    """Twelve answers, drawn at 0.7 or 1.3 and trained at 1; pi_old is asked at either."""
    start, runs = torch.tensor([3.0, *torch.linspace(1, 0, 10), 0.8]), {}
    for at in (0.7, 1.3):
        for old_at in (at, 1.0):
            p = trained(start, torch.eye(12)[11], steps=200, G=16, drawn_at=at, old_at=old_at)
            runs[f"drawn at {at}, pi_old at {old_at}"] = p[..., 11]
    # Seen?
    return runs, lambda cold, right, hot, _: cold < 0.1 < 0.9 < right and hot > 0.5


def length():
    """A token that is right or wrong, then chatter that pays nothing: 6 tokens, on average."""
    table = torch.tensor([[0, 0.3, 0.7, 0], [0, 0.8, 0, 0.2], [0, 0, 0.8, 0.2], [0, 0, 0, 1]])
    place, runs = torch.arange(42), {}
    for arm in ("mean", "sum"):
        policy = Table(table.log().clamp(min=-1e9))         # 0 question, 1 right, 2 wrong, 3 end
        optimizer, history = torch.optim.SGD(policy.parameters(), 1.0), []
        for _ in range(150):
            p = policy.p()
            kind = torch.multinomial(p[0], 64, True)
            goes_on = torch.rand(64, 40) < p[kind, kind][:, None]
            end = 2 + goes_on.cumprod(dim=1).sum(dim=1, keepdim=True)              # its place
            ids = kind[:, None].where(place < end, 3).where(place > 0, 0)
            labels = ids.where((place > 0) & (place <= end), -100)
            A = plain_advantages((kind == 1).float(), 8)
            update(policy, optimizer, ids, labels, A if arm == "mean" else A * end[:, 0] / 6)
            history.append(1 + 1 / (1 - p.diag()[1:3]))
        runs[f"{arm}: right"], runs[f"{arm}: wrong"] = torch.stack(history).T[:, :, None]
    # Seen?
    return runs, lambda right, wrong, *by_sum: right < 3 and max(by_sum) < 13 < 20 < wrong


def flat_groups_and_rare_answers():
    """One answer in 1,000 is right; a step has 64, as eight groups of 8 or as one group."""
    start, worth, runs = torch.tensor([0.999, 0.001]).log(), torch.tensor([0.0, 1.0]), {}
    names = {"r - mean": centred, "GRPO": plain_advantages, "MaxRL": advantage.max_rl_advantages}
    for G in (8, 64):
        for name, f in names.items():
            p = trained(start, worth, lambda r, _, f=f, G=G: f(r, G), 300, 1.0, 64)
            runs[f"{name}, G {G}"] = p[..., 1]
    # Seen?
    steps = [(run < 0.5).sum(dim=0).median().item() for run in runs.values()]
    told = "steps to one half {}, {}, {}; by one group {}, {}, {} (301: never)".format(*steps)
    return runs, lambda *_: steps[0] > 300 > steps[1] > 1.5 * steps[4], told


def credit():
    """T tokens of four choices, one of them right; the reward is the share that is right."""
    def steps(T, counted):
        policy = Table(torch.zeros(T + 1, 4))               # a row for each place
        policy.forward = lambda *_, **__: SimpleNamespace(logits=policy.logits.expand(8, -1, -1))
        optimizer = torch.optim.SGD(policy.parameters(), float(T))      # a row's mean divides by T
        for step in range(200):
            p = policy.p()[:T]
            if p[counted, 0].mean() > 0.9:
                return float(step)
            tokens = torch.multinomial(p, 8, True).T                               # (8, T)
            A = plain_advantages((tokens == 0)[:, counted].float().mean(dim=1), 8)
            update(policy, optimizer, *rows(torch.zeros(8, dtype=torch.long), tokens), A)
        return 200.0
    by_length = [[steps(T, range(T)) for _ in range(8)] for T in (1, 4, 16, 64)]
    by_place = [[steps(8, [place]) for _ in range(8)] for place in range(8)]
    runs = {"all of 1, 4, 16, 64": torch.tensor(by_length), "one of 8": torch.tensor(by_place)}
    # Seen?
    alone, first = (run[0].mean() for run in runs.values())
    return runs, lambda long, last: long > 4 * alone and 2 / 3 < first / last < 3 / 2


def hacking():
    """The right answer pays 1; a worthless one pays 2 by mistake."""
    runs = {}
    for rare, beta in ((0.05, 0), (0.02, 0), (0.02, 0.5)):
        start, worth = torch.full((12,), (0.8 - rare) / 10), torch.zeros(12)
        start[[0, 11]], worth[[0, 11]] = torch.tensor([[0.2, rare], [1.0, 2.0]])
        p = trained(start.log(), worth, steps=400, lr=0.2, kl_coef=beta)
        runs[f"right, beside {rare}, beta {beta}"] = p[..., 0]
    # Seen?
    return runs, lambda beside, rare, kept: beside < 0.7 and kept < 0.4 < 0.9 < rare


RUNGS = (a_baseline, the_std, old_answers, the_clip, beta_and_k1_k2_k3, temperature, length,
         flat_groups_and_rare_answers, credit, hacking)
TINY = {1: ("--kl-coef 0 --steps 25", "--advantage raw"),   # flags, and what spoils it
        4: ("--kl-coef 0 --steps 16 --updates-per-rollout 16", "--clip-eps 1 --clip-eps-high 1e6"),
        10: ("--reward-model {ROOT}/tests/tiny/reward_model --kl-coef 0.5", "--kl-coef 0.02")}
advantage.ADVANTAGES["raw"] = lambda x, s, all_rows: x.rewards


def on_the_tiny_policy(n):
    """The second half of a rung: sampled accuracy in every step."""
    import train  # here, because all else is quicker
    runs = {}
    for more in ("", TINY[n][1]):
        s = train.parse(word.format(ROOT=ROOT) for word in f"{TINY[n][0]} {more}".split())
        run = train.Run()
        train.train_grpo(train.load(s), s, run)
        runs[more or "as it should be"] = torch.tensor([[y] for _, y in run.curve("accuracy")])
    return runs, lambda right, spoilt: right > spoilt + 0.3


def climb(name, rung, hint):
    """Take a rung and print what it shows -> its curves {arm: (steps,)}, more, and is it seen?"""
    torch.manual_seed(0)
    try:
        runs, is_so, *more = rung()
        seen = is_so(*(run[-1].mean().item() for run in runs.values()))
    except Exception as error:
        runs, seen, hint, more = {}, False, f"it raised {error!r}", []
    curves = {arm: run.mean(dim=1).nan_to_num(0, 0, 0) for arm, run in runs.items()}
    if curves and all(curve.max() == curve.min() for curve in curves.values()):
        hint = "nothing moves: has plain_loss a gradient?"
    print(f"{name}:", "seen" if seen else f"not seen: {hint}", *more)
    high = max([1e-9, *(curve.max().item() for curve in curves.values())])
    for arm, curve in curves.items():
        few = curve[torch.linspace(0, len(curve) - 1, 16).long()]
        blocks = ("▁▂▃▄▅▆▇█"[int(7 * y / high)] for y in few)
        print(f"    {arm:28} {curve[0]:8.3g} {''.join(blocks)} {curve[-1]:.3g}")
    return curves, more, seen


def page_of(climbed):
    """The page: each question and its world; folded, what it shows and what it teaches."""
    import page
    shared = page.escape("\n\n".join(map(inspect.getsource, (Table, rows, update, trained))))
    html = (f"<h1>A ladder of ten worlds</h1><details><summary>What they share</summary><section>"
            f"<pre>{shared}</pre></section></details>")
    for name, question, world, shown, lessons in climbed:
        html += (f"<h2>{name}</h2><p>{page.escape(question)}</p><section><pre>{page.escape(world)}"
                 "</pre></section><details><summary>Guess, then open</summary>")
        for curves, more, _ in shown:
            html += page.figures_of_arms(curves)
            lessons = [*more, *lessons]
        html += "".join(f"<p>{page.escape(line)}</p>" for line in lessons) + "</details>"
    return page.document("A ladder of ten worlds", html)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rung", type=int, nargs="?", choices=range(1, 11))
    parser.add_argument("--output", type=Path, default=Path("ladder.html"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    _, *texts = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").split("\n## ")
    climbed = []
    for n in [args.rung] if args.rung else range(1, 11):
        name, question, *lessons, hint = texts[n - 1].strip().split("\n\n")
        world = inspect.getsource(RUNGS[n - 1]).split("    # Seen?")[0]
        if args.rung:
            print(name, question, f"{world}\nGuess, then press Enter.", sep="\n\n")
            sys.stdin.readline()
        shown = [climb(name, RUNGS[n - 1], hint)]
        if args.tiny and n in TINY:
            shown.append(climb(f"{name}, the tiny policy", partial(on_the_tiny_policy, n), hint))
        if args.rung:
            print("", *lessons, sep="\n\n")
        climbed.append((name, question, world, shown, lessons))
    if not args.rung and (ROOT / "tests" / "tools" / "page.py").is_file():
        args.output.write_text(page_of(climbed), encoding="utf-8")
        print(args.output)
    return int(not all(seen for *_, shown, _ in climbed for *_, seen in shown))


if __name__ == "__main__":
    sys.exit(main())
