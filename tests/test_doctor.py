"""The doctor: every fault is found, with what to do; healthy machines get no complaint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from dflash_lit.cli import main
from dflash_lit.config import register
from dflash_lit.doctor import Finding, Machine, examine
from dflash_lit.doctor.finding import GIB
from dflash_lit.doctor.look import driver_version, folder_facts, installed, look, mount_of, try_compiler
from dflash_lit.doctor.machine import Distribution, Folder, Gpu, Tool
from dflash_lit.doctor.memory import PUBLISHED, SMALL, Recipe, run_bytes
from dflash_lit.drafter.config import DrafterConfig

# -- metadata, as published: torch 2.11.0 and cuda-toolkit 13.0.2 (abridged)

LINUX = 'platform_system == "Linux"'
TORCH = (
    "filelock",
    f"cuda-toolkit[cublas,cudart,nvtx]==13.0.2; {LINUX}",
    f"nvidia-cudnn-cu13==9.19.0.56; {LINUX}",
    f"nvidia-nccl-cu13==2.28.9; {LINUX}",
    f"triton==3.6.0; {LINUX}",
    'optree>=0.13.0; extra == "optree"',
)
TOOLKIT = (
    "nvidia-cublas==13.1.0.3.*; (sys_platform == 'linux') and extra == 'cublas'",
    "nvidia-cuda-runtime==13.0.96.*; (sys_platform == 'linux') and extra == 'cudart'",
    "nvidia-npp==13.0.1.2.*; (sys_platform == 'linux') and extra == 'npp'",
    "nvidia-nvtx==13.0.85.*; (sys_platform == 'linux') and extra == 'nvtx'",
)
OURS = ("torch<3,>=2.11", "lightning<3,>=2.6.6", "hydra-core<1.4,>=1.3.8", "transformers<6,>=5.17", 'pytest>=9; extra == "dev"')
PLAIN = {
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "hydra-core": "1.3.8",
    "transformers": "5.24.0",
    "nvidia-ml-py": "13.580.82",
}
WHEELS = {
    "triton": "3.6.0",
    "nvidia-cublas": "13.1.0.3",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-nvtx": "13.0.85",
    "nvidia-cudnn-cu13": "9.19.0.56",
    "nvidia-nccl-cu13": "2.28.9",
}


def site(folder: Path, versions: dict[str, str], requires: dict[str, tuple[str, ...]] | None = None) -> None:
    """Put distributions into a folder as pip leaves them, so far as metadata goes."""
    for name, version in versions.items():
        made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        made.mkdir(parents=True)
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += ["Requires-Python: >=3.11"] if name == "dflash-lit" else []
        lines += [f"Requires-Dist: {line}" for line in (requires or {}).get(name, ())]
        (made / "METADATA").write_text("\n".join([*lines, "", ""]))


@pytest.fixture(scope="module")
def cpu_machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("cpu")
    site(folder, {"dflash-lit": "0.1.0", "torch": "2.13.0+cpu", **PLAIN}, {"dflash-lit": OURS, "torch": TORCH[:1]})
    return Machine(
        "3.12.3",
        installed([str(folder)]),
        torch="2.13.0+cpu",
        include="/usr/include/python3.12",
        cache=Folder("/home/me/.cache/dflash_lit", free=50 * GIB, mount="ext4", options=("rw",)),
        shared_memory=GIB // 16,
        free_memory=8 * GIB,
        needs={"target": GIB, "activations": GIB},
    )


@pytest.fixture(scope="module")
def gpu_machine(cpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("gpu")
    versions = {"dflash-lit": "0.1.0", "torch": "2.11.0", "cuda-toolkit": "13.0.2", **PLAIN, **WHEELS}
    site(folder, versions, {"dflash-lit": OURS, "torch": TORCH, "cuda-toolkit": TOOLKIT})
    return replace(
        cpu_machine,
        distributions=installed([str(folder)]),
        torch="2.11.0+cu130",
        torch_cuda="13.0",
        architectures=("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"),
        driver="580.159.04",
        driver_cuda=(13, 0),
        devices=2,
        gpus=tuple(Gpu(index, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB) for index in range(2)),
        shared_memory=8 * GIB,
        target="Qwen/Qwen3-8B",
        recipe=PUBLISHED,
        needs={"target": 15 * GIB, "drafter with gradients and AdamW": 16 * GIB, "activations": 23 * GIB},
    )


def complaints(machine: Machine) -> list[Finding]:
    return [finding for finding in examine(machine) if finding.level != "ok"]


def only(machine: Machine) -> Finding:
    """The one complaint."""
    found = complaints(machine)
    assert len(found) == 1, found
    assert found[0].advice
    return found[0]


def test_a_healthy_cpu_machine(cpu_machine: Machine) -> None:
    assert complaints(cpu_machine) == []
    names = [finding.name for finding in examine(cpu_machine)]
    assert names == ["Python", "torch", "Triton", "driver", *names[4:]]
    assert {"packages", "compilation", "C++ compiler", "Python.h", "compile cache", "memory"} < set(names)
    assert not {"GPU 0", "peer access", "/dev/shm"} & set(names)


def test_a_healthy_gpu_machine(gpu_machine: Machine) -> None:
    assert complaints(gpu_machine) == []
    said = {finding.name: finding.found for finding in examine(gpu_machine)}
    assert said["torch"] == "2.11.0+cu130, for CUDA 13.0"
    assert said["Triton"] == "3.6.0, as torch wants it"
    assert said["driver"] == "NVIDIA 580.159.04, runs CUDA 13.0 and older"
    assert said["CUDA wheels"] == "6 of NVIDIA's, none of another CUDA than 13"
    assert said["packages"] == "all 3 that dflash-lit asks for are in range"
    assert said["GPU 1"] == "NVIDIA H200, compute capability 9.0, 139.0 GiB of 140.0 GiB free"
    assert said["peer access"] == "between all 2 GPUs"
    assert said["/dev/shm"].startswith("8.0 GiB")
    assert "takes about 54.0 GiB" in said["memory"]
    assert said["memory"].endswith("of 139.0 GiB free on GPU 0")


# -- distributions, in a real folder


def planted(machine: Machine, folder: Path, versions: dict[str, str], gone: tuple[str, ...] = (), **requires: Any) -> Machine:
    """The machine with distributions more, read from their metadata, and without those that are ``gone``."""
    site(folder, versions, requires)
    kept = tuple(d for d in machine.distributions if d.name not in gone)
    return replace(machine, distributions=installed([str(folder)]) + kept)


def test_wheels_of_two_cuda_majors_side_by_side(gpu_machine: Machine, tmp_path: Path) -> None:
    """What broke the project before this one; new names have no suffix, so that pip sees two packages."""
    finding = only(planted(gpu_machine, tmp_path, {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn-cu12": "9.10.2.21"}))
    assert (finding.level, finding.name) == ("error", "CUDA wheels")
    assert "nvidia-cublas-cu12 12.8.4.1 beside nvidia-cublas 13.1.0.3" in finding.found
    assert "nvidia-cudnn-cu12 9.10.2.21 beside nvidia-cudnn-cu13 9.19.0.56" in finding.found
    assert finding.advice == (
        "pip uninstall -y nvidia-cublas-cu12 nvidia-cudnn-cu12 && "
        "pip install --force-reinstall --no-deps 'nvidia-cublas==13.1.0.3.*' 'nvidia-cudnn-cu13==9.19.0.56'"
    )


def test_the_wheels_of_an_older_torch_are_the_right_ones_for_it(gpu_machine: Machine, tmp_path: Path) -> None:
    """Torch for CUDA 12, and somebody brought the new-style wheel."""
    older = planted(
        replace(gpu_machine, torch="2.11.0+cu128", torch_cuda="12.8", driver_cuda=(12, 8)),
        tmp_path,
        {"torch": "2.11.0+cu128", "nvidia-cublas-cu12": "12.8.4.1", "nvidia-nccl-cu12": "2.28.9", "nvidia-cublas": "13.1.0.3"},
        gone=("torch", "cuda-toolkit", *(name for name in WHEELS if name.startswith("nvidia-"))),
        torch=("nvidia-cublas-cu12==12.8.4.1", "nvidia-nccl-cu12==2.28.9", "triton==3.6.0"),
    )
    finding = only(older)
    assert finding.level == "error"
    assert "beside" in finding.found
    assert finding.advice.startswith("pip uninstall -y nvidia-cublas && pip install ")
    assert finding.advice.endswith("'nvidia-cublas-cu12==12.8.4.1'")
    assert complaints(replace(older, distributions=tuple(d for d in older.distributions if d.name != "nvidia-cublas"))) == []

    # The new one alone.
    alone = replace(older, distributions=tuple(d for d in older.distributions if d.name != "nvidia-cublas-cu12"))
    assert "for another CUDA than torch's 12.8: nvidia-cublas 13.1.0.3" in only(alone).found
    assert only(alone).advice == finding.advice


@pytest.mark.parametrize(
    ("torch_cuda", "planted_wheel", "right"),
    [("12.8", "nvidia-cufft", "nvidia-cufft-cu12"), ("13.0", "nvidia-cufft-cu12", "nvidia-cufft")],
)
def test_without_metadata_the_right_wheel_is_that_of_torchs_cuda(
    gpu_machine: Machine, torch_cuda: str, planted_wheel: str, right: str
) -> None:
    """Of a library that torch does not ask for, or of a torch that asks for none."""
    bare = tuple(replace(d, requires=()) if d.name == "torch" else d for d in gpu_machine.distributions)
    bare = tuple(d for d in bare if d.name not in WHEELS or d.name == "triton")
    pair = (Distribution(planted_wheel, "1"), Distribution(right, "2"))
    finding = only(replace(gpu_machine, torch_cuda=torch_cuda, distributions=bare + pair))
    assert finding.advice == f"pip uninstall -y {planted_wheel} && pip install --force-reinstall --no-deps {right}==2"

    # Neither is: what has no major in its name is not of CUDA 12.
    neither = (Distribution("nvidia-cufft-cu11", "1"), Distribution("nvidia-cufft", "2"))
    finding = only(replace(gpu_machine, torch_cuda="12.8", distributions=bare + neither))
    assert finding.advice == "pip uninstall -y nvidia-cufft-cu11 nvidia-cufft"


def test_wheels_of_another_cuda_alone(gpu_machine: Machine, tmp_path: Path) -> None:
    """And who brought them."""
    versions = {"nvidia-cufft-cu12": "11.3.3.83", "jax-cuda12-plugin": "0.11.2"}
    finding = only(planted(gpu_machine, tmp_path, versions, **{"jax-cuda12-plugin": ("nvidia-cufft-cu12>=11",)}))
    assert finding.level == "error"
    assert "for another CUDA than torch's 13.0: nvidia-cufft-cu12 11.3.3.83" in finding.found
    assert "asked for by jax-cuda12-plugin: give it an environment of its own" in finding.found
    assert finding.advice == "pip uninstall -y nvidia-cufft-cu12"


def test_one_wheel_in_place_of_another(gpu_machine: Machine, tmp_path: Path) -> None:
    finding = only(planted(gpu_machine, tmp_path, {"nvidia-nccl-cu12": "2.27.3"}, gone=("nvidia-nccl-cu13",)))
    assert "nvidia-nccl-cu12 2.27.3" in finding.found
    assert finding.advice == (
        "pip uninstall -y nvidia-nccl-cu12 && pip install --force-reinstall --no-deps 'nvidia-nccl-cu13==2.28.9'"
    )


def test_two_wheels_and_a_torch_that_loads_none(cpu_machine: Machine, tmp_path: Path) -> None:
    finding = only(planted(cpu_machine, tmp_path, {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cublas": "13.1.0.3"}))
    assert finding.level == "warning"
    assert finding.advice in (
        "pip uninstall -y nvidia-cublas-cu12 nvidia-cublas",
        "pip uninstall -y nvidia-cublas nvidia-cublas-cu12",
    )
    one = tuple(d for d in installed([str(tmp_path)]) if d.name == "nvidia-cublas")
    assert complaints(replace(cpu_machine, distributions=cpu_machine.distributions + one)) == []


def test_a_wheel_of_another_version_or_missing(gpu_machine: Machine, tmp_path: Path) -> None:
    finding = only(planted(gpu_machine, tmp_path, {"nvidia-nccl-cu13": "2.27.3"}, gone=("nvidia-nccl-cu13",)))
    assert (finding.level, finding.advice) == ("warning", "pip install 'nvidia-nccl-cu13==2.28.9'")
    assert "nvidia-nccl-cu13 2.27.3" in finding.found

    # A torch that works has its libraries from elsewhere; one that does not misses them.
    bare = replace(gpu_machine, distributions=tuple(d for d in gpu_machine.distributions if d.name != "nvidia-nccl-cu13"))
    assert complaints(bare) == []
    broken = complaints(replace(bare, torch_broken="libnccl.so.2: cannot open shared object file", gpus=()))
    assert [(f.level, f.name) for f in broken] == [("error", "torch"), ("error", "CUDA wheels")]
    assert "nvidia-nccl-cu13 missing" in broken[1].found


def test_what_is_out_of_range_has_a_line_each(cpu_machine: Machine, tmp_path: Path) -> None:
    wrong = {"transformers": "4.57.0", "hydra-core": "1.4.0.dev1"}
    found = complaints(planted(cpu_machine, tmp_path, wrong, gone=("lightning",)))
    assert [(f.level, f.name, f.advice) for f in found] == [
        ("error", "packages", "pip install 'lightning<3,>=2.6.6'"),
        ("error", "packages", "pip install 'hydra-core<1.4,>=1.3.8'"),
        ("error", "packages", "pip install 'transformers<6,>=5.17'"),
    ]
    assert found[0].found == "lightning is not installed; dflash-lit wants lightning<3,>=2.6.6"
    assert found[2].found.startswith("transformers 4.57.0; ")


def test_we_ourselves_are_not_installed(cpu_machine: Machine) -> None:
    others = tuple(d for d in cpu_machine.distributions if d.name != "dflash-lit")
    finding = only(replace(cpu_machine, distributions=others))
    assert (finding.level, finding.name, finding.advice) == ("warning", "packages", "pip install -e .")


def test_lightning_under_both_names_in_two_versions(cpu_machine: Machine, tmp_path: Path) -> None:
    finding = only(planted(cpu_machine, tmp_path, {"pytorch-lightning": "2.5.5"}))
    assert (finding.level, finding.advice) == ("warning", "pip install pytorch-lightning==2.6.6")
    assert "lightning 2.6.6 beside pytorch-lightning 2.5.5" in finding.found


def test_one_distribution_twice_in_a_folder(cpu_machine: Machine, tmp_path: Path) -> None:
    """Of two folders the first counts, and that is as it should be."""
    site(tmp_path / "a", {"transformers": "5.20.0"})
    assert complaints(replace(cpu_machine, distributions=installed([str(tmp_path / "a")]) + cpu_machine.distributions)) == []
    site(tmp_path / "a", {"transformers": "5.24.0"})
    finding = only(replace(cpu_machine, distributions=installed([str(tmp_path / "a")]) + cpu_machine.distributions))
    assert finding.level == "error"
    assert f"transformers is there as 5.20.0 and as 5.24.0 in {tmp_path / 'a'}" in finding.found
    assert "then pip install 'transformers<6,>=5.17'" in finding.advice


def test_damaged_metadata_is_passed_over(tmp_path: Path) -> None:
    site(tmp_path, {"rich": "14.0.0"})
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    (tmp_path / "numpy-2.0.0.dist-info").mkdir()
    (tmp_path / "numpy-2.0.0.dist-info" / "METADATA").write_text("")
    assert [(d.name, d.version) for d in installed([str(tmp_path)])] == [("rich", "14.0.0")]


# -- one fact changed

Change = dict[str, Any] | Callable[[Machine], Machine]


def hardware(machine: Machine, **changes: Any) -> Machine:
    """The machine with its GPU 1 changed."""
    return replace(machine, gpus=(machine.gpus[0], replace(machine.gpus[1], **changes)))


def triton_is(version: str | None) -> Callable[[Machine], Machine]:
    def change(machine: Machine) -> Machine:
        others = tuple(d for d in machine.distributions if d.name != "triton")
        return replace(machine, distributions=others + ((Distribution("triton", version),) if version else ()))

    return change


def without_metadata_of_torch(machine: Machine) -> Machine:
    return triton_is(None)(replace(machine, distributions=tuple(d for d in machine.distributions if d.name != "torch")))


CU130 = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
CU128 = CU130.replace("cu130", "cu128")


@pytest.mark.parametrize(
    ("on", "change", "level", "name", "found", "advice"),
    [
        ("cpu", {"python": "3.10.14"}, "error", "Python", "3.10.14", "virtual environment with Python >=3.11"),
        ("cpu", {"torch": None}, "error", "torch", "not installed", "pip install 'torch<3,>=2.11'"),
        ("cpu", {"torch": "2.9.1"}, "error", "torch", "dflash-lit wants torch<3,>=2.11", "pip install 'torch<3,>=2.11'"),
        (
            "cpu",
            {"torch_broken": "undefined symbol: ncclMemFree"},
            "error",
            "torch",
            "ncclMemFree",
            "force-reinstall torch==2.13.0",
        ),
        # Triton
        (
            "gpu",
            triton_is("3.5.1"),
            "error",
            "Triton",
            "3.5.1; torch 2.11.0+cu130 wants triton==3.6.0",
            "pip install 'triton==3.6.0'",
        ),
        ("gpu", triton_is(None), "error", "Triton", "not installed", "pip install 'triton==3.6.0'"),
        ("gpu", without_metadata_of_torch, "error", "Triton", "nothing runs without it", "pip install 'triton'"),
        # driver
        (
            "cpu",
            {"driver": "580.65.06", "driver_cuda": (13, 0), "devices": 1},
            "warning",
            "driver",
            "build without CUDA",
            CU130,
        ),
        ("cpu", {"driver": "570.86.15", "driver_cuda": (12, 8), "devices": 1}, "warning", "driver", "1 GPU(s)", CU128),
        ("cpu", {"driver": "580.65.06"}, "warning", "driver", "no GPU is visible", "docker run --gpus all"),
        (
            "gpu",
            {"driver_cuda": (12, 8), "gpus": ()},
            "error",
            "driver",
            "built for CUDA 13.0",
            f"(580.65 or newer), or {CU128}",
        ),
        (
            "gpu",
            {"smi_problem": "Failed to initialize NVML: Driver/library version mismatch", "gpus": ()},
            "error",
            "driver",
            "Driver/library version mismatch",
            "restart the machine",
        ),
        ("gpu", {"smi_problem": "it hangs"}, "warning", "driver", "it hangs", "restart the machine"),
        (
            "gpu",
            {"gpus": (), "torch_blind": "CUDA initialization: system not yet initialized"},
            "error",
            "driver",
            "none of 2 GPU(s): CUDA initialization: system not yet initialized",
            "nvidia-fabricmanager",
        ),
        (
            "gpu",
            {"gpus": (), "needs": {}, "environment": {"CUDA_VISIBLE_DEVICES": ""}},
            "warning",
            "driver",
            "CUDA_VISIBLE_DEVICES='' hides every GPU",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        # compilation
        (
            "gpu",
            {"environment": {"TORCH_COMPILE_DISABLE": "1"}},
            "error",
            "compilation",
            "TORCH_COMPILE_DISABLE=1",
            "unset TORCH_C",
        ),
        ("gpu", {"environment": {"TORCHDYNAMO_DISABLE": "1"}}, "error", "compilation", "TORCHDYNAMO_DISABLE=1", "unset TORCHD"),
        ("gpu", {"environment": {"TORCHDYNAMO_SUPPRESS_ERRORS": "1"}}, "error", "compilation", "SUPPRESS_ERRORS=1", "unset"),
        (
            "gpu",
            {"environment": {"TRITON_INTERPRET": "True"}},
            "error",
            "compilation",
            "TRITON_INTERPRET=True",
            "unset TRITON_I",
        ),
        (
            "gpu",
            {"c": Tool("")},
            "error",
            "C compiler",
            "none found; Triton starts no kernel",
            "apt install gcc libc6-dev, or set CC",
        ),
        ("gpu", {"c": Tool("gcc", "stdlib.h: No such file")}, "error", "C compiler", "(stdlib.h: No such file)", "libc6-dev"),
        ("cpu", {"cxx": Tool("")}, "warning", "C++ compiler", "none found; torch.compile needs one", "apt install g++"),
        ("cpu", {"cxx": Tool("g++", "boom")}, "warning", "C++ compiler", "(boom)", "set CXX"),
        ("gpu", {"python_h": False}, "error", "Python.h", "not in /usr/include/python3.12", "apt install python3.12-dev"),
        # cache
        ("cpu", {"cache": Folder("/c", "/c is not writable")}, "error", "compile cache", "/c: /c is not writable", "may write"),
        (
            "cpu",
            {"cache": Folder("/c", free=9 * GIB, options=("rw", "noexec"))},
            "error",
            "compile cache",
            "noexec",
            "COMPILE_CACHE",
        ),
        (
            "cpu",
            {"cache": Folder("/c", free=9 * GIB, mount="nfs4")},
            "warning",
            "compile cache",
            "network filesystem (nfs4)",
            "local",
        ),
        (
            "cpu",
            {"cache": Folder("/c", size=GIB, free=GIB)},
            "warning",
            "compile cache",
            "1.0 GiB used, 1.0 GiB free",
            "free some",
        ),
        (
            "cpu",
            {"cache": Folder("/c", mount="lustre", free=9 * GIB), "environment": {"TORCHINDUCTOR_CACHE_DIR": "/c"}},
            "warning",
            "compile cache",
            "lustre",
            "set TORCHINDUCTOR_CACHE_DIR to a folder on a local disk",
        ),
        # GPUs
        (
            "gpu",
            lambda m: hardware(m, capability=(7, 5)),
            "error",
            "GPU 1",
            "compute capability 7.5",
            "trainer.accelerator=cpu",
        ),
        (
            "gpu",
            lambda m: replace(hardware(m, capability=(10, 3)), architectures=("sm_80", "sm_90")),
            "error",
            "GPU 1",
            "kernels for sm_80 sm_90 only",
            CU130,
        ),
        (
            "gpu",
            lambda m: hardware(m, free=100 * GIB),
            "warning",
            "GPU 1",
            "others hold 40.0 GiB",
            "see in nvidia-smi whose it is",
        ),
        ("gpu", lambda m: hardware(m, problem="CUDA error: out of memory"), "error", "GPU 1", "out of memory", "nvidia-smi"),
        ("gpu", {"strangers": ((0, 1),)}, "warning", "peer access", "not between GPUs 0-1", "topo -p2p r"),
        ("gpu", {"shared_memory": GIB // 16}, "warning", "/dev/shm", "64 MiB for the processes of 2 GPUs", "--shm-size=8g"),
        # memory
        ("cpu", {"free_memory": 2 * GIB}, "warning", "memory", "about 2.0 GiB", "lower data.rows_per_batch"),
        ("cpu", {"free_memory": GIB}, "warning", "memory", "1.0 GiB are free in main memory", "take a smaller target"),
        ("cpu", {"needs": "no such model type"}, "warning", "memory", "could not be estimated", "size of its weight files"),
        ("cpu", {"target_problem": "target.path='x': no usable model"}, "error", "memory", "target.path='x'", "give --target"),
    ],
)
def test_a_planted_fault_is_the_only_complaint(
    request: pytest.FixtureRequest, on: str, change: Change, level: str, name: str, found: str, advice: str
) -> None:
    machine: Machine = request.getfixturevalue(f"{on}_machine")
    assert name not in {finding.name for finding in complaints(machine)}
    finding = only(change(machine) if callable(change) else replace(machine, **change))
    assert (finding.level, finding.name) == (level, name)
    assert found in finding.found
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("on", "change"),
    [
        # A CPU does without Triton's needs; a GPU without Inductor's C++.
        ("cpu", {"environment": {"TORCH_COMPILE_DISABLE": "1", "TRITON_INTERPRET": "1"}}),
        ("cpu", {"c": Tool(""), "python_h": False}),
        ("gpu", {"cxx": Tool("")}),
        # Values by which torch and Triton mean "no".
        ("gpu", {"environment": {"TORCH_COMPILE_DISABLE": "0", "TRITON_INTERPRET": "0", "TORCHDYNAMO_SUPPRESS_ERRORS": ""}}),
        ("gpu", triton_is("3.6.0+git1234")),
        ("gpu", {"environment": {"CUDA_VISIBLE_DEVICES": "1,0"}}),
        # Newer driver than torch, older minor version, GPU newer than the binaries but not than the PTX.
        ("gpu", {"driver_cuda": (14, 1)}),
        ("gpu", {"torch_cuda": "13.2"}),
        ("gpu", lambda m: hardware(m, capability=(13, 0))),
        ("gpu", lambda m: hardware(m, capability=(8, 6))),
        # A context of this process, and of a desktop.
        ("gpu", lambda m: hardware(m, free=134 * GIB)),
        ("gpu", lambda m: replace(m, gpus=m.gpus[:1], shared_memory=0)),
        ("cpu", {"shared_memory": None, "free_memory": None, "cache": None, "needs": {}}),
    ],
)
def test_what_is_no_fault(request: pytest.FixtureRequest, on: str, change: Change) -> None:
    machine: Machine = request.getfixturevalue(f"{on}_machine")
    assert complaints(change(machine) if callable(change) else replace(machine, **change)) == []


def test_hidden_gpus_are_not_prepared_for(gpu_machine: Machine) -> None:
    hidden = replace(gpu_machine, gpus=(), needs={}, environment={"CUDA_VISIBLE_DEVICES": "-1", "TRITON_INTERPRET": "1"})
    assert only(replace(hidden, c=Tool(""), python_h=False)).name == "driver"


# -- memory


def qwen3_8b(block_size: int) -> DrafterConfig:
    return DrafterConfig(4096, 12288, 5, 32, 8, 128, 151_936, block_size, 151_669, (1, 9, 17, 25, 33), 36)


@pytest.mark.parametrize(
    ("rows", "tokens", "anchors", "block", "chunk", "peak_gib"),
    [(4, 3072, 512, 16, 4096, 28.3), (1, 8192, 512, 16, 2048, 12.3)],
)
def test_activations_are_those_measured(rows: int, tokens: int, anchors: int, block: int, chunk: int, peak_gib: float) -> None:
    """docs/performance.md, shapes S and M: weights of the drafter, embedding and head of the target, no optimizer yet."""
    config = qwen3_8b(block)
    recipe = Recipe("", 5, 5, block, anchors, rows, tokens, chunk_slots=chunk)
    parameters = 5 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) + 5 * 4096 * 4096
    predicted = run_bytes(0, 0, config, recipe, gpu=True)["activations"] + 4 * parameters + 2 * 2 * 151_936 * 4096
    assert predicted / GIB == pytest.approx(peak_gib, rel=0.05)


def test_the_whole_run_is_that_measured() -> None:
    """docs/performance.md: target and drafter on one GPU, 49 GiB; gradients are counted as if activations were there beside them."""
    parts = run_bytes(8_190_735_360, 1_048_600_000, qwen3_8b(16), PUBLISHED, gpu=True)
    assert 49 <= sum(parts.values()) / GIB <= 49 + 4 + 2  # gradients; libraries and the measured error


def test_recipes_are_those_of_conf() -> None:
    register()
    for recipe, overrides in ((SMALL, []), (PUBLISHED, ["drafter=dflash", "data=file", "data.prompts=x.txt"])):
        with initialize_config_dir(str(Path(__file__).parent.parent / "conf"), version_base="1.3"):
            cfg = compose("train", overrides=["paths.output_dir=/nowhere", *overrides])
        found = Recipe(
            recipe.overrides,
            cfg.drafter.layers,
            cfg.drafter.features,
            cfg.drafter.block_size,
            cfg.drafter.anchors,
            cfg.data.rows_per_batch,
            cfg.data.row_tokens,
            cfg.drafter.intermediate_size,
            cfg.objective.chunk_slots,
        )
        assert found == recipe


# -- reading the facts


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (dvs@host)  Tue Sep 23\n",
    ],
)
def test_driver_version(text: str) -> None:
    assert driver_version(text) == "535.104.05"
    assert driver_version("something else") is None


def test_the_mount_of_a_path() -> None:
    mounts = (
        "/dev/vda / ext4 rw 0 0\nserver:/home /home nfs4 rw,noexec 0 0\nserver:/x /home/my\\040disk lustre rw 0 0\n"
        "a /scratch xfs rw 0 0\nb /scratch tmpfs ro 0 0\nodd\n"
    )
    assert mount_of(Path("/home/me/.cache"), mounts) == ("nfs4", ("rw", "noexec"))
    assert mount_of(Path("/home/my disk/x"), mounts) == ("lustre", ("rw",))
    assert mount_of(Path("/homely"), mounts) == ("ext4", ("rw",))
    assert mount_of(Path("/scratch/y"), mounts) == ("tmpfs", ("ro",))
    assert mount_of(Path("/home"), "") == ("", ())


def test_a_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    missing = folder_facts(tmp_path / "a" / "b")
    assert (missing.problem, missing.size) == ("", None)
    assert missing.free > 0
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert folder_facts(tmp_path).size == 1000
    assert folder_facts(tmp_path / "file" / "c").problem == f"{tmp_path / 'file'} is a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert folder_facts(tmp_path / "cache").problem == f"{tmp_path} is not writable"


def test_compilers_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "brokencc"
    broken.write_text("#!/bin/sh\necho 'x.c:1:10: fatal error: stdlib.h: No such file or directory' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("CXX", f"{sys.executable} -c pass")  # with arguments
    assert try_compiler("CC", ("gcc",), ".c") == Tool(str(broken), "x.c:1:10: fatal error: stdlib.h: No such file or directory")
    assert try_compiler("CXX", (), ".cpp") == Tool(f"{sys.executable} -c pass")
    monkeypatch.setenv("CC", "ccache gcc")  # which Triton would look for under that name
    assert try_compiler("CC", (), ".c").problem.endswith("No such file or directory: 'ccache gcc'")
    monkeypatch.delenv("CC")
    assert try_compiler("CC", ("no-such-compiler",), ".c") == Tool("")


def test_the_target_decides_what_memory_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here = look()
    assert not isinstance(here.needs, str)
    assert 10e6 < here.needs["target"] < 30e6  # 4.9 M parameters
    assert here.cache is not None
    assert here.cache.path == str(tmp_path)
    nowhere = look(str(tmp_path))
    assert "no usable model there" in nowhere.target_problem


# -- the command


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    findings = [Finding(**each) for each in json.loads(capsys.readouterr().out)]
    assert code == (1 if any(finding.level == "error" for finding in findings) else 0)
    assert all(bool(finding.advice) == (finding.level != "ok") for finding in findings)


def test_the_command_in_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-m", "dflash_lit.cli", "doctor"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    names = [line[9:22].strip() for line in lines]
    assert names[:4] == ["Python", "torch", "Triton", "driver"]
    assert "compile cache" in names
    assert names[-1] == "memory"
    assert "\x1b" not in done.stdout


def test_it_runs_where_torch_does_not(tmp_path: Path) -> None:
    """As wheels of two majors leave it: a torch whose library asks for a symbol that is not there."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cuda.so: undefined symbol: ncclMemFree')\n")
    site(tmp_path, {"torch": "2.11.0", "nvidia-nccl-cu13": "2.28.9", "nvidia-nccl-cu12": "2.14.3"}, {"torch": TORCH})
    call = [sys.executable, "-m", "dflash_lit.cli", "doctor"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert any("2.11.0+cu130, for CUDA 13.0; cannot be imported: libtorch_cuda.so: undefined symbol" in line for line in errors)
    assert any("pip uninstall -y nvidia-nccl-cu12 && " in line for line in errors)
