"""Fixtures that tests share: devices and dtypes, the cache, torch's defaults, the forms of modules."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# e3nn 0.4.4 stores a constants file that torch.load reads only with this set; it has to be set before e3nn is imported.
os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

# torch.compile would build a program for each instruction set of the processor, to see that the compiler knows it too.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The function of an AOTInductor package that calls the kernels is long, and its speed is not what is tested.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# There may be more ranks of MPI than cores. Those that wait sleep, and collectives do without shared memory, in which
# ranks would spin: four of LAMMPS for three quarters of their time.
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
os.environ.setdefault("MPIR_CVAR_COLL_SHM_LIMIT_PER_NODE", "0")

import pytest
import torch
from remembered import read_sources_once

read_sources_once()

_FUNCTIONS = {name: getattr(torch, name) for name in ("index_select", "select")}

# A runner that declares a GPU must not skip the tests that need it.
GPU_DECLARED = os.environ.get("EQACCEL_TEST_GPU") == "1"


def _devices() -> list[str]:
    if torch.cuda.is_available():
        return ["cpu", "cuda"]
    if GPU_DECLARED:
        raise RuntimeError("EQACCEL_TEST_GPU=1, but torch sees no GPU")
    return ["cpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden kernels anew, where text has changed")


def pytest_collection_finish() -> None:
    """Leaves what is there before the first test, half a million objects, out of each collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked `gpu` where there is none; `_devices` has refused a declared one that is missing."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, which is not there yet; kernels are not dumped."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(folder))
    monkeypatch.delenv("EQACCEL_DUMP", raising=False)
    return folder


@pytest.fixture(autouse=True)
def e3nn_defaults() -> Iterator[None]:
    """Leaves the options of e3nn as they were: NequIP's packaging changes how modules are built from then on."""
    e3nn = sys.modules.get("e3nn")
    options = e3nn.get_optimization_defaults() if e3nn else {}
    yield
    if e3nn:
        e3nn.set_optimization_defaults(**options)


@pytest.fixture(autouse=True)
def default_dtype_of_torch() -> Iterator[None]:
    """Leaves torch's default dtype as it was: MACE's calculator sets it for the whole process."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def functions_of_torch() -> None:
    """Puts back what torch_geometric, which SevenNet imports, replaces by what TorchScript cannot compile."""
    for name, function in _FUNCTIONS.items():
        setattr(torch, name, function)


@pytest.fixture
def nequip_defaults() -> None:
    """float64 as torch's default, which NequIP sets for a whole process and other tests do not expect."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def dense_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Node-wise modules take their dense forms on a CPU too, as on a GPU; in float64."""
    from eqaccel.patches import dense
    from eqaccel.patches.torch_state import default_dtype

    monkeypatch.setattr(dense, "prefers_dense", lambda x: x.dim() > 0)
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        yield
