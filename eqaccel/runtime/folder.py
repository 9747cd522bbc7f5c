"""The cache folder as the command line shows and empties it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from eqaccel._runtime import cache_dir, cache_files, cache_limit, cache_problem, remove_cached
from eqaccel.errors import CacheError

PLUGINS = "lammps"
"""Folder inside of the cache folder that holds compiled plugins for LAMMPS."""

_KINDS = {
    "CPU kernels": re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}\.so"),
    "GPU kernels": re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}\.bin"),
    "checked kernels of model files": re.compile(r"[0-9a-f]{40}\.ok"),
    "tuned kernels": re.compile(r"tuned-[0-9a-f]{40}\.json"),
}


@dataclass(frozen=True)
class CacheContent:
    """What lies in the cache folder.

    Attributes:
        folder: The folder, "" if there is none: no variable names one and the user has no home.
        problem: Why it is not used; "" if it is.
        files: Number and bytes of the files of each kind.
        limit: Bytes that entries may take together; 0 for no limit.
    """

    folder: str
    problem: str
    files: dict[str, tuple[int, int]]
    limit: int

    def __str__(self) -> str:
        if not self.folder:
            return "folder: none, because no home is known; set EQACCEL_CACHE_DIR to keep compiled kernels"
        lines = [f"folder: {self.folder}"]
        if self.problem:
            return f"{lines[0]}\nnot used: {self.problem}"
        for kind, (count, size) in self.files.items():
            lines.append(f"  {kind:<32}{count:>6}{size / 2**20:>10.1f} MiB")
        total = sum(size for _, size in self.files.values())
        limit = f"{self.limit / 2**20:.0f} MiB" if self.limit else "none"
        lines.append(f"  {'together':<38}{total / 2**20:>10.1f} MiB (limit: {limit}, EQACCEL_CACHE_LIMIT)")
        return "\n".join(lines)


def cache_content() -> CacheContent:
    """Looks into the cache folder.

    Raises:
        SettingsError: If EQACCEL_CACHE_LIMIT is not a whole number.
    """
    folder, problem, limit = cache_dir(), cache_problem(), cache_limit()
    files = dict.fromkeys((*_KINDS, "LAMMPS plugins"), (0, 0))
    if folder and not problem:
        for file in cache_files():
            kind = _kind(file["name"])
            if kind is not None:
                count, size = files[kind]
                files[kind] = (count + 1, size + file["bytes"])
        plugins = [path.stat().st_size for path in Path(folder, PLUGINS).glob("*/*.so")]
        files["LAMMPS plugins"] = (len(plugins), sum(plugins))
    return CacheContent(folder, problem, files, limit)


def clear_cache() -> CacheContent:
    """Removes what eqaccel keeps in the cache folder, and nothing else; returns what was there.

    Processes that run go on: they have read what they use, or make it again.

    Raises:
        CacheError: If the folder is not used, or something in it cannot be removed.
    """
    content = cache_content()
    if content.problem:
        raise CacheError(f"the cache is not emptied: {content.problem}")
    stuck = [
        file["name"]
        for file in cache_files()
        if _kind(file["name"]) is not None and not remove_cached(file["name"]) and _is_there(file["name"])
    ]
    if content.folder:
        shutil.rmtree(Path(content.folder, PLUGINS), ignore_errors=True)
    if stuck:
        raise CacheError(f"{len(stuck)} files of the cache folder '{content.folder}' cannot be removed, as {stuck[0]}")
    return content


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), None)


def _is_there(name: str) -> bool:
    return any(file["name"] == name for file in cache_files())
