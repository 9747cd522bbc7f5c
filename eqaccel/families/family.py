"""What a family of kernels is, to all that handles kernels without knowing what they compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from eqaccel.codegen import COMMON, Direction, Result, translation_unit
from eqaccel.families.words import Word, read_words
from eqaccel.targets import Target


@dataclass(frozen=True)
class TunedKernel:
    """A kernel that is planned otherwise than the cost model would, on one kind of processor only.

    Attributes:
        target: The processor, under the name of its architecture.
        direction: Which derivative the kernel computes.
        scalar_bytes: 4 for float32, 8 for float64.
        tuning: How it is planned, one of the family's tunings; None where it is to be the default kernel, as on every
            other processor.
    """

    target: Target
    direction: Direction
    scalar_bytes: int
    tuning: Any


class KernelFamily(ABC):
    """One kind of computation: what it can compute, and how its kernels are planned, written and checked.

    A spec is a family's own, frozen and hashable; None for a family of which there is one kernel. Kernels travel in a
    payload, whose entry "meta" names the family: by that name the runtime knows how to load and to launch them, and on
    which architectures they run (`csrc/runtime/families.cpp`).

    Attributes:
        name: Name of the family, of its folder, and in payloads.
        directions: Those that have kernels. Derivatives that have none consist of all the kernels that there are.
        words: What someone writes on a command line to name a spec: the arguments of `make_spec`.
        examples: Such words by names that stand for them; the first one is taken where nothing is written.
    """

    name: str
    directions: tuple[Direction, ...] = COMMON
    words: tuple[Word, ...] = ()
    examples: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def make_spec(self, **arguments: Any) -> Any:
        """A spec out of the values of `words`; a family of which there is one kernel has none.

        Raises:
            SpecError: If they are no spec.
        """
        return None

    def read_spec(self, texts: Sequence[str] = ()) -> Any:
        """The spec that someone has written on a command line: its words, or the name of an example.

        Raises:
            SpecError: If the texts cannot be read, or are no spec.
        """
        if not texts:
            texts = next(iter(self.examples.values()), ())
        elif len(texts) == 1:
            texts = self.examples.get(texts[0], texts)
        return self.make_spec(**read_words(self.words, texts))

    @abstractmethod
    def payload(self, spec: Any, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        """The payload of a spec and the integer key that names it; the same arguments give the same bytes.

        Args:
            spec: What to compute.
            tuned: Kernels of plans that are not the default ones, for single processors; empty if there are no others.
        """

    def payload_of(self, spec: Any, direction: Direction) -> tuple[bytes, int] | None:
        """The payload that has the kernels of a direction, with its key; None where there are none.

        Kernels that few models need have a payload of their own, which is made where they are first asked for.
        """
        return self.payload(spec) if direction in self.directions else None

    @abstractmethod
    def prelude(self, backend: str) -> str:
        """The text in front of every body of a backend: "cpu", "cuda" or "hip"."""

    @abstractmethod
    def body(self, spec: Any, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None) -> str:
        """The text of a kernel, which follows the prelude of the target's backend.

        Args:
            spec: What to compute.
            direction: Which derivative.
            target: The processor that runs it.
            scalar_bytes: 4 for float32, 8 for float64.
            tuning: One of `tunings`; None for the plan that travels in the payload.

        Raises:
            UnsupportedError: If there is no kernel for the target.
        """

    def cpu_tables(self, spec: Any, direction: Direction) -> str:
        """Numbers of a spec that a kernel for the CPU takes with its operands, where one text serves all specs."""
        return ""

    @abstractmethod
    def explain(self, spec: Any, direction: Direction, target: Target, scalar_bytes: int) -> str:
        """How the kernel of `body` works, in words."""

    @abstractmethod
    def reference(self, spec: Any, direction: Direction, *, absolute: bool = False, **operands: Any) -> Result:
        """Computes in NumPy what the kernels have to compute.

        Args:
            spec: What to compute.
            direction: Which derivative.
            absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.
            **operands: Those of the family's executor, arrays and numbers, by name.
        """

    def tunings(self, spec: Any, direction: Direction, target: Target, scalar_bytes: int) -> tuple[Any, ...]:
        """Other plans of a kernel that are worth timing; none unless a family says so.

        A tuning is frozen, hashable, reads well as text, and tells what it chooses by name: `choices()`.
        """
        return ()

    def source(self, spec: Any, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None) -> str:
        """The whole source of a kernel; arguments and errors as for `body`."""
        body = self.body(spec, direction, target, scalar_bytes, tuning)
        return translation_unit(direction, scalar_bytes, self.prelude(target.backend), body)

    def serving(self, directions: Iterable[Direction]) -> list[Direction]:
        """The kernels that compute these derivatives."""
        wanted = list(directions)
        return wanted if set(wanted) <= set(self.directions) else list(self.directions)
