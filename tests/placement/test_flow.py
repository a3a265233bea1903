"""Counters and their wire format; the timer on the CPU's clock and on events that are only pretended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dflash_lit.placement.flow import DeviceTimer, Flow, FlowSource
from dflash_lit.placement.layout import Layout


def test_what_happened_between_two_moments() -> None:
    before, after = Flow(100, 0.25, 1.0, 2, 3), Flow(350, 0.75, 1.5, 7, 13)
    assert after - before == Flow(250, 0.5, 0.5, 5, 10)
    assert before + (after - before) == after
    assert after - Flow() == after


def test_it_travels_short() -> None:
    flow = Flow(tokens=12_288, busy_s=1 / 3, waited_s=0.5, batches=3, queued=4)
    assert flow.to_json() == "[12288,0.333333,0.5,3,4]"
    assert Flow.from_json(flow.to_json()) == Flow(12_288, 0.333333, 0.5, 3, 4)
    assert Flow.from_json(Flow().to_json()) == Flow()


def test_who_is_a_source() -> None:
    assert isinstance(SimpleNamespace(layout=Layout(1, 1), flows=dict, serving=int), FlowSource)
    assert not isinstance(SimpleNamespace(layout=Layout(1, 1)), FlowSource)


def test_timer_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr("dflash_lit.placement.flow.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = DeviceTimer("cpu")
    assert timer.seconds() == 0
    with timer.measure():
        pass
    assert timer.seconds() == 0.5
    with pytest.raises(KeyError), timer.measure():
        raise KeyError("a forward pass that fails has taken its time, too")
    assert timer.seconds() == 2.5


class Event:
    """A timing event of a pretended GPU, whose time is the number of events that were recorded. Nothing can wait for it."""

    made: list[Event]
    passed = 0
    """So many of them has the GPU done."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "current stream of cuda:1"
        self.made.append(self)

    def query(self) -> bool:
        return self.made.index(self) < Event.passed

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return 1000.0 * (self.made.index(other) - self.made.index(self))


def test_timer_on_a_gpu_counts_what_is_done_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "made", [], raising=False)
    monkeypatch.setattr(Event, "passed", 0)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"current stream of {device}")
    timer = DeviceTimer("cuda:1")
    for _ in range(3):
        with timer.measure():
            pass
    seen = []
    for Event.passed in range(7):
        seen.append(timer.seconds())
    assert seen == [0, 0, 1, 1, 2, 2, 3]
    assert timer.seconds() == 3  # none is counted twice
    with pytest.raises(KeyError), timer.measure():
        raise KeyError
    Event.passed = 8
    assert timer.seconds() == 4
