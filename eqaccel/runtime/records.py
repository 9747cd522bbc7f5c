"""Small findings about this machine, kept as JSON files beside the compiled kernels."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from eqaccel._runtime import cache_dir
from eqaccel.errors import CacheWarning

_SUFFIX = ".json"


def read_record(name: str) -> dict[str, Any] | None:
    """The record of a name, or None if there is none.

    A file that cannot be read, or holds something else, counts as none and gives a `CacheWarning`.
    """
    path = _folder() / (name + _SUFFIX)
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        record, problem = None, str(error)
    else:
        problem = f"a JSON object was expected, not {type(record).__name__}"
    if isinstance(record, dict):
        return record
    warnings.warn(f"'{path}' is ignored, because it cannot be read ({problem})", CacheWarning, stacklevel=2)
    return None


def write_record(name: str, record: dict[str, Any]) -> None:
    """Stores a record; a reader never sees half of it. A folder that cannot be written gives a `CacheWarning`."""
    folder = _folder()
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The prefix of the kernel cache, which removes what killed processes leave behind.
        descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=folder)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, folder / (name + _SUFFIX))
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        message = f"'{name}' is not kept: can not write to the cache folder '{folder}' ({error.strerror})"
        warnings.warn(message, CacheWarning, stacklevel=2)


def record_names(prefix: str) -> list[str]:
    """Names of the records that start with `prefix`, in order."""
    return sorted(path.stem for path in _folder().glob(f"{prefix}*{_SUFFIX}"))


def _folder() -> Path:
    # A user without a home has no cache folder: nothing is found or kept in one that is not there.
    return Path(cache_dir() or "/nonexistent")
