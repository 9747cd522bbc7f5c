"""How the lanes of a GPU's warp mix pairs of channels by a dense matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

WARP = 32
"""Threads of a GPU block."""


@dataclass(frozen=True)
class DenseMixing:
    """The pairs of a path, by a team of lanes for each edge.

    Attributes:
        lanes: Of a team; one if a lane has all channels of some pairs, and mixes these as a whole.
        channels: Of the output that a lane has at a time.
        together: Pairs that are mixed at a time, whose sums over channels take few shuffles.
        pairs: Those that the code is for: of the path, or, where weights come in chunks, any number that leaves as many
            pairs behind the last `together` ones, so that paths share code.
        tile: Pairs that are coupled at a time.
        chunk: Pairs whose weights are copied to shared memory at a time; 0 if weights are read where they are.
    """

    lanes: int
    channels: int
    together: int
    pairs: int
    tile: int
    chunk: int = 0

    @property
    def leaves_pairs(self) -> bool:
        """Whether there are fewer pairs at last than are mixed together."""
        return self.pairs % self.together > 0


def dense_mixing(
    pairs: int, mul3: int, d3: int, *, least: int, span: int, tangents: bool, chunk_weights: int = 0
) -> DenseMixing:
    """The mixing of a path on a GPU.

    Args:
        pairs: Pairs of channels.
        mul3: Channels of the output.
        d3: Components of the output.
        least: Lanes that there are for an edge; a team has as many if weights are copied, else it may have more.
        span: Elements of the couplings of an edge that are in shared memory at a time.
        tangents: Whether couplings and weights have tangents, as in double backward.
        chunk_weights: Weights of an edge that are copied at a time, or a few more; 0 if they are not.
    """
    lanes = least if chunk_weights else _lanes(mul3, d3, least)
    together = 8 if d3 == 1 else 4 if d3 <= 5 else 2 if d3 <= 8 else 1
    if tangents and together > 1:
        together //= 2
    while together > 1 and 0 < chunk_weights < together * mul3:
        together //= 2
    room = span // d3
    chunk = min(_multiple(chunk_weights // mul3, together), _multiple(room, together), pairs) if chunk_weights else 0
    tile = pairs if pairs <= room else _multiple(room, chunk or together)
    of_code = together + pairs % together if chunk else pairs
    return DenseMixing(lanes, _channels(mul3, d3, lanes), together, of_code, tile, chunk)


def whole_pairs(pairs: int, mul3: int, d3: int, *, lanes: int, span: int, chunk_weights: int) -> DenseMixing:
    """The mixing of a path on a GPU, backward, each pair by a lane; weights are copied.

    Args:
        pairs: Pairs of channels.
        mul3: Channels of the output, fewer than lanes.
        d3: Components of the output.
        lanes: Lanes that there are for an edge, which take as many pairs at a time.
        span: Elements of the couplings of an edge that are in shared memory at a time.
        chunk_weights: Weights of an edge that are copied at a time, or a few more.
    """
    room = span // d3
    whole = _multiple(room, lanes) if room >= lanes else room
    chunk = min(_multiple(chunk_weights // mul3, lanes), whole, pairs)
    return DenseMixing(1, mul3, 1, 1, pairs if pairs <= room else _multiple(room, chunk), chunk)


def share_code(mixings: Sequence[DenseMixing], outputs: Sequence[tuple[int, int]]) -> tuple[DenseMixing, ...]:
    """The same mixings, where weights come in chunks with the code of one that leaves pairs behind, if one is alike.

    Where there are many instructions, a GPU waits for them.

    Args:
        mixings: Of all shapes.
        outputs: Their channels and components.
    """
    kinds = [(m.lanes, m.channels, m.together, *output) for m, output in zip(mixings, outputs, strict=True)]
    pairs: dict[tuple[int, ...], int] = {}
    for kind, mixing in zip(kinds, mixings, strict=True):
        if mixing.chunk and mixing.leaves_pairs:
            pairs[kind] = mixing.pairs
    return tuple(
        mixing if mixing.leaves_pairs or not mixing.chunk else replace(mixing, pairs=pairs.get(kind, mixing.pairs))
        for kind, mixing in zip(kinds, mixings, strict=True)
    )


def lanes_of_all(mul3: int, d3: int) -> int:
    """Lanes, a power of two, that have all channels of the output at a time; more than a warp's if it has too few."""
    lanes = 4
    while lanes * _most_channels(d3) < mul3:
        lanes *= 2
    return lanes


def _multiple(most: int, of: int) -> int:
    """The largest multiple that is no larger, one at least."""
    return max(most // of, 1) * of


def _most_channels(d3: int) -> int:
    """Of a lane, so that its sums are in registers."""
    return 4 if d3 <= 4 else 16 // d3 if d3 <= 16 else 1


def _channels(mul3: int, d3: int, lanes: int) -> int:
    return min(-(-mul3 // lanes), _most_channels(d3))


def _lanes(mul3: int, d3: int, least: int) -> int:
    """Few channels are missing to a full team, and few lanes share them."""
    lanes = [least << n for n in range((WARP // least).bit_length())]
    room = {n: n * _channels(mul3, d3, n) for n in lanes}
    return min((n for n in lanes if room[n] >= mul3), key=lambda n: (room[n], n), default=WARP)
