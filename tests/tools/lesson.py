"""lesson.html: one step of GRPO, line by line, and beside every line what it has computed.

    python tests/tools/lesson.py                       # the tiny policy and a question for it
    python tests/tools/lesson.py --ask "Anna has 9 books , gets 2 , loses 4 . How many ?" 7
    python tests/tools/lesson.py --model FOLDER --ask "What is 3 + 4 - 2?" 5 --output sum.html

plain_step runs once, with four answers and two updates, and sys.settrace hands over the variables
after every line. Equal rewards teach nothing: of 20 seeds the first is taken whose rewards differ.
"""
import argparse
import copy
import re
import sys
from inspect import getsourcelines, unwrap
from pathlib import Path

import page
import torch

import advantage
import logprob
import loss
import reward
import sample
import train

G, T, WIDTH = 4, 40, 4  # answers, the most tokens of one, and how many are shown
PROBLEM = ["Anna has 9 books , loses 4 , gives 2 , gets 7 . How many ?", "10"]
STORY = """The tiny policy guesses, or it works the sum out. Here a worked sum becomes more likely
and a guess less: one update takes the log-prob of y₁'s first token from −1.273 to −0.546, that of
y₂'s from −0.337 to −0.878. y₄ is a lucky guess, and the reward cannot tell. Yet its first token
falls too, for two wrong guesses begin with it: a change for the worse, which [E] never clips."""
STAGES = [  # title, functions, which of their calls are shown, what to look at
    ("[A] Sample", [sample.plain_answer], slice(0, 1),
     "Look at p, its four largest entries: what is rare is drawn, too, as often as p says."),
    ("[B] Score", [reward.rule_reward, reward.extract_boxed, reward.is_equal], slice(0, 2),
     "Look at the box: the rule reads nothing else of an answer."),
    ("[C] Compare siblings", [advantage.plain_advantages], slice(0, 1),
     "Look at the mean: an answer above it has a positive advantage, one below it a negative one."),
    ("[D] Log-probabilities", [logprob.plain_logprobs], slice(-2, None),
     "Look at each first token: one update moves it. (Of V numbers the drawn token's is shown.)"),
    ("[E] Clipped objective, [F] KL", [loss.plain_loss], slice(-2, None),
     "Look at w, which leaves 1 in update ②, and at the framed J: clipped, it has no gradient."),
    ("[G] One step", [train.plain_step], slice(0, 1),
     "Look at the first loss: it is 0, because the advantages sum to 0, but its gradient is not."),
]
STYLE = """
body { max-width: 78rem } section { overflow: auto } table { border-spacing: 0 }
.lines { width: calc(100% + 2rem); min-width: 57rem; margin: .4rem -1rem 1rem; table-layout: fixed }
.lines td { font: 12px/1.5 monospace; vertical-align: top; padding: .1rem .6rem }
.lines :is(p, pre) { margin: 0; font: inherit } .formula { color: rgb(var(--up)) }
.line { width: 1.6rem; opacity: .5 } .values { width: 29.5rem; background: rgb(var(--up) / .06) }
.values div { display: flex; flex-wrap: wrap; gap: 0 1rem } th { opacity: .6; text-align: left }
.values :is(td, th) { font: 11px/1.5 monospace; padding: 0 .15rem; min-width: 1rem }
.values :is(td, th ~ th) { text-align: right; min-width: 2.9rem }
.clip { outline: 1.5px solid rgb(var(--down)); outline-offset: -1px; border-radius: 3px }
"""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ask", nargs=2, default=PROBLEM, metavar=("QUESTION", "ANSWER"))
    parser.add_argument("--model")
    parser.add_argument("--output", type=Path, default=Path("lesson.html"))
    args = parser.parse_args(argv)
    try:
        args.output.write_text(page_of(*args.ask, args.model), encoding="utf-8")
    except (OSError, reward.BadInput) as error:
        parser.exit(2, f"lesson.py: {error}\n")
    print(args.output)


