"""Muon and AdamW in one optimizer, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash_lit.errors import UserError
from dflash_lit.optimizer import MuonWithAdamW, make_optimizer, orthogonal

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.tall = nn.Linear(24, 8, bias=True), nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tall(self.wide(x).tanh())


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_equals_torchs_muon_and_adamw() -> None:
    ours, theirs = Small(), Small()
    train(ours, [MuonWithAdamW(ours.parameters(), **SETTINGS)], range(12))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    others = [p for p in theirs.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, **SETTINGS)
    train(theirs, [muon, adamw], range(12))
    start = dict(Small().named_parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # torch's Muon works in bfloat16: compare with the distance travelled.
        travelled = (b - start[name]).norm()
        assert (a - b).norm() < (0.03 if a.ndim == 2 else 0.01) * travelled, name


def test_state_is_saved_and_restored_exactly() -> None:
    whole, first = Small(), Small()
    train(whole, [MuonWithAdamW(whole.parameters(), **SETTINGS)], range(6))
    optimizer = MuonWithAdamW(first.parameters(), **SETTINGS)
    train(first, [optimizer], range(3))
    second = Small()
    second.load_state_dict(first.state_dict())
    resumed = MuonWithAdamW(second.parameters(), **SETTINGS)
    resumed.load_state_dict(optimizer.state_dict())
    train(second, [resumed], range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_a_schedule_reaches_both_parts() -> None:
    optimizer = make_optimizer(Small(), "muon", **SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]


def test_unknown_kind() -> None:
    with pytest.raises(UserError, match=r"optimizer\.kind='sgd': choose adamw or muon"):
        make_optimizer(Small(), "sgd", **SETTINGS)
