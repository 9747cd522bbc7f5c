"""What every check of a patched model consists of, on whatever the model is run.

A model is compared with a copy from before the patch. Copies of both are in float64, with the same exact coefficients
(`eqaccel.patches.coefficients`), so that they agree to float64 rounding:

    |patched - original| <= ROUNDING * eps(float64) * scale

where `scale` is the sum of the absolute values of what a result is made of (`eqaccel.patches.rounding`). Then kernels
in the dtype of the model are compared with those one by one (`eqaccel.patches.operators`), and the model itself may be
only a few times as far from that truth as the original was, or as far as rounding of its input may take it. One that is
less precise on purpose (`eqaccel.patches.precision`) computes in full precision in float64, and its kernels get
operands that need no rounding; it may be as far from the truth as a few times what errors of that rounding's size do.

What is compared are the outputs, and the derivatives of a random sum of them in all parameters and in the input.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eqaccel.errors import SharedMemoryError, VerificationError
from eqaccel.patches import operators
from eqaccel.patches.coefficients import share_coefficients, sharpen, write
from eqaccel.patches.copying import converted, widened
from eqaccel.patches.kind import Outputs
from eqaccel.patches.precision import precision_of, rounded_at_random
from eqaccel.patches.rounding import FACTOR, ROUNDING, STAGES, derivative_scales, distance
from eqaccel.patches.scripting import run_as_python
from eqaccel.patches.torch_state import first_not_finite, model_device, rounding_unit, untouched_state
from eqaccel.prepare import scalar_name, warmup

_DERIVATIVE = "derivative of a loss in "
_FEW = 16  # of so many roundings, the largest is about as large as in any other evaluation
_ROUNDINGS = 8  # evaluations, of which not all are close to the truth by chance
_LOWERINGS = 4  # the same, of operands with fewer digits
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Results:
    """What a model gives for one input, in float64 on the CPU, and what its rounding is proportional to."""

    values: Outputs
    scales: dict[str, float]


@dataclass(frozen=True)
class Truth:
    """What the original gives for one input in float64.

    Attributes:
        subject: What the model was run on.
        results: The results.
        noise: How far two right evaluations were apart in each, in units of rounding, relative to its scale.
    """

    subject: Any
    results: Results
    noise: dict[str, float]


Run = Callable[[torch.nn.Module, Any], Results]
"""Runs a model on something that it takes."""


class Comparison(ABC):
    """Keeps a copy of a model from before it is patched, to compare with what it is afterwards.

    Parameters, their gradients, training flags and the states of the random number generators are left alone. Who
    derives from it says what the model is run on. Each such subject has a `name`, for messages.

    Args:
        model: The model, not patched yet; it is run and copied here.
        dtype: The floating-point type that the model computes in.

    Raises:
        VerificationError: If the model gives NaN.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        subject, run = self.runs()[0]
        before = run(model, subject)
        self.original = widened(model)
        run_as_python(self.original)
        # What is written into the copy later, and has to be as it was where it is asked what rounding does.
        self._buffers = {name: buffer.clone() for name, buffer in self.original.named_buffers()}
        self._refuse_nan(before)

    @abstractmethod
    def runs(self) -> list[tuple[Any, Run]]:
        """What the model is run on, and how."""

    @abstractmethod
    def rounded_anew(self, subject: Any, seed: int = 0) -> Any:
        """The subject with numbers that differ by what the rounding of all stages of a network may come to."""

    def is_large(self, subject: Any) -> bool:
        """Whether the original takes long on a subject."""
        return False

    def shortened(self, subject: Any) -> Any | None:
        """What most models give the same results for, in less time; None if there is nothing of the kind."""
        return None

    def check_further(self, patched: torch.nn.Module, subject: Any, value: Results, unit: float) -> None:  # noqa: B027
        """What else the results of the patched copy on a subject have to fulfil; raises `VerificationError`."""

    def check(self) -> None:
        """Runs the model again, now patched, and compares.

        Raises:
            VerificationError: If something differs by more than rounding, or is not as `check_further` demands.
        """
        device = self._compile()
        stored = self.dtype
        patched = widened(self.model).to(device)
        self.original.to(device)
        for duplicate in (self.original, patched):
            sharpen(duplicate)
        share_coefficients(self.original, patched, stored)
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
        device, dtype = model_device(self.model), self.dtype
        if dtype != torch.float64:
            warmup(self.model, directions=directions, dtypes=dtype, tune=False)
        try:
            warmup(self.model, directions=directions, dtypes=torch.float64, tune=False)
        except SharedMemoryError:
            if device.type == "cpu" or dtype == torch.float64:
                raise
            return torch.device("cpu")
        return device

    def _check_exact(self, patched: torch.nn.Module) -> list[Truth]:
        """Compares the copies in float64; returns what the original gives."""
        eps = torch.finfo(torch.float64).eps
        unit = ROUNDING * eps
        found = []
        for subject, run in self.runs():
            short = self.shortened(subject)
            right, value = run(self.original, subject if short is None else short), run(patched, subject)
            self._refuse_nan(right)
            bounds = dict.fromkeys(right.values, unit)
            if short is not None and _exceeds(value, right, bounds):
                right = run(self.original, subject)
            if _exceeds(value, right, bounds):
                # A model may multiply rounding by more than usual. How much is seen where its input is rounded anew.
                sensitivity = self._sensitivity(run, self.original, subject, right)
                bounds = {name: unit + FACTOR * eps * sensitivity[name] for name in bounds}
            self._compare(subject, torch.float64, value, right, bounds)
            found.append(Truth(subject, right, _apart(value, right, eps)))
            self.check_further(patched, subject, value, unit)
        return found

    def _check_kernels(self, patched: torch.nn.Module, dtype: torch.dtype) -> None:
        """Compares each kernel of the model in its own dtype with the one in float64."""
        with untouched_state(self.model):
            for excess in operators.excesses(self.model, patched, dtype):
                what = f"{excess.what} changed in {scalar_name(dtype)}"
                raise self.failure(what, excess.error, excess.bound, excess.scale)

    def _check_own(self, patched: torch.nn.Module, truth: list[Truth]) -> None:
        """Compares the model in its own dtype with the truth, from which the original may be as far away."""
        dtype = self.dtype
        eps = rounding_unit(dtype, model_device(self.model))
        floor = STAGES if dtype == torch.float32 else ROUNDING
        for (subject, run), right in zip(self.runs(), truth, strict=True):
            value = run(self.model, subject)
            bounds = dict.fromkeys(right.noise, eps * floor)
            lowered = dict.fromkeys(right.noise, 0.0)
            if precision_of(self.model) and _exceeds(value, right.results, bounds):
                lowered = _lowered(run, patched, subject, right.results)
                bounds = {name: bound + lowered[name] for name, bound in bounds.items()}
            if _exceeds(value, right.results, bounds):
                # In float64 a copy says the same about a large subject, where rounding is small.
                known = dtype == torch.float64 and self.is_large(subject)
                noise = right.noise if known else _apart(run(self._before, subject), right.results, eps)
                bounds = {name: lowered[name] + eps * (floor + FACTOR * units) for name, units in noise.items()}
            if _exceeds(value, right.results, bounds):
                sensitivity = self._sensitivity(run, patched, subject, right.results)
                factor = FACTOR if dtype == torch.float64 else 1.0  # in which the truth is rounded as much
                bounds = {
                    name: max(bound, lowered[name] + factor * eps * sensitivity[name]) for name, bound in bounds.items()
                }
            self._compare(subject, dtype, value, right.results, bounds)

    def _sensitivity(self, run: Run, model: torch.nn.Module, subject: Any, truth: Results) -> dict[str, float]:
        """What rounding does, in units of float64: how far results are from the truth with other roundings.

        Both the input and the parameters are rounded anew. The largest of some evaluations, of which one may be close
        by chance.
        """
        apart = []
        for seed in range(_ROUNDINGS):
            with _rounded_parameters(model, seed):
                results = run(model, self.rounded_anew(subject, seed))
            apart.append(_apart(results, truth, torch.finfo(torch.float64).eps))
        return {name: max(found[name] for found in apart) for name in truth.values}

    def _compare(
        self, subject: Any, dtype: torch.dtype, value: Results, truth: Results, bounds: Mapping[str, float]
    ) -> None:
        """Raises if results differ from the truth by more than their bounds, which are relative to their scales."""
        excesses = list(_excesses(value, truth, bounds))
        if excesses:
            name, error, bound = max(excesses, key=lambda excess: excess[1] / max(excess[2], _TINY))
            what = f"{name} of the {subject.name} changed in {scalar_name(dtype)}"
            raise self.failure(what, error, bound, truth.scales[name])

    def is_wide(self, model: torch.nn.Module) -> bool:
        """Whether a model that is run is one of the copies in float64."""
        return model is not self.model and model is not vars(self).get("_before")

    @functools.cached_property
    def _before(self) -> torch.nn.Module:
        """The model as it was before the patch: a copy on its device, in its dtype, with its own constants."""
        before: torch.nn.Module = converted(self.original, self.dtype).to(model_device(self.model))
        for name, buffer in before.named_buffers():
            write(buffer, self._buffers[name])
        return before

    def _refuse_nan(self, results: Results) -> None:
        """Raises if the original gives what is not finite."""
        for name, value in results.values.items():
            if not bool(torch.isfinite(value).all()):
                culprit = first_not_finite(self.model)
                cause = "all parameters and buffers are finite" if culprit is None else f"{culprit} is not finite"
                raise VerificationError(
                    f"model: {type(self.model).__name__} itself gives NaN or infinity before it is patched "
                    f"({name}); {cause}: load or train it again"
                )

    def failure(self, what: str, error: float, bound: float, scale: float) -> VerificationError:
        """The error that says what differs."""
        if not math.isfinite(bound):
            return VerificationError(
                f"model: {type(self.model).__name__} cannot be compared with what it was ({what}): numbers overflow "
                f"where its inputs are rounded anew (absolute contributions {scale:.3e}), so there is no bound; the "
                f"model has been restored. Look for weights that are much too large, or call patch(model, verify=False)"
            )
        return VerificationError(
            f"model: {type(self.model).__name__} is not the same after patching: {what}, by {error:.3e} where at most "
            f"{bound:.3e} is rounding (absolute contributions {scale:.3e}); the model has been restored. This is a bug "
            f"in eqaccel or an unusual model: please report it with the output of eqaccel.report(model)"
        )


