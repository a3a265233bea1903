"""What a run cannot take up of a checkpoint is named, before a step is made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from dflash_lit.checkpoints.contract import compare
from dflash_lit.checkpoints.form import check_count, check_loops, check_schedules, check_tensors, restoring
from dflash_lit.checkpoints.plain import plain_bytes
from dflash_lit.errors import RankError, UserError
from dflash_lit.optimizer import make_optimizer

Change = Callable[[dict[str, Any]], object]


def _stepped(kind: str) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(model, kind, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def _moments(state: dict[str, Any]) -> dict[str, Any]:
    """Of the first parameter, and the name of its first tensor of its shape."""
    return state["state"][0]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_an_optimizer_takes_its_own_state(kind: str) -> None:
    one, other = _stepped(kind), _stepped(kind)
    other.load_state_dict(one.state_dict())
    fresh = make_optimizer(nn.Linear(2, 2), kind, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    fresh.load_state_dict(fresh.state_dict())  # of a checkpoint before the first step


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: s.update(state=None), r"optimizer_states\[0\]"),
        (lambda s: s.update(param_groups=[]), r"param_groups"),
        (lambda s: s["param_groups"][0].update(lr="0.1"), r"param_groups\[0\]\.lr"),
        (lambda s: s["param_groups"][0].update(lr=float("nan")), r"param_groups\[0\]\.lr"),
        (lambda s: s["param_groups"][0].update(betas=[0.9]), r"param_groups\[0\]\.betas"),
        (lambda s: s["param_groups"][0].pop("weight_decay"), r"param_groups\[0\]\.weight_decay is missing"),
        (lambda s: s["param_groups"][0].update(params=[7]), r"param_groups\[0\]\.params"),
        (lambda s: s["state"].pop(0), r"state\.0 is missing"),
        (lambda s: s["state"].update({9: {}}), r"state\.9"),
        (lambda s: s["state"].update({0: 1}), r"state\.0"),
        (lambda s: _moments(s).update(more=torch.zeros(1)), r"state\.0 has"),
        (lambda s: _moments(s).update({k: v[:1] for k, v in _moments(s).items() if v.ndim}), r"state\.0\.\w+ has shape"),
        (lambda s: _moments(s).update({k: v.int() for k, v in _moments(s).items() if v.ndim}), r"state\.0\.\w+ has values of kind int32"),
        (lambda s: _moments(s).update({k: v / 0 for k, v in _moments(s).items() if v.ndim}), r"state\.0\.\w+ has values that are not finite"),
        (lambda s: _moments(s).update({k: v.to_sparse() for k, v in _moments(s).items() if v.ndim}), r"state\.0\.\w+ has the layout"),
    ],
)  # fmt: skip
def test_an_optimizer_refuses_another(kind: str, change: Change, names: str) -> None:
    optimizer = _stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    with pytest.raises(UserError, match=rf"^ckpt_path: its entry .*{names}"):
        optimizer.load_state_dict(state)


def test_a_switch_that_torch_has_added_since_is_its_default() -> None:
    one, other = _stepped("adamw"), _stepped("adamw")
    state = copy.deepcopy(one.state_dict())
    assert state["param_groups"][0].pop("decoupled_weight_decay") is True
    other.load_state_dict(state)
    assert other.param_groups[0]["decoupled_weight_decay"] is True


def test_moments_that_cannot_be() -> None:
    optimizer = _stepped("adamw")
    for key, value in (("exp_avg_sq", torch.full((4, 3), -1.0)), ("step", torch.tensor(-1.0)), ("step", -1), ("step", "1")):
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0][key] = value
        with pytest.raises(UserError, match=rf"state\.0\.{key}"):
            optimizer.load_state_dict(state)


def test_tensors() -> None:
    ours = {"a": torch.zeros(2, 3), "n": torch.zeros((), dtype=torch.int64)}
    check_tensors({"a": torch.ones(2, 3, dtype=torch.bfloat16), "n": torch.ones((), dtype=torch.int32)}, ours, "state_dict")
    for theirs, names in (
        (None, "state_dict is None"),
        ({"n": ours["n"]}, r"state_dict\.a is missing"),
        ({**ours, "b": ours["a"]}, r"state_dict\.b does not belong"),
        ({**ours, "a": 3}, r"state_dict\.a is 3, no tensor"),
        ({**ours, "a": torch.zeros(3, 2)}, r"state_dict\.a has shape \[3, 2\]"),
        ({**ours, "a": torch.zeros(2, 3, dtype=torch.bool)}, r"state_dict\.a has values of kind bool"),
        ({**ours, "a": torch.full((2, 3), torch.inf)}, r"state_dict\.a has values that are not finite"),
    ):
        with pytest.raises(UserError, match=names):
            check_tensors(theirs, ours, "state_dict")


def test_counts() -> None:
    assert check_count(3, "epoch") == 3
    for wrong in (-1, True, 1.0, "1", None, 2**60):
        with pytest.raises(UserError, match="ckpt_path: its entry epoch is"):
            check_count(wrong, "epoch")


def _loops(**step: Any) -> dict[str, Any]:
    counters = {"ready": 2, "completed": 2, **step}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": 2},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": {"total": counters}}},
        "epoch_loop.batch_progress": {"is_last_batch": False},
    }


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: s.update(epoch=None), "epoch"),
        (lambda s: s.update(global_step=3), "global_step is 3, but loops.fit_loop counts 2 steps"),
        (lambda s: s.pop("loops"), "loops.fit_loop is None"),
        (lambda s: s["loops"]["fit_loop"].pop("epoch_loop.batch_progress"), "epoch_loop.batch_progress"),
        (lambda s: s["loops"]["fit_loop"].update(_loops(ready=1)), "more was ended than begun"),
        (lambda s: s["loops"]["fit_loop"].update(_loops(completed="2")), "completed is '2', no count"),
        (lambda s: s["loops"]["fit_loop"]["epoch_loop.batch_progress"].update(is_last_batch=1), "is_last_batch is 1, not true or false"),
        (lambda s: s["loops"]["fit_loop"].update({"epoch_loop.state_dict": {"_batches_that_stepped": -1}}), "_batches_that_stepped"),
        (lambda s: s["loops"]["fit_loop"].update({"state_dict": 1}), "state_dict is 1, no state"),
    ],
)  # fmt: skip
def test_loops(change: Change, names: str) -> None:
    saved = {"epoch": 0, "global_step": 2, "loops": {"fit_loop": _loops()}}
    check_loops(saved, _loops(ready=0, completed=0))
    change(saved)
    with pytest.raises(UserError, match=names):
        check_loops(saved, _loops(ready=0, completed=0))


_TWO = ["ready", "completed"]
_PROCESSED = [*_TWO, "started", "processed"]


def _both(names: list[str], *more: str) -> dict[str, Any]:
    return {"total": names, "current": names, **dict.fromkeys(more)}


LIGHTNINGS = {
    "state_dict": [],
    "epoch_loop.state_dict": ["_batches_that_stepped"],
    "epoch_loop.batch_progress": _both(_PROCESSED, "is_last_batch"),
    "epoch_loop.scheduler_progress": _both(_TWO),
    "epoch_loop.automatic_optimization.state_dict": [],
    "epoch_loop.automatic_optimization.optim_progress": {
        "optimizer": {"step": _both(_TWO), "zero_grad": _both([*_TWO, "started"])}
    },
    "epoch_loop.manual_optimization.state_dict": [],
    "epoch_loop.manual_optimization.optim_step_progress": _both(_TWO),
    "epoch_loop.val_loop.state_dict": [],
    "epoch_loop.val_loop.batch_progress": _both(_PROCESSED, "is_last_batch"),
    "epoch_progress": _both(_PROCESSED),
}


def _names(state: Any) -> Any:
    """Of counters; those of one tracker as a list."""
    if not isinstance(state, dict):
        return None
    if any(isinstance(value, dict) for value in state.values()):
        return {name: _names(value) for name, value in state.items()}
    return list(state)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_counts_what_is_looked_at(tmp_path: Path) -> None:
    """Of another Lightning: read ``form``, ``owed_validation`` and ``kept_metrics`` against its loops; checkpoints of before are refused."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=3,
        accumulate_grad_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    state = trainer.fit_loop.state_dict()
    assert _names(state) == LIGHTNINGS, f"Lightning {L.__version__} counts otherwise"
    check_loops({"epoch": 0, "global_step": 3, "loops": {"fit_loop": state}}, state)


