"""One line of a prompts file. Apart from what tokenises, so that asking a server needs neither torch nor Transformers."""

from __future__ import annotations

import json
from typing import Any

from dflash_lit.errors import UserError

__all__ = ["parse_prompt"]


def parse_prompt(line: str, place: str) -> dict[str, Any]:
    """The object in ``line``, which has either a prompt or messages; neither is looked into.

    Args:
        place: of the line, for messages.

    Raises:
        UserError: if it is something else.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        else:  # Python reads numbers of thousands of digits no more
            reason = "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"
        raise UserError(f"{place}: is not JSON ({reason}); write one object a line") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise UserError(f'{place}: needs an object with either "prompt" (a text) or "messages" (a list)')
    return entry
