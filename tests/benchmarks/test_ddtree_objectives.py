"""The comparison of objectives: every stage at tiny sizes, and the statistics of its table."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import ddtree_objectives as script
from objectives import texts
from objectives.lengths import lengths_text, read_lengths
from objectives.settings import OBJECTIVES, PRESETS, Job, Settings, jobs
from objectives.statistics import compare, estimate, markdown, read_records, t_quantile, together
from objectives.training import Late, Workbench

from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.data.packing import PackedRows
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy

TINY = replace(PRESETS["tiny"], recipe={**PRESETS["tiny"].recipe, "minutes": 0.01})


def prepared(settings: Settings, folder: Path) -> None:
    """The stages before the drafters, in this process."""
    settings.save(folder)
    texts.build_target(settings, folder)
    for part in (1, 0):
        texts.respond(settings, folder, part, 2)
    texts.pack_texts(settings, folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the standard library."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("asyncio", "email", "http", "json", "logging", "unittest"):
        for path in (Path(sysconfig.get_path("stdlib")) / name).glob("*.py"):
            (folder / name).mkdir(exist_ok=True)
            shutil.copy(path, folder / name / path.name)
    return folder


@pytest.fixture(scope="module")
def texts_folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target and texts, no drafters."""
    folder = tmp_path_factory.mktemp("texts")
    prepared(replace(TINY, roots=(str(source),)), folder)
    return folder


