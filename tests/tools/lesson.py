"""lesson.html: two steps of GRPO, line by line, and beside every line what it has computed.

    python tests/tools/lesson.py                       # the tiny policy and two questions for it
    python tests/tools/lesson.py --ask "Anna has 9 books , gets 2 , loses 4 . How many ?" 7
    python tests/tools/lesson.py --model FOLDER --ask "What is 3 + 4 - 2?" 5 --output sum.html

plain_step runs with four answers to each question and two updates, and sys.settrace hands over the
variables after every line. Equal rewards teach nothing: of 20 seeds the first is taken by which
rewards differ. What can be found in a second way is compared, and where the two differ stands ≠.
"""
import argparse
import copy
import math
import re
import sys
from inspect import getsourcelines, unwrap
from pathlib import Path
from types import SimpleNamespace

import page
import torch

import advantage
import logprob
import loss
import reward
import sample
import train

G, T, WIDTH = 4, 40, 4  # answers, the most tokens of one, and how many are shown
SMALL = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
NAMES = [f"y{n}".translate(SMALL) for n in range(1, 99)]
SEED = 1102  # the first that is tried: by it one answer of four is right, and then none of four
PROBLEMS = [["Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?", "10"],
            ["Ben has 13 coins , finds 7 , sells 2 , sells 4 . How many ?", "14"]]
STORY = """The tiny policy guesses, or it works the sum out. Only y₁ is right: the update takes the
log-prob of its first token from −1.273 to −0.317, that of y₂'s, a guess, from −0.337 to −1.321. y₅
to y₈ earn the same and teach nothing, yet they move, for all answers share the weights. In step 2
y₆ is a lucky guess, and the reward cannot tell. Yet its first token falls, for two wrong guesses
begin with it: a change for the worse (A above 0, w below 0.8), which [E] never clips."""
HOW_TO_READ = """The two updates of a step, with learning rate {:g}, have made blue tokens more
likely and orange ones less. ① and ② are the first two times that a line has run: two tokens of y₁
in [A], two answers in [B], two updates from [D] to [G]. 1 is exactly 1, and 1.000 is rounded.
"= w ②" means that the numbers stand above, at w."""
STAGES = [  # title, functions, which of their calls are shown, what to look at
    ("[A] Sample", [sample.plain_answer], slice(0, 1),
     "Look at p and its running sum Σ over the ids: the token at which Σ passes u is drawn."),
    ("[B] Score", [reward.rule_reward, reward.extract_boxed, reward.is_equal], slice(0, 2),
     "Look at the box: the rule reads nothing else of an answer."),
    ("[C] Compare siblings", [advantage.plain_advantages], slice(0, 1),
     "Look at the std: the rarer a right answer, the larger its advantage. Equal rewards give 0."),
    ("[D] Log-probabilities", [logprob.plain_logprobs], slice(-2, None),
     "Look at each first token: one update moves it. (Of V numbers the drawn token's is shown.)"),
    ("[E] Clipped objective, [F] KL", [loss.plain_loss], slice(-2, None),
     "Look at w, which leaves 1 in update ②, and at J: the minimum has clipped some of w A."),
    ("[G] One step", [train.plain_step], slice(0, 1),
     "Look at the first loss: it is 0, because the advantages sum to 0, but its gradient is not."),
]
TOKENS = """<h3>A long answer and a short one, token by token</h3><p>The logits at t predict token
t + 1, from all tokens up to t (two are shown). So entry t is of token t + 1. It counts where that
has a label, not in the prompt above the answer nor in the padding below. ∂L/∂logp is autograd's. By
hand it is −(w A + beta (exp(d) − 1)) / (N |y|), without w A where the clip holds. So in its first
update an answer gets −A / N in all, long or short, and the KL's part: a token of a long answer gets
less than one of a short answer.</p>"""
STEP_2 = """<h2>Step 2</h2><p>Fresh answers to the same questions. The policy that draws them is no
longer the reference: in update ③ w is 1 again, and d is not 0.</p>"""
STYLE = """
body { max-width: 78rem } section { overflow: auto } table { border-spacing: 0 }
.lines { width: calc(100% + 2rem); min-width: 57rem; margin: .4rem -1rem 1rem; table-layout: fixed }
.lines td { font: 12px/1.5 monospace; vertical-align: top; padding: .1rem .6rem }
.lines :is(p, pre) { margin: 0; font: inherit } .formula { color: rgb(var(--up)) }
.line { width: 1.6rem; opacity: .5 } .values { width: 29.5rem; background: rgb(var(--up) / .06) }
.values div { display: flex; flex-wrap: wrap; gap: 0 1rem } th { opacity: .6; text-align: left }
:is(.values, .rows) :is(td, th) { font: 11px/1.5 monospace; padding: 0 .15rem; min-width: 1rem }
:is(.values, .rows) :is(td, th ~ th) { text-align: right; min-width: 2.9rem }
.rows { margin: .4rem 0 1rem } .rows :is(td, th) { padding: 0 .3rem; white-space: pre }
.off { color: rgb(var(--down)); font-weight: bold }
"""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ask", nargs=2, action="append", metavar=("QUESTION", "ANSWER"))
    parser.add_argument("--model")
    parser.add_argument("--output", type=Path, default=Path("lesson.html"))
    args = parser.parse_args(argv)
    try:
        args.output.write_text(page_of(args.ask or PROBLEMS, args.model), encoding="utf-8")
    except (OSError, reward.BadInput) as error:
        parser.exit(2, f"lesson.py: {error}\n")
    print(args.output)


