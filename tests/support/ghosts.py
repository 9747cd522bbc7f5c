"""An exchange of ghosts, written in Python."""

import ctypes

import torch

_METHOD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool)


class Images:
    """A GhostExchange written in Python: an object of the Itanium C++ ABI is a pointer to a table of its methods.

    Ghost number g is an image of the local node owner[g], as in a periodic system on one rank.
    """

    def __init__(self, owner):
        self.owner, self.calls = torch.tensor(owner, dtype=torch.int64), []
        self._methods = [_METHOD(self.forward), _METHOD(self.reverse)]
        destructors = [None, None]
        self._table = (ctypes.c_void_p * 4)(
            *destructors, *(ctypes.cast(method, ctypes.c_void_p) for method in self._methods)
        )
        self._object = ctypes.c_void_p(ctypes.addressof(self._table))
        self.handle = ctypes.addressof(self._object)

    def _rows(self, address, num_nodes, width, is_double):
        if num_nodes == 0:  # the address is null then
            return torch.empty(0, width)
        scalar = ctypes.c_double if is_double else ctypes.c_float
        buffer = (scalar * (num_nodes * width)).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.float64 if is_double else torch.float32).view(num_nodes, width)

    def forward(self, this, address, num_nodes, width, is_double):
        rows = self._rows(address, num_nodes, width, is_double)
        self.calls.append(("forward", width))
        rows[num_nodes - len(self.owner) :] = rows[self.owner]

    def reverse(self, this, address, num_nodes, width, is_double):
        rows = self._rows(address, num_nodes, width, is_double)
        self.calls.append(("reverse", width))
        rows.index_add_(0, self.owner, rows[num_nodes - len(self.owner) :].clone())
