"""The texts in front of generated bodies: they say what the words of a body mean on a machine.

They are headers, with includes that any tool can follow. Kernels are compiled where these files are not, so payloads
carry them in one piece.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import resources

_INCLUDE = re.compile(r'#include "(.+)"')


def read_prelude(name: str) -> str:
    """One file of this folder."""
    return (resources.files(__name__) / name).read_text()


@functools.cache
def flatten_prelude(name: str, backend: str) -> str:
    """A file of this folder with all that it includes, each once.

    Markers say which line of which file follows, and that what comes after the whole is "body.cpp", so that messages of
    compilers name them.

    Args:
        name: The file.
        backend: "cpu", "cuda" or "hip". On a GPU `machine.h` is the file of this backend.
    """
    seen: set[str] = set()

    def lines_of(file: str) -> Iterator[str]:
        seen.add(file)
        yield f'#line 1 "{file}"'
        for number, line in enumerate(read_prelude(file).splitlines(), 1):
            include = _INCLUDE.fullmatch(line)
            included = include and include[1].replace("machine.h", f"{backend}.h")
            if included and included not in seen:
                yield from lines_of(included)
                yield f'#line {number + 1} "{file}"'
            else:
                yield "" if include or line == "#pragma once" else line

    return "".join(f"{line}\n" for line in (*lines_of(name), '#line 1 "body.cpp"'))
