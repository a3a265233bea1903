"""The HTML of the run report, and how each value of a run's summary reads as text.

One page that loads nothing: styles, figures and text are inside. Everything that comes from the run is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dflash_lit import pictures

__all__ = [
    "CSS",
    "SAMPLE_CSS",
    "decimal",
    "document",
    "duration_text",
    "lossless_text",
    "number",
    "page",
    "sample_html",
    "sampled_at",
    "speed_text",
    "tree_tau_text",
    "tree_text",
]

Metrics = Mapping[str, Sequence[tuple[int, float]]]
NOT_MEASURED = "not measured"


def number(summary: Mapping[str, Any], key: str) -> float | None:
    """A finite number of the summary, or None: a mean over nothing is NaN, which is not a measurement."""
    value = summary.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number that no float holds
        return None


def decimal(summary: Mapping[str, Any], key: str, unit: str = "") -> str:
    value = number(summary, key)
    return NOT_MEASURED if value is None else f"{value:.2f}{unit}"


def count(summary: Mapping[str, Any], key: str) -> str:
    value = number(summary, key)
    return NOT_MEASURED if value is None else f"{value:,.0f}"


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def sampled_at(summary: Mapping[str, Any]) -> list[str]:
    """The temperatures above 0 that were decoded at, as their keys spell them; 0.7 where none was."""
    found = [key.removeprefix("tau_t") for key in summary if re.fullmatch(r"tau_t[0-9.e+-]+", key)]
    return found or ["0.7"]


def lossless_text(summary: Mapping[str, Any]) -> str:
    verdict, prompts = summary.get("lossless"), summary.get("lossless_prompts")
    if not isinstance(verdict, bool):
        return NOT_MEASURED
    ties = summary.get("lossless_near_ties")
    rounding = f", {ties} more differ by rounding at a tie" if ties else ""
    return ("yes" if verdict else "NO") + (f", {prompts} prompts identical{rounding}" if prompts else "")


def ratio_text(summary: Mapping[str, Any], suffix: str) -> str | None:
    """Speed with the drafter over speed without, and its name: below 1 it is called slower."""
    plain, drafted = (number(summary, f"tokens_per_s_{kind}{suffix}") for kind in ("plain", "drafted"))
    if not plain or drafted is None:
        return None
    ratio = round(drafted / plain, 2)
    return f"{ratio:.2f}x, " + ("faster" if ratio > 1 else "slower" if ratio < 1 else "no faster")


def speed_text(summary: Mapping[str, Any], suffix: str) -> str:
    plain, drafted = (number(summary, f"tokens_per_s_{kind}{suffix}") for kind in ("plain", "drafted"))
    if plain is None and drafted is None:
        return NOT_MEASURED
    pair = " -> ".join("?" if rate is None else f"{rate:,.1f}" for rate in (plain, drafted))
    ratio = ratio_text(summary, suffix)
    return f"{pair} ({ratio})" if ratio else pair


def decoded_taus(summary: Mapping[str, Any]) -> dict[str, dict[int, tuple[float, float]]]:
    """Temperature -> node budget -> decoded tau and its standard error (NaN if not known); budget 0 is the chain."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for key in summary:
        match = re.fullmatch(r"tau_(greedy|t[0-9.e+-]+)(?:@(\d+))?", key)
        value = number(summary, key)
        if match is None or value is None:
            continue
        name = "greedy" if match[1] == "greedy" else f"T={match[1].removeprefix('t')}"
        error = number(summary, f"{key}_error")
        found.setdefault(name, {})[int(match[2] or 0)] = (value, math.nan if error is None else error)
    return found


def tree_tau_text(summary: Mapping[str, Any]) -> str:
    """Of the greedy trees: "@16: 3.41, @64: 3.90"."""
    taus = {budget: tau for budget, (tau, _) in decoded_taus(summary).get("greedy", {}).items() if budget}
    return ", ".join(f"@{budget}: {tau:.2f}" for budget, tau in sorted(taus.items())) or NOT_MEASURED


def tree_text(summary: Mapping[str, Any]) -> str:
    values = {key: value for key in summary if (value := number(summary, key)) is not None}
    return ", ".join(f"@{budget}: {eal:.2f}" for budget, eal in sorted(pictures.budgets(values).items())) or NOT_MEASURED


# --- the page ---


def page(summary: Mapping[str, Any], metrics: Metrics, config_yaml: str | None) -> str:
    target = str(summary.get("target") or "")
    config = f"<details><summary>Configuration</summary><pre>{escape(config_yaml)}</pre></details>" if config_yaml else ""
    body = f"""<h1>DFlash drafter report</h1>
{_cards(summary)}
{_figures(summary, metrics)}
{_samples(summary)}
{_phases(summary)}
{_facts(summary)}
{config}"""
    return document("DFlash drafter report" + (f": {target}" if target else ""), body)


