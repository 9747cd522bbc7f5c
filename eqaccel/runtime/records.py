"""Small findings about this machine, kept as JSON files beside the compiled kernels.

A record carries a digest of itself: one that was damaged must not choose a kernel.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any

from eqaccel._runtime import cache_dir, cache_files, read_cached, write_cached
from eqaccel.errors import CacheWarning

_SUFFIX = ".json"
_DIGEST = "digest"


def read_record(name: str) -> dict[str, Any] | None:
    """The record of a name, or None if there is none.

    A file that cannot be read, is damaged, or may have come from somebody else counts as none and gives a
    `CacheWarning`.
    """
    content, problem = read_cached(name + _SUFFIX)
    if content is not None:
        try:
            record = json.loads(content)
        except ValueError as error:
            problem = str(error)
        else:
            if isinstance(record, dict) and record.pop(_DIGEST, None) == _digest(record):
                return record
            problem = "a JSON object and its digest were expected"
    if problem:
        message = f"'{name}' in the cache is ignored, because it cannot be read ({problem})"
        warnings.warn(message, CacheWarning, stacklevel=2)
    return None


def write_record(name: str, record: dict[str, Any]) -> None:
    """Stores a record; a reader never sees half of it. A folder that cannot be written gives a `CacheWarning`."""
    content = json.dumps(record | {_DIGEST: _digest(record)}, indent=1) + "\n"
    problem = write_cached(name + _SUFFIX, content.encode())
    if problem:
        message = f"'{name}' is not kept: can not write to the cache folder '{cache_dir()}' ({problem})"
        warnings.warn(message, CacheWarning, stacklevel=2)


def record_names(prefix: str) -> list[str]:
    """Names of the records that start with `prefix`, in order."""
    names = [file["name"] for file in cache_files()]
    return sorted(n.removesuffix(_SUFFIX) for n in names if n.startswith(prefix) and n.endswith(_SUFFIX))


def newest_record(prefix: str) -> str | None:
    """The name of the record that was written last among those that start with `prefix`, or None."""
    files = [f for f in cache_files() if f["name"].startswith(prefix) and f["name"].endswith(_SUFFIX)]
    return max(files, key=lambda file: file["written"])["name"].removesuffix(_SUFFIX) if files else None


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
