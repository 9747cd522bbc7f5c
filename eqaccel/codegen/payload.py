"""The payload: named texts in one string of bytes, as `csrc/runtime/program.h` defines it, and what they begin with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from eqaccel import _runtime
from eqaccel.codegen.direction import Direction
from eqaccel.codegen.preludes import read_prelude

SCALAR_BYTES = {"float32": 4, "float64": 8}
"""Bytes of a number, by what programs call its type."""

SCALARS = {number: name for name, number in SCALAR_BYTES.items()}
"""The same the other way round."""


def pack(family: str, numbers: Mapping[str, int], entries: Mapping[str, str]) -> tuple[bytes, int]:
    """Makes a payload.

    Args:
        family: Name of the family of kernels, by which the runtime knows how they are loaded and launched.
        numbers: What entry "meta" says besides the family and the number of the interface.
        entries: The other entries.

    Returns:
        The bytes, and the integer key that names them.
    """
    meta = {"family": family, "abi": abi_number(), **numbers}
    packed = [b"EQACCEL-PAYLOAD 1\n"]
    for name, text in (*entries.items(), ("meta", "".join(f"{key}={value}\n" for key, value in meta.items()))):
        data = text.encode()
        packed += [f"{name} {len(data)}\n".encode(), data, b"\n"]
    content = b"".join(packed)
    return content, payload_key(content)


def payload_key(content: bytes) -> int:
    """The integer key that names a payload, 63 bits derived from its bytes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def abi_number() -> int:
    """Number of the interface between kernels and the runtime, which stands in abi.h."""
    return int(re.findall(r"#define EQ_ABI (\d+)", read_prelude("abi.h"))[0])


def translation_unit(direction: Direction, scalar_bytes: int, prelude: str, body: str) -> str:
    """The whole source of a kernel, as the runtime puts it together."""
    return _runtime.translation_unit(SCALARS[scalar_bytes], direction.value, prelude, body)
