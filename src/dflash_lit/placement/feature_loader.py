"""Where token rows become feature batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

__all__ = ["FeatureLoader", "FeatureSource"]


class FeatureSource(Protocol):
    """Whoever turns token rows into context features."""

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A TokenRow batch with ``features`` [R, S, n_ids * H], and whatever else the target gives."""
        ...


class FeatureLoader:
    """Any loader of TokenRow batches, with the target's features added to each.

    Everything else (``sampler``, ``set_epoch``, ``state_dict`` ...) is the wrapped loader's, so Lightning shuffles, saves and
    resumes it as if it were not wrapped. Nothing is fetched ahead: what was handed out is what was trained.
    """

    def __init__(self, loader: Any, source: FeatureSource) -> None:
        self.loader = loader
        self.source = source

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "source"):  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    # Spelled out although __getattr__ would find them: Lightning asks for a protocol whether a loader can be resumed, and from
    # Python 3.12 on protocols do not see what __getattr__ finds.

    def state_dict(self) -> dict[str, Any]:
        """The wrapped loader's position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.loader:
            yield self.source.with_features(batch)
