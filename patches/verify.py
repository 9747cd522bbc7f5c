"""The check that a patched model still is the same model.

A model is compared with a copy from before the patch on small generated structures, and on one that has thousands of
edges and atoms with very different numbers of them. Copies of both are in float64, with the same exact coefficients
(`eqaccel.patches.coefficients`), so that they agree to float64 rounding:

    |patched - original| <= ROUNDING * eps(float64) * scale

where `scale` is the sum of the absolute values of what a result is made of (`eqaccel.patches.rounding`). Then kernels
in the dtype of the model are compared with those one by one (`eqaccel.patches.operators`), and the model itself may be
only a few times as far from that truth as the original was, or as far as rounding of its input may take it.

What is compared are the outputs, and the derivatives of a random sum of them in all parameters and in the positions,
which for forces and stress are second derivatives: what training and Hessians use. Besides, forces and stress have to
be the slopes of the energy, and outputs have to turn with the structure.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from eqaccel.patches import operators
from eqaccel.patches.coefficients import share_coefficients, sharpen, write
from eqaccel.patches.kind import ModelKind, Outputs
from eqaccel.patches.rounding import FACTOR, ROUNDING, STAGES, derivative_scales, distance, scales
from eqaccel.patches.structures import Structure, crowded_structure, small_structures
from eqaccel.patches.torch_state import (
    all_trainable,
    converted,
    first_not_finite,
    model_device,
    rounding_unit,
    untouched_state,
    widened,
)
from eqaccel.patches.work import mismatch, paths

from eqaccel.errors import SharedMemoryError, VerificationError
from eqaccel.prepare import scalar_name, warmup

_DERIVATIVE = "derivative of a loss in "
_MANY_WEIGHTS = 4096  # of an edge in all layers: twice those of the largest MACE models with 128 channels
_FEW = 16  # of so many roundings, the largest is about as large as in any other evaluation
_ROUNDINGS = 4  # evaluations, of which not all are close to the truth by chance
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class _Results:
    """What a model gives for one structure, in float64 on the CPU, and what its rounding is proportional to."""

    values: Outputs
    scales: dict[str, float]


@dataclass(frozen=True)
class _Truth:
    """What the original gives for one structure in float64.

    Attributes:
        structure: The structure.
        results: The results.
        noise: How far two right evaluations were apart in each, in units of rounding, relative to its scale.
    """

    structure: Structure
    results: _Results
    noise: dict[str, float]


class Verification:
    """Keeps a copy of a model from before it is patched, to compare with what it is afterwards.

    Parameters, their gradients, training flags and the states of the random number generators are left alone.

    Args:
        kind: The kind of the model, which knows how to run it.
        model: The model, not patched yet; it is run and copied here.

    Raises:
        VerificationError: If the model cannot be run on generated structures at all, or gives NaN.
    """

    def __init__(self, kind: ModelKind, model: torch.nn.Module) -> None:
        self._kind = kind
        self._model = model
        try:
            self._dtype = kind.dtype(model)
            extent = kind.extent(model)
            self._is_large = _edge_weights(model) > _MANY_WEIGHTS and model_device(model).type == "cpu"
            self._periodic, self._isolated = small_structures(*extent)
            self._crowded = crowded_structure(*extent)
            before = self._outputs(model, self._periodic)
            self._original = widened(model)
            # What is written into the copy later, and has to be as it was where it is asked what rounding does.
            self._buffers = {name: buffer.clone() for name, buffer in self._original.named_buffers()}
        except Exception as error:
            raise VerificationError(
                f"model: {type(model).__name__} could not be run on a small generated structure before it was patched "
                f"({type(error).__name__}: {error}); if it needs inputs of its own, call patch(model, verify=False) "
                f"and compare its results yourself"
            ) from error
        self._refuse_nan(before)

    def check(self) -> None:
        """Runs the model again, now patched, and compares.

        Raises:
            VerificationError: If something differs by more than rounding, or does not turn with the structure, or if
                forces or stress are no slopes of the energy.
        """
        device = self._compile()
        stored = self._dtype
        patched = widened(self._model).to(device)
        self._original.to(device)
        for duplicate in (self._original, patched):
            sharpen(duplicate)
        share_coefficients(self._original, patched, stored)
        truth = self._check_exact(patched)
        if stored != torch.float64:
            self._check_kernels(patched, stored)
        self._check_own(patched, truth)

    def _compile(self) -> torch.device:
        """Compiles all kernels side by side; gives the device for the copies in float64.

        That is the model's own, unless a kernel in float64 needs more memory than a processor of this GPU has, which a
        model in float32 does not mind. Then the copies run on the CPU, and on the GPU there is the check in float32.
        """
        directions = ("forward", "backward", "double_backward")
        device, dtype = model_device(self._model), self._dtype
        if dtype != torch.float64:
            warmup(self._model, directions=directions, dtypes=dtype, tune=False)
        try:
            warmup(self._model, directions=directions, dtypes=torch.float64, tune=False)
        except SharedMemoryError:
            if device.type == "cpu" or dtype == torch.float64:
                raise
            return torch.device("cpu")
        return device

    def _check_exact(self, patched: torch.nn.Module) -> list[_Truth]:
        """Compares the copies in float64; returns what the original gives."""
        eps = torch.finfo(torch.float64).eps
        unit = ROUNDING * eps
        found = []
        for structure, run in self._runs():
            right, value = run(self._original, structure), run(patched, structure)
            self._refuse_nan(right)
            bounds = dict.fromkeys(right.values, unit)
            if next(_excesses(value, right, bounds), None) is not None:
                # A model may multiply rounding by more than usual. How much is seen where its input is rounded anew.
                sensitivity = _apart(run(self._original, _rounded_anew(structure)), right, eps)
                bounds = {name: unit + FACTOR * eps * sensitivity[name] for name in bounds}
            self._compare(structure, torch.float64, value, right, bounds)
            found.append(_Truth(structure, right, _apart(value, right, eps)))
            if structure is self._periodic:
                self._check_turning(patched, value, unit)
                self._check_work(patched, value, unit)
        return found

    def _check_kernels(self, patched: torch.nn.Module, dtype: torch.dtype) -> None:
        """Compares each kernel of the model in its own dtype with the one in float64."""
        with untouched_state(self._model):
            for excess in operators.excesses(self._model, patched, dtype):
                what = f"{excess.what} changed in {scalar_name(dtype)}"
                raise self._failure(what, excess.error, excess.bound, excess.scale)

    def _check_own(self, patched: torch.nn.Module, truth: list[_Truth]) -> None:
        """Compares the model in its own dtype with the truth, from which the original may be as far away."""
        dtype = self._dtype
        eps = rounding_unit(dtype, model_device(self._model))
        floor = STAGES if dtype == torch.float32 else ROUNDING
        for (structure, run), right in zip(self._runs(), truth, strict=True):
            value = run(self._model, structure)
            bounds = dict.fromkeys(right.noise, eps * floor)
            if next(_excesses(value, right.results, bounds), None) is not None:
                # In float64 a copy says the same about the largest structure, where rounding is small anyway.
                known = dtype == torch.float64 and structure is self._crowded
                noise = right.noise if known else _apart(run(self._before, structure), right.results, eps)
                bounds = {name: eps * (floor + FACTOR * units) for name, units in noise.items()}
            if dtype == torch.float32 and next(_excesses(value, right.results, bounds), None) is not None:
                # One evaluation may be close by chance. What rounding does is seen where the input is rounded anew.
                moved = [run(patched, _rounded_anew(structure, seed)) for seed in range(_ROUNDINGS)]
                units = [_apart(results, right.results, torch.finfo(torch.float64).eps) for results in moved]
                bounds = {name: max(bound, eps * max(found[name] for found in units)) for name, bound in bounds.items()}
            self._compare(structure, dtype, value, right.results, bounds)

    @functools.cached_property
    def _before(self) -> torch.nn.Module:
        """The model as it was before the patch: a copy on its device, in its dtype, with its own constants."""
        before = converted(self._original, self._dtype).to(model_device(self._model))
        for name, buffer in before.named_buffers():
            write(buffer, self._buffers[name])
        return before

    def _runs(self) -> list[tuple[Structure, Callable[[torch.nn.Module, Structure], _Results]]]:
        """What is compared on which structure.

        Second derivatives of a large model on the largest one would take a CPU minutes, most of them in the original.
        """
        crowded = self._outputs if self._is_large else self._training
        return [(self._periodic, self._outputs), (self._isolated, self._training), (self._crowded, crowded)]

    def _compare(
        self, structure: Structure, dtype: torch.dtype, value: _Results, truth: _Results, bounds: Mapping[str, float]
    ) -> None:
        """Raises if results differ from the truth by more than their bounds, which are relative to their scales."""
        excesses = list(_excesses(value, truth, bounds))
        if excesses:
            name, error, bound = max(excesses, key=lambda excess: excess[1] / max(excess[2], _TINY))
            what = f"{name} of the {structure.name} changed in {scalar_name(dtype)}"
            raise self._failure(what, error, bound, truth.scales[name])

    def _check_turning(self, patched: torch.nn.Module, value: _Results, unit: float) -> None:
        """Raises if outputs do not turn with the structure, unless those of the original do not either."""
        turned = self._outputs(patched, self._periodic.rotated(_ROTATION)).values
        own = None
        for name in self._kind.ranks.keys() & turned.keys():
            bound = unit * value.scales[name]
            error = distance(turned[name], self._turned(name, value.values[name]))
            if not error <= bound:
                own = own or self._outputs(self._original, self._periodic.rotated(_ROTATION)).values
                # The values of the original, in this frame, are those of the patched model up to rounding.
                allowed = 2 * distance(own[name], self._turned(name, value.values[name])) + bound
                if not error <= allowed:
                    what = f"{name} of the {self._periodic.name} does not turn with the structure"
                    raise self._failure(what, error, allowed, value.scales[name])

    def _check_work(self, patched: torch.nn.Module, value: _Results, unit: float) -> None:
        """Raises if forces or stress are no slopes of the energy, unless those of the original are not either."""
        if "energy" not in value.values:
            return
        for path in paths(self._periodic, value.values):
            found = mismatch(lambda at: self._outputs(patched, at).values, path, value.values)
            scale = value.scales["energy"] / path.half + value.scales[path.output]
            bound = found.truncation + unit * scale
            if not found.error <= bound:
                own = mismatch(lambda at: self._outputs(self._original, at).values, path, value.values)
                if not found.error <= 2 * own.error + bound:
                    what = f"{path.output} of the {self._periodic.name} is not the slope of the energy"
                    raise self._failure(what, found.error, bound, scale)

    def _outputs(self, model: torch.nn.Module, structure: Structure) -> _Results:
        with untouched_state(model):
            values = self._kind.evaluate(model, structure)
        return _Results(values, scales(values, structure))

    def _training(self, model: torch.nn.Module, structure: Structure) -> _Results:
        """Outputs, and the derivatives of a random sum of them."""
        with untouched_state(model), all_trainable(model) as parameters:
            outputs, positions = self._kind.run(model, structure, training=True)
            values = {name: output.detach().to("cpu", torch.float64) for name, output in outputs.items()}
            weights = {name: _random(name, value) for name, value in values.items() if outputs[name].requires_grad}
            loss = sum((outputs[name] * weight.to(outputs[name])).sum() for name, weight in weights.items())
            variables = {**parameters, "positions": positions}
            gradients = torch.autograd.grad(loss, list(variables.values()), allow_unused=True)
        derivatives = {
            f"{_DERIVATIVE}{name}": torch.zeros(variable.shape, dtype=torch.float64)
            if gradient is None
            else gradient.to("cpu", torch.float64)
            for (name, variable), gradient in zip(variables.items(), gradients, strict=True)
        }
        sizes = {f"{_DERIVATIVE}{name}": float(p.detach().double().abs().sum()) for name, p in parameters.items()}
        contributions = sum(float((weight * values[name]).abs().sum()) for name, weight in weights.items())
        of_derivatives = derivative_scales(derivatives, sizes, contributions)
        return _Results(values | derivatives, scales(values, structure) | of_derivatives)

    def _turned(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if self._kind.ranks[name] >= 1:
            value = value @ _ROTATION.T
        return _ROTATION @ value if self._kind.ranks[name] == 2 else value

    def _refuse_nan(self, results: _Results) -> None:
        """Raises if the original gives what is not finite."""
        for name, value in results.values.items():
            if not bool(torch.isfinite(value).all()):
                culprit = first_not_finite(self._model)
                cause = "all parameters and buffers are finite" if culprit is None else f"{culprit} is not finite"
                raise VerificationError(
                    f"model: {type(self._model).__name__} itself gives NaN or infinity before it is patched "
                    f"({name}); {cause}: load or train it again"
                )

    def _failure(self, what: str, error: float, bound: float, scale: float) -> VerificationError:
        return VerificationError(
            f"model: {type(self._model).__name__} is not the same after patching: {what}, by {error:.3e} where at most "
            f"{bound:.3e} is rounding (absolute contributions {scale:.3e}); the model has been restored. This is a bug "
            f"in eqaccel or an unusual model: please report it with the output of eqaccel.report(model)"
        )


def _edge_weights(model: torch.nn.Module) -> int:
    """Weights that an edge has in all tensor products of a model, which its second derivatives take time for."""
    products = [module for module in model.modules() if getattr(module, "shared_weights", True) is False]
    return sum(int(getattr(product, "weight_numel", 0)) for product in products)


def _excesses(value: _Results, truth: _Results, bounds: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Results that differ from the truth by more than their bounds: name, error, and the bound times the scale."""
    for name, expected in truth.values.items():
        error, bound = distance(value.values[name], expected), bounds[name] * truth.scales[name]
        if not error <= bound:  # written so that NaN fails
            yield name, error, bound


