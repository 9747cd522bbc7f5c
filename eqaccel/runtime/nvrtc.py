"""NVRTC, the run-time compiler of CUDA, among the installed Python packages: where to look, for the runtime."""

from __future__ import annotations

import sys
from pathlib import Path

from eqaccel import _runtime


def locate_nvrtc() -> Path | None:
    """The newest libnvrtc of NVIDIA's packages on `sys.path`, or None."""
    found = _runtime.find_nvrtc(_folders())
    return Path(found[0]) if found else None


def use_packages() -> None:
    """Lets the runtime look for NVRTC on `sys.path`; EQACCEL_NVRTC and an NVRTC that torch has loaded come first."""
    _runtime.set_package_folders(_folders())


def _folders() -> list[str]:
    return [str(folder) for folder in sys.path]  # anything may stand there