def page_of(question, answer, folder=None):
    """The page of one step on this question."""
    s = train.parse(["--model", folder, "--lr=2e-5"] if folder else ["--lr=1e-3"])
    group, calls = step_of(question, answer, s)
    html = f"""<h1>One step of GRPO, line by line</h1>
<p>{STORY if [question, answer] == PROBLEM and not folder else ""}</p>
<p>The two updates of this step, with learning rate {s.lr:g}, have made blue tokens more likely and
orange ones less. ① and ② are the first two times that a line has run: two tokens of y₁ in [A], two
answers in [B], and the two updates from [D] to [G].</p>{group}"""
    for title, functions, which, look in STAGES:
        formula = page.escape(sys.modules[functions[0].__module__].__doc__.split("\n\n")[1])
        html += f'<h2>{title}</h2><section><pre class="formula">{formula}</pre><p>{look}</p>'
        html += "".join(table_of(f, calls[unwrap(f).__code__][which]) for f in functions)
        html += "</section>"
    return page.document("One step of GRPO", html, STYLE)


def step_of(question, answer, s):
    """One step -> its group of answers in HTML, and the calls that `watched` has seen."""
    with reward.blame(f"{s.model}:"):
        policy, tokenizer = sample.open_policy(s.model)
        prompt = sample.chat_prompt(tokenizer, {"question": question}, s.system_prompt)
    for seed in range(3, 23):
        generator = torch.Generator().manual_seed(seed)
        drawn = sample.sample_groups(policy, tokenizer, [prompt], G, T, 1.0, generator)
        if len(reward.score_responses(drawn.responses, [answer], G).unique()) > 1:
            break
    else:
        print("lesson.py: all answers earn the same, so nothing is learned", file=sys.stderr)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), s.lr, weight_decay=0.0)
    shown = Shown(tokenizer, policy.config.get_text_config().vocab_size)
    calls, rewards = watched(shown, train.plain_step, policy, reference, optimizer, tokenizer,
                             [prompt], [answer], G, T, generator.manual_seed(seed), updates=2)
    rollout = shown.rollout
    rollout.rewards, rollout.advantages = rewards, advantage.plain_advantages(rewards, G)
    after, before = (logprob.plain_logprobs(model, rollout.input_ids, rollout.labels)
                     for model in (policy, reference))
    group = {"step": 1, "question": question, "prompt": prompt, "truth": answer}
    return page.section_of(group, rollout, after - before, tokenizer), calls


def table_of(f, calls):
    """A function's lines, and their values in these calls."""
    html = f"<h3>{f.__name__} <small>{f.__module__}.py</small></h3><table class='lines'>"
    source, first = getsourcelines(f)
    for line, text in enumerate(source, first):
        runs = [run for call in calls for run in call.get(line, [])][:2]
        code, mark, comment = re.sub(r"(?<=\S) +# ", "  # ", text.rstrip()).partition("# ")
        html += (f'<tr><td class="line">{line}</td><td><pre>{page.escape(code)}'
                 f'<q>{mark}{page.escape(comment)}</q></pre></td><td class="values">')
        values = [html_of(name, [run[name] for run in runs]) for name in runs[0]] if runs else [""]
        html += "".join(values or "✓") + "</td></tr>"
    return html + "</table>"


def html_of(name, values):
    """What a line has computed in one run or in two: ① and ② where they differ."""
    values = [*dict.fromkeys(values)]
    texts = [*dict.fromkeys(text for text, _ in values)]
    text = texts[0] if len(texts) == 1 else "① {} ② {}".format(*texts)
    tables = {}                                              # by their heads
    for mark, (_, rows) in zip("①②" if len(values) > 1 else [""], values):
        for head, cells in rows:
            tables[head] = tables.get(head, head) + f"<tr><th>{mark}</th>{cells}</tr>"
    html = "".join(f"<table>{table}</table>" for table in tables.values())
    return f"<p><b>{name}</b> {text}</p><div>{html}</div>"


