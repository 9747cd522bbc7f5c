"""The settings of eqaccel: the environment variables listed in `VARIABLES`, and no others.

They are read when they are needed, never at import, so a test or a notebook can change them at any time. The runtime
reads them (`csrc/runtime/settings.h`), because it needs them in programs without Python too, and Python asks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eqaccel import _runtime

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "EQACCEL_CACHE_DIR": "folder of compiled kernels (default: $XDG_CACHE_HOME/eqaccel or ~/.cache/eqaccel)",
        "EQACCEL_CACHE_LIMIT": "MiB of compiled kernels to keep, 0: all; those not used for longest go (default: 2048)",
        "EQACCEL_DUMP": "folder to write plan, source, compile log and resource use of every kernel to (default: none)",
        "EQACCEL_CHECK_INDICES": "1: check edge indices on a GPU too, which waits for the device (default: 0)",
        "EQACCEL_SHARED_KIB": "shared memory of a GPU block, to run kernels of smaller GPUs (default: the device's)",
        "EQACCEL_TUNE": "1: warmup and patch time several plans of each kernel and keep the fastest (default: 0)",
        "EQACCEL_WEIGHT_MIB": "memory of weights of edges in a step, else made in pieces (default: 3788, or less)",
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
        weight_bytes: Memory that the weights of edges of a layer may take in a step, and their gradients; 0 for the
            default.
    """

    tune: bool = False
    compile_limit: float = 600.0
    weight_bytes: int = 0


def current() -> Settings:
    """Reads the settings from the environment as it is now; a variable set to the empty string counts as unset.

    Raises:
        SettingsError: If EQACCEL_TUNE is neither a yes nor a no, EQACCEL_COMPILE_LIMIT no positive number, or
            EQACCEL_WEIGHT_MIB no whole one.
    """
    return Settings(_runtime.tune(), _runtime.compile_limit(), _runtime.weight_bytes())
