"""The one kind of error that is meant for people."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Wrong input: one line that names the field, row or file, says what is wrong with it, and what to do.

    The commands print it without a traceback and exit with 2.
    """
