"""The check that a patched model still is the same model.

A model is compared with a copy from before the patch (`eqaccel.patches.comparison`) on small generated structures, and
on one that has thousands of edges and atoms with very different numbers of them. Derivatives in the positions are, for
forces and stress, second derivatives: what training and Hessians use. Besides, forces and stress have to be the slopes
of the energy, and outputs have to turn with the structure.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from eqaccel.errors import VerificationError
from eqaccel.patches.comparison import Comparison, Results, Run, differentiated, random_like
from eqaccel.patches.counting import CountedEdges
from eqaccel.patches.kind import ModelKind
from eqaccel.patches.rounding import STAGES, distance, scales
from eqaccel.patches.structures import Structure, crowded_structure, small_structures
from eqaccel.patches.torch_state import all_trainable, model_device, untouched_state
from eqaccel.patches.work import mismatch, paths

_MANY_WEIGHTS = 4096  # of an edge in all layers: twice those of the largest MACE models with 128 channels


class Verification(Comparison):
    """The comparison of a model of a known kind, on generated structures.

    Args:
        kind: The kind of the model, which knows how to run it.
        model: The model, not patched yet; it is run and copied here.

    Raises:
        VerificationError: If the model cannot be run on generated structures at all, or gives NaN.
    """

    def __init__(self, kind: ModelKind, model: torch.nn.Module) -> None:
        self._kind = kind
        try:
            extent = kind.extent(model)
            self._has_many_weights = _edge_weights(model) > _MANY_WEIGHTS and model_device(model).type == "cpu"
            self._periodic, self._isolated = small_structures(*extent)
            self._counted = crowded_structure(*extent)
            self._crowded = self._counted.written_out()
            super().__init__(model, kind.dtype(model))
        except VerificationError:
            raise
        except Exception as error:
            raise VerificationError(
                f"model: {type(model).__name__} could not be run on a small generated structure before it was patched "
                f"({type(error).__name__}: {error}); if it needs inputs of its own, call patch(model, verify=False) "
                f"and compare its results yourself"
            ) from error

    def runs(self) -> list[tuple[Structure, Run]]:
        """What is compared on which structure.

        Second derivatives of a large model on the largest one would take a CPU minutes, most of them in the original.
        """
        crowded = self._outputs if self._has_many_weights else self._training
        return [(self._periodic, self._outputs), (self._isolated, self._training), (self._crowded, crowded)]

    def rounded_anew(self, subject: Structure, seed: int = 0) -> Structure:
        """See `Comparison.rounded_anew`: positions are displaced."""
        size = math.sqrt(STAGES) * torch.finfo(torch.float64).eps * subject.cutoff
        return subject.displaced(size * random_like(f"positions {seed}", subject.positions))

    def is_large(self, subject: Structure) -> bool:
        """See `Comparison.is_large`."""
        return subject is self._crowded

    def shortened(self, subject: Structure) -> Structure | None:
        """See `Comparison.shortened`: equal edges are computed once."""
        return self._counted if subject is self._crowded else None

    def check_further(self, patched: torch.nn.Module, subject: Structure, value: Results, unit: float) -> None:
        """See `Comparison.check_further`."""
        if subject is self._periodic:
            self._check_turning(patched, value, unit)
            self._check_work(patched, value, unit)

    def _check_turning(self, patched: torch.nn.Module, value: Results, unit: float) -> None:
        """Raises if outputs do not turn with the structure, unless those of the original do not either."""
        turned = self._outputs(patched, self._periodic.rotated(_ROTATION)).values
        own = None
        for name in self._kind.ranks.keys() & turned.keys():
            bound = unit * value.scales[name]
            error = distance(turned[name], self._turned(name, value.values[name]))
            if not error <= bound:
                own = own or self._outputs(self.original, self._periodic.rotated(_ROTATION)).values
                # The values of the original, in this frame, are those of the patched model up to rounding.
                allowed = 2 * distance(own[name], self._turned(name, value.values[name])) + bound
                if not error <= allowed:
                    what = f"{name} of the {self._periodic.name} does not turn with the structure"
                    raise self.failure(what, error, allowed, value.scales[name])

    def _check_work(self, patched: torch.nn.Module, value: Results, unit: float) -> None:
        """Raises if forces or stress are no slopes of the energy, unless those of the original are not either."""
        if "energy" not in value.values:
            return
        for path in paths(self._periodic, value.values):
            found = mismatch(lambda at: self._outputs(patched, at).values, path, value.values)
            scale = value.scales["energy"] / path.half + value.scales[path.output]
            bound = found.truncation + unit * scale
            if not found.error <= bound:
                own = mismatch(lambda at: self._outputs(self.original, at).values, path, value.values)
                if not found.error <= 2 * own.error + bound:
                    what = f"{path.output} of the {self._periodic.name} is not the slope of the energy"
                    raise self.failure(what, found.error, bound, scale)

    def _outputs(self, model: torch.nn.Module, structure: Structure) -> Results:
        with untouched_state(model), _counting(structure):
            values = self._kind.evaluate(model, structure)
        return Results(values, scales(values, structure))

    def _training(self, model: torch.nn.Module, structure: Structure) -> Results:
        """Outputs, and the derivatives of a random sum of them."""
        with untouched_state(model), all_trainable(model) as parameters:
            with _counting(structure):
                outputs, positions = self._kind.run(model, structure, training=True)
            values, of_derivatives = differentiated(outputs, parameters, {"positions": positions})
        return Results(values, scales(values, structure) | of_derivatives)

    def _turned(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if self._kind.ranks[name] >= 1:
            value = value @ _ROTATION.T
        return _ROTATION @ value if self._kind.ranks[name] == 2 else value


def _counting(structure: Structure) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if structure.counts is None else CountedEdges(structure.counts)


def _edge_weights(model: torch.nn.Module) -> int:
    """Weights that an edge has in all tensor products of a model, which its second derivatives take time for."""
    products = [module for module in model.modules() if getattr(module, "shared_weights", True) is False]
    return sum(int(getattr(product, "weight_numel", 0)) for product in products)


def _rotation(axis: tuple[float, float, float], angle: float) -> torch.Tensor:
    x, y, z = torch.nn.functional.normalize(torch.tensor(axis, dtype=torch.float64), dim=0).tolist()
    generator = torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]], dtype=torch.float64)
    return torch.linalg.matrix_exp(angle * generator)


_ROTATION = _rotation((1.0, 2.0, -0.5), 1.1)
"""A rotation about a general axis: it mixes all components of every irrep."""
