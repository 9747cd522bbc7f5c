"""The check that a patched model still is the same model: same outputs, and outputs that turn with the structure.

A model is run before and after the patch on two small generated structures, each also in a rotated frame. What is
required follows from the dtype, not from a number chosen per model:

    |after - before| <= ROUNDING * eps(dtype) * scale

where `scale` is the sum of the absolute values of what the output is made of (`_scales`), and ROUNDING covers the
chain of sums inside a network, some tens of stages of up to a thousand terms. A wrong kernel is off by a sizeable part
of `scale`, a right one by a small part of the bound.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from eqaccel.errors import VerificationError

if TYPE_CHECKING:
    from eqaccel.patches.core import ModelFamily

ROUNDING = 1024
"""How many units of rounding, relative to the absolute contributions, two evaluations of a model may be apart."""

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Structure:
    """Atoms and their neighbours, as plain float64 tensors on the CPU.

    Attributes:
        name: What messages call it.
        positions: (num_atoms, 3), angstrom.
        cell: (3, 3), a lattice vector per row, angstrom; a box around the atoms if not periodic.
        periodic: Whether the cell repeats in all three directions.
        species: (num_atoms,), index of each atom's element among those of the model.
        edge_index: (2, num_edges), senders and receivers, sorted by sender.
        unit_shifts: (num_edges, 3), lattice vectors to add in `positions[receiver] - positions[sender] + shift`.
        cutoff: Radius that the neighbours were searched in, angstrom.
    """

    name: str
    positions: torch.Tensor
    cell: torch.Tensor
    periodic: bool
    species: torch.Tensor
    edge_index: torch.Tensor
    unit_shifts: torch.Tensor
    cutoff: float

    def rotated(self, rotation: torch.Tensor) -> Structure:
        """The same structure in another frame, with the very same edges."""
        return replace(
            self,
            name=f"{self.name} (rotated)",
            positions=self.positions @ rotation.T,
            cell=self.cell @ rotation.T,
        )


def small_structures(cutoff: float, num_species: int) -> list[Structure]:
    """Builds one periodic and one isolated structure, the same ones at every call.

    The periodic one is a jittered 2x2x2 lattice in a sheared cell smaller than the cutoff, so atoms see several images
    of their neighbours and of themselves. The isolated one adds an atom with few neighbours and one with none.

    Args:
        cutoff: Cutoff radius of the model, angstrom.
        num_species: Number of elements the model knows; the atoms are spread evenly over them.
    """
    spacing = 0.45 * cutoff
    generator = torch.Generator().manual_seed(20240521)  # a generator of its own: the global RNG stays untouched
    lattice = torch.cartesian_prod(*[torch.arange(2, dtype=torch.float64)] * 3) * spacing
    lattice += spacing * 0.2 * (torch.rand(lattice.shape, generator=generator, dtype=torch.float64) - 0.5)
    sheared = torch.tensor([[1.0, 0.0, 0.0], [0.1, 1.0, 0.0], [0.05, -0.1, 1.0]], dtype=torch.float64)
    cell = 2 * spacing * sheared
    box = 8 * cutoff * torch.eye(3, dtype=torch.float64)
    far = torch.tensor([[-0.8, 0.1, 0.05], [3.5, 0.0, 0.0]], dtype=torch.float64) * cutoff
    return [
        _structure("periodic structure", lattice, cell, True, num_species, cutoff),
        _structure("isolated structure", torch.cat([lattice, far]), box, False, num_species, cutoff),
    ]


def _structure(
    name: str, positions: torch.Tensor, cell: torch.Tensor, periodic: bool, num_species: int, cutoff: float
) -> Structure:
    species = (torch.arange(len(positions)) * max(1.0, num_species / len(positions))).long() % num_species
    edge_index, unit_shifts = _neighbours(positions, cell, periodic, cutoff)
    return Structure(name, positions, cell, periodic, species, edge_index, unit_shifts, cutoff)


def _neighbours(
    positions: torch.Tensor, cell: torch.Tensor, periodic: bool, cutoff: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ordered pairs within the cutoff, by trying every pair of atoms and every image that could matter."""
    images = torch.zeros(1, 3, dtype=torch.float64)
    if periodic:
        heights = 1.0 / torch.linalg.inv(cell).norm(dim=0)
        reach = [math.ceil(cutoff / height) + 1 for height in heights.tolist()]
        images = torch.cartesian_prod(*[torch.arange(-n, n + 1, dtype=torch.float64) for n in reach])
    vectors = positions[None, :, None] - positions[:, None, None] + images @ cell
    near = vectors.norm(dim=-1) < cutoff
    itself = torch.eye(len(positions), dtype=torch.bool)[:, :, None] & (images == 0).all(dim=-1)
    senders, receivers, image = torch.nonzero(near & ~itself, as_tuple=True)
    return torch.stack([senders, receivers]), images[image]


@dataclass(frozen=True)
class _Frames:
    """Outputs for one structure as generated and in the rotated frame."""

    structure: Structure
    plain: Outputs
    rotated: Outputs


