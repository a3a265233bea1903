"""How much of a known continuation a drafter with a path head gets right, as a chain and in a tree.

The probability of a prefix depends on its whole path, so there is no threshold to be had from the slots alone, as in
:mod:`.tree`. The tree itself is grown, as in decoding, and the continuation is walked through it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_lit.decode.lattice import Lattice, greedy_path, grow_paths
from dflash_lit.decode.tree import accept, tree_of_levels

__all__ = ["path_lengths"]


@torch.no_grad()
def path_lengths(lattice: Lattice, labels: Tensor, label_ok: Tensor, budgets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens that the best path, and a tree of each budget, accept on the labels, without the bonus.

    Args:
        lattice: of M blocks.
        labels: int64 [M, B-1]; label_ok: bool [M, B-1]. A slot without a label ends the path.
        budgets: tree sizes in nodes, the root not counted.

    Returns:
        int64 [M] and [M, len(budgets)].
    """
    wanted = torch.where(label_ok, labels, -1)
    chain = (greedy_path(lattice) == wanted).long().cumprod(dim=-1).sum(dim=-1)
    tree = tree_of_levels(grow_paths(lattice, max(budgets)), max(budgets))
    # A target that says the labels, whatever the branch.
    path = accept(tree, F.pad(wanted, (0, 1), value=-1).gather(1, F.pad(tree.depths, (1, 0))))
    # Nodes are sorted: the tree of a smaller budget is the beginning of this one.
    accepted = torch.arange(path.rows.shape[1], device=labels.device) < path.counts[:, None]
    lengths = [(accepted & (path.rows <= budget))[:, 1:].sum(dim=1) for budget in budgets]
    return chain, torch.stack(lengths, dim=1)
