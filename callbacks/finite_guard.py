"""Find a step that is not finite, or that spikes, without waiting for the device: leave it out, stop, or go back; and save it."""

from __future__ import annotations

import logging
import math
from collections import deque
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dflash_lit.checkpoints.form import check_count
from dflash_lit.errors import UserError
from dflash_lit.guard.kept import KeptStates
from dflash_lit.guard.mailbox import Mailbox
from dflash_lit.guard.probe import Layout, Probe, Seen
from dflash_lit.guard.saved_step import finish, save_batches, save_weights
from dflash_lit.guard.spikes import Spike, SpikeDetector
from dflash_lit.module import DrafterModule
from dflash_lit.optimizer_steps import OptimizerSteps

__all__ = ["FiniteGuard"]

_log = logging.getLogger(__name__)
Batch = dict[str, Tensor]
BEHIND = 2
"""Steps between an update and the look at its numbers: all ranks look at the same step, and none waits for its device."""

_TOKENS = ("input_ids", "document_ids", "position_ids", "supervised", "row_ids")


class FiniteGuard(Callback):
    """Watches every optimizer step: losses, gradients and features, and now and then weights.

    Whether a step that is not finite becomes an update is decided on the device, by numbers that all drafters have in common. The
    host reads them two steps later, says what was found, and saves the step for ``dflash-lit replay``. A spike (a loss or gradient
    norm far above its running median) is finite and has become an update when it is read; going back undoes it.

    Logs ``train/skipped_steps``, and unless ``spikes`` is off ``train/spikes`` and ``train/rollbacks``; all since the run's start.

    Args:
        folder: where steps are saved, each in a folder of its own.
        non_finite: "skip" (that update does not happen: weights and optimizer stay as they are to the last bit) or "stop".
        max_skips: updates that may be left out within ``skip_window`` steps; one more stops the run.
        skip_window: steps.
        weights_every: steps between looks at all weights.
        saved_steps: at most so many are saved in a run.
        features_gib: memory for the features of the last steps, which are saved with a step; where they need more, rows are saved
            without, and replaying asks the target again.
        spikes: "off", "warn", or "rollback" (weights and optimizer return to a state kept before; the data since then is passed
            over, and the schedule goes on with the step number).
        spike_window, spike_threshold, spike_warmup: see :class:`SpikeDetector`.
        keep_every: steps between states that are kept, two of them in the host's memory, with ``spikes="rollback"``.
        max_rollbacks: of a run; a further spike stops it.

    Raises:
        UserError: for a setting that cannot be, and, during the fit, for a run that is to be stopped.
    """

    def __init__(
        self,
        folder: str,
        non_finite: str = "skip",
        max_skips: int = 5,
        skip_window: int = 100,
        weights_every: int = 25,
        saved_steps: int = 3,
        features_gib: float = 1.0,
        spikes: str = "warn",
        spike_window: int = 128,
        spike_threshold: float = 10.0,
        spike_warmup: int = 100,
        keep_every: int = 100,
        max_rollbacks: int = 3,
    ) -> None:
        if spikes is False:  # YAML's off
            spikes = "off"
        for name, value, choices in (("non_finite", non_finite, ("skip", "stop")), ("spikes", spikes, _SPIKES)):
            if value not in choices:
                raise UserError(f"{name}={value!r}: choose {', '.join(choices[:-1])} or {choices[-1]}")
        least = {
            "max_skips": (max_skips, 0),
            "skip_window": (skip_window, 1),
            "weights_every": (weights_every, 1),
            "saved_steps": (saved_steps, 0),
            "spike_window": (spike_window, 8),
            "spike_warmup": (spike_warmup, 8),
            "keep_every": (keep_every, 10),
            "max_rollbacks": (max_rollbacks, 1),
        }
        for name, (number, smallest) in least.items():
            if type(number) is not int or number < smallest:
                raise UserError(f"{name}={number!r}: must be a whole number from {smallest} up")
        for name, size in (("features_gib", features_gib), ("spike_threshold", spike_threshold)):
            if not 0 <= size < math.inf:
                raise UserError(f"{name}={size!r}: must be 0 or positive")
        if spike_threshold == 0:
            raise UserError(
                "spike_threshold=0: every step above the median would be a spike; use spikes=off for none, or about 10"
            )
        self.folder = Path(folder)
        self.non_finite, self.max_skips, self.skip_window = non_finite, max_skips, skip_window
        self.weights_every, self.saved_steps, self.features_gib = weights_every, saved_steps, features_gib
        self.spikes, self.keep_every, self.max_rollbacks = spikes, keep_every, max_rollbacks
        self._spike_settings = (spike_window, spike_threshold, spike_warmup)
        self._loaded: dict[str, Any] | None = None
        self._probe: Probe | None = None
        self._reset()

    def _reset(self) -> None:
        self.mailbox = Mailbox(BEHIND)
        self.detector = SpikeDetector(*self._spike_settings)
        self.skipped: deque[int] = deque(maxlen=self.max_skips + 1)
        self.skip_count = self.spike_count = self.rollbacks = self.saved = 0
        self._steps = OptimizerSteps()
        self._ignored = 0  # numbers up to this step are of a state that was given up
        self._batches: list[Batch] = []
        self._held: dict[int, list[Batch]] = {}
        self._kept: KeptStates | None = None

    # -- around a fit

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        self._reset()
        losses, parameters = pl_module.probed()
        self.layout = Layout(losses, tuple(parameters), tuple(pl_module.config.target_layer_ids))
        self._probe = probe = Probe(
            self.layout, list(parameters.values()), holds=self.non_finite == "stop", weights_every=self.weights_every
        )
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self.skip_count, self.spike_count, self.rollbacks = (state[name] for name in _COUNTS)
            self.skipped.extend(state["skipped"])
            self.detector.load_state_dict(state["detector"])
            self.mailbox.put_back([(about, numbers) for about, numbers in state["unread"]])
            self._ignored = state["ignored"]
            probe.skips.fill_(state["device_skips"])  # those of what is unread among them
        device = pl_module.device
        self._logged = {name: torch.full((), float(getattr(self, name)), device=device) for name in _COUNTS[1:]}
        pl_module.probe = probe

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        self._steps.begin(trainer)
        if self.spikes == "rollback":
            self._kept = KeptStates(list(pl_module.drafter.parameters()) + _buffers(pl_module), trainer.optimizers[0])
            self._kept.keep(self._steps.last)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(pl_module, DrafterModule):
            pl_module.probe = None
        self._held, self._batches, self._kept = {}, [], None

    def state_dict(self) -> dict[str, Any]:
        """Counts, the window of values, and what has not been read: a resumed run decides as one that was never stopped."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "device_skips": float(self._probe.skips) if self._probe is not None else 0.0,
            "skipped": list(self.skipped),
            "detector": self.detector.state_dict(),
            "unread": [[about, numbers] for about, numbers in self.mailbox.peek()],
            "ignored": self._ignored,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Looked at here, where what is wrong is known to be the checkpoint's.
        where = f"callbacks.{type(self).__name__}"
        counts = {name: check_count(state_dict.get(name), f"{where}.{name}") for name in (*_COUNTS, "ignored")}
        SpikeDetector().load_state_dict(state_dict["detector"])
        self._loaded = {
            **counts,
            "device_skips": float(state_dict["device_skips"]),
            "skipped": [check_count(step, f"{where}.skipped") for step in state_dict["skipped"]],
            "detector": state_dict["detector"],
            "unread": [(dict(about), [float(number) for number in numbers]) for about, numbers in state_dict["unread"]],
        }

    # -- steps

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._batches.append(batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, DrafterModule)
        if not self._steps.taken(trainer):
            return
        step = trainer.global_step
        self._hold(step)
        assert self._probe is not None
        assert self._probe.numbers is not None
        self.mailbox.send({"step": step, "epoch": trainer.current_epoch, **self._probe.facts}, self._probe.numbers)
        self._look(trainer, pl_module)
        if self._kept is not None and step % self.keep_every == 0 and step > self._ignored:
            self._kept.keep(step)
        # Tensors of the device: Lightning would copy a number there each time, and wait for it.
        pl_module.log("train/skipped_steps", self._probe.skips)
        if self.spikes != "off":
            pl_module.log("train/spikes", self._logged["spike_count"])
            pl_module.log("train/rollbacks", self._logged["rollbacks"])

    def _hold(self, step: int) -> None:
        """Keep the step's batches until its numbers are read; with features if those of all such steps are not too much."""
        size = sum(x.nbytes for batch in self._batches for name, x in batch.items() if name not in _TOKENS)
        whole = size * (BEHIND + 1) <= self.features_gib * 2**30
        self._held[step] = [{name: x for name, x in batch.items() if whole or name in _TOKENS} for batch in self._batches]
        self._batches = []
        self._held.pop(step - BEHIND - 1, None)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What is validated, and saved after it, is looked at to the last step: validation waits for the device anyway."""
        if not trainer.sanity_checking:
            self._look(trainer, pl_module, behind=0)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """A state that a run is to be stopped for does not become its last checkpoint."""
        assert isinstance(pl_module, DrafterModule)
        for about, numbers in self.mailbox.peek():
            seen = self.layout.read(**about, numbers=numbers)
            if seen.step > self._ignored and not seen.finite and self.non_finite == "stop":
                self._not_finite(trainer, pl_module, seen)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, DrafterModule)
        self._look(trainer, pl_module, behind=0)
        if not _weights_finite(pl_module):  # by the last update, after which no step has looked at them
            raise UserError(f"step {trainer.global_step}: not finite: {_bad_weights(pl_module)}; {_CURE}")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Where nothing was left to train, what the checkpoint holds is looked at before it is exported."""
        self.on_train_end(trainer, pl_module)

    def _look(self, trainer: L.Trainer, module: L.LightningModule, behind: int | None = None) -> None:
        assert isinstance(module, DrafterModule)
        for about, numbers in self.mailbox.read(behind):
            seen = self.layout.read(**about, numbers=numbers)
            if seen.step <= self._ignored:
                continue
            if not seen.finite:
                self._not_finite(trainer, module, seen)
            elif self.spikes != "off" and (found := self.detector.look({**seen.losses, **seen.norms})):
                self._spiked(trainer, module, seen, found)

    # -- what is not finite

    def _not_finite(self, trainer: L.Trainer, module: DrafterModule, seen: Seen) -> None:
        broken = not _weights_finite(module)
        everyone = _of_all(trainer, self._own_findings(trainer, seen))
        found = [*([_bad_weights(module)] if broken else []), *_merged(everyone), *_bad_numbers(seen)]
        place = self._save(trainer, module, seen, found)
        what = f"step {seen.step}: not finite: {'; '.join(found)}{_rows_of(everyone)}"
        if broken and self._kept is not None and self.rollbacks < self.max_rollbacks:
            self._go_back(trainer, module, seen, what, place)
            return
        if broken:
            raise UserError(f"{what}; {_CURE}{place}")
        if self.non_finite == "stop":
            raise UserError(
                f"{what}; that update did not happen, and training was stopped; lower optimizer.lr, leave such rows out, or go on "
                f"from a checkpoint (ckpt_path) with callbacks.finite_guard.non_finite=skip{place}"
            )
        self.skip_count += 1
        self.skipped.append(seen.step)
        lately = sum(step > seen.step - self.skip_window for step in self.skipped)
        if lately > self.max_skips:
            raise UserError(
                f"{what}; {lately} of the last {self.skip_window} updates were left out, callbacks.finite_guard.max_skips="
                f"{self.max_skips}: lower optimizer.lr, or look at what was saved{place}"
            )
        if trainer.is_global_zero:
            _log.warning("%s; its update was left out (%d of at most %d lately)%s", what, lately, self.max_skips, place)

    def _own_findings(self, trainer: L.Trainer, seen: Seen) -> dict[str, Any]:
        """What only this drafter knows: its rows by number, and what is the matter with them."""
        batches = self._held.get(seen.step, [])
        ids = [int(row) for batch in batches for row in batch["row_ids"].tolist()]
        if len(ids) != len(seen.rows):  # of a step before the checkpoint that this run goes on from: they are not known
            ids = []
        features = {name: [ids[r] for r in rows if ids] for name, rows in seen.bad_features(self.layout.layers).items()}
        losses = [] if all(map(math.isfinite, seen.losses.values())) else [ids[r] for r in seen.bad_losses() if ids]
        return {"rank": trainer.global_rank, "rows": ids, "features": features, "losses": losses}

    # -- spikes

    def _spiked(self, trainer: L.Trainer, module: DrafterModule, seen: Seen, found: list[Spike]) -> None:
        self.spike_count += 1
        self._logged["spike_count"].fill_(self.spike_count)
        if self.spikes == "warn" and self.spike_count > _WARNINGS:
            return  # it is counted
        names = [str(spike) for spike in found]
        everyone = _of_all(trainer, self._own_findings(trainer, seen))
        # Of mere warnings one is saved: others, and what is not finite, may come.
        place = self._save(trainer, module, seen, names) if self._kept is not None or self.spike_count == 1 else ""
        what = f"step {seen.step}: {'; '.join(names)}{_rows_of(everyone)}"
        if self._kept is not None:
            self._go_back(trainer, module, seen, what, place)
        elif trainer.is_global_zero:
            _log.warning("%s%s", what, place)

    def _go_back(self, trainer: L.Trainer, module: DrafterModule, seen: Seen, what: str, place: str) -> None:
        assert self._kept is not None
        if self.rollbacks >= self.max_rollbacks:
            raise UserError(
                f"{what}; it was gone back {self.rollbacks} times already (callbacks.finite_guard.max_rollbacks): lower optimizer.lr{place}"
            )
        # A loss is of the weights before its step: the update that spoilt them is the one before, or earlier.
        step = self._kept.go_back(seen.step - 2)
        self.rollbacks += 1
        self._logged["rollbacks"].fill_(self.rollbacks)
        assert self._probe is not None
        self._probe.release()
        self._ignored = trainer.global_step
        if trainer.is_global_zero:
            _log.warning(
                "%s; went back to the weights of step %d, and on with the data after step %d%s",
                what,
                step,
                self._ignored,
                place,
            )

    # -- saving

    def _save(self, trainer: L.Trainer, module: DrafterModule, seen: Seen, found: list[str]) -> str:
        """Save the step, by all ranks together; what to say of it, on rank 0."""
        batches = self._held.get(seen.step)
        if self.saved >= self.saved_steps or batches is None:
            return ""
        self.saved += 1
        folder = self.folder / f"step={seen.step}"
        failed = ""
        try:
            save_batches(folder, trainer.global_rank, batches)
            if trainer.is_global_zero:
                save_weights(
                    folder,
                    {name: x for name, x in module.state_dict().items() if name.startswith("drafter.")}
                    | _named_buffers(module),
                )
        except OSError as error:  # a full disk is no reason to end a run
            failed = f"{type(error).__name__}: {error}"
        reasons = [reason for reason in _of_all(trainer, failed) if reason]
        if trainer.is_global_zero and not reasons:
            try:
                finish(folder, self._facts(trainer, module, seen, found))
            except OSError as error:
                reasons = [f"{type(error).__name__}: {error}"]
        return f"; could not be saved ({reasons[0]})" if reasons else f"; saved: dflash-lit replay {folder}"

    def _facts(self, trainer: L.Trainer, module: DrafterModule, seen: Seen, found: list[str]) -> dict[str, Any]:
        assert self._probe is not None
        target = getattr(trainer.strategy, "target", None)
        info = getattr(target, "info", None)
        return {
            "step": seen.step,
            "epoch": seen.epoch,
            "found": found,
            "skipped": seen.skipped,
            # Held back from the step on, the weights are those that it saw.
            "weights_step": seen.step - 1 if self._probe.holds and seen.skipped else trainer.global_step,
            "drafters": trainer.world_size,
            "losses": seen.losses,
            "gradient_norms": seen.norms,
            "precision": str(trainer.precision),
            "module": dict(module.hparams),
            "target": {"path": getattr(info, "path", ""), "dtype": str(module.embed.dtype).removeprefix("torch.")},
            "torch": torch.__version__,
        }


