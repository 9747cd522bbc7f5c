"""Irreducible representations of O(3) and direct sums of them, written and read as e3nn does (``128x0e+64x1o``).

Source of the notation: e3nn (https://docs.e3nn.org), whose objects are accepted wherever irreps are, without importing
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
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

    Args:
        l: The degree; or, without `p`, whatever `parse` reads.
        p: The parity.

    Attributes:
        l: Degree, 0, 1, 2, ...
        p: Parity, +1 (even, ``e``) or -1 (odd, ``o``).

    Raises:
        IrrepsError: If the degree is negative or the parity is not +1 or -1.
    """

    __slots__ = ()

    def __new__(cls, l: Any, p: int | None = None) -> Irrep:  # noqa: D102, E741
        if p is None and not _is_int(l):
            return cls.parse(l)
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
        if _is_irrep(irrep):
            return cls(int(irrep.l), int(irrep.p))
        if isinstance(value, tuple) and len(value) == 2:
            return cls(*value)
        raise IrrepsError(f"cannot read irrep {value!r}: expected text such as '1o', a pair (l, p), or an e3nn Irrep")

    @classmethod
    def _from_text(cls, degree: str, parity: str) -> Irrep:
        l = int(degree)  # noqa: E741
        return cls(l, {"e": 1, "o": -1, "y": (-1) ** l}[parity])

    @classmethod
    def iterator(cls, lmax: int | None = None) -> Iterator[Irrep]:
        """Iterates over the irreps up to a degree, or all of them: by degree, that of the harmonic first."""
        for l in count() if lmax is None else range(lmax + 1):  # noqa: E741
            yield from (cls(l, (-1) ** l), cls(l, -((-1) ** l)))

    @property
    def dim(self) -> int:
        """Number of components, 2l+1."""
        return 2 * self.l + 1

    def is_scalar(self) -> bool:
        """Whether it is ``0e``, which no rotation or inversion changes."""
        return self == (0, 1)

    def __mul__(self, other: IrrepLike) -> Iterator[Irrep]:  # type: ignore[override]
        """Iterates over the irreps in the product of two, by increasing degree."""
        ir = Irrep.parse(other)
        return (Irrep(l, self.p * ir.p) for l in range(abs(self.l - ir.l), self.l + ir.l + 1))  # noqa: E741

    def __rmul__(self, mul: int) -> Irreps:  # type: ignore[override]
        return Irreps([(mul, self)])

    def __add__(self, other: IrrepsLike) -> Irreps:  # type: ignore[override]
        return Irreps(self) + other

    def __str__(self) -> str:
        return f"{self.l}{'e' if self.p == 1 else 'o'}"

    __repr__ = __str__


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

    def __repr__(self) -> str:
        return str(self)


