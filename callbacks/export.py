"""Write the drafter in the served format when training ends."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lit.export import save_drafter
from dflash_lit.module import DrafterModule

__all__ = ["Export"]


class Export(Callback):
    """Export to ``folder`` at the end of training.

    Args:
        folder: written completely or not at all; replaced if it exists.
        auto_map: add the field that z-lab's loader wants (SGLang does not).
    """

    def __init__(self, folder: str, auto_map: bool = False) -> None:
        self.folder, self.auto_map = Path(folder), auto_map
        self.exported_to: Path | None = None  # where it was written, once it was

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            assert isinstance(pl_module, DrafterModule)
            self.exported_to = save_drafter(pl_module.drafter, self.folder, auto_map=self.auto_map)
