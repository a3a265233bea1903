"""The data of a run: prompts and the target's responses to them, or conversations as they are, in packed rows."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dflash_lit.cache_folder import cache_folder
from dflash_lit.checkpoints.contract import CONTENT, compare
from dflash_lit.checkpoints.file import load
from dflash_lit.config import TrainConfig
from dflash_lit.data.chat_data import chat_data
from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.data.documents import Document
from dflash_lit.data.offline import StoredFeatures, ensure_features
from dflash_lit.data.packing import pack
from dflash_lit.data.prompts import Prompt, file_prompts, split_held_out, stdlib_prompts
from dflash_lit.data.respond import respond
from dflash_lit.data.stored_rows import load_rows
from dflash_lit.errors import UserError
from dflash_lit.placement.remote_target import RemoteTarget
from dflash_lit.placement.strategy import LocalTarget
from dflash_lit.placement.world import World
from dflash_lit.plan import Plan
from dflash_lit.responses.on_policy import PolicyQuestion, answer_policy
from dflash_lit.target.frozen import FrozenTarget, TargetInfo

__all__ = ["DataPhase", "JobData"]


@dataclass(frozen=True)
class JobData:
    """Everything the data phase yields.

    Attributes:
        figures: for the summary; empty on other ranks than 0, which are only given the rows.
    """

    module: RowDataModule
    eval_prompts: list[list[int]]
    figures: dict[str, Any]


class DataPhase:
    """Makes the data of one run.

    Args:
        cfg, plan: of the run.
        world: of this rank, if the run has several.
        console: where to say what was made.
    """

    def __init__(self, cfg: TrainConfig, plan: Plan, world: World | None, console: Console) -> None:
        self._cfg, self._plan, self._world, self._console = cfg, plan, world, console
        self._folder = Path(cfg.paths.output_dir)
        self._leads = world is None or world.rank == 0

    def make(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """The rows, made by rank 0 for all.

        Raises:
            UserError: also if another host does not see the folder of the run.
        """
        if self._world is None or self._plan.layout.drafter_world == 1:
            made = self._make_data(target)
            self._attach(made.module, self._offline(made.module, target))
            return made
        folder = self._folder / ".rows"
        if self._leads:
            made = self._make_data(target)
            self._world.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            for side, rows in (("train", made.module.train), ("val", made.module.val)):
                rows.save(folder / side)
            offline = self._offline(made.module, target)
            self._attach(made.module, offline)
            self._world.tell("data", (made.eval_prompts, [str(folder) for folder in offline]))
            return made
        prompts, offline = self._world.told("data")
        if not folder.is_dir():
            raise UserError(
                f"paths.output_dir={self._cfg.paths.output_dir!r}: {folder.resolve()} of rank 0 is not there on host {self._world.host}; "
                "put the run on a file system that all hosts see"
            )
        train, val = (load_rows(folder / side) for side in ("train", "val"))
        module = RowDataModule(train, val, self._cfg.data.rows_per_batch, self._cfg.seed)
        module.eval_prompts = prompts  # type: ignore[attr-defined]
        self._attach(module, [Path(folder) for folder in offline])
        return JobData(module, prompts, {})

    def _offline(self, module: RowDataModule, target: FrozenTarget | RemoteTarget) -> list[Path]:
        """Folders with the features of training and validation rows, written now unless they are there; none without data.offline.

        Raises:
            UserError: if they would be too large.
        """
        data, plan = self._cfg.data, self._plan
        if not data.offline:
            return []
        assert isinstance(target, FrozenTarget)  # plan.py: not with a split placement
        return ensure_features(
            (module.train, module.val),
            LocalTarget(target, plan.drafter.target_layer_ids, teacher=self._plan.objective.needs_teacher),
            cache_folder(data.cache_dir) / "features",
            widths=[plan.drafter.feature_size, *([plan.drafter.hidden_size] if self._plan.objective.needs_teacher else [])],
            limit_gib=data.offline_limit_gib,
            rows_per_batch=data.rows_per_batch,
            console=self._console,
        )

    def _attach(self, module: RowDataModule, folders: list[Path]) -> None:
        if folders:
            train, val = (StoredFeatures.open(folder) for folder in folders)
            module.features = (train, val)

    def _make_data(self, target: FrozenTarget | RemoteTarget) -> JobData:
        make = self._chats if self._cfg.data.kind == "chat" else self._responses
        if self._cfg.ckpt_path is None:
            return make(target)
        # What plan.py could not know yet, each before the work that comes next.
        saved = load(self._cfg.ckpt_path, mmap=True)
        compare(saved, {"drafter.target_fingerprint": target.fingerprint})
        made = make(target)
        compare(saved, {CONTENT: made.module.contract()[CONTENT]})
        return made

    def _chats(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """Conversations as they are."""
        data, info = self._cfg.data, target.info
        made = chat_data(
            data,
            info,
            mask_token_id=self._plan.drafter.mask_token_id,
            seed=self._cfg.seed,
            cache_dir=cache_folder(data.cache_dir),
            decoded=self._cfg.evaluation.prompts if info.packs else 0,
        )
        module = RowDataModule(made.train, made.val, data.rows_per_batch, self._cfg.seed)
        module.eval_prompts = made.prompts  # type: ignore[attr-defined]
        figures = made.figures(self._cfg.drafter.anchors)
        for line in made.lines(figures):
            self._console.print(f"  {line}", highlight=False, markup=False)
        self._say_one_a_row(info, made.train.efficiency)
        if data.policy_documents and not (documents := made.val_documents(data.policy_documents)):
            self._console.print(
                "  no held-out document has a supervised token in its first row, so none is checked for being the target's own",
                highlight=False,
            )
        elif data.policy_documents:
            figures |= self._check_policy(
                target, PolicyQuestion(documents, data.temperature, data.row_tokens, data.rows_per_batch)
            )
        return JobData(module, made.prompts, figures)

    def _check_policy(self, target: FrozenTarget | RemoteTarget, question: PolicyQuestion) -> dict[str, Any]:
        """Say whether the conversations are what the target would have said."""
        (check,) = target.each(answer_policy, [question])
        says = (
            f"{check.documents} held-out documents: {check.nll:.3f} nats a token, {check.entropy:.3f} if the target had written them "
            f"at T={check.temperature:g}"
        )
        if check.off_policy:
            logging.getLogger(__name__).warning(
                "%s: this is another's text, or of another temperature (data.temperature). A drafter learns what its target says: let it "
                "respond to the prompts (dflash-lit respond)",
                says,
            )
        else:
            self._console.print(f"  {says}: its own text", highlight=False)
        return {"policy_nll": check.nll, "policy_entropy": check.entropy, "off_policy": check.off_policy}

    def _responses(self, target: FrozenTarget | RemoteTarget) -> JobData:
        """The target responds to prompts."""
        data = self._cfg.data
        train, val, decoded = self._prompts(target)
        self._refuse_mask_token([*train, *val, *decoded])
        everything = respond(
            target,
            [*train, *val] if not data.validate_on_train else train,
            max_new_tokens=data.response_tokens,
            temperature=data.temperature,
            batch_size=data.responses_per_batch,
            seed=self._cfg.seed,
            cache_dir=cache_folder(data.cache_dir) / "responses",
        )
        # A sampled mask token is a one in a million accident: the document is dropped, not the run.
        documents = [d for d in everything.documents if not (d.input_ids == self._plan.drafter.mask_token_id).any()]
        names = {prompt.name for prompt in val}
        sides: tuple[list[Document], list[Document]] = (
            [d for d in documents if data.validate_on_train or d.name not in names],
            [d for d in documents if d.name in names],
        )
        info = target.info
        arguments: dict[str, Any] = {"seed": self._cfg.seed, "pad_id": info.pad_id, "one_per_row": not info.packs}
        rows = [pack(side, data.row_tokens, **arguments) for side in sides]
        module = RowDataModule(rows[0], rows[1], data.rows_per_batch, self._cfg.seed)
        # Decoding on the training text: only what was trained on, and not the prompts whose responses were dropped.
        learnt = {d.name for d in documents}
        decoded = [prompt for prompt in decoded if not data.validate_on_train or prompt.name in learnt]
        prompts = [list(prompt.input_ids) for prompt in decoded[: self._cfg.evaluation.prompts if info.packs else 0]]
        module.eval_prompts = prompts  # type: ignore[attr-defined]
        said = (
            f"{len(everything.documents)} responses of {target.info.path} at T={data.temperature:g}"
            f" ({everything.repetitive} repetitive and {everything.empty} empty ones dropped"
            + (", from the cache)" if everything.from_cache else f", {everything.tokens_per_second:.0f} tokens/s)")
            + f"; {len(rows[0])} + {len(rows[1])} rows of {data.row_tokens} tokens, {100 * rows[0].efficiency:.1f} % filled"
        )
        # A path may hold what rich takes for markup, and a line of a log stays a line.
        self._console.print(Text(f"  {said}"), soft_wrap=True)
        self._say_one_a_row(info, rows[0].efficiency)
        figures = {
            "responses": len(everything.documents),
            "responses_repetitive": everything.repetitive,
            "responses_from_cache": everything.from_cache,
        }
        return JobData(module, prompts, figures)

    def _say_one_a_row(self, info: TargetInfo, filled: float) -> None:
        if not info.packs:
            self._console.print(
                f"  {info.path} has layers of kind {info.not_packed!r}, which no mask keeps to one document: each row holds one, "
                f"{100 * filled:.1f} % filled (data.row_tokens near the documents' length fills more); nothing is "
                "decoded, since rejected drafts cannot be taken back from their state"
            )

    def _prompts(self, target: FrozenTarget | RemoteTarget) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
        """Prompts to train on, to validate on, and to decode."""
        data, seed = self._cfg.data, self._cfg.seed
        evaluated = self._cfg.evaluation.prompts
        wanted = data.val_prompts + evaluated
        if data.prompts is None:
            size = data.prompt_tokens
            train = stdlib_prompts(target.tokenizer, count=data.train_prompts, prompt_tokens=size, held_out=False, seed=seed)
            held = stdlib_prompts(target.tokenizer, count=wanted, prompt_tokens=size, held_out=True, seed=seed)
        else:
            everything = file_prompts(data.prompts, target.tokenizer, max_prompt_tokens=data.prompt_tokens)
            train, held = split_held_out(everything, data.held_out_share, seed)
            if not train or len(held) < 2:
                raise UserError(
                    f"data.prompts={data.prompts!r}: {len(everything)} different prompts give {len(train)} to train on and {len(held)} held "
                    "out; at least 1 and 2 are needed: add prompts or raise data.held_out_share"
                )
            train = train[: data.train_prompts]
        cut = min(data.val_prompts, len(held) // 2 if len(held) < wanted else data.val_prompts)
        val, decoded = held[:cut], held[cut:][:evaluated]
        if data.validate_on_train:
            val = decoded = train
        return train, val, decoded

    def _refuse_mask_token(self, prompts: list[Prompt]) -> None:
        mask = self._plan.drafter.mask_token_id
        for prompt in prompts:
            if mask in prompt.input_ids:
                raise UserError(
                    f"drafter.mask_token_id={mask} occurs in the data (prompt {prompt.name!r}); choose a reserved id that is never text"
                )
