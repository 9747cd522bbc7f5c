"""Compiles kernels with few optimizations: `compile_quickly.py LIBRARY ARCH:FILE...` writes FILE.ARCH for each of them.

That is PTX for an architecture like compute_90, and machine code for one like sm_90. It is a process of its own because
NVRTC keeps this option for later compilations, in which spills would be others.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any


def compile_quickly(nvrtc: ctypes.CDLL, file: Path, arch: str) -> bytes:
    """A file for an architecture; ends the process with NVRTC's messages if it does not compile."""
    program = ctypes.c_void_p()
    words = ["--std=c++17", "-default-device", f"--gpu-architecture={arch}", "--Ofast-compile=max"]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), file.read_bytes(), file.name.encode(), 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(words), options)
    if failed:
        sys.exit(f"{arch}: {_read(nvrtc, 'ProgramLog', program).decode()}")
    return _read(nvrtc, "CUBIN" if arch.startswith("sm_") else "PTX", program)


def _read(nvrtc: ctypes.CDLL, what: str, program: Any) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1])
    # Some versions look for these by name alone, and find what is open.
    for second in Path(sys.argv[1]).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(second))
    for target, name in (word.split(":", 1) for word in sys.argv[2:]):
        Path(f"{name}.{target}").write_bytes(compile_quickly(library, Path(name), target))
