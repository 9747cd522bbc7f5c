"""The settings of eqaccel: the environment variables listed in `VARIABLES`, and no others.

They are read when they are needed, never at import, so a test or a notebook can change them at any time. Python reads
the ones in `Settings`; the runtime in C++ reads the others, and says what came of them (`runtime.cache_dir`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eqaccel import _runtime
from eqaccel.errors import SettingsError

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "EQACCEL_CACHE_DIR": "folder of compiled kernels (default: $XDG_CACHE_HOME/eqaccel or ~/.cache/eqaccel)",
        "EQACCEL_CACHE_LIMIT": "MiB of compiled kernels to keep, 0: all; those not used for longest go (default: 2048)",
        "EQACCEL_DUMP": "folder to write plan, source, compile log and resource use of every kernel to (default: none)",
        "EQACCEL_CHECK_INDICES": "1: check edge indices on a GPU too, which waits for the device (default: 0)",
        "EQACCEL_SHARED_KIB": "shared memory of a GPU block, to run kernels of smaller GPUs (default: the device's)",
        "EQACCEL_TUNE": "1: warmup and patch time several plans of each kernel and keep the fastest (default: 0)",
        "EQACCEL_CXX": "host C++ compiler of the CPU backend (default: $CXX, else the first one found)",
        "EQACCEL_COMPILE_LIMIT": "seconds after which the host C++ compiler is ended, as one that hangs (default: 600)",
        "EQACCEL_NVRTC": "path of the libnvrtc to load (default: the one that came with torch or the CUDA toolkit)",
    }
)
"""Name and meaning of every variable, for `python -m eqaccel doctor` and the documentation."""


@dataclass(frozen=True)
class Settings:
    """What the environment asked for when `current` was called.

    Attributes:
        tune: Whether `warmup` and `patch` choose between plans by timing them.
        compile_limit: Seconds after which the host C++ compiler is ended.
    """

    tune: bool = False
    compile_limit: float = 600.0


def current(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from the environment as it is now; a variable set to the empty string counts as unset.

    Args:
        environ: Variables to read instead of `os.environ`.

    Raises:
        SettingsError: If EQACCEL_TUNE is neither a yes nor a no, or EQACCEL_COMPILE_LIMIT no positive number.
    """
    env = os.environ if environ is None else environ
    return Settings(
        tune=_flag(env, "EQACCEL_TUNE"),
        compile_limit=_seconds(env, "EQACCEL_COMPILE_LIMIT", 600.0),
    )


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = _runtime.parse_flag(env.get(name, ""))  # one rule for the settings of both languages
    if value is None:
        raise SettingsError(f"environment variable {name}: expected 1 or 0, got {env[name]!r}")
    return value


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    value = env.get(name) or default
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise SettingsError(f"environment variable {name}: expected seconds > 0, got {value!r}")
    return seconds
