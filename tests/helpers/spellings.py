r"""How final answers may be written: numbers that are equal, answers that are not, hostile text."""

NUMBERS = {  # how 18, and other numbers, may be written; answers.jsonl has more
    "18": r"""18$  $\$18.00$  $18.$  ((18))  36/2  x_{10} = 18  \text{Answer: }18
        18 \text{ dollars}.  18\,\text{km/h}  18.\text{ eggs}  18~\text{}  \$18\text{ a day}
        18\qquad km  18\:\text{km}  \mathbf{ 18. }  $\textbf{\$18}$  18 \degree  18\%  18%
        18 \%  18 percent  \emph{18}  \bm{18}  \textsc{18}  \boldsymbol{\frac{36}{2}}
        \textbf{\underline{18}}  \underline{\textbf{18}}  {\bf 18}  \color{red}18
        \displaystyle 18  \text{USD }18  ¥18  18 usd  usd -18 * -1  $18 = 18$  9 \cdot 2
        9*2  9 \times \$2 = \$18  36/2 = 18 km  \frac{9 \cdot 2}{1}  \textbf{18\text{ km}}
        \frac{36}{2} = 9 \times 2 = 18\text{ km}  Total = 9 * 2 = 18  \text{The answer is } 18
        \text{The answer is: }\$18.  It equals 18  \text{Anna's total} = 18  \text{Größe: }18
        `18`  ```18 km```  “18”  θ = 18  \theta = 18  x = y = 18
        \textstyle 18  18^{th}  18 sq. ft.  18 cu ft  18^\circ\text{C}  18_{}
        18 out-of-town guests'  """ + "18\u200b",
    "12.5": r"12.5  12.50  12\frac{1}{2}  12 1/2  12½  25/2  12.5\% \text{off}  1.25e1",
    "-3": r"-$3  $-3  -\$3.0  -6/2  \frac{-6}{2}  -\frac{6}{2}  6/-2",
    "1000": r"""1000  10³  1\cdot 10^3  1 × 10^3  1*10^3  1.0e+3  100\times 10^1
        1\times10^3\text{ m}  1e3 m  1'000  1’000  \$1'000.00  (1000)  [1000]""",
    "0.5": r"0.5  \dfrac{1}{2}  \cfrac{1}{2}  \frac12  \frac{1}2  ½  5\times 10^{-1}  5e-1",
    "3.5": r"3 \frac{1}{2}  7/2",
    "-3.5": r"-3 1/2  -\frac{7}{2}",
    "1/3": r"\frac{2}{6}  1/3  \frac{0.5}{1.5}  \frac{1,000}{3,000}",
    "1000/3": r"1000/3  1,000/3  1 000/3  333 1/3  333\frac{1}{3}",
    "0": r"0.0  $0  .0  0\%  0/5  0e9",
    "1234567.5": r"1 234 567.5  1,234,567.5  1'234'567.5  1’234’567.5",
    "-18": "‐18  ‑18  ‒18  –18  −18",  # hyphens, a figure dash, an en dash, a minus
}
SAME = r"""
2π  2\pi  2 \pi  2 π  $2\pi$
\frac{\pi}{2}  \dfrac{π}{2}  π/2
πr²  \pi r^2  \pi r^{2}
∞  \infty  +\infty  $+\infty$
(-∞, 3]  (-\infty, 3]  (−∞,3]  \left(-\infty, 3\right]
(-∞, ∞)  (-\infty, \infty)  (-\infty,+\infty)
√2  \sqrt2  \sqrt 2  \sqrt{2}  √(2)
√12  \sqrt{12}  \sqrt{ 12 }
2√3  2\sqrt{3}  2 \sqrt 3
\frac{\sqrt2}{2}  \frac{\sqrt{2}}{2}  √2/2  \sqrt{2}/2
√(x+1)  \sqrt{x + 1}
x ≤ 3  x≤3  x \le 3  x\leq3
x ≥ y  x \ge y  x\geq y
x ≠ 3  x \ne 3
x < 3  x<3  x \lt 3
±5  \pm 5  \pm5  x = ±5
3 ± √2  3\pm\sqrt{2}
∅  \varnothing  \emptyset  $\emptyset$
A ∪ B  A\cup B  A \cup B
(-∞, 1) ∪ (2, ∞)  (-\infty,1)\cup(2,\infty)
A ∩ B  A \cap B
x ∈ ℝ  x \in \mathbb{R}
∠ABC  \angle ABC
x → 0  x \rightarrow 0  x\rightarrow0
2516₈  2516_8  2516_{8}
x₁  x_1  x_{1}
2ⁿ  2^n  2^{n}
x^{-1}  x^-1
log₂3  \log_2 3  \log_{2}3  \log_{2}{3}
\ln{2}  \ln 2  ln 2
\sin{x}  \sin x
x_{\max}  x_{max}  x_max
\frac x2  \frac{x}{2}  x/2  \cfrac{x}2
\frac{x+1}{2}  (x+1)/2  \dfrac{x + 1}2
\frac{3\sqrt{3}}{4}  \frac{3 \sqrt 3}4  3√3/4
x^{\frac{1}{2}}  x^{1/2}  x^{\frac12}
\sqrt[3]4  \sqrt[3]{4}
\{1, 2\}  \left\{1,2\right\}
2+3 i  2+3i
\tan^{-1} x  \tan^{-1}x
5 and 6  5, 6  5 or 6  5\text{ and }6
|x|  \left|x\right|
{1, 2, …}  {1, 2, ...}
3:45 PM  3:45pm  3:45 \text{ PM}
9 AM  9am
(2,500)  (2, 500)  \left(2, 500\right)  $(2,500)$  (2,\,500)
[1,100]  [1, 100]  [ 1 , 100 ]
(1,234,567)  (1, 234, 567)
`Monday`  Monday  “Monday”
""" + "".join(f"{letter}  \\{name}\n" for letter, name in zip(
    "αβγδεζηθικλμνξρστυφχψωϕΔΩ", """alpha beta gamma delta varepsilon zeta eta vartheta iota kappa
    lambda mu nu xi rho varsigma tau upsilon varphi chi psi omega phi Delta Omega""".split()))
