"""The command `doctor` says which class of machines a device belongs to, and what it would refuse."""

from __future__ import annotations

import pytest

from eqaccel import runtime
from eqaccel.__main__ import main
from eqaccel.families import FAMILIES


def device(kib: int) -> dict[str, object]:
    return {"name": "Toy", "arch": "sm_86", "shared_bytes_per_block": kib * 1024}


def test_classes_and_refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runtime, "cuda_devices", lambda: [device(99), device(99)])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    toy = "Toy (sm_86, kernels planned for 99 KiB of shared memory a block)"
    present = ", ".join(FAMILIES).replace("matrix_product", "matrix_product (rounded)")
    kernels = f"  kernels         of {present}; none of matrix_product (split)\n"
    nothing = "  refused         none of the examples of eqaccel show\n"
    assert f"  devices         {toy}, {toy}\n{kernels}{nothing}" in text
    monkeypatch.setenv("EQACCEL_SHARED_KIB", "20")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for scalar in ("float32", "float64"):
        wanted = f"tensor_product mace-large: no plan of the {scalar} double_backward kernel fits the 20480 bytes"
        assert f"  refused         {wanted} of shared memory" in text
    assert "  devices         none found\n" in text  # of AMD


def test_devices_on_which_nothing_was_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runtime, "cuda_devices", lambda: [device(99)])
    assert main(["doctor"]) == 0
    assert "have only been compiled" not in capsys.readouterr().out
    monkeypatch.setattr(runtime, "hip_devices", lambda: [device(64) | {"arch": "gfx90a"}])
    assert main(["doctor"]) == 0
    devices = "  devices         Toy (gfx90a, kernels planned for 64 KiB of shared memory a block)\n"
    beware = "  beware          eqaccel's kernels have only been compiled for such devices, and never run\n"
    assert devices + beware in capsys.readouterr().out