class Verification:
    """Remembers what a model gives before it is patched, to compare with what it gives afterwards.

    Parameters, their gradients, the training flag and the states of the random number generators are left alone.

    Args:
        family: Knows how to run the model.
        model: The model, not patched yet; it is run here.

    Raises:
        VerificationError: If the model cannot be run on generated structures at all.
    """

    def __init__(self, family: ModelFamily, model: torch.nn.Module) -> None:
        self._family = family
        self._model = model
        try:
            self._before = self._run()
        except Exception as error:
            raise VerificationError(
                f"model: {type(model).__name__} could not be run on a small generated structure before it was patched "
                f"({type(error).__name__}: {error}); if it needs inputs of its own, call patch(model, verify=False) "
                f"and compare its results yourself"
            ) from error

    def check(self) -> None:
        """Runs the model again, now patched, and compares.

        Raises:
            VerificationError: If an output differs by more than rounding, or does not turn with the structure.
        """
        eps = max(torch.finfo(model_dtype(self._model)).eps, _coefficient_eps(self._model))
        for before, after in zip(self._before, self._run(), strict=True):
            scales = _scales(before.plain, before.structure)
            bounds = {name: ROUNDING * eps * scale for name, scale in scales.items()}
            for frame in ("plain", "rotated"):
                label = before.structure.name + (" in a rotated frame" if frame == "rotated" else "")
                for name, expected in getattr(before, frame).items():
                    error = _distance(getattr(after, frame)[name], expected)
                    if not error <= bounds[name]:  # written so that NaN fails
                        raise self._failure(f"{name} of the {label} changed", error, bounds[name], scales[name])
            for name in self._family.ranks.keys() & after.plain.keys():
                error, own = self._turning_error(after, name), self._turning_error(before, name)
                # A model that is not equivariant by itself is not the patch's fault.
                if not error <= max(bounds[name], 2 * own):
                    label = f"{name} of the {before.structure.name} does not turn with the structure"
                    raise self._failure(label, error, bounds[name], scales[name])

    def _run(self) -> list[_Frames]:
        with _untouched_state(self._model):
            return [
                _Frames(
                    structure,
                    self._family.evaluate(self._model, structure),
                    self._family.evaluate(self._model, structure.rotated(_ROTATION)),
                )
                for structure in self._family.structures(self._model)
            ]

    def _turning_error(self, frames: _Frames, name: str) -> float:
        turned = frames.plain[name]
        if self._family.ranks[name] >= 1:
            turned = turned @ _ROTATION.T
        if self._family.ranks[name] == 2:
            turned = _ROTATION @ turned
        return _distance(frames.rotated[name], turned)

    def _failure(self, what: str, error: float, bound: float, scale: float) -> VerificationError:
        return VerificationError(
            f"model: {type(self._model).__name__} is not the same after patching: {what}, by {error:.3e} where at most "
            f"{bound:.3e} is rounding (absolute contributions {scale:.3e}); the model has been restored. This is a bug "
            f"in eqaccel or an unusual model: please report it with the output of eqaccel.report(model)"
        )


def _coefficient_eps(model: torch.nn.Module) -> float:
    """Rounding of the coupling coefficients that a model carries: a model saved in float32 keeps it in float64.

    eqaccel's coefficients are exact, so such a model changes by the rounding of its own.
    """
    stored = [buffer for name, buffer in model.named_buffers() if "_w3j_" in name and buffer.dtype == torch.float64]
    rounded = [torch.equal(buffer.float().double(), buffer) for buffer in stored]
    return torch.finfo(torch.float32).eps if rounded and all(rounded) else 0.0


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """The floating-point type a model computes in, read from its parameters."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def model_device(model: torch.nn.Module) -> torch.device:
    """The device a model is on, read from its parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype, in which MACE and e3nn build their constants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.shape != expected.shape:
        return math.inf
    return float((value - expected).abs().max()) if value.numel() else 0.0


def _scales(outputs: Outputs, structure: Structure) -> dict[str, float]:
    """Sums of the absolute values that each output is made of, which its rounding error is proportional to.

    Entries of one output are sums over the same neighbours, so they share a scale: the sum over all of them. Totals
    add their per-atom terms. An energy and a virial also add the work of all forces over one cutoff, since both are
    sums of terms of that size that may cancel.
    """
    scales = {name: float(value.abs().sum()) for name, value in outputs.items()}
    work = scales.get("forces", 0.0) * structure.cutoff
    for name in ("energy", "interaction_energy", "node_energy", "virials"):
        if name in scales:
            scales[name] += work + scales.get("node_energy" if name == "energy" else "", 0.0)
    if "stress" in scales:
        scales["stress"] += work / float(torch.linalg.det(structure.cell).abs())
    if "dipole" in scales:
        scales["dipole"] += scales.get("atomic_dipoles", 0.0)
        if "charges" in outputs:
            scales["dipole"] += float((outputs["charges"].abs()[:, None] * structure.positions.abs()).sum())
    return scales


@contextlib.contextmanager
def _untouched_state(model: torch.nn.Module) -> Iterator[None]:
    """Runs a model with gradients on and its own dtype as the default, and leaves no trace in torch's global state."""
    device, dtype = model_device(model), torch.get_default_dtype()
    cuda = [device.index or 0] if device.type == "cuda" else []
    unprofiled = torch.jit.optimized_execution(False)  # e3nn scripts its parts; specialising them here would be slow
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad(), unprofiled:
        torch.set_default_dtype(model_dtype(model))  # models create small constants in the default dtype
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _rotation(axis: tuple[float, float, float], angle: float) -> torch.Tensor:
    x, y, z = torch.nn.functional.normalize(torch.tensor(axis, dtype=torch.float64), dim=0).tolist()
    generator = torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]], dtype=torch.float64)
    return torch.linalg.matrix_exp(angle * generator)


_ROTATION = _rotation((1.0, 2.0, -0.5), 1.1)
"""A rotation about a general axis: it mixes all components of every irrep."""