HUGE = ["10^999999999", "10^{999999999}", "1e999999999", "1e-999999999", r"1\times10^{999999999}",
        "9**9**9**9", "9^{9^{9^9}}"]
NOT_EQUAL = [
    ("5", "5.01"), ("63", "62.995"), ("1", "1.0000000000000000000000001"),
    ("1/3", "0.333333333333333333"), ("-5", "5"), (r"\pm 5", "5"), ("1,0000", "10000"),
    (",100", "100"), ("1 00", "100"), ("1_000", "1000"), ("0x10", "16"), ("18 thousand", "18000"),
    (r"\$18k", "18"), (r"18\text{ K}", "18"), (r"5\text{ or }6", "6"), (r"5\text{ or 6}", "5"),
    ("5$6", "56"), ("5$6", "5"), (r"\text{about }5", "5"), ("5 am", "5"), ("50%", "0.5"),
    ("18 pi", "18"), (r"18^{2}", "324"), (r"\not= 18", "18"), ("5-3", "2"), ("9 * 2 * 1", "18"),
    ("1/2/3", "1/6"), ("36/2*9", "162"), (r"\frac{36}{2\cdot 9}", "2"),
    ("9 x 2", "18"), ("9 * x", "9"), ("0x12", "0"), (r"\$18M", "18"), ("18 = x", "18"),
    ("x = 17 = 18", "17"), ("2x = 18", "9"), ("it is not 18", "18"),
    (r"\text{It is not: }18", "18"), ("this 18", "18"), ("<= 18", "18"), (r"\overline{18}", "18"),
    ("2516₈", "25168"), ("2⁻¹", "21"), ("2ⁿ", "2n"), ("a₁", "a1"),
    ("10₂", "102"), (r"\frac{1}{2x}", r"\frac{1}{2}x"), ("18 -", "18"),
    (r"\{18\}", "18"), (r"\{1,2\}", "[1,2]"), ("5, 6", "56"), ("x^{2n}", "x^2n"), ("5 x 2 = ", "5"),
    *((f"5 {word}", "5") for word in
      "Millionen millones milhões crores thousandths миллиона тысяч 億円".split()),
    ("x^{3}5", "x^{35}"), (r"\frac{x+1}{2}", "x+1/2"), ("1/0", "1"), ("0/0", "0"),
    (r"10^{3}5", "10^{35}"), ("inf", "0"), ("-", "0"), ("%", "0"), (",", "0"), ("-.", "0"),
    ("\u00b2", "2"), ("\u0665", "6"), ("5\u4e07", "5"), ("5(x)", "5"), ("5 \u03c0", "5"),
    ("(1,234)", "1234"), ("(2, 500)", "2500"), ("[1,100]", "1100"), ("[1, 100]", "1100"),
    ("((1,234))", "1234"), ("(1,100]", "1100"), ("(1,234)", "(12,34)"), ("√12", r"\sqrt12"),
    (r"\sqrt{2}", "2"), ("√2", "2"), ("±5", "5"), (r"+\infty", r"-\infty"), ("≤ 18", "18"),
    ("x ≤ 18", "x ≥ 18"), ("x < 18", r"x \le 18"), ("≠ 18", "18"), ("2π", "2"), ("π", "p"),
    ("2π", "2p"), ("3:45 PM", "3:45 AM"), ("5 p.m.", "5"), ("3:45 PM", "3"), ("A ∪ B", "A ∩ B"),
    ("1'00", "100"), ("5'10", "510"), ("α", "a"), (r"\alpha", "β"), ("f'(x)", "f(x)"),
    ("∅", "0"), (r"\in A", r"\notin A"), ("(U)", r"(\cup)"),
    ("9" * 301, "9" * 300), ("10^9999", "10"), ("1e1000", "1"), ("1e999999999", "1"),
    *((r"17 \boxed{18}", truth) for truth in ("17", "18", "1718")),  # a box with a guess and a box
    *((number, "5") for number in HUGE),  # which nothing computes
]
DIFFERS = {  # where the rule reads less, or more, than a fair reader
    "2^3", "eighteen", "18{,}5", "18 apples and oranges", "18_{10}", "1+x", r"\sqrt{8}", "0.5x",
    r"\{1, 2\}", "18 = x",  # missed
    "18 km", "18 cm", r"2 \times 3",  # paid, where the truth has another unit, or is 3 by 2
    "5 tausend",  # paid: nearly all number words of other languages are units
}
PIECES_OF_IT = [
    "(", ")", "[", "{", "}", "}{", "\\", "\\frac", "\\frac{", "\\frac1", "^", "^{", "1", "1,", "1 ",
    "1/", ",", ",000", ".", "-", "+", "=", "x=", "*", "$", '"', "a", "a-", " ", "\t", "\n", "°",
    "½", "é", "\\text{", "\\text{ or }", "\\{", "\\boxed", "\\boxed{", "\\boxed{ ", "\\boxed ",
    "\\boxed 1.", "\\boxed{1}", "\\boxed{\\boxed{1}", "\\boxed\n1!!!!", "\N{MINUS SIGN}", "\0",
    "\ud800\udfff", "\\math{", "\\text{{", "is ", "not ", "x is ", "\\frac{1}{", "1 000 ", "1,000,",
    "10^", "1*", "= 1", "usd ", "x10^", "\\textcolor{a}{", "M", '"a"', "_{", "(a)", "<", "<think>",
    "</think>", "<think></think><answer>", "</answer>", "\ufdfa", "\ufdfa(", "\u0301\u0327",
    "\u0665", "\u2075", "\u215a-", "\u4e07", "\u044f", "qu", "mill", "million", "(a", ")(", "\\\\",
    "\\pi ", "times ", "five", "√(", "√", "sqrt(", "\\sqrt", "\\sqrt{", "+∞", ") U (", "1'000",
    "\\not", "\\{\\}", "<-", "α", "\\frac{{", "\\frac{\\sqrt{1}", "5 p. ", "p.m.", "`", "..", "\\(",
    "m ", "a in ", "km ", "°c "]