def document(title: str, body: str, css: str | None = None) -> str:
    """A page that may load nothing, by its own policy; ``body`` is HTML, ``title`` text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{CSS if css is None else css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _cards(summary: Mapping[str, Any]) -> str:
    tau, lossless, ratio = number(summary, "tau_greedy"), summary.get("lossless"), ratio_text(summary, "")
    meaning = (
        "How many tokens each target pass yields instead of 1 (greedy decoding of held-out prompts, bonus token included)."
    )
    if summary.get("validated_on_train"):
        meaning = meaning.replace("held-out prompts", "prompts it was TRAINED on")
    if loops := number(summary, "greedy_repetitive"):
        meaning += f" {loops:.0f} of the greedy responses end in a short cycle, as small models' do, which is easy to draft."
    if tau is not None:
        meaning = meaning.replace("How many tokens each target pass yields", f"Each target pass yields {tau:.2f} tokens")
    speed = "Plain decoding -> drafted, greedy, on this machine."
    speed += "".join(f" T={t}: {speed_text(summary, f'_t{t}')}." for t in sampled_at(summary))
    if ratio and "slower" in ratio:
        speed += " Where it is slower, drafting costs more time than the saved target passes give back."
    same = "Whether the drafted greedy output equals the target's own, token by token: a drafter may change speed, never text."
    if lossless is False:
        same = "The drafted greedy output differs from the target's own. Find the cause before this drafter is used."
    chain = "Expected accepted length of a single chain of drafts on validation text, without decoding."
    tree = "The same for a tree of drafts that the target verifies in one pass, by its number of nodes."
    cards = [
        ("big", "tau, greedy (incl. bonus)", decimal(summary, "tau_greedy"), meaning),
        *(
            ("", f"tau at T={t} (incl. bonus)", decimal(summary, f"tau_t{t}"), f"The same, with sampling at temperature {t}.")
            for t in sampled_at(summary)
        ),
        (
            "",
            "tree tau by budget, greedy (incl. bonus)",
            tree_tau_text(summary),
            "The same with trees of drafts, by their number of nodes: the target verifies a whole tree in one pass.",
        ),
        (
            "",
            "tau untrained (incl. bonus)",
            decimal(summary, "tau_untrained"),
            "The same with fresh random weights: the floor.",
        ),
        ("bad" if lossless is False else "", "lossless", lossless_text(summary), same),
        ("", "tokens/s", speed_text(summary, ""), speed),
        ("", "chain EAL (incl. bonus)", decimal(summary, "val/chain_eal"), chain),
        ("", "tree EAL by budget (incl. bonus)", tree_text(summary), tree),
    ]
    return "<section class='cards'>" + "".join(_card(*card) for card in cards) + "</section>"


def _card(look: str, name: str, value: str, meaning: str) -> str:
    look += " missing" if value == NOT_MEASURED else ""
    return f"<div class='card {look}'><h3>{escape(name)}</h3><p class='value'>{escape(value)}</p><p>{escape(meaning)}</p></div>"


def _figures(summary: Mapping[str, Any], metrics: Metrics) -> str:
    # The summary's numbers are of the final weights; without them, the last validation is the best that is known.
    last = {name: series[-1][1] for name, series in metrics.items() if series and math.isfinite(series[-1][1])}
    known = last | {key: value for key in summary if (value := number(summary, key)) is not None}
    drawn = [
        (
            pictures.length_curves(metrics),
            "Higher is better. EAL is the length that the validation pass expects; decoded tau is counted in real decoding. "
            "EAL that rises while tau does not is a sign that training and decoding disagree.",
        ),
        (
            pictures.loss_curves(metrics),
            "Lower is better; validation that turns up while training goes on falling is overfitting.",
        ),
        (
            pictures.acceptance_by_slot(metrics),
            "Solid: share of blocks that are right up to slot k, so still accepted there. Dashed: slot k alone. "
            "The points of a solid line add up to the chain EAL less its bonus token.",
        ),
        (
            pictures.tree_by_budget(pictures.budgets(known), known.get("val/chain_eal")),
            "What a larger tree of drafts brings over one chain; each node costs the target one more position to verify.",
        ),
    ]
    drawn.append(
        (
            pictures.budget_curves(metrics),
            "What larger trees bring while the drafter learns: expected by validation (solid), counted in real decoding (dashed).",
        )
    )
    drawn.append(
        (
            pictures.tau_by_budget(decoded_taus(summary)),
            "Real decoding: what trees of drafts bring over one chain, with standard errors over prompts. A larger tree costs the "
            "target more a pass; `dflash-lit evaluate` measures whether it is faster, too.",
        )
    )
    drawn.append(
        (
            pictures.pipeline_curves(metrics),
            "Training speed. Where targets run apart, the lower dashed line is the side that sets the pace.",
        )
    )
    figures = [f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in drawn if svg]
    return "<h2>Pictures</h2><section class='figures'>" + "".join(figures) + "</section>" if figures else ""


def _samples(summary: Mapping[str, Any]) -> str:
    samples = summary.get("samples") or []
    if not samples:
        return ""
    legend = (
        "<p>Held-out prompts, decoded with the drafter: <span class='ok'>drafts that the target accepted</span> and the "
        "<span class='bonus'>bonus token</span> of the target that ends each round. Long green runs are passes saved.</p>"
    )
    return "<h2>Samples</h2>" + legend + "".join(sample_html(sample) for sample in samples)


def sample_html(sample: Mapping[str, Any]) -> str:
    """A decoded prompt and its rounds, in the classes that :data:`SAMPLE_CSS` colours; all text is escaped."""
    rounds = sample.get("rounds") or []
    text = ""
    for part in rounds:
        accepted, bonus = str(part.get("text_accepted") or ""), str(part.get("text_bonus") or "")
        text += f"<span class='ok'>{escape(accepted)}</span>" if accepted else ""
        line_end = " line-end" if bonus.startswith("\n") else ""  # a bare line break would show no mark at all
        text += f"<span class='bonus{line_end}'>{escape(bonus)}</span>" if bonus else ""
    prompt = f"<span class='prompt'>{escape(str(sample.get('prompt') or ''))}</span>"
    # A div, not a pre: the parser drops the first line break of a pre.
    return f"<p class='rounds'>{len(rounds)} rounds</p><div class='text'>{prompt}{text}</div>"


def _phases(summary: Mapping[str, Any]) -> str:
    phases = summary.get("phases")
    spent = {name: s for name in phases if (s := number(phases, name)) is not None} if isinstance(phases, Mapping) else {}
    if not spent:
        return ""
    named = sum(spent.values())
    whole = max(number(summary, "wall_s") or 0, named) or 1
    if whole - named > 0.01 * whole:
        spent["(not in a phase)"] = whole - named
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{duration_text(s)}</td><td>{s / whole:.0%}</td>"
        f"<td class='bar'><div style='width:{max(s / whole, 0):.1%}'></div></td></tr>"
        for name, s in spent.items()
    )
    return f"<h2>Time by phase</h2><table>{rows}</table>"


def _facts(summary: Mapping[str, Any]) -> str:
    facts = [
        (name, str(summary.get(key) or "not recorded")) for name, key in (("target", "target"), ("objective", "objective"))
    ]
    counts = {
        "target parameters": "target_parameters",
        "drafter parameters": "drafter_parameters",
        "block size (tokens)": "block_size",
        "optimizer steps": "steps",
        "training tokens": "train_tokens",
    }
    facts += [(name, count(summary, key)) for name, key in counts.items()]
    facts += [
        ("wall time", duration_text(number(summary, "wall_s"))),
        ("peak memory", decimal(summary, "peak_rss_gib", " GiB")),
        ("exported drafter", str(summary.get("export_dir") or "not written")),
    ]
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<h2>The run</h2><table>{rows}</table>"


SAMPLE_CSS = """
:root { --soft: #5b6573; --ok: #cdebdd; --bonus: #ffdca8; }
@media (prefers-color-scheme: dark) { :root { --soft: #9aa4b2; --ok: #1d5240; --bonus: #7a4d0c; } }
.ok, .bonus { border-radius: 3px; } .ok { background: var(--ok); }
.bonus { background: var(--bonus); font-weight: 700; text-decoration: underline; } .line-end::before { content: "\\21B5"; }
.prompt { color: var(--soft); } .rounds { margin: 1rem 0 .2rem; font-size: .85rem; color: var(--soft); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.55 ui-monospace, monospace; }
"""
"""What the samples need wherever they are shown."""

CSS = (
    SAMPLE_CSS
    + """
:root { --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5b6573; --line: #dfe3e8;
  --accent: #0072b2; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171c; --card: #1e232a; --ink: #e6e9ee; --soft: #9aa4b2;
  --line: #323943; --accent: #56b4e9; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.5rem; }
h1 { margin: 0 0 1rem; font-size: 1.6rem; } h2 { margin: 2.2rem 0 .8rem; font-size: 1.2rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; }
.card h3 { margin: 0; font-size: .85rem; font-weight: 600; color: var(--soft); }
.card p { margin: .3rem 0 0; font-size: .88rem; }
.card .value { font-size: 1.25rem; font-weight: 650; } .card.big { grid-column: 1 / -1; border-left: 5px solid var(--accent); }
.card.big .value { font-size: 3.2rem; line-height: 1.1; color: var(--accent); } .card.big p:last-child { font-size: 1.05rem; }
.card.bad .value { color: var(--bad); } .card.missing .value { font-weight: 400; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem; background: #fff; color: #1c2430; border: 1px solid var(--line); border-radius: 10px; }
figure svg { display: block; width: 100%; height: auto; } figure svg text { font-family: system-ui, sans-serif !important; }
figcaption { margin-top: .4rem; font-size: .88rem; color: #4a5462; }
.text, pre { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.55 ui-monospace, monospace; }
table { width: 100%; border-collapse: collapse; background: var(--card); font-size: .9rem; }
th, td { padding: .35rem .7rem; border: 1px solid var(--line); border-width: 1px 0; text-align: left; overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); } .bar { width: 45%; } .bar div { height: .7rem; background: var(--accent); }
details { margin-top: 2rem; } details summary { cursor: pointer; font-weight: 600; margin-bottom: .6rem; }
"""
)
