"""What a report says: a row for each module that was replaced or left, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from eqaccel.patches.precision import LowPrecision, precision_note


@dataclass(frozen=True)
class ReportRow:
    """One line of a `Report`.

    Attributes:
        path: Where the module is in the model, e.g. `interactions.0.conv_tp`.
        kind: Class of the module the model came with.
        accelerated: Whether eqaccel replaced it, by something that is faster on the device that the model is on.
        note: What replaced it, or why it was left.
        paths: Number of paths of the tensor product, if it is one.
        weight_numel: Weights per edge of the tensor product, if it is one.
        mul: Distinct multiplicities of its first input, largest first.
        idle: Whether it was replaced, but runs its own code on the device that the model is on, where eqaccel has
            nothing faster.
    """

    path: str
    kind: str
    accelerated: bool
    note: str
    paths: int | None = None
    weight_numel: int | None = None
    mul: tuple[int, ...] = ()
    idle: bool = False

    def cells(self) -> tuple[str, ...]:
        """The row as text, a cell per column of the printed table."""
        numbers = ["" if n is None else str(n) for n in (self.paths, self.weight_numel)]
        mark = "yes" if self.accelerated else "no"
        return (self.path, self.kind, mark, *numbers, ",".join(map(str, self.mul)), self.note)


@dataclass(frozen=True)
class Report:
    """What eqaccel replaced in a model, what it left, and why.

    `str()` gives, after a line or two, a table: what was accelerated, then what was left; rows that are idle share its
    last line.

    Attributes:
        model: Class of the model.
        rows: A row for each module that eqaccel looked at.
        unverified: Paths of patched models that were not compared, as wholes, with what they had been.
        low_precision: What is less precise than the model was, see `patch`.
    """

    model: str
    rows: tuple[ReportRow, ...]
    unverified: tuple[str, ...] = ()
    low_precision: tuple[LowPrecision, ...] = ()

    @property
    def accelerated(self) -> int:
        """Number of modules that eqaccel replaced."""
        return sum(row.accelerated for row in self.rows)

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("module", "kind", "accelerated", "paths", "weights", "mul", "note")]
        shown = [row for row in self.rows if not row.idle]
        table += [row.cells() for row in sorted(shown, key=lambda row: not row.accelerated)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        idle = Counter(row.kind for row in self.rows if row.idle)
        if idle:
            kinds = ", ".join(f"{count} {kind}" for kind, count in idle.items())
            lines.append(f"{idle.total()} more run as they came, where nothing is faster on this device: {kinds}")
        if self.unverified:
            which = ", ".join(path for path in self.unverified if path)
            where = f" ({which})" if which else ""
            lines.append(f"not verified as a whole{where}: no example was given, or verify=False")
        head = [f"{self.model}: {self.accelerated} modules accelerated"]
        if self.low_precision:
            note = precision_note(self.low_precision)
            head.append(f"low precision: {note}; docs/precision.md says what that does to results")
        return "\n".join([*head, *lines])