def page_of(problems, folder=None):
    """The page of two steps on these problems, (question, answer) each."""
    s = train.parse(["--model", folder, "--lr=2e-5"] if folder else ["--lr=1.5e-3"])
    with reward.blame(f"{s.model}:"):
        policy, tokenizer = sample.open_policy(s.model)
        prompts = [sample.chat_prompt(tokenizer, {"question": question}, s.system_prompt)
                   for question, _ in problems]
    truths = [answer for _, answer in problems]
    generator = generator_for(policy, tokenizer, prompts, truths)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), s.lr, weight_decay=0.0)
    html = f"""<h1>Two steps of GRPO, line by line</h1>
<p>{STORY if problems == PROBLEMS and not folder else ""}</p><p>{HOW_TO_READ.format(s.lr)}</p>"""
    for step in 1, 2:
        shown = Shown(tokenizer, policy.config.get_text_config().vocab_size, reference)
        shown.watch(train.plain_step, policy, reference, optimizer, tokenizer, prompts, truths, G,
                    T, generator, updates=2)
        for j, (question, answer) in enumerate(problems):
            group = {"step": step, "question": question, "prompt": prompts[j], "truth": answer}
            html += group_of(shown, group, range(j * G, (j + 1) * G), policy)
        html += stages_of(shown) + STEP_2 if step == 1 else tokens_of(shown, "③", "④")
    return page.document("Two steps of GRPO", html, STYLE)


def generator_for(policy, tokenizer, prompts, truths):
    """Random numbers by which the answers to a question earn different rewards."""
    for seed in range(SEED, SEED + 20):
        generator = torch.Generator().manual_seed(seed)
        drawn = sample.sample_groups(policy, tokenizer, prompts, G, T, 1.0, generator)
        rewards = reward.score_responses(drawn.responses, truths, G)
        if not advantage.is_flat(rewards, G).all():
            return generator.manual_seed(seed)
    print("lesson.py: all answers earn the same, so nothing is learned", file=sys.stderr)
    return generator.manual_seed(seed)


def group_of(shown, group, rows, policy):
    """A question with its answers, tinted by how far this step has moved their tokens."""
    rollout = shown.rollout
    _, old, _, A, *_ = shown.updates[0]
    rollout.rewards, rollout.advantages = shown.rewards, A
    after = logprob.plain_logprobs(policy, rollout.input_ids, rollout.labels).detach()
    moved = (after - old)[rows]
    html = page.section_of(group, sample.take(rollout, rows), moved, shown.tokenizer)
    names = iter(NAMES[rows.start:])
    return re.sub(r"y<sub>\d</sub>", lambda _: next(names), html)