@pytest.fixture
def folder(texts_folder: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(texts_folder, tmp_path / "work")
    return tmp_path / "work"


def test_files_train_the_target_or_give_prompts(source: Path) -> None:
    sides = texts.corpus([str(source)])
    names = [file.name for files in sides.values() for file in files]
    assert len(names) == len(set(names))
    assert all(sides.values())
    assert len(sides["target"]) > 3 * len(sides["drafter"])


def test_prompts_and_responses_become_rows(texts_folder: Path) -> None:
    settings = Settings.load(texts_folder)
    prompts = np.load(texts_folder / "prompts.npz")
    rows = PackedRows.load(texts_folder / "rows" / "held")
    assert len(prompts["held"]) == settings.held_prompts
    known = {tuple(prompt) for prompt in prompts["held"].tolist()}
    assert 1 <= len(rows) <= settings.held_prompts
    for ids, supervised in zip(rows.input_ids, rows.supervised, strict=True):
        assert tuple(ids[: settings.prompt_tokens].tolist()) in known
        assert not supervised[: settings.prompt_tokens].any()
        assert supervised[settings.prompt_tokens]


def test_a_path_head_changes_nothing_of_the_drafter_beside_it(folder: Path) -> None:
    settings = replace(Settings.load(folder), steps=6)
    bench = Workbench.load(settings, folder)
    states = []
    for objective in ("soft-dpace", "soft-dpace-path"):
        job = Job("scratch", objective, 0, settings.steps)
        module = bench.module(job)
        with torch.no_grad():
            module.drafter.norm.weight.fill_(50.0)  # sure of itself: gradients are large enough to be clipped
        bench.train(job, module)
        states.append(module.drafter.state_dict())
    plain, beside = states
    assert all(torch.equal(beside[name], value) for name, value in plain.items())
    assert (beside["path_head.out_proj.weight"] != 0).any()


def test_a_run_records_every_drafter_and_every_decoding(folder: Path) -> None:
    settings = Settings.load(folder)
    assert script.work(folder, 0, float("inf")) == 0
    records = script.all_records(folder)
    expected = {(job.regime, job.objective, job.seed) for job in jobs(settings)}
    about = [(r["regime"], r["objective"], r["seed"]) for r in records if r["kind"] == "trained"]
    assert len(about) == len(set(about))
    assert set(about) == expected
    cells = [(t, b) for t in settings.temperatures for b in (0, *settings.budgets)]
    decoded = [
        (r["regime"], r["objective"], r["seed"], r["temperature"], r["budget"]) for r in records if r["kind"] == "decoded"
    ]
    assert sorted(decoded) == sorted((*one, *cell) for one in expected for cell in cells)
    for record in records:
        if record["kind"] == "decoded":
            assert len(record["tokens"]) == len(record["rounds"]) == settings.decode_prompts
            # A round yields one token to a whole block.
            pairs = list(zip(record["tokens"], record["rounds"], strict=True))
            assert all(rounds <= tokens <= rounds * settings.block for tokens, rounds in pairs)
        elif record["kind"] == "trained":
            rows = len(PackedRows.load(folder / "rows" / "held"))
            assert {len(text) for text in record["blocks"].values()} == {rows * settings.anchors}
    table = markdown(records)
    assert "CE x decay" in table
    assert "continued, 2 steps" in table
    # Nothing is left to do, and nothing is recorded twice.
    assert script.work(folder, 1, float("inf")) == 0
    assert len(script.all_records(folder)) == len(records)


def test_objectives_of_a_seed_share_first_weights_and_batches(folder: Path) -> None:
    bench = Workbench.load(Settings.load(folder), folder)
    first, other = (Job("scratch", objective, 1, 3) for objective in ("ce-decay", "soft-dpace"))
    weights = {name: value.clone() for name, value in bench.module(first).drafter.state_dict().items()}
    bench.train(first, bench.module(first))  # whatever has happened in between
    for name, value in bench.module(other).drafter.state_dict().items():
        assert torch.equal(value, weights[name]), name
    another = bench.module(replace(other, seed=2)).drafter.state_dict()
    assert not torch.equal(another["fc.weight"], weights["fc.weight"])


@pytest.mark.parametrize("objective", ["ce-dpace", "soft-mix-T2"])
def test_training_is_that_of_the_trainer(folder: Path, objective: str) -> None:
    bench = Workbench.load(Settings.load(folder), folder)
    settings, job = bench.settings, Job("scratch", objective, 1, 4)
    before = Job("scratch", "soft-tree-T2", 0, 3)
    bench.train(before, bench.module(before))  # leaves nothing behind
    module = bench.module(job)
    first = {name: value.clone() for name, value in module.drafter.state_dict().items()}
    bench.train(job, module)

    product = DrafterModule(
        bench.config.to_dict(),
        bench.target.ends(),
        module.objective.to_dict(),
        anchors=settings.anchors,
        seed=1,
        optimizer=settings.optimizer,
        lr=settings.lr,
        warmup=settings.warmup,
    )
    product.drafter.load_state_dict(first)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ColocatedStrategy(bench.target, bench.config.target_layer_ids, teacher=objective.startswith("soft")),
        max_steps=job.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    train, held = (PackedRows.load(folder / "rows" / side) for side in ("train", "held"))
    trainer.fit(product, datamodule=RowDataModule(train, held, settings.rows, 1))
    for name, value in product.drafter.state_dict().items():
        torch.testing.assert_close(module.drafter.state_dict()[name], value, atol=1e-5, rtol=1e-4)
        assert not torch.equal(value, first[name])


def test_a_training_cut_off_by_the_deadline_goes_on(folder: Path) -> None:
    bench = Workbench.load(Settings.load(folder), folder)
    job = Job("scratch", "soft-tree-T2", 0, 60)
    whole = bench.train(job, bench.module(job))
    weights = {name: value.clone() for name, value in bench.module(job).drafter.state_dict().items()}
    module = bench.module(job)
    bench.deadline = 0.0
    with pytest.raises(Late):
        bench.train(job, module)
    bench.deadline = float("inf")
    module = bench.module(job)
    assert all(torch.equal(value, weights[name]) for name, value in module.drafter.state_dict().items())
    assert bench.train(job, module)["loss"] == whole["loss"]


def test_a_failed_job_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "ce-decay", {"labels": "hard", "weights": "none such"})
    replace(Settings.load(folder), seeds=1, warm_steps=0).save(folder)
    assert script.work(folder, 0, float("inf")) == 1
    records = script.all_records(folder)
    assert [r["job"] for r in records if r["kind"] == "failed"] == ["scratch_ce-decay_0"]
    assert {r["objective"] for r in records if r["kind"] == "decoded"} == {"soft-dpace", "soft-dpace-path"}