def test_schedules() -> None:
    good = {"last_epoch": 2, "_step_count": 3, "base_lrs": [0.1, 0.1], "_last_lr": [0.0, 0.1], "lr_lambdas": [None, {}]}
    check_schedules([good], 2)
    for wrong in (
        {"last_epoch": -1},
        {"_step_count": None},
        {"base_lrs": [0.1]},
        {"_last_lr": ["a", 1]},
        {"lr_lambdas": [1, 2]},
    ):
        with pytest.raises(UserError, match=next(iter(wrong))):
            check_schedules([{**good, **wrong}], 2)
    with pytest.raises(UserError, match="lr_schedulers is"):
        check_schedules([], 2)


def _raised_in(file: str, function: str, error: BaseException) -> Callable[[], object]:
    space: dict[str, Any] = {"error": error}
    exec(compile(f"def {function}(): raise error", file, "exec"), space)
    return space[function]


def test_only_what_fails_while_a_checkpoint_is_read_is_its_fault() -> None:
    connector = "lightning/checkpoint_connector.py"
    with pytest.raises(UserError, match=r"^ckpt_path='a\.ckpt': cannot be taken up \(KeyError: 'lr'\)"), restoring("a.ckpt"):
        _raised_in(connector, "restore_optimizers", KeyError("lr"))()
    for file, function in (
        (connector, "_get_loops_state_dict"),  # while one is written
        (connector, "resume_end"),  # which waits for the others
        ("/home/me/migration/train.py", "restore"),
    ):
        with pytest.raises(KeyError), restoring("a.ckpt"):
            _raised_in(file, function, KeyError("lr"))()
    with pytest.raises(KeyError), restoring(None):
        _raised_in(connector, "restore_optimizers", KeyError("lr"))()


@pytest.mark.parametrize("error", [RankError("rank 1 is gone"), torch.OutOfMemoryError("too little"), dist.DistError("closed")])
def test_what_happens_to_a_run_while_a_checkpoint_is_read_is_not_its_fault(error: Exception) -> None:
    with pytest.raises(type(error)), restoring("a.ckpt"):
        _raised_in("lightning/checkpoint_connector.py", "restore_optimizers", error)()


def test_a_sparse_tensor_is_not_written() -> None:
    with pytest.raises(UserError, match=r"a has the layout torch\.sparse_coo"):
        plain_bytes({"a": torch.eye(2).to_sparse()})


def test_text_and_number_that_look_alike_are_told_apart() -> None:
    drafter = {"hidden_size": 8, "vocab_size": "512"}
    saved = {"hyper_parameters": {"drafter": drafter, "objective": {}}}
    with pytest.raises(UserError, match=r"drafter\.vocab_size='512', this run 512; "):
        compare(saved, {"drafter.vocab_size": 512})
