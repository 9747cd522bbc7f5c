"""What a report shows first, and what it keeps short."""

from __future__ import annotations

import pytest

from eqaccel import patch, report
from eqaccel.patches.report import Report, ReportRow


def test_idle_modules_share_a_line() -> None:
    rows = (
        ReportRow("a", "Linear", False, "merged on a GPU", idle=True),
        ReportRow("b", "Gate", False, "left: a reason"),
        ReportRow("c", "TensorProduct", True, "replaced"),
        ReportRow("d", "Linear", False, "merged on a GPU", idle=True),
        ReportRow("e", "Embedding", False, "merged on a GPU", idle=True),
    )
    title, header, *lines = str(Report("Model", rows)).splitlines()
    assert title == "Model: 1 modules accelerated"
    assert header.split()[0] == "module"
    assert [line.split()[0] for line in lines] == ["c", "b", "3"]
    assert lines[-1] == "3 more run as they came, where nothing is faster on this device: 2 Linear, 1 Embedding"


def test_a_good_patch_on_a_cpu_has_no_lines_about_gpus() -> None:
    pytest.importorskip("mace")
    import mace_models as mm

    found = report(patch(mm.energy_model()))
    assert found.accelerated > 10
    assert not any(row.accelerated for row in found.rows if row.idle)
    assert "on a GPU" not in str(found)
