"""The mask as a picture for people: who sees whom, token by token, and which tiles of it are computed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib.style
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from dflash_lit.attention.block_mask import visible_tiles
from dflash_lit.attention.intervals import TILE
from dflash_lit.attention.mask import BlockLayout, dense_mask
from dflash_lit.errors import UserError
from dflash_lit.pictures import BLUE, GREY, ORANGE, STYLE, save_picture

__all__ = ["draw_mask", "tile_counts"]

LARGEST = 2**24
"""Pairs of query and key in a picture: one byte and some each, and beyond this nobody sees the blocks anyway."""

HIDDEN, PARTIAL, DARK = "#F1F3F5", "#9CCBE8", "#1F2933"


def tile_counts(layout: BlockLayout, tile: int = TILE) -> dict[str, int]:
    """Tiles of ``tile`` x ``tile`` in all rows: ``full``, ``partial``, ``skipped``, ``all``.

    Raises:
        ValueError: ``S`` is not a multiple of ``tile``.
    """
    visible_any, full = visible_tiles(layout, tile)
    total, computed, whole = visible_any.numel(), int(visible_any.sum()), int(full.sum())
    return {"full": whole, "partial": computed - whole, "skipped": total - computed, "all": total}


def draw_mask(layout: BlockLayout, path: str | Path, *, tile: int = TILE) -> None:
    """Draw the mask of one small row to ``path``; the suffix chooses the format (.png, .svg, .pdf).

    Above the pairs: a line of pixels a query, a column a key. Below the tiles, from the code that training uses.

    Raises:
        UserError: more than one row, too many pairs, or a file that cannot be written.
        ValueError: ``S`` is not a multiple of ``tile``.
    """
    keys = layout.row_tokens + layout.queries
    if layout.rows != 1:
        raise UserError(f"a picture shows one row, these are {layout.rows}")
    if layout.queries * keys > LARGEST:
        raise UserError(
            f"{layout.queries} queries x {keys} keys are too many for a picture (at most {LARGEST} pairs): "
            "take fewer row tokens or anchors, or a smaller block size"
        )
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(10.5, 8.6), layout="constrained")
        figure.suptitle(_sentence(layout), fontsize=12, fontweight="bold")
        pairs, tiles = figure.subplots(2, 1, sharex=True)
        _draw_pairs(pairs, layout)
        _draw_tiles(tiles, layout, tile)
        save_picture(figure, path, dpi=100)


def _sentence(layout: BlockLayout) -> str:
    back = "" if layout.window is None else f", {layout.window} tokens back at most,"
    own = "its block up to itself" if layout.causal else "its own block"
    return f"A slot sees only its document before the anchor{back} and {own}"


def _draw_pairs(axes: Axes, layout: BlockLayout) -> None:
    """Token by token, with the documents and the anchors that explain it."""
    tokens, size = layout.row_tokens, layout.block_size
    mask = dense_mask(layout)[0].int()
    mask[:, tokens:] *= 2
    _image(axes, mask, layout, [HIDDEN, BLUE, ORANGE])
    for block, (anchor, valid) in enumerate(zip(layout.anchors[0].tolist(), layout.valid[0].tolist(), strict=True)):
        top = block * size
        axes.axhline(top, color="white", linewidth=0.8)
        if valid:
            axes.plot([anchor + 0.5] * 2, [top, top + size], color=DARK, linewidth=2.5, solid_capstyle="butt")
    axes.set_title(
        f"Pair by pair: a line is a slot ({size} a block: the anchor's token, then mask tokens), a column is a key",
        loc="left",
        pad=26,
        fontsize=11,
    )
    _name_blocks(axes, layout)
    axes.set_ylabel("queries: blocks @ their anchors")
    axes.legend(
        handles=[
            Patch(facecolor=BLUE, label="context it sees"),
            Patch(facecolor=ORANGE, label="slots of its own block it sees"),
            Patch(facecolor=HIDDEN, edgecolor=GREY, label="hidden"),
            Line2D([], [], color=DARK, linewidth=2.5, label="its anchor: hidden as context, held by slot 0"),
        ],
        loc="upper left",
        bbox_to_anchor=(0, -0.02),
        ncols=4,
        fontsize=9,
    )


def _draw_tiles(axes: Axes, layout: BlockLayout, tile: int) -> None:
    """The tiles that hold those pairs."""
    visible_any, full = (t[0].int() for t in visible_tiles(layout, tile))
    cells = (visible_any + full).repeat_interleave(tile, 0).repeat_interleave(tile, 1)
    _image(axes, cells[: layout.queries, : layout.row_tokens + layout.queries], layout, [HIDDEN, PARTIAL, BLUE])
    for place in range(0, layout.queries + 1, tile):
        axes.axhline(place, color="white", linewidth=1)
    for place in range(0, layout.row_tokens + layout.queries + 1, tile):
        axes.axvline(place, color="white", linewidth=1)
    count = tile_counts(layout, tile)
    share = (count["full"] + count["partial"]) / count["all"]
    here = "" if tile == TILE else f" (small for this small row; in training {TILE} x {TILE})"
    axes.set_title(
        f"In tiles of {tile} x {tile}{here}: {count['full'] + count['partial']} of {count['all']} are computed, {share:.0%}",
        loc="left",
        pad=26,
        fontsize=11,
    )
    _name_blocks(axes, layout)
    axes.set_ylabel("queries: blocks @ their anchors")
    axes.set_xlabel("keys: the tokens of the packed row, then the slots of all blocks (noise)")
    axes.legend(
        handles=[
            Patch(facecolor=BLUE, label=f"full: all pairs visible, the mask is not asked ({count['full']})"),
            Patch(facecolor=PARTIAL, label=f"partial: the mask is asked for each pair ({count['partial']})"),
            Patch(facecolor=HIDDEN, edgecolor=GREY, label=f"skipped ({count['skipped']})"),
        ],
        loc="upper left",
        bbox_to_anchor=(0, -0.17),
        ncols=3,
        fontsize=9,
    )


def _image(axes: Axes, cells: Tensor, layout: BlockLayout, colours: list[str]) -> None:
    """int [Q, KV] of colour numbers, and what both panels have: the documents' names above, their ends as lines."""
    queries, keys = cells.shape
    tokens = layout.row_tokens
    colour_map = ListedColormap(colours)
    axes.imshow(
        cells.numpy(), cmap=colour_map, vmin=0, vmax=2, extent=(0, keys, queries, 0), aspect="auto", interpolation="nearest"
    )
    axes.grid(visible=False)
    documents = layout.document_ids[0]
    starts = [0, *(torch.nonzero(documents[1:] != documents[:-1])[:, 0] + 1).tolist(), tokens]
    names = [
        (start, end, "padding" if documents[start] < 0 else f"document {number}")
        for number, (start, end) in enumerate(pairwise(starts))
    ]
    for start, end, name in [*names, (tokens, keys, "noise: the blocks' own slots")]:
        if end < keys:
            last = end == tokens
            axes.axvline(end, color=DARK, linewidth=1.6 if last else 0.8, linestyle="-" if last else "--", zorder=3)
        if end - start > 0.05 * keys:
            axes.text((start + end) / 2, -0.02 * queries, name, ha="center", va="bottom", fontsize=9, color=DARK)


def _name_blocks(axes: Axes, layout: BlockLayout) -> None:
    blocks, size = layout.anchors.shape[1], layout.block_size
    shown = range(0, blocks, -(-blocks // 16))
    labels = [f"block {b} @ {layout.anchors[0, b]}" if layout.valid[0, b] else f"block {b}: padding" for b in shown]
    axes.set_yticks([(b + 0.5) * size for b in shown], labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