def stages_of(shown):
    """From [A] to [G] the lines of each function, and what they have computed."""
    html, seen = "", {}
    for title, functions, which, look in STAGES:
        formula = page.escape(sys.modules[functions[0].__module__].__doc__.split("\n\n")[1])
        html += f'<h2>{title}</h2><section><pre class="formula">{formula}</pre><p>{look}</p>'
        html += "".join(table_of(f, shown.calls_of(f)[which], seen) for f in functions)
        html += "</section>" + (tokens_of(shown, "①", "②") if "[E]" in title else "")
    return html


@torch.no_grad()
def tokens_of(shown, first, last):
    """[D] [E] [F] Of a group that is not flat the longest answer and the shortest."""
    rollout, mask = shown.rollout, shown.rollout.mask
    logp, old, ref, A, used_mask, eps, _ = shown.updates[-1]
    right_A = advantage.group_advantages(shown.rewards, G)                           # (N,)
    right_ref, _ = logprob.token_logprobs(shown.reference, rollout.input_ids, rollout.labels)
    J, clipped = loss.clipped_objective(logp - old, A.view(-1, 1), eps, eps)         # (N, S-1)
    columns = {  # (N, S-1) each, and where it is known in another way, what it must be
        "id": [rollout.input_ids[:, 1:]], "label": [rollout.labels[:, 1:]],
        "mask": [used_mask.int(), mask.int()],
        "log π_ref": [ref, right_ref], "log π_old": [old, rollout.sampler_logprobs],
        f"log π {last}": [logp], "w": [(logp - old).exp()], "J": [J], "clipped": [clipped.int()],
        "d": [ref - logp], "KL": [loss.kl_estimate(logp, ref)],
        f"∂L/∂logp {first}": gradients_of(shown.updates[0], mask),
        last: gradients_of(shown.updates[-1], mask)}
    group = range(A.abs().argmax() // G * G, len(A))[:G]
    lengths = mask.sum(dim=1).tolist()
    html = TOKENS
    for n in max(group, key=lengths.__getitem__), min(group, key=lengths.__getitem__):
        words = shown.words_of(rollout.input_ids[n].tolist())
        own = mask[n].nonzero()[:, 0].tolist()
        near = range(max(own[0] - 2, 1), min(own[-1] + 3, len(words) - 1))  # two more at each end
        rows = [[t, f"… {words[t - 1]} {words[t]}", words[t + 1],
                 *([x[n, t].item() for x in both] for both in columns.values())] for t in near]
        *others, first_sums, last_sums = [[x[n].sum().item() for x in both]
                                          for both in columns.values()]
        rows.append(["A", [A[n].item(), right_A[n].item()], "sum", *[""] * len(others),
                     first_sums, last_sums])
        html += table_of_rows([f"{NAMES[n]}: t", "predicted from", "token t + 1", *columns], rows)
    return f"<section>{html}</section>"


def gradients_of(update, mask):
    """∂L/∂logp for these arguments of plain_loss, (N, S-1): autograd's, and by hand."""
    logp, old, ref, A, used_mask, eps, beta = update
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        loss.plain_loss(leaf, old, ref, A, used_mask, eps, beta).backward()
    A = A.view(-1, 1)
    _, clipped = loss.clipped_objective(logp - old, A, eps, eps)
    policy_part = (logp - old).exp() * A * ~clipped
    KL_part = beta * (ref - logp).expm1()
    return leaf.grad, -(policy_part + KL_part) * mask / mask.sum(dim=1, keepdim=True) / len(mask)


def table_of_rows(heads, rows):
    """Its values are words, numbers, or lists of what was found and what it must be."""
    html = "".join(f"<th>{head}</th>" for head in heads)
    for row in rows:
        html += "<tr>"
        for value in row:
            found, *right = value if isinstance(value, list) else [value]
            text = page.escape(found) if isinstance(found, str) else text_of(found, ".4f")
            for number in right:
                if not math.isclose(found, number, rel_tol=1e-3, abs_tol=1e-5):
                    text = f'<b class="off">{found:.6g} ≠ {number:.6g}</b>'
            html += f"<td>{text}</td>"
    return f'<table class="rows">{html}</table>'


def table_of(f, calls, seen):
    """A function's lines, and their values in these calls."""
    html = f"<h3>{f.__name__} <small>{f.__module__}.py</small></h3><table class='lines'>"
    source, first = getsourcelines(f)
    for line, text in enumerate(source, first):
        runs = [run for call in calls for run in call.lines.get(line, [])][:2]
        code, mark, comment = re.sub(r"(?<=\S) +# ", "  # ", text.rstrip()).partition("# ")
        html += (f'<tr><td class="line">{line}</td><td><pre>{page.escape(code)}'
                 f'<q>{mark}{page.escape(comment)}</q></pre></td><td class="values">')
        names = [*dict.fromkeys(name for run in runs for name in run)]
        values = [html_of(name, name if name != "return" else f.__name__, seen,
                          [run[name] for run in runs if name in run]) for name in names]
        html += ("".join(values) or "✓" * len(runs[:1])) + "</td></tr>"
    return html + "</table>"


def html_of(name, place, seen, values):
    """What a line has computed in one run or in two; `seen` has the place of what stands above."""
    values = [*dict.fromkeys(values)]
    texts, tables = {}, {}                                   # by themselves, and by their heads
    for mark, (text, rows) in zip("①②" if len(values) > 1 else [""], values):
        if rows in seen:
            text, rows = f"{text} = {seen[rows]}", ()
        elif any("." in cells for _, cells in rows):         # not a 0 or a 1 alone
            seen[rows] = f"{place} {mark}"
        texts[text] = f"{mark} {text}"
        for head, cells in rows:
            tables[head] = tables.get(head, head) + f"<tr><th>{mark}</th>{cells}</tr>"
    text = " ".join(texts.values() if len(texts) > 1 else texts)
    html = "".join(f"<table>{table}</table>" for table in tables.values())
    return f"<p><b>{name}</b> {text}</p><div>{html}</div>"


def values_of(code, enters, variables, result):
    """What this line has computed -> {name: value}; {} if that is nothing."""
    if code.startswith("def "):
        return variables
    if code.startswith("return "):
        return {"return": result}
    if code.startswith(("if ", "while ")):
        return {"": enters}
    found = re.match(r"(?:for )?(\w+)( [-+*/]?= | in |\.)", code)   # ids.append(token) changes ids
    if found and found[2] == "." and "optimizer" in variables:
        pairs = [*zip(variables["policy"].parameters(), variables["reference"].parameters())]
        gradients = [p.grad for p, _ in pairs if p.grad is not None]
        return {"norm of the gradient": torch.nn.utils.get_total_norm(gradients),
                "largest move of a weight": max((p - q).abs().max() for p, q in pairs)}
    return {found[1]: variables[found[1]]} if found and found[1] in variables else {}


class Shown:
    """A step, and its values for the reader: (text, tables); a table is its head and its cells."""

    def __init__(self, tokenizer, V, reference):
        self.tokenizer, self.V, self.reference, self.rollout = tokenizer, V, reference, None
        functions = [f for _, functions, *_ in STAGES for f in functions]
        self.calls = {unwrap(f).__code__: [] for f in [sample.sample_groups, *functions]}

    def calls_of(self, function):
        return self.calls[unwrap(function).__code__]

    def watch(self, step, *given, **options):
        """Take a step, whose calls fill self.calls."""
        sys.settrace(self.trace)
        try:
            self.rewards = step(*given, **options)
        finally:
            sys.settrace(None)
        self.updates = [call.given for call in self.calls_of(loss.plain_loss)]

    def trace(self, frame, event, _):
        code = frame.f_code
        if code not in self.calls:
            return None
        given, lines = [frame.f_locals[name] for name in code.co_varnames[:code.co_argcount]], {}
        self.calls[code].append(SimpleNamespace(given=given, lines=lines))
        source, first = getsourcelines(code)
        line = first + source[0].startswith("@")

        def trace_line(frame, event, result):
            nonlocal line
            text, enters = source[line - first].strip(), frame.f_lineno == line + 1
            self.variables = frame.f_locals
            values = values_of(text, enters, frame.f_locals, result)
            values = {name: self.of(value) for name, value in values.items()}
            lines.setdefault(line, []).append(values)
            line = frame.f_lineno
            if isinstance(result, sample.Rollout):
                self.rollout = result
            return trace_line
        return trace_line

    def words_of(self, ids):
        ids = [id for id in ids if id in range(self.V)]
        return [word.strip() or repr(word) for word in sample.words_of(self.tokenizer, ids)]

    def of(self, value):
        match value:
            case torch.Tensor(ndim=0):
                return self.of(value.item())
            case torch.Tensor():
                tables = self.tables_of(value) if value.is_floating_point() else ()
                return str(tuple(value.shape)), tuple(tables)
            case sample.Rollout():
                return self.of(value.input_ids)
            case tuple((ids, logprobs)):
                return self.of(ids)[0], self.of(ids)[1] + self.of(logprobs)[1]
            case [int() | float(), *_]:                      # ids, or their log-probs
                ids = value if isinstance(value[0], int) else self.variables.get("ids", [])
                return f"list of {len(value)}", (table("", self.words_of(ids[:8]), value),)
            case None | bool() | int() | float() | str() | list():
                return text_of(value), ()
        return type(value).__name__, ()

    def tables_of(self, tensor):
        numbers, rollout = tensor.flatten().tolist(), self.rollout
        if tensor.shape == (self.V,):                        # in the order of the ids
            ids = tensor.topk(WIDTH).indices.sort().values
            words = self.words_of(ids.tolist())
            sums = tensor.cumsum(dim=0)[ids].tolist()        # of probabilities: where u falls
            return [table("", words, tensor[ids].tolist()),
                    *[table("Σ", words, sums)] * bool(tensor.min() >= 0)]
        N, S = rollout.input_ids.shape if rollout else (0, 0)
        if tensor.shape == (N // G, G):                      # each group by itself
            return [table("", NAMES[n:], numbers[n:n + G]) for n in range(0, N, G)]
        if tensor.shape[:2] not in ((N, S), (N, S - 1)):
            names = {N: NAMES, N // G: ["x₁", "x₂"]}.get(len(numbers), [""] * WIDTH)
            return [table("", names, numbers)]
        if tensor.ndim == 3:                                 # (N, S or S-1, V or 1)
            index = rollout.input_ids[:, 1:, None].clamp(max=tensor.shape[2] - 1)
            tensor = tensor[:, :S - 1].gather(2, index)[:, :, 0]
        tables = []
        for n in sorted({0, 1, G % N}):                      # two siblings, and another group
            own = rollout.mask[n].nonzero()[:WIDTH, 0]
            words = self.words_of(rollout.input_ids[n, own + 1].tolist())
            tables.append(table(NAMES[n], words, tensor[n, own].tolist()))
        return tables


def table(name, words, numbers):
    head = "".join(f"<th>{page.escape(word)}</th>" for word in [name, *words[:len(numbers)]])
    cells = [f"<td>{text_of(number, '.3f')}</td>" for number, _ in zip(numbers, words)]
    return f"<tr>{head}</tr>", "".join(cells)


def text_of(value, form=".4g"):
    if isinstance(value, float):
        return str(int(value) if value.is_integer() else format(value, form)).replace("-", "−")
    return page.escape(re.sub(r"slice\((\d+), (\d+), None\)", r"\1:\2", repr(value))[:90])


if __name__ == "__main__":
    main()