_SPIKES = ("off", "warn", "rollback")
_WARNINGS = 3
"""Spikes that are told of; all are counted."""

_COUNTS = ("skip_count", "spike_count", "rollbacks")
_CURE = (
    "no update can mend that, so training was stopped: lower optimizer.lr, and resume from an earlier checkpoint (ckpt_path)"
)


def _named_buffers(module: DrafterModule) -> dict[str, Tensor]:
    return {"floor_ratio": module.floor_ratio} if module.objective.top else {}


def _buffers(module: DrafterModule) -> list[Tensor]:
    return list(_named_buffers(module).values())


def _of_all(trainer: L.Trainer, mine: Any) -> list[Any]:
    """One thing of each drafter, by rank. Waits for all; only where all have found the same to be wrong."""
    if trainer.world_size == 1:
        return [mine]
    # By the strategy, which reads nothing that was not signed; torch's own would.
    return [trainer.strategy.broadcast(mine, src=rank) for rank in range(trainer.world_size)]


def _weights_finite(module: DrafterModule) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in module.drafter.parameters())


def _bad_weights(module: DrafterModule) -> str:
    names = [name for name, parameter in module.drafter.named_parameters() if not bool(parameter.isfinite().all())]
    return f"weight {_few([f'drafter.{name}' for name in names])}"


