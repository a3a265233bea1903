"""How documents lie in the rows of training, as a picture: what is one document, what is learnt, what is padding."""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dflash_lit.data.packing import PackedRows, Rows
from dflash_lit.pictures import BLUE, GREEN, GREY, STYLE, save_picture

__all__ = ["draw_packing", "packing_pixels"]

PADDING = "#F1F3F5"


def packing_pixels(rows: PackedRows) -> np.ndarray:
    """fp64 [N, S, 3] in [0, 1]: two colours in turn for the documents of a row, paler where a token is not learnt."""
    colours = np.array([to_rgb(BLUE), to_rgb(GREEN)])[rows.document_ids % 2]
    pale = 1 - 0.35 * (1 - colours)
    pixels = np.where(rows.supervised[..., None], colours, pale)
    return np.where(rows.document_ids[..., None] < 0, np.array(to_rgb(PADDING)), pixels)


def draw_packing(rows: Rows, path: str | Path, *, most: int = 32) -> None:
    """Draw the first ``most`` rows to ``path``, a line a row, a column a token."""
    count = min(most, len(rows))
    first = rows.take(range(count))
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(9, 1.6 + 0.12 * count), layout="constrained")
        axes = figure.add_subplot(xlabel="token in the row", ylabel="row")
        axes.imshow(packing_pixels(first), aspect="auto", interpolation="nearest")
        axes.grid(False)
        axes.set_title(f"{count} of {len(rows)} rows, {100 * rows.efficiency:.1f} % filled", loc="left", fontsize=10)
        key = {"a document": BLUE, "the next": GREEN, "padding": PADDING}
        handles = [Patch(facecolor=colour, edgecolor=GREY, label=name) for name, colour in key.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, title="paler: not learnt (prompts)")
        save_picture(figure, path, dpi=100)