def watched(shown, step, *given, **options):
    """Take a step -> its calls, {code: [{line: [{name: value as shown}]}]}, and what it returns."""
    calls = {unwrap(function).__code__: [] for stage in STAGES for function in stage[1]}

    def trace(frame, event, _):
        if frame.f_code not in calls:
            return None
        source, first = getsourcelines(frame.f_code)
        line = first + source[0].startswith("@")
        runs = {}
        calls[frame.f_code].append(runs)

        def trace_line(frame, event, result):
            nonlocal line
            code, enters = source[line - first].strip(), frame.f_lineno == line + 1
            values = values_of(code, enters, frame.f_locals, result)
            runs.setdefault(line, []).append(shown.all_of(values, frame.f_locals))
            line = frame.f_lineno
            return trace_line
        return trace_line

    sys.settrace(trace)
    try:
        return calls, step(*given, **options)
    finally:
        sys.settrace(None)


def values_of(code, enters, variables, result):
    """What this line has computed -> {name: value}; {} if that is nothing."""
    if code.startswith("def "):
        return variables
    if code.startswith("return "):
        return {"return": result}
    if code.startswith(("if ", "while ")):
        return {"": enters}
    found = re.match(r"(?:for )?(\w+)( = | in |\.)", code)   # ids.append(token) changes ids
    if found and found[2] == "." and "optimizer" in variables:
        pairs = [*zip(variables["policy"].parameters(), variables["reference"].parameters())]
        gradients = [p.grad for p, _ in pairs if p.grad is not None]
        return {"norm of the gradient": torch.nn.utils.get_total_norm(gradients),
                "largest move of a weight": max((p - q).abs().max() for p, q in pairs)}
    return {found[1]: variables[found[1]]} if found else {}


class Shown:
    """Values for the reader, (text, tables); a table is its head and its cells."""

    def __init__(self, tokenizer, V):
        self.tokenizer, self.V, self.rollout = tokenizer, V, None

    def words_of(self, ids):
        return [word.strip() or repr(word) for word in sample.words_of(self.tokenizer, ids)]

    def all_of(self, values, variables):
        self.variables = variables
        self.rollout = values.get("rollout", self.rollout)
        return {name: self.of(value) for name, value in values.items()}

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
                ids = value if isinstance(value[0], int) else self.variables["ids"]
                return f"list of {len(value)}", (table("", self.words_of(ids[:8]), value),)
            case None | bool() | int() | float() | str() | list():
                return text_of(value), ()
        return type(value).__name__, ()

    def tables_of(self, tensor):
        if tensor.shape == (self.V,):
            largest, ids = tensor.topk(WIDTH)
            return [table("", self.words_of(ids.tolist()), largest.tolist())]
        if len(tensor) != G or tensor.numel() == G:
            names = ["y₁", "y₂", "y₃", "y₄"] if tensor.numel() == G else [""] * WIDTH
            return [table("", names, tensor.flatten().tolist())]
        if tensor.ndim == 3:                                 # (N, S or S-1, V or 1)
            index = self.rollout.input_ids[:, 1:, None].clamp(max=tensor.shape[2] - 1)
            tensor = tensor[:, :index.shape[1]].gather(2, index)[:, :, 0]
        J, w, A = map(self.variables.get, "JwA")             # None outside of plain_loss
        clipped = tensor < w * A if tensor is J else torch.zeros(tensor.shape, dtype=torch.bool)
        answers = zip("₁₂₃₄", self.rollout.answer_ids, self.rollout.mask, tensor, clipped)
        return [table(f"y{n}", self.words_of(ids[:WIDTH]), row[own].tolist(), frames[own].tolist())
                for n, ids, own, row, frames in answers]


def table(name, words, numbers, framed=(False,) * 8):
    head = "".join(f"<th>{page.escape(word)}</th>" for word in [name, *words])
    cells = [f"<td class='{'clip' * frame}'>{text_of(number, '.3f')}</td>"
             for number, frame, _ in zip(numbers, framed, words)]
    return f"<tr>{head}</tr>", "".join(cells)


def text_of(value, form=".4g"):
    if isinstance(value, float):
        return str(int(value) if value.is_integer() else format(value, form)).replace("-", "−")
    return page.escape(repr(value)[:90])


if __name__ == "__main__":
    main()