def _bad_numbers(seen: Seen) -> list[str]:
    found = [name for name, value in seen.losses.items() if not math.isfinite(value)]
    gradients = [name for name, value in seen.gradients.items() if not math.isfinite(value)]
    if gradients:
        found.append(f"gradient of {_few(gradients)}")
    elif not all(map(math.isfinite, seen.norms.values())):
        found.append("norm of all gradients")
    return found


def _merged(everyone: list[dict[str, Any]]) -> list[str]:
    """Each of the target's tensors once, with the rows of all drafters."""
    rows: dict[str, list[int]] = {}
    for one in everyone:
        for name, bad in one["features"].items():
            rows.setdefault(name, []).extend(bad)
    return [f"{name} (row {_few(sorted(set(bad)))})" if bad else name for name, bad in rows.items()]


def _rows_of(everyone: list[dict[str, Any]]) -> str:
    """Rows whose loss is not finite, else all of the step."""
    bad = sorted({row for one in everyone for row in one["losses"]})
    if any(one["features"] for one in everyone):  # which are named with their rows
        return ""
    if bad:
        return f", in row {_few(bad)}"
    rows = sorted({row for one in everyone for row in one["rows"] if row >= 0})
    return f", in the step of rows {_few(rows)}" if rows else ""


def _few(names: list[Any]) -> str:
    """The first of many."""
    shown = ", ".join(str(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
