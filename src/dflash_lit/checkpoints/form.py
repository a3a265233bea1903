"""Whether what a checkpoint holds can be taken up by this run. A checksum says that a file is what was written, not that this can be used.

What Lightning and PyTorch would take as it is, and stumble over some steps later or never, is refused by the name of its entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dflash_lit.errors import RankError, UserError

__all__ = ["check_count", "check_loops", "check_optimizer", "check_schedules", "check_tensors", "restoring"]

_CURE = (
    "it was not saved by a run of this version, or was changed since; use another checkpoint, or start anew (drafter.init_from)"
)
_READER = "checkpoint_connector.py"
_TAKES_UP = ("restore", "_restore", "resume_start")
"""How its functions begin that take up a checkpoint; others write one, or wait for other ranks."""
_MOST = 2**53
"""Counts beyond it are none: floats would lose them."""


def _refuse(where: str, what: str) -> UserError:
    return UserError(f"ckpt_path: its entry {where} {what}; {_CURE}")


def _shown(value: object) -> str:
    return repr(value)[:60]


def check_count(value: Any, where: str) -> int:
    """A number of steps, batches or epochs.

    Raises:
        UserError: naming the entry ``where``, if it is none.
    """
    if type(value) is not int or not 0 <= value < _MOST:
        raise _refuse(where, f"is {_shown(value)}, no count")
    return value


def check_tensors(theirs: Any, ours: Mapping[str, Tensor], where: str, *, finite: bool = True) -> None:
    """Refuse tensors that are not those of ``ours``: names, shapes, floating point or not.

    Args:
        finite: refuse those with values that are not finite, too.

    Raises:
        UserError: naming the entry.
    """
    if not isinstance(theirs, Mapping):
        raise _refuse(where, f"is {_shown(theirs)}, no tensors")
    for name in sorted({*map(str, theirs), *ours}):
        if name not in theirs:
            raise _refuse(f"{where}.{name}", "is missing")
        if name not in ours:
            raise _refuse(f"{where}.{name}", "does not belong to this drafter")
        _check_tensor(theirs[name], ours[name].shape, f"{where}.{name}", floating=ours[name].is_floating_point(), finite=finite)


def _check_tensor(value: Any, shape: Sequence[int], where: str, *, floating: bool = True, finite: bool = True) -> None:
    if not isinstance(value, Tensor):
        raise _refuse(where, f"is {_shown(value)}, no tensor")
    if value.layout is not torch.strided:
        raise _refuse(where, f"has the layout {value.layout}")
    if value.shape != torch.Size(shape):
        raise _refuse(where, f"has shape {list(value.shape)}, this run's has {list(shape)}")
    if value.is_floating_point() != floating:
        raise _refuse(where, f"has values of kind {str(value.dtype).removeprefix('torch.')}")
    if finite and floating and not bool(value.isfinite().all()):
        raise _refuse(where, "has values that are not finite")


def _check_number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refuse(where, f"is {_shown(value)}, no finite number")


def check_optimizer(optimizer: Optimizer, theirs: Any) -> None:
    """Refuse a state that is not one of ``optimizer``: groups, settings, moments of every parameter.

    Raises:
        UserError: naming the entry.
    """
    where = "optimizer_states[0]"
    if not isinstance(theirs, Mapping) or not isinstance(theirs.get("state"), Mapping):
        raise _refuse(where, f"is {_shown(theirs)}, no state of an optimizer")
    groups, found = optimizer.state_dict()["param_groups"], theirs.get("param_groups")
    if not isinstance(found, list) or len(found) != len(groups):
        raise _refuse(f"{where}.param_groups", f"is not a list of {len(groups)} groups")
    for number, (group, ours) in enumerate(zip(found, groups, strict=True)):
        name = f"{where}.param_groups[{number}]"
        if not isinstance(group, Mapping):
            raise _refuse(name, f"is {_shown(group)}, no group")
        for key, value in ours.items():
            # torch gives switches that it has added since the checkpoint their defaults.
            if key not in group and (value is None or isinstance(value, bool)):
                continue
            if key not in group:
                raise _refuse(f"{name}.{key}", "is missing")
            _check_like(group[key], value, f"{name}.{key}")
        if group["params"] != ours["params"]:
            raise _refuse(f"{name}.params", "are not the parameters of this drafter")
    _check_moments(theirs["state"], optimizer, f"{where}.state")


def _check_like(value: Any, ours: Any, where: str) -> None:
    """A setting, which has to be of the kind that ours is."""
    if isinstance(ours, bool) or ours is None or isinstance(ours, str):
        if value != ours or type(value) is not type(ours):
            raise _refuse(where, f"is {_shown(value)}, this run's is {_shown(ours)}")
    elif isinstance(ours, int | float):
        _check_number(value, where)
    elif isinstance(ours, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(ours):
            raise _refuse(where, f"is {_shown(value)}, this run's is {_shown(ours)}")
        for one in value:
            _check_number(one, where)


def _check_moments(state: Mapping[Any, Any], optimizer: Optimizer, where: str) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [key for key in state if type(key) is not int or not 0 <= key < len(parameters)]:
        raise _refuse(f"{where}.{_shown(strange[0])}", "is of no parameter of this drafter")
    kinds: dict[str, set[Any]] = {}
    for number, moments in sorted(state.items()):
        name = f"{where}.{number}"
        if not isinstance(moments, Mapping):
            raise _refuse(name, f"is {_shown(moments)}, no moments")
        # Matrices and vectors may have different rules, but all of a kind the same.
        rule = next(
            str(group.get("kind")) for group in optimizer.param_groups if any(p is parameters[number] for p in group["params"])
        )
        names = kinds.setdefault(rule, _names_of(rule, optimizer))
        if set(moments) != names:
            raise _refuse(name, f"has {_shown(sorted(map(str, moments)))}, not {sorted(names)}")
        for key, value in moments.items():
            if key != "step":
                _check_tensor(value, parameters[number].shape, f"{name}.{key}")
                if key in ("square", "exp_avg_sq") and bool((value < 0).any()):
                    raise _refuse(f"{name}.{key}", "has squares that are negative")
            elif isinstance(value, Tensor):
                _check_tensor(value, (), f"{name}.{key}")
                _check_steps(float(value), f"{name}.{key}")
            else:  # in older checkpoints
                _check_number(value, f"{name}.{key}")
                _check_steps(value, f"{name}.{key}")
    missing = set(range(len(parameters))) - set(state)
    if state and missing:
        raise _refuse(f"{where}.{min(missing)}", "is missing")


def _check_steps(value: float, where: str) -> None:
    if not 0 <= value < _MOST:
        raise _refuse(where, f"is {value:g}, no count")


def _names_of(rule: str, optimizer: Optimizer) -> set[str]:
    if rule == "muon":
        return {"momentum"}
    if rule == "adamw":
        return {"mean", "square", "step"}
    assert isinstance(optimizer, torch.optim.AdamW)
    return {"exp_avg", "exp_avg_sq", "step"}


def check_schedules(theirs: Any, groups: int) -> None:
    """Refuse what is no state of the one schedule of the learning rate, over so many groups of parameters.

    Raises:
        UserError: naming the entry.
    """
    if not isinstance(theirs, list) or len(theirs) != 1 or not isinstance(theirs[0], Mapping):
        raise _refuse("lr_schedulers", f"is {_shown(theirs)}, not the state of one schedule")
    where, state = "lr_schedulers[0]", theirs[0]
    for key in ("last_epoch", "_step_count"):
        check_count(state.get(key), f"{where}.{key}")
    for key in ("base_lrs", "_last_lr"):
        rates = state.get(key)
        if not isinstance(rates, list) or len(rates) != groups:
            raise _refuse(f"{where}.{key}", f"is {_shown(rates)}, not {groups} learning rates")
        for rate in rates:
            _check_number(rate, f"{where}.{key}")
    functions = state.get("lr_lambdas")
    if (
        not isinstance(functions, list)
        or len(functions) != groups
        or any(one is not None and not isinstance(one, dict) for one in functions)
    ):
        raise _refuse(f"{where}.lr_lambdas", f"is {_shown(functions)}, not those of {groups} groups")


def check_loops(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse counters of Lightning's loop that are none, or that contradict each other or ``global_step``.

    Args:
        saved: the checkpoint.
        ours: the state of this run's fit loop, as it is stored under ``loops.fit_loop``.

    Raises:
        UserError: naming the entry.
    """
    step, where = check_count(saved.get("global_step"), "global_step"), "loops.fit_loop"
    check_count(saved.get("epoch"), "epoch")
    loops = saved.get("loops")
    theirs = loops.get("fit_loop") if isinstance(loops, Mapping) else None
    if not isinstance(theirs, Mapping):
        raise _refuse(where, f"is {_shown(theirs)}, no state of a loop")
    for name, value in ours.items():
        # What our own loader stores is its own to look at.
        if not name.endswith("state_dict"):
            _check_counters(theirs.get(name), value, f"{where}.{name}")
        elif not isinstance(theirs.get(name), Mapping):
            raise _refuse(f"{where}.{name}", f"is {_shown(theirs.get(name))}, no state")
    steps = theirs["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    if steps != step:
        raise _refuse("global_step", f"is {step}, but {where} counts {steps} steps")
    stepped = theirs["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    check_count(stepped, f"{where}.epoch_loop.state_dict._batches_that_stepped")


def _check_counters(theirs: Any, ours: Any, where: str) -> None:
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping) or set(theirs) != set(ours):
            raise _refuse(where, f"is {_shown(theirs)}, not {_shown(sorted(ours))}")
        for name, value in ours.items():
            _check_counters(theirs[name], value, f"{where}.{name}")
        order = [theirs[name] for name in ("ready", "started", "processed", "completed") if name in theirs]
        if order and all(type(value) is int for value in order) and order != sorted(order, reverse=True):
            raise _refuse(where, f"is {_shown(dict(theirs))}: more was ended than begun")
    elif isinstance(ours, bool):
        if not isinstance(theirs, bool):
            raise _refuse(where, f"is {_shown(theirs)}, not true or false")
    else:
        check_count(theirs, where)


@contextmanager
def restoring(path: str | Path | None) -> Iterator[None]:
    """Around a run that goes on from ``path``, if from any: what Lightning, while it takes up the checkpoint, cannot do with an entry is
    the checkpoint's fault.

    Raises:
        UserError: instead of other errors from there.
    """
    try:
        yield
    except (RankError, torch.OutOfMemoryError, dist.DistError):  # no fault of a file
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if path is None or not _while_reading(error):
            raise
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"ckpt_path={str(path)!r}: cannot be taken up ({type(error).__name__}: {reason}); {_CURE}") from error


def _while_reading(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if Path(code.co_filename).name == _READER and code.co_name.startswith(_TAKES_UP):
            return True
        trace = trace.tb_next
    return False
