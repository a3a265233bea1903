"""Placements as Lightning strategies: where the target runs, and how its features reach the drafter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dflash_lit.cores import cores
from dflash_lit.placement.agreement import Agreement
from dflash_lit.placement.feature_loader import FeatureLoader, FeatureSource, PrefetchingLoader
from dflash_lit.placement.layout import Transport
from dflash_lit.placement.secret import ForgedError
from dflash_lit.placement.signed_pickle import seal, unseal
from dflash_lit.placement.signed_store import LARGEST
from dflash_lit.target.frozen import FrozenTarget

if TYPE_CHECKING:
    from dflash_lit.placement.flow import Flow
    from dflash_lit.placement.layout import Layout
    from dflash_lit.placement.remote_target import RemoteTarget
    from dflash_lit.placement.world import World

__all__ = ["ColocatedStrategy", "DrafterGroupStrategy", "LocalTarget", "SplitStrategy", "threads_of_a_rank"]


# The buffers are the target's embedding and head: alike everywhere and never changed, so not to be sent at every step. torch 2.13
# renames the argument.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class LocalTarget:
    """Features from a target in this process.

    Args:
        target: the frozen target.
        layer_ids: its feature layers.
        teacher: add the target's last hidden state to each batch as ``last_hidden``, for losses on its distribution.
    """

    def __init__(self, target: FrozenTarget, layer_ids: Sequence[int], *, teacher: bool = False) -> None:
        self.target, self.layer_ids, self.teacher = target, tuple(layer_ids), teacher

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with ``features`` [R, S, n_ids * H] and, for a teacher, ``last_hidden`` [R, S, H], in the target's dtype.

        A batch that has them (``data.offline``) stays as it is.
        """
        if "features" in batch:
            return batch
        rows = (batch["input_ids"], batch["document_ids"], batch["position_ids"])
        if not self.teacher:
            return {**batch, "features": self.target.features(*rows, self.layer_ids)}
        features, last_hidden = self.target.features_and_last_hidden(*rows, self.layer_ids)
        return {**batch, "features": features, "last_hidden": last_hidden}


class _Featured:
    """A strategy whose batches come with features, from its ``source``."""

    source: FeatureSource

    def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`LocalTarget.with_features`."""
        return self.source.with_features(batch)

    def process_dataloader(self, dataloader: object) -> FeatureLoader:
        """Lightning's hook for every loader (training, validation, test, sanity check): attach the features here."""
        return FeatureLoader(dataloader, self.source)


class ColocatedStrategy(_Featured, SingleDeviceStrategy):
    """Target and drafter in one process on one device (a GPU or a CPU), the only one of the run.

    Args:
        target: the frozen target, on ``device``.
        layer_ids: its feature layers.
        device: where both run.
        teacher: see :class:`LocalTarget`.
    """

    def __init__(
        self,
        target: FrozenTarget,
        layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        teacher: bool = False,
    ) -> None:
        super().__init__(device=device)
        self.target = target
        self.source = LocalTarget(target, layer_ids, teacher=teacher)