def _rounded_anew(structure: Structure, seed: int = 0) -> Structure:
    """The structure with positions that differ by what the rounding of all stages of a network may come to."""
    size = math.sqrt(STAGES) * torch.finfo(torch.float64).eps * structure.cutoff
    return structure.displaced(size * _random(f"positions {seed}", structure.positions))


def _apart(value: _Results, truth: _Results, eps: float) -> dict[str, float]:
    """How far results are from the truth, in units of rounding relative to their scales.

    Small tensors of derivatives share the largest of all: the rounding of few entries may be small by chance.
    """
    units = {
        name: distance(value.values[name], expected) / (eps * truth.scales[name]) if truth.scales[name] > 0 else 0.0
        for name, expected in truth.values.items()
    }
    shared = max((units[name] for name in units if name.startswith(_DERIVATIVE)), default=0.0)
    few = {name for name, value in truth.values.items() if name.startswith(_DERIVATIVE) and value.numel() < _FEW}
    return {name: shared if name in few else own for name, own in units.items()}


def _random(name: str, like: torch.Tensor) -> torch.Tensor:
    """Weights of the entries of an output in the loss, the same ones at every call."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def _rotation(axis: tuple[float, float, float], angle: float) -> torch.Tensor:
    x, y, z = torch.nn.functional.normalize(torch.tensor(axis, dtype=torch.float64), dim=0).tolist()
    generator = torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]], dtype=torch.float64)
    return torch.linalg.matrix_exp(angle * generator)


_ROTATION = _rotation((1.0, 2.0, -0.5), 1.1)
"""A rotation about a general axis: it mixes all components of every irrep."""
