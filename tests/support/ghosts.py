"""An exchange of ghosts, written in Python."""

import ctypes

import torch

_NODES = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_EXCHANGE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool)


class _GhostNodes(ctypes.Structure):
    _fields_ = [
        ("num_ghosts", ctypes.c_int64),
        ("num_messages", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
    ]


class Images:
    """A GhostExchange written in Python: an object of the Itanium C++ ABI is a pointer to a table of its methods.

    Ghost number g is an image of the local node owner[g], as in a periodic system on one rank. Images of a node come in
    messages of their own, as if each were on another rank.
    """

    def __init__(self, owner):
        self.owner, self.calls = torch.tensor(owner, dtype=torch.int64), []
        nth = [owner[:ghost].count(node) for ghost, node in enumerate(owner)]
        self._order = torch.tensor(sorted(range(len(owner)), key=lambda ghost: nth[ghost]), dtype=torch.int64)
        self._sent = self.owner[self._order]
        self._ends = torch.tensor([nth.count(0)] + [0] * max(nth, default=0), dtype=torch.int64)
        for message in range(1, len(self._ends)):
            self._ends[message] = self._ends[message - 1] + nth.count(message)
        self._methods = [_NODES(self.nodes), _EXCHANGE(self.forward), _EXCHANGE(self.reverse)]
        destructors = [None, None]
        self._table = (ctypes.c_void_p * 5)(
            *destructors, *(ctypes.cast(method, ctypes.c_void_p) for method in self._methods)
        )
        self._object = ctypes.c_void_p(ctypes.addressof(self._table))
        self.handle = ctypes.addressof(self._object)

    def _rows(self, address, width, is_double):
        if len(self.owner) == 0:  # the address may be null then
            return torch.empty(0, width)
        scalar = ctypes.c_double if is_double else ctypes.c_float
        buffer = (scalar * (len(self.owner) * width)).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.float64 if is_double else torch.float32).view(-1, width)

    def nodes(self, this, address):
        found = _GhostNodes.from_address(address)
        found.num_ghosts, found.num_messages = len(self.owner), len(self._ends)
        found.ends, found.sent = self._ends.data_ptr(), self._sent.data_ptr()

    def forward(self, this, rows, ghost_rows, width, is_double):
        self.calls.append(("forward", width))
        self._rows(ghost_rows, width, is_double)[self._order] = self._rows(rows, width, is_double)

    def reverse(self, this, ghost_rows, rows, width, is_double):
        self.calls.append(("reverse", width))
        self._rows(rows, width, is_double)[:] = self._rows(ghost_rows, width, is_double)[self._order]
