"""page.html of a run: its curves, and groups of answers, tinted by how far each token has moved.

    python tests/tools/page.py RUN        # of its final/, or if it has none yet of its best/
"""
import html
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import sample  # noqa: E402
import train  # noqa: E402

STYLE = """
:root { color-scheme: light dark; --up: 37 105 214; --down: 230 112 10; --line: 1px solid #8884 }
@media (prefers-color-scheme: dark) { :root { --up: 110 168 255; --down: 255 159 67 } }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.6 system-ui;
  overflow-wrap: anywhere }
h1 { margin: 0; font-size: clamp(1.4rem, 5vw, 2rem); line-height: 1.2 }
h2 { margin: 2rem 0 .5rem; font-size: 1.3rem } h3 { display: flow-root; margin: 0; font-size: 1rem }
p { margin: .3rem 0 } pre { margin: 0 } small { float: right } li { color: rgb(var(--down)) }
small, text, q { opacity: .65; font-weight: normal } q { quotes: none } ul:empty { display: none }
div { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr));
  gap: 1rem } .two { margin-top: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)) }
figure, section { border: var(--line); border-radius: 10px; margin: 0; padding: .6rem 1rem;
  break-inside: avoid } body > section { margin-top: 1rem }
figure p { margin: 0 } figure b { font-size: 1.2rem; white-space: nowrap }
figure small { margin-top: .35rem; font-size: 11px }
svg { display: block; clear: both; margin-top: .4rem; overflow: visible }
polyline { fill: none; stroke: rgb(var(--up)); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round } .dot { stroke-width: 6 } .grid { stroke: #8884; stroke-width: .7 }
text { fill: currentColor; font-size: 10px }
@media (max-width: 34rem) { figure { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem }
  svg { grid-area: 1 / 2 / 4; margin: 0 } figure b { grid-row: 2; font-size: 1rem }
  figure small { margin: 0 } text { font-size: 14px } }
.y { display: flex; flex-wrap: wrap; gap: 0; border-top: var(--line); margin-top: .3rem }
.y > * { flex: 0 0 4.2rem } .y b { flex: 0 0 2rem } .y s { flex: 0 0 7rem }
.y p { flex: 1 1 20rem; margin: 0 } .y p, pre { font: 13px/1.85 monospace; white-space: pre-wrap }
i { font-style: normal; border-radius: 3px; print-color-adjust: exact; background:
  linear-gradient(rgb(var(--up) / min(var(--d) * .3, .6)) 0 0),
  linear-gradient(rgb(var(--down) / min(var(--d) * -.3, .6)) 0 0) }
s i { display: block; height: .5rem; margin-top: .5rem; --d: calc(9 * var(--A));
  --left: clamp(-50%, var(--A) * -50% / 3, 50%); width: max(var(--left), -1 * var(--left));
  margin-left: calc(50% - max(var(--left), 0%)) }
"""


def main(folder):
    """Write the page -> its path."""
    folder = Path(folder)
    policy = folder / ("final" if (folder / "final").is_dir() else "best")
    flags = "--config", folder / "config.json", "--model", policy
    s = train.plan_memory(train.parse(flags), to_train=False)
    model, tokenizer = train.load_policy(s)
    sections = ""
    run = run_of(folder)
    for group in tinted_groups(run):
        tensors = {name: torch.tensor(group[name]) for name in train.TENSORS}
        rewards = torch.tensor([math.nan if r is None else r for r in group["rewards"]])
        answers = sample.Rollout(**tensors, responses=None, rewards=rewards)
        logprobs, _ = train.rollout_logprobs(model, answers, s)                         # (G, S-1)
        sections += section_of(group, answers, logprobs - answers.sampler_logprobs, tokenizer)
    page = folder / "page.html"
    page.write_text(page_of(run, sections, s), encoding="utf-8")
    return page


def tinted_groups(run):
    """The groups in samples.jsonl that have token ids."""
    groups = train.records_in(run.folder, "samples.jsonl")
    return [group for group in groups if "input_ids" in group]


def run_of(folder):
    """The Run that its folder tells of."""
    run = train.Run()
    run.folder = folder
    run.read_metrics(train.records_in(folder, "metrics.jsonl"))
    return run


