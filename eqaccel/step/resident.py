"""A step of systems that are on the device already: nothing of them passes through the host while candidates serve."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eqaccel.ops import EdgeTensors
from eqaccel.step.capture import Capture, Recording
from eqaccel.step.engine import SKIN, Evaluation, PotentialFunction, on_device
from eqaccel.step.known import Given, Known
from eqaccel.step.memory import Sent
from eqaccel.step.system import System

Finish = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From energies (num_structures,), forces (num_atoms, 3), virials and cells (num_structures, 3, 3) to results.

All of them are float64. The virials are symmetric. There may be more atoms and structures than those of the system,
whose rows mean nothing.
"""


class ResidentStep(Evaluation):
    """Evaluates a potential on systems that are on its device.

    The device looks whether candidates serve, and the host reads the answer and how many edges there are. Both are
    there before the potential is evaluated, so what the host does next goes on beside that. What they do not serve for
    comes by the host, as in a `Step`.

    Args:
        potential: See `Evaluation`.
        cutoff: See `Evaluation`.
        device: See `Evaluation`.
        dtype: See `Evaluation`.
        finish: What to make of the results, on the device; it is recorded, too.
        skin: See `Evaluation`; None for `SKIN`, which what is recorded knows.
        patient: See `Evaluation`.
    """

    def __init__(
        self,
        potential: PotentialFunction,
        cutoff: float,
        device: torch.device,
        dtype: torch.dtype,
        finish: Finish,
        *,
        skin: float | None = None,
        patient: bool = False,
    ) -> None:
        super().__init__([potential], cutoff, device, dtype, skin=SKIN if skin is None else skin, patient=patient)
        self._finish = finish
        self._known: Known | None = None
        """What the candidates were found for; None where they are for nothing that is known."""
        self._looked = Sent(device)
        """What `_look` found."""
        self._differed = Sent(device)
        """Whether an edge and its reverse shared weights that were not the same, in the last replay."""
        self._edges: EdgeTensors | None = None
        self._raw: Tensor | None = None
        """What `_evaluate` gave."""
        self._results: Tensor | None = None
        """Of `finish`, in the last run."""
        self._given: Given | None = None
        """What the device computes already."""
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def begin(self, given: Given) -> None:
        """Has a GPU begin with a system, if there is a recording: `take` takes it up.

        So there is time to look at what the potential depends on. If it has changed, the step may still be dropped,
        after `cancel`.

        Args:
            given: What will be taken, or dropped.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), on_device(self.device):
            if self._given is not None:
                self.cancel()
            if self._capture is not None and self._differed.fetch().any():
                self._share_no_longer()
            if self._capture is not None and self._put(given):
                self._capture.replay()
                self._note_end()
                self._given = given

    def cancel(self) -> None:
        """Waits for what the device does."""
        with self._lock:
            self._given = None
            if self._done is not None:
                self._done.synchronize()

    def take(self, given: Given) -> Tensor | None:
        """The results for a system; None if it has to be read by the host, and given to `compute`.

        On a GPU they need not be there yet, as with whatever is queued on a stream.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), on_device(self.device):
            if self._given is not given:
                self.begin(given)
            if self._given is not None:
                self._given = None
                found, stale = self._looked.fetch()
                return self._taken() if not stale and self._all_fit(found) else None
            if not self._put(given):
                return None
            assert self._known is not None
            if bool(self._known.differs(self.cutoff, self.skin)):
                return None
            self._served = True
            self._settle()
            return self._taken()

    def compute(self, given: Given, system: System) -> Tensor:
        """The results for a system that could not be taken.

        Args:
            given: The system.
            system: The same as the host has read it, with its types; at least one atom.

        Raises:
            StructureError: If positions or cell are not finite, or a periodic cell has no volume.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), on_device(self.device):
            self.cancel()
            system.check()
            known, self._known = self._known, None  # not to be kept if what follows fails
            self._candidates = None
            self._follow(system)
            assert self._memory is not None
            if known is None or known.memory is not self._memory:
                known = Known(self._memory)
                if self._capture is not None:  # it reads what was known before a call that failed
                    self._capture, self._reason = None, "a failed call"
            known.learn(system, given)
            known.put(given)
            self._known = known
            self._settle()
            return self._taken()

    @property
    def rooms(self) -> tuple[int, int, int]:
        """How many energies, components of forces and of virials `finish` was given last."""
        assert self._memory is not None
        atoms, structures = len(self._memory.positions), len(self._memory.cells)
        return structures, 3 * atoms, 9 * structures

    def _put(self, given: Given) -> bool:
        """Puts a system where it is looked at; whether it has the size of the last one."""
        if self._known is None or not self._known.has_size_of(given):
            return False
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)  # it may be on another stream
        self._known.memory.calls += 1
        self._known.put(given)
        return True

    def _all_fit(self, found: float) -> bool:
        """Whether there is room for all edges, of which so many were found."""
        assert self._memory is not None
        assert self._raw is not None
        if self.device.type == "cpu":
            return True
        if len(self._raw) > 2 + self._memory.num_results:  # there are ranges of edges, with room of their own
            return not self._obstacle(self._raw.cpu().numpy())
        return found <= self._memory.capacity

    def _taken(self) -> Tensor:
        """Results that the next run leaves alone."""
        assert self._results is not None
        if self._capture is None:
            return self._results
        results = self._results.clone()
        self._note_end()
        return results

    def _note_end(self) -> None:
        if self._done is not None:
            self._done.record()

    def _look(self, _: bool) -> Tensor:
        """How many edges there are, and whether candidates do not serve, as two float64."""
        assert self._known is not None
        stale = self._known.differs(self.cutoff, self.skin)
        assert self._memory is not None
        self._edges = self._search_edges(self._memory.capacity)
        return torch.cat([self._edges.num_edges.double(), stale.double()])

    def _evaluate(self, check: bool, capacity: int | None = None) -> Tensor:
        raw = super()._evaluate(check, capacity)
        self._results = self._finished(raw)
        return raw

    def _evaluate_edges(self, check: bool) -> tuple[Tensor, Tensor]:
        """What comes after `_look`: the results, and what `finish` makes of them."""
        assert self._edges is not None
        raw = self._apply(self._edges, check)
        return raw, self._finished(raw)

    def _finished(self, raw: Tensor) -> Tensor:
        """What `finish` makes of results."""
        assert self._known is not None
        memory = self._known.memory
        atoms, structures = len(memory.positions), len(memory.cells)
        own = raw[len(raw) - memory.num_results :]
        energies, forces, virials = own.split([atoms, 3 * atoms, memory.num_results - 4 * atoms])
        if structures > 1:
            virials = self._known.of_structures(virials.view(atoms, 9))
        virials = virials.view(structures, 3, 3)
        energies = self._known.of_structures(energies)
        results = self._finish(energies, forces.view(atoms, 3), (virials + virials.mT) / 2, memory.cells)
        # The host does not wait to see whether weights were shared that differ: NaN, rather than a wrong result.
        return results.masked_fill(raw[1] != 0, torch.nan)

    def _record(self) -> Recording:
        return _TwoParts(self)


class _TwoParts:
    """A recording of a step, with what the host has to know in between."""

    def __init__(self, step: ResidentStep) -> None:
        self._step = step
        self._first = Capture(step._look, step.device)
        self._first.replay()  # so that there are edges to record the second part with
        self._second = Capture(step._evaluate_edges, step.device)

    def replay(self) -> Tensor:
        """See `Recording`."""
        step = self._step
        step._looked.send(self._first.replay())
        raw, results = self._second.replay()
        step._raw, step._results = raw, results
        step._differed.send(raw[1:2])
        return raw