def differentiated(
    outputs: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> tuple[Outputs, dict[str, float]]:
    """The outputs with the derivatives of a random sum of them, and the scales of the latter.

    Args:
        outputs: By name, differentiable or not.
        parameters: The parameters of the model, by name.
        inputs: What it was run on, by name: leaves.

    Returns:
        All in float64 on the CPU; scales of derivatives only.
    """
    values = {name: output.detach().to("cpu", torch.float64) for name, output in outputs.items()}
    weights = {name: random_like(name, value) for name, value in values.items() if outputs[name].requires_grad}
    loss: Any = sum((outputs[name] * weight.to(outputs[name])).sum() for name, weight in weights.items())
    variables = {**parameters, **inputs}
    if not weights or not variables:
        return values, {}
    gradients = torch.autograd.grad(loss, list(variables.values()), allow_unused=True)
    derivatives = {
        f"{_DERIVATIVE}{name}": torch.zeros(variable.shape, dtype=torch.float64)
        if gradient is None
        else gradient.to("cpu", torch.float64)
        for (name, variable), gradient in zip(variables.items(), gradients, strict=True)
    }
    sizes = {f"{_DERIVATIVE}{name}": float(p.detach().double().abs().sum()) for name, p in parameters.items()}
    contributions = sum(float((weight * values[name]).abs().sum()) for name, weight in weights.items())
    return values | derivatives, derivative_scales(derivatives, sizes, contributions)


def _excesses(value: Results, truth: Results, bounds: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Results that differ from the truth by more than their bounds: name, error, and the bound times the scale."""
    for name, expected in truth.values.items():
        error, bound = distance(value.values[name], expected), bounds[name] * truth.scales[name]
        if not error <= bound:  # written so that NaN fails
            yield name, error, bound


def _exceeds(value: Results, truth: Results, bounds: Mapping[str, float]) -> bool:
    return next(_excesses(value, truth, bounds), None) is not None


@contextlib.contextmanager
def _rounded_parameters(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Changes each parameter of a model in float64 by what the rounding of all stages of a network may come to."""
    size = math.sqrt(STAGES) * torch.finfo(torch.float64).eps
    parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.mul_(1 + size * random_like(f"{name} {seed}", parameter).to(parameter.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])


def _lowered(run: Run, patched: torch.nn.Module, subject: Any, truth: Results) -> dict[str, float]:
    """How far results may be from the truth, relative to their scales, where a model is less precise than its dtype."""
    apart = []
    for seed in range(_LOWERINGS):
        with rounded_at_random(patched, seed):
            apart.append(_apart(run(patched, subject), truth, 1.0))
    return {name: FACTOR * max(found[name] for found in apart) for name in truth.values}


def _apart(value: Results, truth: Results, eps: float) -> dict[str, float]:
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


def random_like(name: str, like: torch.Tensor) -> torch.Tensor:
    """Weights of the entries of an output in the loss, the same ones at every call."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)
