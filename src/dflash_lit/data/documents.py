"""One conversation or text as the drafter learns from it: tokens, and which of them count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_lit.errors import UserError

__all__ = ["Document"]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens that belong together and never see another document's tokens.

    Attributes:
        input_ids: int32 [n], n >= 2, all >= 0. Other integer types are converted.
        supervised: bool [n]; true where the token is to be learnt (the response), false where it is context (the prompt).
        name: where it comes from, for messages.

    Raises:
        UserError: if the arrays break the rules above.
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    name: str

    def __post_init__(self) -> None:
        ids, supervised = np.asarray(self.input_ids), np.asarray(self.supervised)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"document {self.name!r}: input_ids must be one list of whole numbers; give its token ids")
        if supervised.shape != ids.shape or supervised.dtype != np.bool_:
            raise UserError(
                f"document {self.name!r}: {len(ids)} input_ids need as many true or false values in supervised, "
                f"not {supervised.dtype} {list(supervised.shape)}"
            )
        if len(ids) < 2:
            raise UserError(f"document {self.name!r}: has {len(ids)} token(s), needs at least 2; leave it out")
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise UserError(f"document {self.name!r}: token ids must lie in [0, 2^31); tokenize it with the target's tokenizer")
        # Frozen for everybody else: the fields are set once more, in their final types.
        object.__setattr__(self, "input_ids", ids.astype(np.int32, copy=False))
        object.__setattr__(self, "supervised", supervised)

    def __len__(self) -> int:
        return len(self.input_ids)
