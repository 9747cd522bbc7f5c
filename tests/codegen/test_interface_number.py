"""What the runtime hands to kernels changes with its number, by which exported files of another one are refused."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import eqaccel
from eqaccel.codegen.payload import abi_number

SOURCES = Path(eqaccel.__file__).parent
KNOWN = (18, "5e92f94efbfc3be1")
"""The number, and the digest of what has it."""


def interface() -> str:
    """Structures that kernels take, and parameters of those that take others, without comments and spaces."""
    text = (SOURCES / "codegen/preludes/abi.h").read_text()
    for file in sorted(SOURCES.glob("**/*.h")):
        kernels = re.findall(r"(?<!#define )EQ_KERNEL[^;{]*", file.read_text())
        text += "\n".join(kernels)
    return re.sub(r"//[^\n]*|\\\n|\s+", "", text)


def test_an_interface_has_one_number() -> None:
    """Raise EQ_ABI in preludes/abi.h when this fails, and write down both here."""
    assert "eq_write_pairs(" in interface()
    assert "intshares_across)" in interface()  # of a kernel with launch bounds
    assert (abi_number(), hashlib.sha256(interface().encode()).hexdigest()[:16]) == KNOWN
