"""The settings of eqaccel: the environment variables listed in `VARIABLES`, and no others.

They are read when they are needed, never at import, so a test or a notebook can change them at any time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from eqaccel.errors import SettingsError

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "EQACCEL_CACHE_DIR": "folder of compiled kernels (default: $XDG_CACHE_HOME/eqaccel or ~/.cache/eqaccel)",
        "EQACCEL_DUMP": "folder to write plan, source, compile log and resource use of every kernel to (default: none)",
        "EQACCEL_CHECK_INDICES": "1: check edge indices on a GPU too, which waits for the device (default: 0)",
        "EQACCEL_SHARED_KIB": "shared memory of a GPU block, to run kernels of smaller GPUs (default: the device's)",
        "EQACCEL_TUNE": "1: warmup and patch time several plans of each kernel and keep the fastest (default: 0)",
        "EQACCEL_CXX": "host C++ compiler of the CPU backend (default: $CXX, else the first one found)",
        "EQACCEL_NVRTC": "path of the libnvrtc to load (default: the one that came with torch or the CUDA toolkit)",
    }
)
"""Name and meaning of every variable, for `python -m eqaccel doctor` and the documentation."""


@dataclass(frozen=True)
class Settings:
    """What the environment asked for when `current` was called.

    Attributes:
        cache_dir: Folder of compiled kernels; it need not exist yet.
        dump_dir: Folder for plans, sources and logs of every kernel built, or None to write nothing.
        check_indices: Whether edge indices are range-checked on a GPU too (this synchronises with the device).
        cxx: Host C++ compiler (a name or a path), or None to look for one.
        nvrtc: Path of libnvrtc, or None to look for one.
        tune: Whether `warmup` and `patch` choose between plans by timing them.
    """

    cache_dir: Path
    dump_dir: Path | None = None
    check_indices: bool = False
    cxx: str | None = None
    nvrtc: Path | None = None
    tune: bool = False


def current(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from the environment as it is now; a variable set to the empty string counts as unset.

    Args:
        environ: Variables to read instead of `os.environ`.

    Raises:
        SettingsError: If EQACCEL_CHECK_INDICES or EQACCEL_TUNE is neither a yes nor a no.
    """
    env = os.environ if environ is None else environ
    cache_dir = _path(env.get("EQACCEL_CACHE_DIR"))
    return Settings(
        cache_dir=_default_cache_dir(env) if cache_dir is None else cache_dir,
        dump_dir=_path(env.get("EQACCEL_DUMP")),
        check_indices=_flag(env, "EQACCEL_CHECK_INDICES"),
        cxx=env.get("EQACCEL_CXX") or env.get("CXX") or None,
        nvrtc=_path(env.get("EQACCEL_NVRTC")),
        tune=_flag(env, "EQACCEL_TUNE"),
    )


def _path(value: str | None) -> Path | None:
    return Path(os.path.expanduser(value)) if value else None


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise SettingsError(f"environment variable {name}: expected 1 or 0, got {env[name]!r}")


def _default_cache_dir(env: Mapping[str, str]) -> Path:
    base = _path(env.get("XDG_CACHE_HOME"))
    if base is not None:
        return base / "eqaccel"
    try:
        return Path.home() / ".cache" / "eqaccel"
    except RuntimeError:  # a container may run under a user id that has no home
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"eqaccel-{user}"
