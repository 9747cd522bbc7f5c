"""Payloads by hand, and processes of their own, for tests of the runtime and of its cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from eqaccel import codegen, runtime

ABI = (Path(codegen.__file__).parent / "preludes/abi.h").read_text()

SCALE_BODY = """
extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {
  const EQ_SCALAR* x = (const EQ_SCALAR*)o->x;
  EQ_SCALAR* z = (EQ_SCALAR*)o->z;
#pragma omp parallel for num_threads(o->threads)
  for (int64_t i = 0; i < o->num_receivers; ++i) z[i] = 2 * x[i];
}
extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {
  return o->num_receivers * sizeof(EQ_SCALAR);
}
"""

CUDA_BODY = """
extern "C" __global__ void first(double* x, int n) {
  extern __shared__ double s[];
  s[threadIdx.x] = x[n];
  __syncthreads();
  x[threadIdx.x] = s[n];
}
extern "C" __global__ void second(float* x) { x[threadIdx.x] = 1; }
"""


def make_payload(cpu: str = SCALE_BODY, meta: str = "x_dim=1\nz_dim=1\n", family: str = "tensor_product") -> bytes:
    entries = {
        "meta": f"family={family}\n{meta}",
        "prelude/cpu": ABI,
        "prelude/cuda": "",
        "cpu/forward": cpu,
        "gpu/forward/float32": CUDA_BODY,
    }
    return b"EQACCEL-PAYLOAD 1\n" + b"".join(
        f"{name} {len(text.encode())}\n{text}\n".encode() for name, text in entries.items()
    )


def kept(folder: Path) -> list[Path]:
    """What lies in a cache folder, besides the file that processes lock."""
    return [path for path in folder.iterdir() if path.name != ".lock"] if folder.exists() else []


def start_python(script: str, **env: str) -> subprocess.Popen:
    """Starts a fresh interpreter that sees this module as `common`."""
    head = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # else background jobs ignore it
    head += f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import runtime_checks as common\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + "from eqaccel import runtime\n" + textwrap.dedent(script)],
        cwd="/",  # not the checkout: its eqaccel folder has no compiled part
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_python(script: str, **env: str) -> str:
    process = start_python(script, **env)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


COMPILE = """
r = runtime.Program(common.make_payload()).compile("cpu", "float32", "forward")
print(r["cached"], r["seconds"])
"""


def read(content: bytes) -> dict[str, str]:
    """The entries of a payload."""
    entries, position = {}, content.index(b"\n") + 1
    while position < len(content):
        end = content.index(b"\n", position)
        name, size = content[position:end].decode().split()
        entries[name] = content[end + 1 : end + 1 + int(size)].decode()
        position = end + 2 + int(size)
    return entries


def program(entries: dict[str, str]) -> runtime.Program:
    parts = [f"{name} {len(text.encode())}\n{text}\n" for name, text in entries.items()]
    return runtime.Program(("EQACCEL-PAYLOAD 1\n" + "".join(parts)).encode())