def page_of(run, sections, s):
    items = "".join(f"<li>step {step}: {escape(line)}</li>" for step, line in run.curve("warning"))
    curves = train.curves_of(run)
    steps = run.evaluations[-1]["step"]
    figures = "".join(figure_of_curve(*curve, steps) for curve in curves)
    _, n = train.points_and_steps(steps)
    _, title, points = curves[0]
    (_, first), (step, last) = points[0], points[-1]
    rows = train.first_and_last(run)
    if not rows:
        sys.exit(f"page.py: {run.folder}/evaluations.jsonl has lost its answers")
    before, after = train.example_of(*rows)
    changes = [f"{escape(title)}: {train.change_of(metric, *rows)}" for metric, title, _ in curves
               if metric.startswith("eval_")]
    return document(run.folder.name, f"""
<h1>{title.capitalize()} {first:.3g} → {last:.3g} after {step:g} steps</h1>
<p>{"<br>".join(changes)}</p>
<p>{escape(run.folder.name)}: {steps} steps of GRPO, each with B = {s.prompts_per_step} questions
and G = {s.group_size} answers to each; lr {s.learning_rate:g}. The best evaluation is that of step
{train.best_step(run):g}. Held-out answers are greedy, all others sampled: their numbers are means
of the first and of the last {n} steps. What is 0 throughout is left out.</p>
<ul>{items}</ul><div>{figures}</div>
<h2>The held-out problem that gained most</h2>
<p>{escape(before["problem"])}</p><p>true answer: {escape(before["truth"])}</p>
<div class="two">
<section><h3>before <small>reward {number(before["reward"])}</small></h3>
<pre>{escape(before["answer"])}</pre></section>
<section><h3>after {step:g} steps <small>reward {number(after["reward"])}</small></h3>
<pre>{escape(after["answer"])}</pre></section></div>
<h2>The groups it learned from</h2>
<p>x is a question, y<sub>i</sub> an answer of its group, r<sub>i</sub> its reward and A<sub>i</sub>
its advantage. Tinted tokens have become <i style="--d:2">more likely</i> or
<i style="--d:-2">less likely</i> since the policy drew them:
<i style="--d:-2">÷ 7.4 or more</i> <i style="--d:-1">÷ 2.7</i> <i style="--d:1">× 2.7</i>
<i style="--d:2">× 7.4 or more</i>. Hover for log π − log π<sub>old</sub> in nats, the log of
[E]'s ratio.</p>{sections}""")


def document(title, body, style=""):
    """A page of its own, which runs and loads nothing."""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style></head><body>{body}</body></html>"""


def figures_of_arms(curves):
    """{arm: its values at 0, 1, 2 …}: figures of one scale, side by side."""
    high = max((curve.max().item() for curve in curves.values()), default=0)
    figures = [figure_of_curve("", arm, [*enumerate(curve.tolist())], len(curve) - 1, high, "")
               for arm, curve in curves.items()]
    return f"<div>{''.join(figures)}</div>"


def figure_of_curve(metric, title, points, last, high=0, x="step"):
    """A curve of (x, value)s that rises from 0, to `high` at least; it spans x from 0 to `last`."""
    _, values = zip(*points)
    low, high = min(0, *values), max(high, *values)
    span = high - low or 1
    line = [f"{50 + 250 * step / last:.1f},{78 - 76 * (value - low) / span:.1f}"
            for step, value in points]
    return f"""<figure><p>{escape(title)}</p><small>{escape(metric)}</small>
<b>{values[0]:.3g} → {values[-1]:.3g}</b><svg viewBox="0 0 303 94">
<polyline points="{' '.join(line)}"/><polyline class="dot" points="{line[-1]} {line[-1]}"/>
<polyline class="grid" points="50,2 300,2"/><polyline class="grid" points="50,78 300,78"/>
<text y="9">{high:.3g}</text><text y="79">{low:.3g}</text><text x="50" y="91">{x} 0</text>
<text x="300" y="91" text-anchor="end">{last}</text></svg></figure>"""


def section_of(group, answers, moved, tokenizer):
    """A group: its question x; of its answers reward r, advantage A and tinted tokens y."""
    r = answers.rewards
    scored = r[~r.isnan()]
    text = (f"<section><h3>step {group['step']} <small>mean reward {scored.mean():.3g}, std "
            f"{scored.std(correction=0):.3g}</small></h3><details><summary><b>x</b> "
            f"{escape(group['question'])}</summary><pre>{escape(group['prompt'])}</pre></details>"
            f"true answer: {escape(group['truth'])}")
    for n, is_answer in enumerate(answers.mask):                                       # (S-1,)
        tokens = is_answer.nonzero()[:, 0]
        if len(tokens) == 0:  # no reward applies to it: it is not trained on
            text += (f'<div class="y"><b>y<sub>{n + 1}</sub></b><span>r –</span>'
                     f'<p dir="auto">{escape(str(group["responses"][n]))}</p></div>')
            continue
        # Between its first and its last token there may be replies, which others wrote.
        span = slice(tokens[0], tokens[-1] + 1)
        words = sample.words_of(tokenizer, answers.input_ids[n, 1:][span].tolist())
        distances = moved[n, span].tolist()
        y = ""
        for word, d, wrote_it in zip(words, distances, is_answer[span].tolist()):
            word = escape(word).replace("\n", "↵\n")
            if not wrote_it:
                word = f"<q>{word}</q>"
            elif abs(d) > 0.02:
                word = f'<i style="--d:{d:.2f}" title="{d:+.4f}">{word}</i>'
            y += word
        if not answers.finished[n]:
            y += " <small>cut at the limit</small>"
        A = answers.advantages[n].expand_as(is_answer)[is_answer].mean()  # each may have its own
        text += (f'<div class="y"><b>y<sub>{n + 1}</sub></b><span>r {r[n]:.4g}'
                 f'</span><span>A {A:+.2f}</span><s><i style="--A:{A:.2f}"></i></s>'
                 f'<p dir="auto">{y}</p></div>')
    return text + "</section>"


def number(reward):
    """A reward, or a dash where none applies."""
    return "–" if reward is None else f"{reward:.3g}"


def escape(text):
    """Escaped for HTML, with invisible characters as their code points."""
    return html.escape(sample.printable(text))


if __name__ == "__main__":
    print(main(sys.argv[1]))