def test_the_command_goes_on_and_writes_the_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    replace(Settings.load(folder), seeds=1, warm_steps=0, objectives=("ce-decay",)).save(folder)
    for name in ("prompts.done", "rows.done"):
        (folder / name).touch()
    out = tmp_path / "out"
    assert script.main(["run", "--preset", "tiny", "--work", str(folder), "--out", str(out), "--minutes", "5"]) == 0
    records = read_records([out / "records.jsonl"])
    assert sorted({r["kind"] for r in records}) == ["decoded", "setup", "trained"]
    capfd.readouterr()
    assert script.main(["table", str(out / "records.jsonl")]) == 0
    assert capfd.readouterr().out.strip() == (out / "table.md").read_text().strip()


def test_a_job_is_claimed_once(tmp_path: Path) -> None:
    job = jobs(TINY)[0]
    assert script.claim(tmp_path, job)
    assert not script.claim(tmp_path, job)


def test_whole_seeds_of_the_main_comparison_come_first() -> None:
    settings = PRESETS["built"]
    order = jobs(settings)
    assert order[0].regime == "warm start"
    main = order[1 : 1 + len(settings.objectives) * settings.seeds]
    assert [(job.seed, job.objective) for job in main] == [(s, o) for s in range(settings.seeds) for o in settings.objectives]
    assert {job.after for job in order if job.regime == "continued"} == {order[0].name}
    assert len({job.name for job in order}) == len(order)


# -- statistics


def records_of(
    objective: str, tau: float, *, seeds: int = 3, prompts: int = 40, spread: float = 0.0, **more: Any
) -> list[dict[str, Any]]:
    """Decodings whose ratio is ``tau`` but for ``spread``."""
    rng = np.random.default_rng(0)
    rounds = rng.integers(20, 40, prompts)
    made = []
    for seed in range(seeds):
        tokens = rounds * (tau + spread * rng.standard_normal(prompts))
        about = {"target": "t", "regime": "scratch", "objective": objective, "seed": seed}
        made.append(
            {
                "kind": "trained",
                **about,
                "steps": 5,
                "nll": 1.0,
                "anchors": 2,
                "blocks": {"chain": "01.3", "64": "12.a"},
            }
        )
        made.append(
            {
                "kind": "decoded",
                **about,
                "temperature": 0.0,
                "budget": 64,
                "tokens": tokens.tolist(),
                "rounds": rounds.tolist(),
                "loops": [0] * prompts,
                **more,
            }
        )
    return made


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Prompts differ, seeds differ, and both are drawn anew: 95 of 100 intervals have to hold the truth."""
    rng = np.random.default_rng(1)
    for seeds in (3, 5):
        inside = 0
        for _ in range(400):
            prompts = 3.0 + 0.5 * rng.standard_normal(100)
            runs = 0.05 * rng.standard_normal((seeds, 1))
            rounds = np.full((seeds, 100), 30.0)
            found = estimate(rounds * (prompts + runs + 0.1 * rng.standard_normal((seeds, 100))), rounds)
            inside += abs(found.value - 3.0) <= found.half_width
        assert 0.92 <= inside / 400 <= 1.0


def test_pairs_take_out_what_prompts_and_seeds_have_in_common() -> None:
    rng = np.random.default_rng(2)
    common = 3 + rng.standard_normal((3, 200)).clip(-1.5, 2)  # the same hard prompts and lucky seeds for both
    rounds = np.full((3, 200), 25.0)
    first, second = 1.1 * rounds * common, rounds * common
    found = compare(((first, rounds), (second, rounds)))
    assert found.value == pytest.approx(10.0)
    assert found.half_width < 1e-6
    assert estimate(first, rounds).half_width > 0.05
    assert compare(((second, rounds), (first, rounds))).value == pytest.approx(100 / 1.1 - 100)


def test_targets_join_by_their_seeds_and_their_prompts() -> None:
    """Logs of all pairs are one sample; the prompts of two targets are independent, so each has half the weight and they join."""
    rng = np.random.default_rng(3)
    rounds = np.full((2, 50), 25.0)

    def pair(gain: float) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        tokens = rounds * (3 + rng.standard_normal((2, 50)).clip(-1, 1))
        return (gain * tokens + rng.standard_normal((2, 50)), rounds), (tokens, rounds)

    pairs = [pair(1.1), pair(1.2)]
    both, (one, other) = compare(*pairs), (compare(each) for each in pairs)
    logs = [np.log(a[0][0].sum(1) / a[1][0].sum(1)) for a in pairs]
    assert both.seeds == 4
    assert both.value == pytest.approx(100 * (np.exp(np.mean(logs)) - 1))
    scale = 100 + both.value
    assert both.training == pytest.approx(scale * t_quantile(3) * np.std(np.concatenate(logs), ddof=1) / 2)
    halves = [estimate.prompts / (100 + estimate.value) / 2 for estimate in (one, other)]
    assert both.prompts == pytest.approx(scale * np.hypot(*halves))


def test_a_table_over_targets_counts_what_each_has() -> None:
    records = [*records_of("ce-decay", 3.0), *records_of("soft-dpace", 3.6)]
    other = [{**r, "target": "u"} for r in [*records_of("ce-decay", 2.0), *records_of("ce-dpace", 2.2)]]
    table = together([*records, *other])
    assert "2 targets" in table
    assert "CE x decay: 6, CE x D-PACE: 3, soft x D-PACE: 3 drafters" in table
    against = table[table.index("| against CE x decay") :].splitlines()
    assert against[2].startswith("| CE x D-PACE | **+10.0")
    assert against[3].startswith("| soft x D-PACE | **+20.0")


def test_prompts_are_clusters_of_unequal_size() -> None:
    """The ratio of sums, and the standard error of Cochran's ratio estimator."""
    tokens, rounds = np.array([[30.0, 8.0, 12.0, 40.0]]), np.array([[10.0, 4.0, 3.0, 20.0]])
    found = estimate(tokens, rounds)
    ratio = 90 / 37
    residuals = tokens[0] - ratio * rounds[0]
    assert found.value == pytest.approx(ratio)
    assert found.half_width == pytest.approx(1.96 * np.sqrt((residuals**2).sum() / 3 / 4) / rounds.mean())
    assert np.isnan(found.training)


