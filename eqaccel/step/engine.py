"""The step itself: it keeps candidates, memory and recordings from call to call, and makes each anew when it has to."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel import settings
from eqaccel.errors import StepWarning
from eqaccel.ops import (
    EdgePairs,
    EdgeTensors,
    GivenEdges,
    Neighbors,
    ProgramUse,
    WeightLimits,
    given_edges,
    given_to_programs,
)
from eqaccel.step.candidates import Candidates
from eqaccel.step.capture import Capture, Recording
from eqaccel.step.memory import Memory
from eqaccel.step.system import System

PotentialFunction = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
"""As a `Potential`: vectors, edge index, types, number of atoms, 0; to node energies and the gradient of their sum."""

SKIN = 0.5
"""Angstrom by which candidates go beyond the cutoff, at first."""

MOST_SKIN = 1.5
"""The same where atoms are fast, as hydrogen is: what is found anew takes a GPU longer than a step of a small model."""

_WORTH_FINDING = 16
"""Calls that candidates should serve at least."""

_NO_MEMORY_TEXTS = "out of memory", "can't allocate memory"
"""What torch says of a GPU and of a CPU."""

_ROUNDINGS = 1024
"""Units of rounding that two right evaluations may be apart, relative to the sum of absolute contributions."""

_LASTING = 250
"""Calls for the same structures that are worth a recording without room for others."""

_DIFFER = "weights that an edge and its reverse do not share"
"""Reason for a recording that makes weights for every edge, after one that did not."""

_NO_MEMORY = "less memory for weights"
"""Reason for a recording after a GPU had no memory for what was done before."""


@dataclass(frozen=True)
class Outcome:
    """What potentials give for a system, in eV and angstrom.

    Attributes:
        energies: (num_potentials, num_atoms) float64, of atoms.
        forces: (num_potentials, num_atoms, 3) float64.
        virials: (num_potentials, num_structures, 3, 3) float64, derivatives of energies in the strain, symmetric.
        num_edges: Number of edges.
    """

    energies: NDArray[np.float64]
    forces: NDArray[np.float64]
    virials: NDArray[np.float64]
    num_edges: int


class Evaluation:
    """What is kept to evaluate potentials on a system that changes a little from call to call, as in a simulation.

    Candidates for neighbours are found anew when atoms or cell have moved so far that one could be missing; atoms that
    were put back into a cell on its other side have not moved. On a GPU everything from positions to forces is recorded
    as a CUDA graph, which is recorded again when atoms, edges or candidates do not fit any more. If there is no memory,
    the call is computed again, and weights may take half of what they could from then on. Results do not depend on what
    was computed before, but for the room for edges and for weights.

    Calls are made one at a time, from whichever thread.

    Args:
        potentials: Functions that give node energies and gradients, all with the same cutoff.
        cutoff: Angstrom.
        device: Of the potentials.
        dtype: float32 or float64, of the vectors that the potentials take.
        skin: Angstrom by which candidates go beyond the cutoff. None for `SKIN`, and for more, up to `MOST_SKIN`, once
            candidates have served few calls of a simulation; results are the same.
        capture: Whether to record CUDA graphs, on a GPU that can.
        patient: Whether to record only when candidates serve a second call, for structures that come only once.
        weight_bytes: Memory that the weights of edges of a layer may take, and their gradients; where they would take
            more they are made in pieces, and once more for the gradient. None for what EQACCEL_WEIGHT_MIB says, and
            without that for a few GiB, and as much as keeps pieces few.
    """

    def __init__(
        self,
        potentials: Sequence[PotentialFunction],
        cutoff: float,
        device: torch.device,
        dtype: torch.dtype,
        *,
        skin: float | None = None,
        capture: bool = True,
        patient: bool = False,
        weight_bytes: float | None = None,
    ) -> None:
        self.potentials, self.cutoff = list(potentials), cutoff
        self.skin = SKIN if skin is None else skin
        """By how much candidates go beyond the cutoff when they are found next."""
        self._widens = skin is None
        self.device, self.dtype, self.patient = device, dtype, patient
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        self.limits = WeightLimits(weight_bytes or settings.current().weight_bytes, memory)
        """What weights of edges may take."""
        self.captures: Counter[str] = Counter()
        """How often a graph was recorded, by the reason."""
        self.rebuilds = 0
        """How often candidates were found."""
        self.not_captured = "" if capture and device.type == "cuda" else "not asked for" if not capture else "on a CPU"
        """Why no graph is recorded; empty if it is."""
        self.shares_weights = False
        """Whether weights of edges were made once for an edge and its reverse, in the last call."""
        self._search = Neighbors().to(device)
        self._lock = threading.RLock()
        self._candidates: Candidates | None = None
        self._found_at = 0
        """Calls of the memory when candidates were found."""
        self._served = False
        """Whether the candidates are those of the call before."""
        self._memory: Memory | None = None
        self._capture: Recording | None = None
        self._reason = ""
        """Why there is no recording yet."""
        self._lengths_decide = True
        """Whether weights were the same for every edge and its reverse so far, where that was looked at."""
        self._programs_differ = False
        """Whether a layer of an exported program had other edges, as many as there are."""

    def cancel(self) -> None:
        """Waits for what was begun and is not wanted, if anything was."""

    def _settle(self) -> NDArray[np.float64]:
        """Results of what is in memory, with as much room for edges as there are."""
        while True:
            assert self._memory is not None
            self._memory.results.send(self._run())
            values = self._memory.results.fetch()
            obstacle = self._obstacle(values)
            if not obstacle:
                return values
            if obstacle == _DIFFER:
                self._share_no_longer()
            else:
                self._renew(obstacle, int(values[0]))

    def _share_no_longer(self) -> None:
        """Has weights made for each edge from now on; what was recorded before is forgotten."""
        self._lengths_decide = False
        self._capture, self._reason = None, _DIFFER

    def _follow(self, system: System) -> None:
        """Brings candidates and memory to what they have to be for a system."""
        served = None if self._candidates is None else self._candidates.serve(system)
        self._served = served is not None
        if served is None:
            self._widen(system)
            self._candidates = None  # not to be kept if what follows fails
            found = Candidates.find(system, self.cutoff, self.skin, self.device)
            self.rebuilds += 1
            memory = self._memory
            if memory is None:
                reason = "first call"
            elif not memory.takes(system.sizes):
                reason = "other numbers of atoms"
            elif len(memory.candidates.sender) < len(found.tensors.sender):
                reason = "more candidates"
            elif memory.is_swapped and memory.calls >= _LASTING:
                reason = "structures that stay"
            else:
                reason = ""
                memory.fill(system.sizes, found.tensors)
            if reason:
                others = memory is not None and (memory.is_swapped or memory.sizes != system.sizes)
                often = memory is not None and memory.calls < _LASTING
                self._capture = None
                swapped = others and often and not self.not_captured
                self._memory = Memory(system.sizes, found.tensors, self.device, swapped, self._most_candidates())
            self._candidates = found
            assert self._memory is not None
            self._memory.move(system)
            self._found_at = self._memory.calls
            if self.device.type == "cuda":
                # Without room edges are only counted.
                count = int(self._search_edges(1).num_edges)
                if reason or not self._memory.has_right_capacity(count):
                    self._renew(reason or ("more edges" if count > self._memory.capacity else "fewer edges"), count)
            return
        assert self._memory is not None
        self._memory.move(served)

    def _widen(self, system: System) -> None:
        """Has the next candidates go farther beyond the cutoff, if atoms of a simulation were too fast for the last."""
        if self._widens and self._candidates is not None and self._candidates.farthest(system) <= self.skin:
            assert self._memory is not None
            served = self._memory.calls - self._found_at + 1
            if served < _WORTH_FINDING:
                self.skin = min(MOST_SKIN, self.skin * _WORTH_FINDING / served)

    def _most_candidates(self) -> float:
        """How many candidates there may come to be, for each that there is now: as many as the volume has."""
        most = max(self.skin, MOST_SKIN if self._widens else 0.0)
        return ((self.cutoff + most) / (self.cutoff + self.skin)) ** 3

    def _renew(self, reason: str, num_edges: int) -> None:
        """Makes room for so many edges, which there are now; what was recorded before is forgotten."""
        memory = self._memory
        assert memory is not None
        self._capture, self._reason = None, reason
        memory.capacity = int(num_edges * memory.edge_slack) + 64
        memory.row_ptr = self._search_edges(memory.capacity).graph[2 : len(memory.types) + 3].cpu().numpy()

    def _run(self) -> Tensor:
        while True:
            try:
                return self._run_once()
            except RuntimeError as error:
                if not self._may_take_less(error):
                    raise
            self.limits.halve()  # outside of the clause, where the error would hold what was computed
            self._capture, self._reason = None, _NO_MEMORY
            self._empty_cache()

    def _may_take_less(self, error: Exception) -> bool:
        """Whether there was no memory, and weights may take less of it.

        Programs of TorchScript leave nothing of an error but its text.
        """
        return self.limits.may_be_halved and any(text in str(error) for text in _NO_MEMORY_TEXTS)

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _run_once(self) -> Tensor:
        if not self.not_captured and self._capture is None and (self._served or not self.patient):
            reason = self._try_recording()
            if reason:
                # The same work without a graph, whose memory is free again: where that fails too, its error is the one
                # to see.
                self._empty_cache()
                outputs = self._evaluate(True)
                self.not_captured = reason
                warnings.warn(
                    f"this step runs without a CUDA graph from now on, which costs time: {reason}",
                    StepWarning,
                    stacklevel=5,
                )
                return outputs
        return self._evaluate(True) if self._capture is None else self._capture.replay()

    def _record(self) -> Recording:
        return Capture(self._evaluate, self.device)

    def _try_recording(self) -> str:
        """Records what to do from now on; returns what is in the way of it, and lets go of what was done until then."""
        try:
            exact = self._evaluate_exactly()  # before there is a recording, which has memory of its own
            recording = self._record()
            self._verify(recording.replay(), exact)
        except (RuntimeError, NotImplementedError) as error:
            if self._may_take_less(error):
                raise
            return f"recording failed ({type(error).__name__}: {str(error).splitlines()[0]})"
        self._capture = recording
        self.captures[self._reason] += 1
        return ""

    def _evaluate_exactly(self) -> NDArray[np.float64]:
        """The vector of results without room for further edges."""
        return self._evaluate(True, max(1, int(self._search_edges(1).num_edges))).cpu().numpy()

    def _verify(self, outputs: Tensor, exact: NDArray[np.float64]) -> None:
        """Raises `RuntimeError` unless recorded results are those without room for further edges, but for rounding."""
        values = outputs.cpu().numpy()
        if self._obstacle(values):  # this is no result yet
            return
        assert self._candidates is not None
        system = self._candidates.system
        found, expected = self._unpack(values, system), self._unpack(exact, system)
        bound = _ROUNDINGS * torch.finfo(self.dtype).eps
        work = self.cutoff * np.abs(expected.forces).sum()
        for name, scale in (("energies", work), ("forces", 0.0), ("virials", work)):
            value, right = getattr(found, name), getattr(expected, name)
            error, size = np.abs(value - right).max(initial=0.0), np.abs(right).sum() + scale
            if np.isfinite(right).all() and not error <= bound * size:
                raise RuntimeError(f"{name} differ by {error:.3e} where room for edges must not matter")

    def _search_edges(self, capacity: int) -> EdgeTensors:
        memory = self._memory
        assert memory is not None
        search = memory.positions, memory.cells, memory.structure, memory.candidates
        edges: EdgeTensors = self._search(*search, self.cutoff, memory.spare, capacity, self.dtype)
        return edges

    def _evaluate(self, check: bool, capacity: int | None = None) -> Tensor:
        """From positions to one vector of results.

        That is the number of edges, whether an edge and its reverse shared weights that are not the same, by how many
        the edges of each range exceed their room, and for each potential what it gives.
        """
        memory = self._memory
        assert memory is not None
        return self._apply(self._search_edges(memory.capacity if capacity is None else capacity), check)

    def _apply(self, edges: EdgeTensors, check: bool) -> Tensor:
        """The potentials, on edges; see `_evaluate`."""
        memory = self._memory
        assert memory is not None
        num_nodes, num_atoms = len(memory.types), len(memory.positions)
        row_ptr, pairs = memory.row_ptr, None
        if self.device.type == "cpu":
            row_ptr = edges.graph[2 : num_nodes + 3].numpy()
            if check or self._lengths_decide:  # a CPU looks in every step
                pairs = EdgePairs.find(edges.vectors, edges.graph, num_nodes)
        elif self._lengths_decide:
            pairs = self._search.pairs(edges, num_atoms, num_nodes)
        given = GivenEdges(
            edges.edge_index,
            edges.graph,
            num_nodes,
            check,
            row_ptr,
            self.limits.get(),
            memory.slack,
            pairs=pairs,
        )
        results = []
        programs = nullcontext(ProgramUse()) if self._programs_differ else given_to_programs(given)
        with given_edges(given), programs as use:
            for potential in self.potentials:
                energies, gradient = potential(edges.vectors, edges.edge_index, memory.types, num_nodes, 0)
                forces, virials = self._search.forces(edges, gradient.contiguous(), num_nodes)
                virials = virials[:num_atoms]
                if len(memory.cells) == 1:
                    virials = virials.sum(0)
                results += [energies[:num_atoms], forces[:num_atoms].flatten(), virials.flatten()]
        if use.differed:
            self._programs_differ = True
            if use.shared:
                return self._apply(edges, check)
        self.shares_weights = bool(given.shared) or use.shared
        self._lengths_decide = self._lengths_decide and not (given.differ or use.values_differed)
        counts = [edges.num_edges.double(), memory.zero if pairs is None else pairs.differ]
        if given.excess:
            counts.append(torch.cat(given.excess).double())
        return torch.cat([*counts, *results])

    def _obstacle(self, values: NDArray[np.float64]) -> str:
        """Why something else is to be computed in place of these results; empty if they are good.

        There was no room for all edges, but for a CPU, where room is made as there are edges; or values of edges were
        taken for those of their reverses, and are others.
        """
        memory = self._memory
        assert memory is not None
        excess = values[2 : len(values) - len(self.potentials) * memory.num_results]
        if self.device.type != "cpu" and not (values[0] <= memory.capacity and (excess <= 0).all()):
            return "more edges"
        return _DIFFER if values[1] else ""

    def _unpack(self, values: NDArray[np.float64], system: System) -> Outcome:
        memory = self._memory
        assert memory is not None
        num_atoms, room, count = len(system.positions), len(memory.positions), len(self.potentials)
        each = values[len(values) - count * memory.num_results :].reshape(count, memory.num_results)
        energies, forces = each[:, :num_atoms], each[:, room : room + 3 * num_atoms].reshape(count, num_atoms, 3)
        virials = each[:, 4 * room :].reshape(count, -1, 3, 3)
        if len(memory.cells) > 1:
            virials = np.stack([system.of_structures(np.add, of_atoms[:num_atoms]) for of_atoms in virials])
        return Outcome(energies, forces, (virials + virials.swapaxes(2, 3)) / 2, int(values[0]))


class Step(Evaluation):
    """Evaluates potentials on systems that are on the host; see `Evaluation`."""

    _begun: System | None = None
    """What the device computes already."""

    def begin(self, system: System) -> None:
        """Has a GPU begin with a system, if what was recorded serves for it: a call with the same object takes it up.

        So there is time to look at what the potentials depend on while the device computes. If they have changed, the
        step may still be dropped, after `cancel`.

        Args:
            system: What will be called with, or dropped; the arrays must not change until then.
        """
        with self._lock:
            self.cancel()
            served = None if self._capture is None or self._candidates is None else self._candidates.serve(system)
            if served is None:
                return
            assert self._memory is not None
            assert self._capture is not None
            with on_device(self.device):
                self._memory.move(served)
                self._memory.results.send(self._capture.replay())
            self._begun = system

    def cancel(self) -> None:
        """Waits for what was begun and is not wanted, if anything was."""
        with self._lock:
            if self._begun is not None:
                assert self._memory is not None
                self._memory.results.fetch()
                self._begun = None

    def __call__(self, system: System) -> Outcome:
        """Evaluates the potentials.

        Raises:
            StructureError: If positions or cell are not finite, or a periodic cell has no volume.
        """
        with self._lock:
            if self._begun is not system:
                self.begin(system)
            if self._begun is not None:
                self._begun = None
                assert self._memory is not None
                values = self._memory.results.fetch()
                if not self._obstacle(values):
                    return self._unpack(values, system)
            # A system that cannot be computed is never begun with.
            system.check()
            if len(system.positions) == 0:
                count = len(self.potentials)
                virials = np.zeros((count, len(system.cells), 3, 3))
                return Outcome(np.zeros((count, 0)), np.zeros((count, 0, 3)), virials, 0)
            with torch.inference_mode(False), torch.no_grad(), on_device(self.device):
                return self._compute(system)

    def _compute(self, system: System) -> Outcome:
        self._follow(system)
        return self._unpack(self._settle(), system)


def on_device(device: torch.device) -> torch.cuda.device | torch.device:
    """Makes a GPU the current one for a while."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.device("cpu")
