"""The digest that every exported file ends with, so that a damaged one is not run.

Exported files are zip archives, whose last entry is a comment. It holds the SHA-256 of all bytes before the digits, so
nothing in the file can change unseen. It tells of damage, not of who made the file.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from eqaccel.errors import ExportError

LABEL = b"eqaccel sha256 "
"""What stands before the digits; csrc/model/file.cpp knows it too."""

DIGITS = 64

_END_OF_ARCHIVE = b"PK\x05\x06"
_END_SIZE = 22
"""Bytes of the last record of an archive without a comment; its last two are the length of the comment."""


def append_digest(file: Path) -> None:
    """Completes a file that torch has just written: its archive has no comment yet, and gets the digest as one."""
    with open(file, "r+b") as stream:
        stream.seek(-_END_SIZE, 2)
        record = stream.read(_END_SIZE)
        if not record.startswith(_END_OF_ARCHIVE) or record[-2:] != b"\0\0":
            raise ExportError(f"path: torch wrote '{file.name}' as something else than a zip archive without a comment")
        stream.seek(-2, 2)
        stream.write(struct.pack("<H", len(LABEL) + DIGITS) + LABEL)
    digest = _sha256(file, file.stat().st_size)
    with open(file, "ab") as stream:
        stream.write(digest)


def read_digest(file: Path) -> bytes:
    """The digits that a file of `export` ends with; empty for any other file."""
    with open(file, "rb") as stream:
        stream.seek(max(file.stat().st_size - DIGITS - len(LABEL), 0))
        label, digits = stream.read(len(LABEL)), stream.read()
    return digits if label == LABEL else b""


def check_digest(file: Path) -> None:
    """Raises `ExportError` unless a file is as `export` wrote it."""
    expected = "expected a file written by eqaccel.export"
    try:
        size = file.stat().st_size
        digits = read_digest(file)
        if size == 0:
            raise ExportError(f"path: {expected}, got '{file}', which is empty; copy or export it again")
        if not digits:
            raise ExportError(
                f"path: {expected}, got '{file}', which is incomplete, or was not written by this version of it (it "
                "does not end with a digest); copy it again, or export the model again"
            )
        if digits != _sha256(file, size - DIGITS):
            raise ExportError(
                f"path: {expected}, got '{file}', which is damaged: it differs from what was written (SHA-256); copy "
                "it or export it again"
            )
    except OSError as error:
        raise ExportError(f"path: {expected}, got '{file}', which cannot be read ({error.strerror})") from error


def _sha256(file: Path, size: int) -> bytes:
    """The digits of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while size > 0 and (block := stream.read(min(size, 1 << 20))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest().encode()
