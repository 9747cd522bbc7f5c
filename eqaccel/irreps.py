"""Irreducible representations of O(3) and direct sums of them, written and read as e3nn does (``128x0e+64x1o``).

Source of the notation: e3nn (https://docs.e3nn.org), whose objects are accepted wherever irreps are, without importing
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, overload

from eqaccel.errors import IrrepsError

_IRREP = re.compile(r"\s*(\d+)\s*([eoy])\s*", re.ASCII)
_TERM = re.compile(r"\s*(?:(\d+)\s*x)?\s*(\d+)\s*([eoy])\s*", re.ASCII)


class _DegreeAndParity(NamedTuple):
    l: int  # noqa: E741  (the field's own name for the degree)
    p: int


class Irrep(_DegreeAndParity):
    """An irreducible representation of O(3); the order is e3nn's: by degree, then odd before even.

    It is the tuple (l, p), so e3nn reads it wherever it takes an irrep.

    Attributes:
        l: Degree, 0, 1, 2, ...
        p: Parity, +1 (even, ``e``) or -1 (odd, ``o``).

    Raises:
        IrrepsError: If the degree is negative or the parity is not +1 or -1.
    """

    __slots__ = ()

    def __new__(cls, l: int, p: int) -> Irrep:  # noqa: D102, E741
        if not _is_int(l) or l < 0:
            raise IrrepsError(f"irrep degree l: expected an integer >= 0, got {l!r}")
        if not _is_int(p) or p not in (1, -1):
            raise IrrepsError(f"irrep parity p: expected +1 or -1, got {p!r}")
        return super().__new__(cls, l, p)

    @classmethod
    def parse(cls, value: IrrepLike) -> Irrep:
        """Reads an irrep from text (``1o``; ``1y`` is the parity of a spherical harmonic), (l, p), or an irrep object.

        Raises:
            IrrepsError: If `value` is none of these.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            match = _IRREP.fullmatch(value)
            if match is None:
                raise IrrepsError(f"cannot read irrep {value!r}: expected a degree and e or o, such as '1o'")
            return cls._from_text(*match.groups())
        # Attributes first: e3nn's Irrep is a tuple, but one that refuses to tell its length.
        irrep: Any = value
        if hasattr(irrep, "l") and hasattr(irrep, "p"):
            return cls(int(irrep.l), int(irrep.p))
        if isinstance(value, tuple) and len(value) == 2:
            return cls(*value)
        raise IrrepsError(f"cannot read irrep {value!r}: expected text such as '1o', a pair (l, p), or an e3nn Irrep")

    @classmethod
    def _from_text(cls, degree: str, parity: str) -> Irrep:
        l = int(degree)  # noqa: E741
        return cls(l, {"e": 1, "o": -1, "y": (-1) ** l}[parity])

    @property
    def dim(self) -> int:
        """Number of components, 2l+1."""
        return 2 * self.l + 1

    def __mul__(self, other: Irrep) -> Iterator[Irrep]:  # type: ignore[override]
        """Iterates over the irreps in the product of two, by increasing degree."""
        if not isinstance(other, Irrep):
            return NotImplemented
        return (Irrep(l, self.p * other.p) for l in range(abs(self.l - other.l), self.l + other.l + 1))  # noqa: E741

    def __str__(self) -> str:
        return f"{self.l}{'e' if self.p == 1 else 'o'}"


class MulIrrep(NamedTuple):
    """A block of irreps: the same irrep `mul` times; `mul` may be 0, as in e3nn."""

    mul: int
    ir: Irrep

    @property
    def dim(self) -> int:
        """Number of elements, mul * (2l+1)."""
        return self.mul * self.ir.dim

    def __str__(self) -> str:
        return f"{self.mul}x{self.ir}"


