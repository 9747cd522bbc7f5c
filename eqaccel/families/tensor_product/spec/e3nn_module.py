"""Reading an `e3nn.o3.TensorProduct` by its attributes, so that any version of e3nn, packaged ones too, will do."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eqaccel.errors import SpecError, UnsupportedError
from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Instruction
from eqaccel.irreps import Irreps
from eqaccel.wigner import WignerConvention, wigner_3j, wigner_sign

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


def coupling_sign(module: Any, l1: int, l2: int, l3: int, convention: WignerConvention | None) -> int:
    """The sign of the module's own coupling tensor relative to that of e3nn 0.5 and later.

    e3nn keeps the tensors as buffers, named after the degrees, of the code that it generated for the module. A module
    without the buffer (made without code, or on the device "meta") has the sign of the version of e3nn that made it.

    Args:
        module: The e3nn module.
        l1: Degree of the in1 block.
        l2: Degree of the in2 block.
        l3: Degree of the out block.
        convention: What the caller says of the module; None to find out.

    Raises:
        UnsupportedError: If the module's tensor is in another basis or of another norm.
        SpecError: If the convention is not the one of the module's tensor, or if the sign depends on a convention that
            nothing tells.
    """
    name = f"_w3j_{l1}_{l2}_{l3}"
    named_buffers = getattr(module, "named_buffers", dict)
    for path, buffer in named_buffers() if callable(named_buffers) else ():
        if path.rpartition(".")[2] == name and not getattr(buffer, "is_meta", False):
            sign = _sign_of(path, np.array(buffer.tolist()), (l1, l2, l3))
            if convention is not None and sign != wigner_sign(l1, l2, l3, convention):
                raise SpecError(f"convention: expected that of the module, whose {path} is not of '{convention}'")
            return sign
    return wigner_sign(l1, l2, l3, convention or _convention_of(module))


def _sign_of(path: str, theirs: NDArray, degrees: tuple[int, int, int]) -> int:
    ours = wigner_3j(*degrees, WignerConvention.E3NN_0_5)
    for sign in (1, -1):
        # Loose enough for a buffer in bfloat16: only the sign and the basis are in question.
        if theirs.shape == ours.shape and np.abs(theirs - sign * ours).max() < 0.01:
            return sign
    raise UnsupportedError(f"module: expected buffer {path} to be e3nn's wigner_3j{degrees} up to sign")


def _convention_of(module: Any) -> WignerConvention | None:
    """That of the e3nn which made the module; None for one from a package, whose e3nn is another than the installed."""
    packaged = any(base.__module__.startswith("<torch_package_") for base in type(module).__mro__)
    return None if packaged else WignerConvention.installed()
