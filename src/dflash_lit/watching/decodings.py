"""Sample decodings as HTML that carries its own colours, for pages that are not ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lit.report_page import SAMPLE_CSS, sample_html

__all__ = ["decoding_cell", "decoding_rows"]


# Of the two looks only the light one: what is around the cell does not follow the reader's choice.
_LIGHT = ":root { --soft: #5b6573; --ok: #cdebdd; --bonus: #ffdca8; } body { background: #fff; color: #1c2430; }"


def decoding_cell(sample: Mapping[str, Any]) -> str:
    """One sample: accepted drafts green, the bonus token that ends each round amber; all text is escaped."""
    return f"<style>{SAMPLE_CSS}{_LIGHT}</style>{sample_html(sample)}"


def decoding_rows(samples: list[Mapping[str, Any]]) -> list[tuple[str, int, float, str]]:
    """Prompt, rounds, share of rounds in which any draft was accepted, and :func:`decoding_cell`."""
    rows = []
    for sample in samples:
        rounds = sample.get("rounds") or []
        accepted = sum(bool(part.get("text_accepted")) for part in rounds)
        share = accepted / len(rounds) if rounds else 0.0
        rows.append((str(sample.get("prompt") or ""), len(rounds), share, decoding_cell(sample)))
    return rows