class Irreps(tuple[MulIrrep, ...]):
    """A direct sum of irreps: an immutable sequence of `MulIrrep` blocks, in order, never merged or sorted.

    Args:
        value: Text (``128x0e + 1o``; a missing multiplicity is 1, empty text is the empty sum), another `Irreps`, an
            `Irrep`, an iterable of (mul, irrep) pairs or of single irreps, or an e3nn-like object with the attributes
            `dim` and `num_irreps` whose text has this form.

    Raises:
        IrrepsError: If `value` is none of these; the message quotes the part that was not understood.
    """

    __slots__ = ()

    def __new__(cls, value: IrrepsLike = ()) -> Irreps:  # noqa: D102
        if isinstance(value, Irreps):
            return value
        if isinstance(value, Irrep):
            return super().__new__(cls, (MulIrrep(1, value),))
        if isinstance(value, str):
            return super().__new__(cls, _parse_terms(value))
        if hasattr(value, "num_irreps") and hasattr(value, "dim"):
            return super().__new__(cls, _parse_terms(str(value)))
        if isinstance(value, Iterable):
            return super().__new__(cls, (_parse_block(block) for block in value))
        raise IrrepsError(
            f"cannot read irreps from {type(value).__name__} {value!r}: expected text such as '128x0e+64x1o', pairs "
            "(mul, irrep), or an e3nn Irreps"
        )

    @classmethod
    def spherical_harmonics(cls, lmax: int) -> Irreps:
        """The irreps of the spherical harmonics of degree 0 to `lmax`: ``1x0e+1x1o+1x2e+...``."""
        return cls((1, (l, (-1) ** l)) for l in range(lmax + 1))  # noqa: E741

    @property
    def dim(self) -> int:
        """Number of elements of a row with these irreps."""
        return sum(block.dim for block in self)

    @property
    def num_irreps(self) -> int:
        """Number of irreps, counted with their multiplicities."""
        return sum(block.mul for block in self)

    def offsets(self) -> tuple[int, ...]:
        """Index of the first element of each block within a row."""
        return tuple(accumulate((block.dim for block in self), initial=0))[:-1]

    def slices(self) -> tuple[slice, ...]:
        """The elements of each block within a row."""
        return tuple(slice(start, start + block.dim) for start, block in zip(self.offsets(), self, strict=True))

    def simplify(self) -> Irreps:
        """Joins neighbouring blocks of the same irrep, and drops those of multiplicity 0, as e3nn does."""
        blocks: list[MulIrrep] = []
        for mul, ir in self:
            if blocks and blocks[-1].ir == ir:
                blocks[-1] = MulIrrep(blocks[-1].mul + mul, ir)
            elif mul > 0:
                blocks.append(MulIrrep(mul, ir))
        return Irreps(blocks)

    def sort(self) -> SortedIrreps:
        """Sorts the blocks by irrep, equal ones in the order that they have, as e3nn does."""
        inv = tuple(sorted(range(len(self)), key=lambda index: self[index].ir))
        p = tuple(sorted(range(len(self)), key=inv.__getitem__))
        return SortedIrreps(Irreps(self[index] for index in inv), p, inv)

    @overload
    def __getitem__(self, index: SupportsIndex) -> MulIrrep: ...
    @overload
    def __getitem__(self, index: slice) -> Irreps: ...
    def __getitem__(self, index: SupportsIndex | slice) -> MulIrrep | Irreps:
        if isinstance(index, slice):
            return Irreps(super().__getitem__(index))
        return super().__getitem__(index)

    def __add__(self, other: IrrepsLike) -> Irreps:  # type: ignore[override]
        return Irreps((*self, *Irreps(other)))

    def __str__(self) -> str:
        return "+".join(map(str, self))

    def __repr__(self) -> str:
        return f"Irreps('{self}')"


class SortedIrreps(NamedTuple):
    """What `Irreps.sort` gives.

    Attributes:
        irreps: The blocks in order.
        p: Where each block has gone.
        inv: Which block has come to each place.
    """

    irreps: Irreps
    p: tuple[int, ...]
    inv: tuple[int, ...]


IrrepLike: TypeAlias = Irrep | str | tuple[int, int] | Any
"""What `Irrep.parse` reads; `Any` stands for e3nn's own objects."""

IrrepsLike: TypeAlias = Irreps | Irrep | str | Iterable[tuple[int, IrrepLike] | IrrepLike] | Any
"""What `Irreps` reads; `Any` stands for e3nn's own objects."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_terms(text: str) -> Iterator[MulIrrep]:
    if not text.strip():
        return
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise IrrepsError(
                f"cannot read {term.strip()!r} in irreps {text!r}: expected terms such as '64x1o' (multiplicity, "
                "degree, e or o) joined by '+'"
            )
        mul, degree, parity = match.groups()
        yield MulIrrep(1 if mul is None else int(mul), Irrep._from_text(degree, parity))


def _parse_block(block: Any) -> MulIrrep:
    if isinstance(block, str) or (hasattr(block, "l") and hasattr(block, "p")):
        return MulIrrep(1, Irrep.parse(block))
    try:
        mul, ir = block
    except (TypeError, ValueError):
        raise IrrepsError(f"cannot read irreps block {block!r}: expected a pair (mul, irrep)") from None
    if not _is_int(mul) or mul < 0:
        raise IrrepsError(f"irreps block {block!r}: expected a multiplicity that is an integer >= 0, got {mul!r}")
    return MulIrrep(mul, Irrep.parse(ir))