class Irreps(tuple[MulIrrep, ...]):
    """A direct sum of irreps: an immutable sequence of `MulIrrep` blocks, in order, never merged or sorted.

    Args:
        value: Text (``128x0e + 1o``; a missing multiplicity is 1, empty text is the empty sum, as None is), another
            `Irreps`, an `Irrep`, an iterable of (mul, irrep) pairs or of single irreps, or an e3nn-like object with the
            attributes `dim` and `num_irreps` whose text has this form.

    Raises:
        IrrepsError: If `value` is none of these; the message quotes the part that was not understood.
    """

    __slots__ = ()

    def __new__(cls, value: IrrepsLike | None = ()) -> Irreps:  # noqa: D102
        if isinstance(value, Irreps):
            return value
        if value is None:
            return super().__new__(cls)
        if _is_irrep(value):
            return super().__new__(cls, (MulIrrep(1, Irrep.parse(value)),))
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
    def spherical_harmonics(cls, lmax: int, p: int = -1) -> Irreps:
        """The irreps of the spherical harmonics of degree 0 to `lmax`: ``1x0e+1x1o+1x2e+...``; all even if `p` is 1."""
        return cls((1, (l, p**l)) for l in range(lmax + 1))  # noqa: E741

    @property
    def dim(self) -> int:
        """Number of elements of a row with these irreps."""
        return sum(block.dim for block in self)

    @property
    def num_irreps(self) -> int:
        """Number of irreps, counted with their multiplicities."""
        return sum(block.mul for block in self)

    @property
    def ls(self) -> list[int]:
        """The degree of each irrep, counted with its multiplicity."""
        return [block.ir.l for block in self for _ in range(block.mul)]

    @property
    def lmax(self) -> int:
        """The largest degree.

        Raises:
            IrrepsError: If there is no irrep.
        """
        degrees = self.ls
        if not degrees:
            raise IrrepsError(f"lmax: expected at least one irrep, got '{self}'")
        return max(degrees)

    def count(self, ir: IrrepLike) -> int:  # type: ignore[override]
        """The multiplicity of an irrep, of all its blocks together."""
        wanted = Irrep.parse(ir)
        return sum(block.mul for block in self if block.ir == wanted)

    def offsets(self) -> tuple[int, ...]:
        """Index of the first element of each block within a row."""
        return tuple(accumulate((block.dim for block in self), initial=0))[:-1]

    def slices(self) -> list[slice]:
        """The elements of each block within a row."""
        return [slice(start, start + block.dim) for start, block in zip(self.offsets(), self, strict=True)]

    @property
    def slice_by_mul(self) -> SliceByMul:
        """The irreps counted with their multiplicities: ``irreps.slice_by_mul[1:3]`` are the second and the third."""
        return SliceByMul(self)

    def simplify(self) -> Irreps:
        """Joins neighbouring blocks of the same irrep, and drops those of multiplicity 0, as e3nn does."""
        blocks: list[MulIrrep] = []
        for mul, ir in self:
            if blocks and blocks[-1].ir == ir:
                blocks[-1] = MulIrrep(blocks[-1].mul + mul, ir)
            elif mul > 0:
                blocks.append(MulIrrep(mul, ir))
        return Irreps(blocks)

    def remove_zero_multiplicities(self) -> Irreps:
        """Drops the blocks of multiplicity 0."""
        return Irreps(block for block in self if block.mul > 0)

    def filter(self, keep: Chosen | None = None, *, drop: Chosen | None = None, lmax: int | None = None) -> Irreps:
        """The blocks of some irreps; one of the arguments says which, or none for all.

        Args:
            keep: Irreps to keep, whatever their multiplicities; or a function of a block that says whether to.
            drop: Irreps to leave out, or a function.
            lmax: The largest degree to keep.

        Raises:
            IrrepsError: If there is more than one argument.
        """
        if sum(argument is not None for argument in (keep, drop, lmax)) > 1:
            raise IrrepsError("filter: expected one of keep, drop and lmax, got several")
        if lmax is not None:
            return Irreps(block for block in self if block.ir.l <= lmax)
        if keep is None and drop is None:
            return self
        is_chosen = _chooser(drop if keep is None else keep)
        return Irreps(block for block in self if bool(is_chosen(block)) == (keep is not None))

    def regroup(self) -> Irreps:
        """Sorts the blocks and joins those of the same irrep."""
        return self.sort().irreps.simplify()

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

    def __contains__(self, ir: object) -> bool:
        """Whether an irrep has a block, which may be of multiplicity 0."""
        wanted = Irrep.parse(ir)
        return any(block.ir == wanted for block in self)

    def __add__(self, other: IrrepsLike) -> Irreps:  # type: ignore[override]
        return Irreps((*self, *Irreps(other)))

    def __mul__(self, times: SupportsIndex) -> Irreps:
        """All blocks so many times, one after another."""
        return Irreps(super().__mul__(times))

    __rmul__ = __mul__

    def __str__(self) -> str:
        return "+".join(map(str, self))

    __repr__ = __str__


@dataclass(frozen=True)
class SliceByMul:
    """What `Irreps.slice_by_mul` gives.

    Attributes:
        irreps: The irreps that are sliced.
    """

    irreps: Irreps

    def __getitem__(self, index: slice) -> Irreps:
        """The irreps of a slice.

        Raises:
            IrrepsError: If it is no slice, or one with a step.
        """
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise IrrepsError(f"slice_by_mul: expected a slice without a step, got {index!r}")
        start, stop, _ = index.indices(self.irreps.num_irreps)
        ends = accumulate(block.mul for block in self.irreps)
        parts = [(min(stop, end) - max(start, end - mul), ir) for (mul, ir), end in zip(self.irreps, ends, strict=True)]
        return Irreps((mul, ir) for mul, ir in parts if mul > 0)


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

Chosen: TypeAlias = IrrepsLike | Callable[[MulIrrep], bool]
"""What `Irreps.filter` keeps or drops."""


def _chooser(chosen: Any) -> Callable[[MulIrrep], bool]:
    if callable(chosen):
        return chosen
    if isinstance(chosen, MulIrrep) or _is_irrep(chosen):
        chosen = [chosen]
    elif isinstance(chosen, str):
        chosen = Irreps(chosen)
    # In a list a pair of numbers is a degree and a parity, as in e3nn.
    wanted = {Irrep.parse(getattr(item, "ir", item)) for item in chosen}
    return lambda block: block.ir in wanted


def _is_irrep(value: object) -> bool:
    """Whether it is an irrep, of eqaccel or of e3nn."""
    return hasattr(value, "l") and hasattr(value, "p")


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
    if isinstance(block, str) or _is_irrep(block):
        return MulIrrep(1, Irrep.parse(block))
    try:
        mul, ir = block
    except (TypeError, ValueError):
        raise IrrepsError(f"cannot read irreps block {block!r}: expected a pair (mul, irrep)") from None
    if not _is_int(mul) or mul < 0:
        raise IrrepsError(f"irreps block {block!r}: expected a multiplicity that is an integer >= 0, got {mul!r}")
    return MulIrrep(mul, Irrep.parse(ir))