class DrafterGroupStrategy(_Featured, DDPStrategy):
    """Several drafters, data-parallel; each has a target in its own process.

    The Trainer's world is that of the drafters, and their processes exist already (:mod:`dflash_lit.placement.world`): Lightning
    starts none, and all its collectives are over the default process group, which holds the drafters alone.

    Args:
        world: of this rank.
        device: of this rank.
        target, layer_ids, teacher: see :class:`LocalTarget`.
        transport: of gradients; see :meth:`World.start_drafter_group`.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        target: FrozenTarget,
        layer_ids: Sequence[int],
        *,
        teacher: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._of_drafters(world, device, transport)
        self.target: FrozenTarget | RemoteTarget = target
        self.source: LocalTarget | RemoteTarget = LocalTarget(target, layer_ids, teacher=teacher)

    def _of_drafters(self, world: World, device: torch.device, transport: Transport | None) -> None:
        super().__init__(cluster_environment=world.environment)
        self.world, self.device_of_rank, self._transport = world, device, transport
        self._key, self._broadcasts = world.key("broadcast"), 0

    @property
    def root_device(self) -> torch.device:
        return self.device_of_rank

    @property
    def num_processes(self) -> int:
        return self.world.layout.drafters  # on a host, also where they share its GPUs

    def determine_ddp_device_ids(self) -> list[int] | None:
        return [self.root_device.index] if self.root_device.type == "cuda" else None

    def setup_distributed(self) -> None:
        if not torch.distributed.is_initialized():
            self.world.start_drafter_group(self.root_device, self._transport)
        super().setup_distributed()  # finds the group, and sets the ranks

    def configure_ddp(self) -> None:
        # Lightning's own does it on a stream aside, for CUDA graphs: then each step's backward pass waits between two streams.
        assert self.model is not None
        self.model = DistributedDataParallel(
            self.model,
            device_ids=self.determine_ddp_device_ids(),
            # All parameters of the drafter take part in every step.
            find_unused_parameters=False,
            **_KEEP_BUFFERS,
            # Else every gradient would exist twice.
            gradient_as_bucket_view=True,
        )

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Lightning's, with pickles that are signed: torch's own would read a stranger's.

        Raises:
            ForgedError: if the drafter ``src`` has not signed it as its next.
        """
        if not dist.is_initialized():
            return obj
        self._broadcasts += 1
        place, mine = f"from {src}, {self._broadcasts}", self.global_rank == src
        sealed = seal(self._key, place, obj) if mine else b""
        size = torch.tensor([len(sealed)], device=self.root_device)
        dist.broadcast(size, src)
        if not 0 < (length := int(size)) <= LARGEST:
            raise ForgedError(f"drafter {src} tells the others {length} bytes: at most {LARGEST} are taken")
        body = torch.empty(length, dtype=torch.uint8, device=self.root_device)
        if mine:
            body.copy_(torch.frombuffer(bytearray(sealed), dtype=torch.uint8))
        dist.broadcast(body, src)
        return obj if mine else unseal(self._key, place, body.cpu().numpy().tobytes(), f"drafter {src}")

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """Lightning's, without the barrier that it begins with: there the host would wait for the device in every step."""
        if not isinstance(tensor, Tensor):
            return tensor
        named = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        mean = named in ("mean", "avg")
        if mean or named is None:
            named = "sum"
        op = getattr(dist.ReduceOp, named.upper()) if isinstance(named, str) else named
        dist.all_reduce(tensor, op, group)
        # In place, whole numbers too, as Lightning does.
        return tensor.copy_(tensor / dist.get_world_size(group)) if mean else tensor

    def agreement(self) -> Agreement:
        """For what all drafters have to decide alike at a step."""
        return Agreement(self.world)

    def setup(self, trainer: L.Trainer) -> None:
        # Inside a DDP forward, Dynamo would cut graphs at its buckets; layers are graphs of their own already.
        torch._dynamo.config.optimize_ddp = False
        super().setup(trainer)
        # Private: Lightning asks all ranks before every batch whether one got SIGTERM, and waits for the device to hear it. That
        # is callbacks/interrupt.py's here, which does not wait. tests/placement/test_strategy.py fails if it moves.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


class SplitStrategy(DrafterGroupStrategy):
    """Drafters whose target runs in other processes, on other devices.

    The module cannot tell: batches come with features, as everywhere. Requests are in flight while a batch is trained on.

    Args:
        world: of this rank, a drafter.
        device: of this rank.
        target: connected to the target ranks of this host.
        prefetch: requests in flight while a batch is trained on; memory is ``prefetch + 1`` feature batches.
        transport: of gradients; see :meth:`World.start_drafter_group`.
    """

    source: RemoteTarget

    def __init__(
        self, world: World, device: torch.device, target: RemoteTarget, *, prefetch: int = 2, transport: Transport | None = None
    ) -> None:
        self._of_drafters(world, device, transport)
        self.target = self.source = target
        self.prefetch = prefetch

    @property
    def layout(self) -> Layout:
        return self.world.layout

    def flows(self) -> dict[int, Flow]:
        """Newest known counters of all ranks, by physical rank."""
        return self.world.flows()

    def serving(self) -> int:
        """Target ranks that are there, of all hosts."""
        return len(self.world.members.joined)

    def process_dataloader(self, dataloader: object) -> FeatureLoader:
        """Lightning's hook for every loader (training, validation, test, sanity check): ask for the features ahead here."""
        return PrefetchingLoader(dataloader, self.source, self.prefetch)


def threads_of_a_rank(ranks: int) -> int:
    """CPU threads for each of the ranks of a host, so that together they do not fight for its cores."""
    return max(cores() // ranks, 1)
