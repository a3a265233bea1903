"""The state of a run on one line of at most 80 columns, whatever the figures."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SHOWN", "WIDTH", "left_text", "progress_line"]

WIDTH = 80

_LENGTHS = {"loss": "train/loss", "chain": "train/chain_eal", "tree": "val/tree_eal@64", "tau": "acceptance/tau_greedy"}
"""Name on the line -> metric."""

SHOWN = tuple(_LENGTHS.values())
"""Metrics of the model that the line shows."""

_SPEED, _WAIT = "pipeline/ktok_s", "pipeline/wait_share"

# Longest form first: whether "step" is written, digits after the point, what is left out.
_FORMS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("step ", 2, ()),
    ("step ", 2, ("tau",)),
    ("", 2, ("tau",)),
    ("", 1, ("tau",)),
    ("", 0, ("tau",)),
)


def left_text(seconds: float) -> str:
    """Time left in at most 7 columns: ``45s``, ``3m12s``, ``2h05m``, ``12d04h``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h" if whole < 1000 * 86400 else ">999d"


def progress_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None, width: int = WIDTH) -> str:
    """Steps, loss, chain and tree EAL, decoded tau, Ktok/s, share of time waited, time left; what was not measured is left out.

    Of a line that is too long first tau goes, which the tree EAL foretells, then digits.

    Args:
        metrics: by their logged names.
        left_s: seconds, None where nothing is known yet.
        width: columns, at most :data:`WIDTH` count.
    """
    width = min(width, WIDTH)
    line = ""
    for prefix, digits, left_out in _FORMS:
        parts = [f"{prefix}{step}/{total}"]
        parts += [
            f"{name} {_short(metrics[key], digits)}"
            for name, key in _LENGTHS.items()
            if key in metrics and name not in left_out
        ]
        if _SPEED in metrics:
            parts.append(f"{_short(metrics[_SPEED], min(digits, 1))} Ktok/s")
        if _WAIT in metrics:
            parts.append(f"wait {100 * metrics[_WAIT]:.0f}%")
        if left_s is not None:
            parts.append(f"{left_text(left_s)} left")
        line = " ".join(parts)
        if len(line) <= width:
            break
    return line[:width]


def _short(value: float, digits: int) -> str:
    """``nan`` and ``inf`` as they are; thousands without digits, millions as a power."""
    if abs(value) >= 1e5:
        return f"{value:.0e}"
    return f"{value:.{digits if abs(value) < 1000 else 0}f}"
