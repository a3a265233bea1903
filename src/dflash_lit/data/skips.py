"""What was not taken from the data, why, and where it stands: counted, shown, and an error where it is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dflash_lit.errors import UserError

__all__ = ["Skip", "SkipRecord", "Skips"]


class Skip(Exception):  # noqa: N818 - no error: the normal way out for a record that is not taken
    """A record is not taken.

    Attributes:
        reason: one of few texts, which are counted.
        detail: what exactly, of this record; may be empty.
        choice: left out because the settings or the template say so. It is counted, but not under the limit: the record is not
            broken.
    """

    def __init__(self, reason: str, detail: str = "", *, choice: bool = False) -> None:
        super().__init__(reason, detail, choice)
        self.reason, self.detail, self.choice = reason, detail, choice


@dataclass(frozen=True, slots=True)
class SkipRecord:
    """One record that was not taken: where it stands (``file:line``), and the fields of its :class:`Skip`."""

    where: str
    reason: str
    detail: str = ""
    choice: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Skips:
    """Counts of a whole data set.

    Attributes:
        seen: records read, the skipped ones included.
        broken: reason -> how many, of those that count towards the limit.
        left_out: reason -> how many, of those that do not.
        examples: the first few of each reason.
    """

    seen: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[SkipRecord]] = field(default_factory=dict)

    def add(self, seen: int, skipped: Iterable[SkipRecord], *, keep: int = 3) -> None:
        """Count ``seen`` further records, of which ``skipped`` were not taken; ``keep`` examples of each reason are kept."""
        self.seen += seen
        for record in skipped:
            (self.left_out if record.choice else self.broken)[record.reason] += 1
            shown = self.examples.setdefault(record.reason, [])
            if len(shown) < keep:
                shown.append(record)

    def check(self, limit: float, *, final: bool = True) -> None:
        """Refuse more broken records than the share ``limit`` of those seen.

        Args:
            limit: in [0, 1].
            final: everything has been seen. Otherwise only what no number of good records to come is expected to mend: a
                thousand records at least.

        Raises:
            UserError: naming counts, reasons and places.
        """
        broken = self.broken.total()
        if broken <= limit * self.seen or not (final or self.seen >= 1000):
            return
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.broken.most_common(4))
        places = "; ".join(str(self.examples[reason][0]) for reason, _ in self.broken.most_common(4))
        raise UserError(
            f"data.skip_limit={limit:g}: {broken} of {self.seen} records cannot be used ({reasons}). First of each: {places}. "
            "Mend the data, or raise data.skip_limit to leave them out"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seen": self.seen,
            "broken": dict(self.broken),
            "left_out": dict(self.left_out),
            "examples": {
                reason: [[r.where, r.reason, r.detail, r.choice] for r in records] for reason, records in self.examples.items()
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Skips:
        examples = {reason: [SkipRecord(*record) for record in records] for reason, records in values["examples"].items()}
        return cls(values["seen"], Counter(values["broken"]), Counter(values["left_out"]), examples)
