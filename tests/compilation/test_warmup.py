"""Ranks warm up one after the other: real processes, a real process group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dflash_lit.attention.compiled import compiled
from dflash_lit.compilation.warmup import WarmupError, in_turn, undisturbed, warm_up
from dflash_lit.errors import UserError
from tests.compilation import processes

RANKS = 3


class Gloo:
    """What a strategy offers of its process group."""

    def broadcast(self, obj: object, src: int = 0) -> object:
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]


def _curve(x: Tensor) -> Tensor:
    return (x.sin() * 2 + x.cos()).sum()


def _rank(rank: int, folder: Path, fails: int | None) -> None:
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    curve = compiled(_curve)
    x = torch.linspace(0, 1, 50, requires_grad=True)

    def run() -> None:
        (folder / "order").open("a").write(f"{rank}\n")
        if rank == fails:
            raise ValueError("no compiler here\nand more lines")
        for made in warm_up({"curve": lambda: torch.autograd.grad(curve(x), x)}):
            (folder / f"made{rank}").write_text(f"{made.graphs} {made.hits} {made.misses}")

    try:
        in_turn(run, Gloo(), rank, RANKS)
    except WarmupError as error:
        (folder / f"error{rank}").write_text(str(error))
    finally:
        dist.destroy_process_group()


def _start(folder: Path, fails: int | None = None) -> None:
    processes.preload()
    mp.start_processes(_rank, (folder, fails), nprocs=RANKS, start_method="forkserver")


def test_later_ranks_find_what_the_first_compiled(tmp_path: Path) -> None:
    _start(tmp_path)
    assert (tmp_path / "order").read_text().split() == ["0", "1", "2"]
    made = [[int(n) for n in (tmp_path / f"made{rank}").read_text().split()] for rank in range(RANKS)]
    assert [graphs for graphs, _, _ in made] == [1, 1, 1]
    assert made[0][2] > 0  # the first had nothing to find
    for _, hits, misses in made[1:]:
        assert hits > 0
        assert misses == 0


def test_a_rank_that_fails_ends_all_with_its_message(tmp_path: Path) -> None:
    _start(tmp_path, fails=1)
    assert (tmp_path / "order").read_text().split() == ["0", "1"]  # the one after it does not run
    for rank in range(RANKS):
        assert (
            tmp_path / f"error{rank}"
        ).read_text() == "rank 1 could not be warmed up: ValueError: no compiler here and more lines"


def test_alone_no_group_is_needed() -> None:
    def fail() -> None:
        raise ValueError("why")

    group: Any = None
    with pytest.raises(WarmupError, match="rank 0 could not be warmed up: ValueError: why") as caught:
        in_turn(fail, group, 0, 1)
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_the_user_can_mend_is_one_line() -> None:
    def fail() -> None:
        raise UserError("no C compiler: install one")

    group: Any = None
    with pytest.raises(UserError, match=r"^no C compiler: install one$"):
        in_turn(fail, group, 0, 1)


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with undisturbed(torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(torch.rand(3), expected)