def test_quantiles_fall_to_the_normal_one() -> None:
    values = [t_quantile(freedom) for freedom in range(1, 40)]
    assert values[1] == pytest.approx(4.303)
    assert values == sorted(values, reverse=True)
    assert t_quantile(10_000) == pytest.approx(1.96, abs=1e-3)


def test_the_table_marks_differences_beyond_their_interval() -> None:
    table = markdown([*records_of("ce-decay", 3.0), *records_of("soft-dpace", 3.6), *records_of("ce-dpace", 3.0, spread=0.3)])
    assert "| CE x decay | 3 | 3.000 ± 0.000 |" in table
    assert "**+20.0 ± 0.0 %**" in table
    against = table[table.index("| against CE x decay") :].splitlines()
    (dpace,) = [line for line in against if line.startswith("| CE x D-PACE")][:1]
    assert "**" not in dpace


def test_of_equal_records_the_last_counts_and_a_cut_line_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = [json.dumps(r) for r in [*records_of("ce-decay", 9.0), *records_of("ce-decay", 3.0)]]
    path.write_text("\n".join(lines) + '\n{"kind": "decod')
    table = markdown(read_records([path]))
    assert "3.000 ± 0.000" in table
    assert "9.000" not in table


def test_loops_can_be_left_out() -> None:
    records = records_of("ce-decay", 3.0, seeds=1)
    for record in records:
        if record["kind"] == "decoded":
            record["tokens"][0], record["loops"][0] = 1000.0, 1
    assert "3.000 ± 0.000" not in markdown(records)
    assert "3.000 ± 0.000" in markdown(records, loops=False)
    assert "1 of 40 responses end in a loop" in markdown(records)


def test_lengths_go_into_a_text_and_back() -> None:
    text = lengths_text([0, 9, 10, 15, 3], [True, True, True, True, False])
    assert text == "09af."
    np.testing.assert_array_equal(read_lengths(text), [0, 9, 10, 15, np.nan])


def test_settings_survive_the_file_and_name_a_wrong_objective(tmp_path: Path) -> None:
    TINY.save(tmp_path)
    assert Settings.load(tmp_path) == TINY
    with pytest.raises(ValueError, match="no objective 'magic'"):
        replace(TINY, objectives=("magic",))
    with pytest.raises(ValueError, match="multiple of 128"):
        replace(TINY, prompt_tokens=17)
