"""Exact coupling coefficients for float64 copies of models, so that what differs is a mistake and not a constant.

A model that was made in float32 keeps constants of e3nn in float32, also where it is converted to float64 later, while
eqaccel's are exact. Without a remedy, the patched model would differ from the original by that rounding, and mistakes
below it would pass. So both get the same constants first: coupling tensors are replaced by their exact values, and the
tensors of MACE's symmetric contraction by those that its polynomial was made of. Either must be what the model carries
but for the rounding of that.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from eqaccel.errors import VerificationError
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


def _coupling(*degrees: int) -> torch.Tensor:
    return torch.from_numpy(wigner_3j(*degrees).copy())


def _sharpen(buffer: torch.Tensor, exact: torch.Tensor) -> bool:
    """Writes exact values into a buffer, if that is what it holds but for rounding to float32; says whether."""
    if buffer.shape != exact.shape:
        return False
    # Rounded were the coupling tensor, the weight of its path, and their product: by half an eps each.
    bound = 2 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    for signed in (exact.to(buffer), -exact.to(buffer)):  # e3nn 0.4 and 0.5 differ in the signs of some
        if float((buffer - signed).abs().max()) <= bound:
            _write(buffer, signed)
            return True
    return False


def share_contractions(original: torch.nn.Module, patched: torch.nn.Module, stored: torch.dtype) -> None:
    """Puts the tensors that the polynomials of a patched model stand for into the original, both in float64.

    Args:
        original: Copy of the model from before the patch.
        patched: Copy of the patched model.
        stored: The dtype that the coefficients of the polynomials were read in.

    Raises:
        VerificationError: If they differ by more than the rounding of what the model carries.
    """
    for path, module in patched.named_modules():
        if hasattr(module, "polynomial_tensors"):
            try:
                share_contraction(original.get_submodule(path), module, stored)
            except VerificationError as error:
                raise VerificationError(f"{path}: {error}") from error


def share_contraction(contraction: Any, replacement: Any, stored: torch.dtype) -> None:
    """`share_contractions` for one contraction of MACE, and what it has become or a copy of that."""
    for degree, (tensor, magnitude) in replacement.polynomial_tensors().items():
        buffer = contraction.U_tensors(degree)
        value = tensor.to(buffer)
        error = (value - symmetric(buffer.view(tensor.shape))).flatten(0, -2).norm(dim=0)
        # Paths that are zero are sums that cancel, of products like those of the others, whose factors have norm one.
        size = max(1.0, float(magnitude.max()))
        bound = _roundings(degree, tensor.shape[-2]) * torch.finfo(stored).eps / 2 * size
        if not bool((error <= bound).all()):
            worst = int(error.argmax())
            raise VerificationError(
                f"the polynomial of the contraction has other coefficients: those of degree {degree}, path {worst} "
                f"differ by {float(error[worst]):.3e} where at most {bound:.3e} is rounding"
            )
        _write(buffer, value.view(buffer.shape))


def symmetric(tensor: torch.Tensor) -> torch.Tensor:
    """The mean over all orders of the features of a contraction's tensor (num_outputs, num_ell, ..., num_paths)."""
    # Adding one feature after the other: the mean over the places that it may take among those before it.
    for last in range(2, tensor.dim() - 1):
        swapped = [tensor.transpose(place, last) for place in range(1, last)]
        tensor = torch.stack([tensor, *swapped]).mean(0)
    return tensor


def _roundings(degree: int, num_ell: int) -> int:
    """How often a coefficient of a contraction was rounded when the model was made.

    Each feature is coupled by a tensor, whose entries are rounded and scaled, in sums over the components of what came
    before it, at most 2l + 1 products.
    """
    components = 2 * math.isqrt(num_ell) - 1
    return degree * (components + 3)


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    # Through `.data`, which hides the change from a replacement that looks after the buffers it was made from: it is to
    # be verified as it is.
    buffer.data.copy_(value)
