"""Draws what the GPUs of a run did in a few steps, one above the other, from the traces of ``placement.py run --trace FOLDER``.

    python benchmarks/timeline.py FOLDER --out docs/placement_timeline.png

Each line is a stream of a GPU (without a GPU, a thread that ran operators), named by its process: what computes is blue, what
sends or receives is orange. Shown is the time in which all of them were traced. Prints how much of it each process computed
and moved, and how much of the latter lay beside computing: a line of JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["Lane", "covered", "draw", "lanes", "union"]

Span = tuple[float, float]
"""Begin and end, seconds."""

ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Lane:
    """Work of one stream: spans that do not overlap, in order."""

    process: str
    name: str
    computing: list[Span] = field(default_factory=list)
    moving: list[Span] = field(default_factory=list)


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted, those that touch or overlap joined."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def covered(spans: list[Span], by: list[Span]) -> float:
    """Seconds of ``spans`` during which one of ``by`` lasts; both as of :func:`union`."""
    both = seconds(spans) + seconds(by) - seconds(union([*spans, *by]))
    return max(both, 0.0)


def clipped(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """What of them lies between two times."""
    return [(max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin]


def in_common(all_lanes: list[Lane]) -> tuple[list[Lane], Span]:
    """What the lanes hold of the time in which all processes were traced, and that time; everything if there is none."""
    times: dict[str, list[float]] = {}
    for lane in all_lanes:
        times.setdefault(lane.process, []).extend(time for span in [*lane.computing, *lane.moving] for time in span)
    begins, ends = [min(of) for of in times.values()], [max(of) for of in times.values()]
    begin, end = max(begins), min(ends)
    if begin >= end:
        return all_lanes, (min(begins), max(ends))
    return [
        replace(lane, computing=clipped(lane.computing, begin, end), moving=clipped(lane.moving, begin, end))
        for lane in all_lanes
    ], (begin, end)


def is_transfer(name: str) -> bool:
    name = name.lower()
    return "nccl" in name or "gloo" in name or "send" in name or "recv" in name


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def lanes(path: Path) -> list[Lane]:
    """The streams of one process's trace; times are those of the host's clock, in seconds."""
    trace = read(path)
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kinds = ON_A_GPU if any(event.get("cat") in ON_A_GPU for event in events) else ("cpu_op",)
    found: dict[Any, Lane] = {}
    process = path.name.split(".")[0]
    for event in events:
        if event.get("cat") not in kinds:
            continue
        stream = event["args"].get("stream", event["tid"])
        word = "stream" if kinds is ON_A_GPU else "thread"
        lane = found.setdefault(stream, Lane(process, f"{word} {stream}"))
        begin = base + event["ts"] / 1e6
        (lane.moving if is_transfer(event["name"]) else lane.computing).append((begin, begin + event["dur"] / 1e6))
    for lane in found.values():
        lane.computing, lane.moving = union(lane.computing), union(lane.moving)
    return sorted(found.values(), key=lambda lane: -seconds([*lane.computing, *lane.moving]))


def summary(all_lanes: list[Lane], time: Span) -> dict[str, Any]:
    """Of every process: the share of ``time`` that it computed, and of its transfers the share beside computing."""
    length = time[1] - time[0]
    found: dict[str, Any] = {}
    for process in dict.fromkeys(lane.process for lane in all_lanes):
        own = [lane for lane in all_lanes if lane.process == process]
        computing = union(span for lane in own for span in lane.computing)
        moving = union(span for lane in own for span in lane.moving)
        found[process] = {
            "seconds": round(length, 4),
            "computing": round(seconds(computing) / length, 3),
            "moving": round(seconds(moving) / length, 4),
            "moving_beside_computing": round(covered(moving, computing) / seconds(moving), 3) if moving else None,
        }
    return found


def draw(all_lanes: list[Lane], time: Span, out: Path, *, least: float = 0.002) -> None:
    """A picture; streams that move nothing and compute for less than a share ``least`` of the time are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, last = time
    shown = [lane for lane in all_lanes if lane.moving or seconds(lane.computing) >= least * (last - first)]
    figure, axes = pyplot.subplots(figsize=(11, 0.9 + 0.5 * len(shown)), layout="constrained")
    for row, lane in enumerate(shown):
        for spans, colour, width in ((lane.computing, "tab:blue", 0.0), (lane.moving, "tab:orange", least * (last - first))):
            bars = [(1000 * (begin - first), 1000 * max(end - begin, width)) for begin, end in spans]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(shown)), [f"{lane.process}\n{lane.name}" for lane in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(
        f"computing (blue), sending and receiving (orange, at least {1000 * least * (last - first):.1f} ms wide)", fontsize=9
    )
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the traces")
    parser.add_argument("--out", type=Path, required=True, help="the picture, such as timeline.png")
    args = parser.parse_args()
    traces = sorted([path for kind in ("drafter", "target") for path in args.folder.glob(f"{kind}-*.json*")])
    if not traces:
        parser.error(f"{args.folder}: no trace; `placement.py run --trace {args.folder}` writes them")
    all_lanes, time = in_common([lane for path in traces for lane in lanes(path)])
    draw(all_lanes, time, args.out)
    print(json.dumps(summary(all_lanes, time)))


if __name__ == "__main__":
    main()
