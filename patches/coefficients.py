"""Exact coupling coefficients for float64 copies of models, so that what differs is a mistake and not a constant.

A model that was made in float32 keeps constants of e3nn in float32, also where it is converted to float64 later, while
eqaccel's are exact. Without a remedy, the patched model would differ from the original by that rounding, and mistakes
below it would pass. So both get the same constants first: coupling tensors are replaced by their exact values, and
tensors that a replacement was made from by those that it stands for (`Replacement.share_coefficients`). Either must be
what the model carries but for the rounding of that.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from eqaccel.errors import VerificationError
from eqaccel.patches.replacement import Replacement
from eqaccel.wigner import wigner_3j

_COUPLING = re.compile(r"_w3j_(\d+)_(\d+)_(\d+)")
_FOLDED = re.compile(r"_tensor_constant\d+")


def sharpen(model: torch.nn.Module) -> None:
    """Puts the exact values into all coupling tensors of a float64 model that are these values in float32.

    Copies and pickles of e3nn's products carry them times the weights of their paths: torch traces the programs again,
    and does on the way what depends on constants alone, in the dtype that these have. These become exact too.

    A tensor that differs from them by more is left: then it is no coupling tensor that eqaccel knows.
    """
    for name, buffer in model.named_buffers():
        match = _COUPLING.fullmatch(name.rpartition(".")[2])
        if match is not None:
            _sharpen(buffer, _coupling(*map(int, match.groups())))
    for module in model.modules():
        if hasattr(module, "irreps_in1") and hasattr(module, "instructions"):
            _sharpen_folded(module)


def _sharpen_folded(product: Any) -> None:
    """`sharpen` for the constants of a product that torch has traced again."""
    folded = [buffer for name, buffer in product.named_buffers() if _FOLDED.fullmatch(name.rpartition(".")[2])]
    for buffer in folded:
        for item in product.instructions:
            irreps = (product.irreps_in1[item.i_in1], product.irreps_in2[item.i_in2], product.irreps_out[item.i_out])
            degrees = [ir.l for _, ir in irreps]
            shape = tuple(2 * degree + 1 for degree in degrees)
            if tuple(buffer.shape) == shape and _sharpen(buffer, item.path_weight * _coupling(*degrees)):
                break


def _coupling(l1: int, l2: int, l3: int) -> torch.Tensor:
    return torch.from_numpy(wigner_3j(l1, l2, l3).copy())


def _sharpen(buffer: torch.Tensor, exact: torch.Tensor) -> bool:
    """Writes exact values into a buffer, if that is what it holds but for rounding to float32; says whether."""
    if buffer.shape != exact.shape:
        return False
    # Rounded were the coupling tensor, the weight of its path, and their product: by half an eps each.
    bound = 2 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    for signed in (exact.to(buffer), -exact.to(buffer)):  # e3nn 0.4 and 0.5 differ in the signs of some
        if float((buffer - signed).abs().max()) <= bound:
            write(buffer, signed)
            return True
    return False


def share_coefficients(original: torch.nn.Module, patched: torch.nn.Module, stored: torch.dtype) -> None:
    """Puts the coefficients that the replacements of a patched model compute with into the original, both in float64.

    Args:
        original: Copy of the model from before the patch.
        patched: Copy of the patched model.
        stored: The dtype that the coefficients of the replacements were read in.

    Raises:
        VerificationError: If they differ by more than the rounding of what the model carries.
    """
    for path, module in patched.named_modules():
        if isinstance(module, Replacement):
            try:
                module.share_coefficients(original.get_submodule(path), stored)
            except VerificationError as error:
                raise VerificationError(f"{path}: {error}") from error


def write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Writes values into a buffer, past a replacement that looks after the buffers it was made from.

    That replacement is to be verified as it is.
    """
    buffer.data.copy_(value)
