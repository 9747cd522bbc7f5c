"""Arrays behind which nothing may be read or written: a kernel that does it ends the process there and then."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

_ALIGNED = 16
"""Bytes that a GPU reads at a time; allocations of torch begin at multiples of it."""


def guarded(array: NDArray) -> NDArray:
    """A copy with a page behind it that cannot be touched; less than 16 bytes are between, if there are odd ones.

    The memory stays as long as the copy.
    """
    page = mmap.PAGESIZE
    length = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, length + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + length), page, 0):
        raise OSError(ctypes.get_errno(), "no page can be protected")
    offset = length - -(-array.nbytes // _ALIGNED) * _ALIGNED
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy
