"""Where token rows become feature batches: at once, or asked for ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

__all__ = ["AskedFeatures", "FeatureLoader", "FeatureSource", "PrefetchingLoader"]


class FeatureSource(Protocol):
    """Whoever turns token rows into context features."""

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A TokenRow batch with ``features`` [R, S, n_ids * H], and whatever else the target gives."""
        ...


class AskedFeatures(Protocol):
    """Whoever can be asked for features before they are needed."""

    def ask(self, batch: dict[str, Tensor]) -> Any:
        """Ask for those of a TokenRow batch; what is returned has ``arrived()``."""
        ...

    def take(self, batch: dict[str, Tensor], pending: Any, arrived: int) -> dict[str, Tensor]:
        """The batch with what was asked for."""
        ...

    def abandon(self, pending: Any) -> None:
        """It will not be taken."""
        ...


class FeatureLoader:
    """Any loader of TokenRow batches, with the target's features added to each.

    Everything else (``sampler``, ``set_epoch``, ``state_dict`` ...) is the wrapped loader's, so Lightning shuffles, saves and
    resumes it as if it were not wrapped. Nothing is fetched ahead: what was handed out is what was trained.

    Attributes:
        over: asked before each batch; once it says so the iterator ends.
    """

    over: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, loader: Any, source: Any) -> None:
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
            if self.over():
                return
            yield self.source.with_features(batch)


class PrefetchingLoader(FeatureLoader):
    """The same, with requests in flight while the batches before are trained on.

    Batches, their order and the saved position are those of :class:`FeatureLoader`. An iterator may be dropped before its end (a
    limit, the sanity check, the end of a run inside an epoch): what it has asked for comes in all the same, into memory of its
    own until then, and is not mistaken for what the next one asks for.

    Args:
        loader: of TokenRow batches.
        source: an :class:`AskedFeatures`.
        ahead: requests in flight while a batch is trained on, >= 0.
    """

    def __init__(self, loader: Any, source: AskedFeatures, ahead: int) -> None:
        super().__init__(loader, source)
        self.ahead = ahead
        self._in_flight: deque[tuple[dict[str, Tensor], Any]] = deque()

    def state_dict(self) -> dict[str, Any]:
        """The position of the batches that were passed on: those in flight are asked for again."""
        state = self.loader.state_dict()
        # None are in flight of an epoch that has not begun, whatever is left of the one before.
        return {**state, "batches": max(state["batches"] - len(self._in_flight), 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._in_flight = deque()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        in_flight: deque[tuple[dict[str, Tensor], Any]] = deque()
        self._in_flight = in_flight
        coming = iter(self.loader)
        try:
            while True:
                while len(in_flight) <= self.ahead and (batch := next(coming, None)) is not None:
                    in_flight.append((batch, self.source.ask(batch)))
                if not in_flight or self.over():
                    return
                arrived = sum(pending.arrived() for _, pending in in_flight)
                batch, pending = in_flight.popleft()
                yield self.source.take(batch, pending, arrived)
        finally:
            for _, pending in in_flight:  # which go on counting as not passed on
                self.source.abandon(pending)
