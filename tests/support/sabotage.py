"""Kernels, coefficients and forms that are wrong on purpose, and a table of what verification says of each.

    python tests/support/sabotage.py

runs all that the installed libraries have models for, and prints the table of docs/verification.md. Results of
operators are spoilt below autograd, so that a sabotage of one direction leaves the others right.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import eqaccel
from eqaccel.errors import VerificationError
from eqaccel.families.polynomial import PolynomialSpec
from eqaccel.families.tensor_product import TensorProductSpec
from eqaccel.o3 import harmonics
from eqaccel.patches import convolution, gate, linear
from eqaccel.patches.mace import contraction
from eqaccel.patches.nequip import typed_product

MANY = 1024
"""More edges than the small structures have."""

OFF = 1.001
"""A factor that is wrong by 0.1 %."""

RESULTS = {
    "tensor_product": ("z",),
    "tensor_product_backward": ("gx", "gy", "gw"),
    "tensor_product_double_backward": ("ggz", "gx", "gy", "gw"),
    "polynomial": ("z",),
    "polynomial_backward": ("gx", "gw"),
    "polynomial_double_backward": ("ggz", "gx", "gw"),
    "matrix_product": ("z",),
}
"""The operators that have kernels, one for each direction, and their results."""


@dataclass(frozen=True)
class Sabotage:
    """Something wrong.

    Attributes:
        what: What is wrong.
        where: In which operator and result, or in which form.
        dtype: The dtype that it is wrong in: "float32", "float64" or "both".
        apply: Makes it wrong for as long as the context lasts.
        family: Whose models have it: "mace" or "nequip".
    """

    what: str
    where: str
    dtype: str
    apply: Callable[[], contextlib.AbstractContextManager[Any]]
    family: str = "mace"

    def __str__(self) -> str:
        return f"{self.where}-{self.what}-{self.dtype}".replace(" ", "_")


@dataclass(frozen=True)
class Catch:
    """What verification found.

    Attributes:
        check: Which comparison failed, on what.
        error: The difference, relative to the sum of absolute contributions where that is known.
        bound: What would have been rounding, likewise.
    """

    check: str
    error: float
    bound: float


class _Spoilt(contextlib.AbstractContextManager["_Spoilt"]):
    """Spoils one result of one operator, in one dtype: its kernels are replaced where torch looks for them."""

    def __init__(self, operator: str, number: int, dtype: torch.dtype, spoil: Callable[..., None]) -> None:
        self._operator, self._number, self._dtype, self._spoil = operator, number, dtype, spoil

    def __enter__(self) -> _Spoilt:
        self._library = torch.library.Library("eqaccel", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for device in ("CPU", "CUDA"):
                right = torch.library.get_kernel(f"eqaccel::{self._operator}", device)
                self._library.impl(self._operator, partial(self._wrong, right), device, with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _wrong(self, right: Any, keys: Any, *arguments: Any) -> Any:
        results = right.call_boxed(keys, *arguments)
        several = results if isinstance(results, (tuple, list)) else (results,)
        if several[self._number].dtype == self._dtype:
            self._spoil(several[self._number], arguments)
        return results


def _sign(result: Tensor, _: Sequence[Any]) -> None:
    result[:, -1] *= -1


def _all(result: Tensor, _: Sequence[Any]) -> None:
    result *= OFF


def _many(result: Tensor, _: Sequence[Any]) -> None:
    result[MANY:] *= OFF


def _first(result: Tensor, _: Sequence[Any]) -> None:
    result[0] *= OFF


def _hub(result: Tensor, arguments: Sequence[Any]) -> None:
    """Rows of a node with many edges, or of the edges that it receives."""
    graph, receivers = _graph(arguments)
    row_ptr = graph[: receivers + 1]
    for node in torch.nonzero(row_ptr.diff() > 500).flatten().tolist():
        if len(result) == receivers:
            result[node] *= OFF
        else:
            result[graph[receivers + 1 :][row_ptr[node] : row_ptr[node + 1]].long()] *= OFF


def _graph(arguments: Sequence[Any]) -> tuple[Tensor, int]:
    """Row pointers and what follows them in the packed index among the arguments, and the number of receivers."""
    packed, receivers = next(
        (index, after)
        for index, after in pairwise(arguments)
        if isinstance(index, Tensor) and index.dtype == torch.int32
    )
    return packed[2:], receivers


def _dropped(result: Tensor, arguments: Sequence[Any]) -> None:
    """What one edge adds: its rows, or its share of the output of its receiver."""
    graph, receivers = _graph(arguments)
    row_ptr = graph[: receivers + 1]
    if len(result) != receivers:
        result[len(result) // 2] = 0.0
    else:
        node = int(row_ptr.diff().argmax())
        result[node] *= 1 - 1 / float(row_ptr.diff()[node])


_SPOILS = {
    ("edges", "float64"): {"sign of a component": _sign, "0.1 % at a hub": _hub, "a dropped edge": _dropped},
    ("edges", "float32"): {"0.1 %": _all, "0.1 % at a hub": _hub},
    ("rows", "float64"): {"sign of a component": _sign, "0.1 % of a row": _first, "0.1 % after 1024 rows": _many},
    ("rows", "float32"): {"0.1 %": _all},
}


def _operators() -> Iterator[Sabotage]:
    for operator, names in RESULTS.items():
        over = "edges" if operator.startswith("tensor") else "rows"
        for (number, name), dtype in product(enumerate(names), (torch.float64, torch.float32)):
            label = str(dtype).removeprefix("torch.")
            for what, spoil in _SPOILS[over, label].items():
                if (spoil, name) == (_many, "gw"):
                    continue  # so many rows are edges, in spherical harmonics, whose weights are ones
                yield Sabotage(what, f"{operator} {name}", label, partial(_Spoilt, operator, number, dtype, spoil))


LINEAR_FORMS = {"gx": 0, "gw": 2, "z": 3}
"""The forms of a linear map that models reach: of which operand they are the derivative, and its number."""


def _linear_maps() -> Iterator[Sabotage]:
    for (name, missing), dtype in product(LINEAR_FORMS.items(), (torch.float64, torch.float32)):
        label = str(dtype).removeprefix("torch.")
        spoils = {"0.1 %": _all} if dtype == torch.float32 else {"0.1 % of a row": _first}
        if dtype == torch.float64 and name != "gw":
            spoils["sign of a component"] = _sign
        for what, spoil in spoils.items():
            wrong = partial(_Spoilt, "linear", 0, dtype, partial(_of_form, missing, spoil))
            yield Sabotage(what, f"linear {name}", label, wrong)


def _of_form(missing: int, spoil: Callable[..., None], result: Tensor, arguments: Sequence[Any]) -> None:
    if arguments[5] == missing:
        spoil(result, arguments)


def _highest_degree(result: Tensor, _: Sequence[Any]) -> None:
    result[:, 4:] *= 1.02


def _changed_path(module: Any, *_: Any, **__: Any) -> TensorProductSpec:
    spec = _from_e3nn(module)
    paths = [replace(path, coefficient=path.coefficient * OFF) for path in spec.paths[-1:]]
    object.__setattr__(spec, "paths", (*spec.paths[:-1], *paths))
    return spec


_from_e3nn = TensorProductSpec.from_e3nn


def _changed_term(*arguments: Any) -> PolynomialSpec:
    *sizes, terms = arguments
    return PolynomialSpec(*sizes, (*terms[:-1], terms[-1]._replace(coefficient=terms[-1].coefficient * OFF)))


def _off(form: type) -> Callable[[], Any]:
    right = form.dense

    def wrong(self: Any, *operands: Tensor) -> Tensor:
        z = right(self, *operands)
        return torch.cat([z[:, :-1], z[:, -1:] * OFF], 1)

    return partial(mock.patch.object, form, "dense", wrong)


def _coefficients() -> Iterator[Sabotage]:
    degree = partial(_Spoilt, "tensor_product_backward", 1, torch.float64, _highest_degree)
    yield Sabotage("2 % of the highest degree", "tensor_product_backward gy", "float64", degree)
    path = partial(mock.patch.object, convolution.TensorProductSpec, "from_e3nn", _changed_path)
    yield Sabotage("0.1 % of one path", "coefficients of a convolution", "both", path)
    for module, name in ((contraction, "a contraction"), (harmonics, "spherical harmonics")):
        term = partial(mock.patch.object, module, "PolynomialSpec", _changed_term)
        yield Sabotage("0.1 % of one term", f"coefficients of {name}", "both", term)


def _forms() -> Iterator[Sabotage]:
    families = {linear.LinearMap: "mace", linear.AttributeProduct: "mace"}
    families |= {typed_product.TypedProduct: "nequip", gate.FusedGate: "nequip"}
    for form, family in families.items():
        yield Sabotage("0.1 % of a column", f"form {form.__name__}", "both", _off(form), family)


SABOTAGES = [*_operators(), *_linear_maps(), *_coefficients(), *_forms()]


def caught(sabotage: Sabotage, model: torch.nn.Module, **options: Any) -> Catch | None:
    """Patches a model that is right, by kernels or coefficients that are not.

    Returns:
        What verification found; None if it found nothing.
    """
    try:
        with sabotage.apply():
            eqaccel.patch(model, **options)
    except VerificationError as error:
        return _read(str(error))
    return None


def _read(message: str) -> Catch:
    numbers = [float(number) for number in re.findall(r"\d\.\d+e[+-]\d+", message)]
    scale = numbers[2] if len(numbers) > 2 and numbers[2] > 0 else 1.0  # what has no terms has to be zero
    check = message.partition(": ")[2].partition(", by ")[0].removeprefix("the model is ")
    check = re.sub(r".*is not the same after patching: ", "", check)
    check = re.sub(
        r".*the polynomial of the contraction has other coefficients.*", "coefficients of the polynomial", check
    )
    return Catch(check, numbers[0] / scale, numbers[1] / scale)


def small_model(family: str) -> torch.nn.Module:
    """A small model in float32, the dtype whose checks are the harder ones."""
    if family == "mace":
        import mace_models

        return mace_models.energy_model(hidden_irreps="4x0e+4x1o", dtype=torch.float32)
    import nequip_models

    return nequip_models.model(dtype="float32")


def _table(family: str) -> Iterator[str]:
    model = small_model(family)
    yield "| what is wrong | where | kernels in | caught by | error | bound |"
    yield "|---|---|---|---|---|---|"
    for sabotage in SABOTAGES:
        if sabotage.family == family:
            catch = caught(sabotage, copy.deepcopy(model))
            found = (
                ("**nothing**", "", "") if catch is None else (catch.check, f"{catch.error:.1e}", f"{catch.bound:.1e}")
            )
            yield f"| {' | '.join((sabotage.what, f'`{sabotage.where}`', sabotage.dtype, *found))} |"


if __name__ == "__main__":
    for line in _table("mace" if find_spec("mace") else "nequip"):
        print(line, flush=True)
