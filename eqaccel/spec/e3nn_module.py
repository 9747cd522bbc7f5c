"""Reading an `e3nn.o3.TensorProduct` by its attributes, so that any version of e3nn, packaged ones too, will do."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from eqaccel.errors import SpecError, UnsupportedError
from eqaccel.irreps import Irreps
from eqaccel.spec.instruction import ConnectionMode, Instruction
from eqaccel.wigner import wigner_3j

_ATTRIBUTES = ("irreps_in1", "irreps_in2", "irreps_out", "instructions", "shared_weights", "weight_numel")


class E3nnModule(NamedTuple):
    """What a spec needs of an e3nn tensor product; the path weights of `instructions` are final coefficients."""

    irreps: tuple[Irreps, Irreps, Irreps]
    instructions: tuple[Instruction, ...]
    shared_weights: bool
    weight_numel: int


def read_module(module: Any) -> E3nnModule:
    """Reads an e3nn tensor product.

    Raises:
        SpecError: If an attribute of e3nn's `TensorProduct` is missing or makes no sense.
    """
    missing = [name for name in _ATTRIBUTES if not hasattr(module, name)]
    if missing:
        raise SpecError(
            f"module: expected an e3nn TensorProduct, got {type(module).__name__} without {', '.join(missing)}"
        )
    instructions = []
    for number, item in enumerate(module.instructions):
        try:
            indices = int(item.i_in1), int(item.i_in2), int(item.i_out)
            mode, has_weight = ConnectionMode(item.connection_mode), bool(item.has_weight)
            coefficient = float(item.path_weight)
        except (AttributeError, TypeError, ValueError) as error:
            raise SpecError(f"instruction {number}: expected an instruction of e3nn, got {item!r}") from error
        if not math.isfinite(coefficient):
            raise SpecError(f"instruction {number}: expected a finite path_weight, got {coefficient}")
        instructions.append(Instruction(*indices, mode, has_weight, coefficient))
    return E3nnModule(
        (Irreps(module.irreps_in1), Irreps(module.irreps_in2), Irreps(module.irreps_out)),
        tuple(instructions),
        bool(module.shared_weights),
        int(module.weight_numel),
    )


def coupling_sign(module: Any, l1: int, l2: int, l3: int) -> int:
    """The sign of the module's own coupling tensor relative to `wigner_3j`: -1 for some tensors of e3nn 0.4.

    e3nn keeps the tensors as buffers, named after the degrees, of the code that it generated for the module. A module
    without the buffer is taken to follow `wigner_3j`, as e3nn does since 0.5.

    Raises:
        UnsupportedError: If the module's tensor is in another basis or of another norm.
    """
    name = f"_w3j_{l1}_{l2}_{l3}"
    named_buffers = getattr(module, "named_buffers", dict)
    for path, buffer in named_buffers() if callable(named_buffers) else ():
        if path.rpartition(".")[2] != name or getattr(buffer, "is_meta", False):
            continue
        ours, theirs = wigner_3j(l1, l2, l3), np.array(buffer.tolist())
        for sign in (1, -1):
            # Loose enough for a buffer in bfloat16: only the sign and the basis are in question.
            if theirs.shape == ours.shape and np.abs(theirs - sign * ours).max() < 0.01:
                return sign
        raise UnsupportedError(f"module: expected buffer {path} to be e3nn's wigner_3j({l1}, {l2}, {l3}) up to sign")
    return 1
