"""A convolution made of an e3nn tensor product, as kinds of model have it, and what a report says of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eqaccel.errors import PatchError, SpecError
from eqaccel.families.tensor_product import TensorProductSpec
from eqaccel.o3.origins import forward_owner, full_name, package_of
from eqaccel.ops import TensorProductConv
from eqaccel.patches.kind import class_names
from eqaccel.patches.precision import WEIGHTS, Options
from eqaccel.patches.replacement import Replacement, Swap
from eqaccel.patches.report import ReportRow
from eqaccel.patches.snapshot import came_as
from eqaccel.patches.torch_state import model_device


def check_product(path: str, product: Any) -> None:
    """Refuses what is not an e3nn tensor product with weights of its own for every edge.

    Raises:
        PatchError: If it is something else; `path` is where it was found.
    """
    if "TensorProduct" not in class_names(product) or not hasattr(product, "instructions"):
        raise PatchError(
            f"{path}: expected an e3nn TensorProduct, got {type(product).__name__}; load the model without another "
            f"accelerator"
        )
    check_forward(path, came_as(product), "e3nn", "TensorProduct")
    if product.shared_weights or product.internal_weights:
        raise PatchError(f"{path}: expected weights per edge, got shared or internal weights; use the model unpatched")


def check_forward(path: str, cls: type[torch.nn.Module], library: str, name: str) -> None:
    """Refuses what computes in another way than a class of a library does.

    Args:
        path: Where it was found.
        cls: The class that it came as.
        library: The package of the library's class.
        name: The name of that.

    Raises:
        PatchError: If its forward method is another one.
    """
    owner = forward_owner(cls)
    if (package_of(owner), owner.__name__) != (library, name):
        raise PatchError(
            f"{path}: expected the forward method of {library}'s {name}, got that of {full_name(owner)}; use the model "
            f"unpatched"
        )


def build_convolution(path: str, product: Any, options: Options, device: torch.device) -> torch.nn.Module:
    """The accelerated convolution of an e3nn tensor product, on the device of the model it is for.

    Raises:
        PatchError: If eqaccel has no kernel for it.
    """
    try:
        spec = TensorProductSpec.from_e3nn(product)
    except SpecError as error:
        raise PatchError(f"{path}: {error}; use the model unpatched") from error
    if WEIGHTS in options.low_precision:
        try:
            spec = spec.with_bfloat16_weights()
        except SpecError as error:
            raise PatchError(f"{path}: {error}: leave {WEIGHTS!r} out of low_precision") from error
    return TensorProductConv(spec, deterministic=options.deterministic).to(device)


def convolution_swaps(
    model: torch.nn.Module,
    layers: Sequence[tuple[str, torch.nn.Module, Any]],
    kind: type[Replacement],
    product: str,
    check: Callable[[str, Any], None],
    options: Options,
) -> list[Swap]:
    """Checks every layer of a model, then builds the convolution of each.

    Args:
        model: The model.
        layers: The modules that gather, multiply and scatter: path, owner, and module.
        kind: What is put in their place.
        product: Name of the e3nn tensor product in each.
        check: Raises `PatchError` if a layer, of this path, cannot be replaced.
        options: See `Swapping.swaps`.
    """
    for path, _, module in layers:
        check(path, module)
    device = model_device(model)
    return [
        Swap(
            parent=parent,
            name=path.rpartition(".")[2],
            kind=kind,
            added=build_convolution(f"{path}.{product}", getattr(module, product), options, device),
        )
        for path, parent, module in layers
    ]


def rebuilt_convolution(product: Any, conv: Any) -> torch.nn.Module:
    """The accelerated convolution of a product whose coefficients may have changed, otherwise like `conv`.

    Raises:
        PatchError: If eqaccel has no kernel for it.
    """
    check_product(type(product).__name__, product)
    options = Options(conv.deterministic, frozenset({WEIGHTS} if conv.spec.bfloat16_weights else ()))
    built: Any = build_convolution(type(product).__name__, product, options, conv.payload.device)
    if built.spec == conv.spec:
        return conv
    built.retune(conv.tuned)
    return built


def convolution_row(path: str, module: torch.nn.Module, product: Any, check: Callable[[], None]) -> ReportRow:
    """The line of a report about a convolution, replaced or not.

    Args:
        path: Where it is in the model.
        module: The module, replaced or not.
        product: Its e3nn tensor product.
        check: Raises `PatchError` if the convolution cannot be replaced; called if it is not.
    """
    replaced = isinstance(module, Replacement)
    if replaced:
        note = "replaced by eqaccel.TensorProductConv"
    else:
        try:
            check()
            note = "left: not patched yet, eqaccel.patch(model) replaces it"
        except PatchError as error:
            note = f"left: {error}"
    instructions = getattr(product, "instructions", None)
    mul = {product.irreps_in1[item.i_in1].mul for item in instructions or ()}
    return ReportRow(
        path=path,
        kind=type(module).__name__,
        accelerated=replaced,
        note=note,
        paths=None if instructions is None else len(instructions),
        weight_numel=getattr(product, "weight_numel", None),
        mul=tuple(sorted(mul, reverse=True)),
    )
