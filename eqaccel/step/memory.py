"""The memory of a step: tensors that stay where they are, which is what a recording works on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.ops import CandidateTensors
from eqaccel.step.system import System

_SLACK = 1.04
"""Room for edges on a GPU, of those there are when memory is taken: in a fluid their number varies by a few percent."""
_RANGE_SLACK = 1.1
"""The same for the edges of a range of atoms, whose number varies more."""
_CANDIDATE_SLACK = 1.25
"""The same for candidates, which take little memory."""
_ROOMY = 1.25
"""Room above which memory is given back when candidates are found anew, of what is made anew then."""
_SWAPPED_ROOMY = 3.0
"""The same where structures are swapped: of the last ones, which become fewer and fewer, few batches last as long as a
recording takes, and little is computed for room that is empty."""
_SWAPPED_SLACK = 1.2
"""Room for atoms, edges and more candidates where structures are swapped for others every few calls."""


class Memory:
    """Tensors that stay where they are while positions, cells, types and candidates change.

    Where structures are swapped for others there is room for some more atoms, which have no edges, and structures.

    Args:
        sizes: Number of atoms of each structure.
        candidates: Those that there are now.
        device: Where the tensors are.
        swapped: Whether to make room for other structures.
        most: How many candidates there may come to be, for each of those.

    Attributes:
        sizes: Number of atoms of each structure that is there now.
        calls: Since there are these structures.
        positions: (num_atoms, 3) float64.
        cells: (num_structures, 3, 3) float64.
        structure: (num_atoms,) int32, the structure of each atom.
        types: (num_atoms + spare,) int64.
        spare: Nodes behind the atoms, for edges beyond the last; none on a CPU.
        candidates: Room for some more than there are.
        capacity: Room for edges; not used on a CPU.
        edge_slack: Room for edges, of those that there are when it is made.
        row_ptr: (num_atoms + spare + 1,), first edge of each node when room was made; not used on a CPU.
        slack: Room for the edges of a range of atoms, of those that there were then.
        zero: (1,) float64.
        results: On their way to the host.
        num_results: How many numbers a potential gives. Virials of one structure are summed where they are made; those
            of several are summed on the host, where it takes no launch for each, and no recording depends on which
            atoms are whose.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        candidates: CandidateTensors,
        device: torch.device,
        swapped: bool,
        most: float = 1.0,
    ) -> None:
        self.sizes, self.calls, self.is_swapped = sizes, 0, swapped
        num_atoms, num_structures = sum(sizes), len(sizes)
        if swapped:
            num_atoms = int(num_atoms * _SWAPPED_SLACK)
            num_structures = 1 if num_structures == 1 else 2 * num_structures + 8
        self.edge_slack = _SWAPPED_SLACK if swapped else _SLACK
        self._roomy = _SWAPPED_ROOMY if swapped else _ROOMY
        self.num_results = 4 * num_atoms + 9 * (1 if num_structures == 1 else num_atoms)
        self.spare = 0 if device.type == "cpu" else max(8, num_atoms // 64)
        # A system is one piece of memory on either side, which moves at once; all of its entries take eight bytes.
        lengths = [9 * num_structures, 3 * num_atoms, num_atoms]
        self._staged = torch.zeros(sum(lengths), dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
        cells, positions, types = self._staged.split(lengths)
        self._arrays = cells.view(-1, 3, 3).numpy(), positions.view(-1, 3).numpy(), types.view(torch.int64).numpy()
        own = torch.zeros(sum(lengths) + self.spare, dtype=torch.float64, device=device)
        self._moved = own[: sum(lengths)]
        cells, positions, types = own.split([*lengths[:2], num_atoms + self.spare])
        self.cells, self.positions, self.types = cells.view(-1, 3, 3), positions.view(-1, 3), types.view(torch.int64)
        self.structure = torch.zeros(num_atoms, dtype=torch.int32, device=device)
        room = int(len(candidates.sender) * most * _CANDIDATE_SLACK * (_SWAPPED_SLACK if swapped else 1.0))
        self.candidates = CandidateTensors(
            *(
                t.new_zeros((num_atoms + 1 if "ptr" in name else room, *t.shape[1:]))
                for name, t in candidates._asdict().items()
            )
        )
        self.capacity = 0
        self.row_ptr = np.zeros(len(self.types) + 1, dtype=np.int32)
        self.slack = 1.0 if device.type == "cpu" else _RANGE_SLACK
        self.zero = torch.zeros(1, dtype=torch.float64, device=device)
        self.results = Sent(device)
        self.fill(sizes, candidates)

    def takes(self, sizes: tuple[int, ...]) -> bool:
        """Whether there is room for structures of these sizes, and not too much."""
        if sizes == self.sizes:
            return True
        room, num_atoms = len(self.positions), sum(sizes)
        enough = num_atoms <= room and len(sizes) <= len(self.cells)
        return self.is_swapped and enough and room <= self._roomy * _SWAPPED_SLACK * num_atoms

    def has_right_capacity(self, num_edges: int) -> bool:
        """Whether there is room for so many edges, and not too much."""
        return num_edges <= self.capacity <= max(self._roomy * self.edge_slack * num_edges, 1024)

    def fill(self, sizes: tuple[int, ...], candidates: CandidateTensors) -> None:
        """Puts other structures in, or other candidates; there may be fewer."""
        if self.calls == 0 or sizes != self.sizes:
            self.sizes, self.calls = sizes, 0
            numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            self.structure[: sum(sizes)].copy_(torch.from_numpy(numbers))
        for name, source in candidates._asdict().items():
            to = getattr(self.candidates, name)
            to[: len(source)].copy_(source)
            if "ptr" in name:
                to[len(source) :] = len(candidates.sender)  # atoms behind these have none

    def move(self, system: System) -> None:
        """Puts a system in."""
        self.calls += 1
        for to, array in zip(self._arrays, (system.cells, system.positions, system.types), strict=True):
            np.copyto(to[: len(array)], array)
        self._moved.copy_(self._staged, non_blocking=True)


class Sent:
    """Numbers on their way from a device to the host.

    Args:
        device: Where they come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._values: Tensor | None = None
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, values: Tensor) -> None:
        """Has them copied, after what is queued already."""
        if self._values is None or len(self._values) != len(values):
            self._values = torch.empty(len(values), dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(values.device))

    def fetch(self) -> NDArray[np.float64]:
        """Waits for those that were sent; returns a copy."""
        assert self._values is not None
        if self._event is not None:
            self._event.synchronize()
        return self._values.numpy().copy()
