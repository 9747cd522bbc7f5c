"""The texts in front of generated bodies: they say what the words of a body mean on a machine.

They are headers, with includes that any tool can follow. Those of all families are here; what one family alone has to
say stands in its folder, and finds these where `-I` names this one. Kernels are compiled where these files are not, so
payloads carry them in one piece.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import resources

_INCLUDE = re.compile(r'#include "(.+)"')
_MACHINES = {"cpu": "cpu", "cuda": "gpu", "hip": "gpu"}  # the words that names of files begin with, by backend


def read_prelude(name: str, package: str | None = None) -> str:
    """One file of this folder, or of that of a package, which comes first."""
    own = resources.files(package) / name if package else None
    return (own if own and own.is_file() else resources.files(__name__) / name).read_text()


@functools.cache
def flatten_prelude(name: str, backend: str, package: str | None = None) -> str:
    """A file with all that it includes, each once.

    Markers say which line of which file follows, and that what comes after the whole is "body.cpp", so that messages of
    compilers name them.

    Args:
        name: The file.
        backend: "cpu", "cuda" or "hip". On a GPU `machine.h` is the file of this backend.
        package: The family in whose folder files are looked for before this one.
    """
    seen: set[str] = set()

    def lines_of(file: str) -> Iterator[str]:
        seen.add(file)
        yield f'#line 1 "{file}"'
        for number, line in enumerate(read_prelude(file, package).splitlines(), 1):
            include = _INCLUDE.fullmatch(line)
            included = include and include[1].replace("machine.h", f"{backend}.h")
            if included and included not in seen:
                yield from lines_of(included)
                yield f'#line {number + 1} "{file}"'
            else:
                yield "" if include or line == "#pragma once" else line

    return "".join(f"{line}\n" for line in (*lines_of(name), '#line 1 "body.cpp"'))


def family_prelude(name: str, backend: str, package: str) -> str:
    """What stands in front of the bodies of a family: its file `cpu_<name>.h` or `gpu_<name>.h`, flattened.

    Args:
        name: What both files are named after.
        backend: "cpu", "cuda" or "hip".
        package: The family, in whose folder they are.
    """
    return flatten_prelude(f"{_MACHINES[backend]}_{name}.h", backend, package)
