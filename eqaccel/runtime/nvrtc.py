"""Finding NVRTC, the run-time compiler of CUDA, among the installed Python packages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from eqaccel import _runtime


def locate_nvrtc() -> Path | None:
    """Looks for NVIDIA's NVRTC package on `sys.path`.

    Returns:
        The newest libnvrtc found, or None. Its files are `nvidia/cu13/lib/libnvrtc.so.13` (CUDA 13) or
        `nvidia/cuda_nvrtc/lib/libnvrtc.so.12` (CUDA 12).
    """
    found = [
        path
        for entry in sys.path
        for pattern in ("nvidia/cu[0-9]*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
        for path in Path(entry or ".").glob(pattern)
        if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)
    ]
    return max(found, key=lambda path: int(path.suffix[1:]), default=None)


def use_located_nvrtc() -> None:
    """Tells the runtime where NVRTC is; it looks at EQACCEL_NVRTC and at an NVRTC that torch has loaded first."""
    path = locate_nvrtc()
    if path is not None:
        _runtime.set_nvrtc_path(str(path))
