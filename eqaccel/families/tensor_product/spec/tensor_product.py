"""`TensorProductSpec`: a tensor product of irreps, validated and resolved into paths."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from eqaccel.errors import OperandError, SpecError, UnsupportedError
from eqaccel.families.tensor_product.spec.e3nn_module import coupling_sign, read_module
from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Instruction, InstructionLike
from eqaccel.families.tensor_product.spec.normalization import path_coefficients
from eqaccel.families.tensor_product.spec.path import Path
from eqaccel.irreps import Irrep, Irreps, IrrepsLike
from eqaccel.wigner import WignerConvention, depends_on_convention, wigner_sign

MAX_DEGREE = 11
"""Largest degree l of an irrep that a path may have; the tables of e3nn 0.4 end there."""

Layout = Literal["mul_ir", "ir_mul"]
"""Order inside a block of irreps: (mul, 2l+1) as in e3nn, or (2l+1, mul)."""

_MAX_CHANNELWISE_DEGREE = 7  # above, edge matrices take too many registers


@dataclass(frozen=True, init=False, repr=False)
class TensorProductSpec:
    """The mathematics of a tensor product x (x) y -> z with weights w, in the sense of `e3nn.o3.TensorProduct`.

    Specs are equal, and have the same digest, when they compute the same: the same irreps, paths and weight layout,
    whichever normalisation led there. Weights are laid out as in e3nn: in the order of the weighted instructions, those
    of each in the shape that its mode says.

    Args:
        irreps_in1: Irreps of x (node features).
        irreps_in2: Irreps of y (edge attributes).
        irreps_out: Irreps of z; blocks that no path writes are zero.
        instructions: Couplings, as `Instruction` or e3nn's tuples.
        shared_weights: Whether w is one row for the whole batch, shape (weight_numel,), rather than one a sample.
        irrep_normalization: ``component``, ``norm`` or ``none``, as in e3nn.
        path_normalization: ``element``, ``path`` or ``none``, as in e3nn.
        in1_var: Variance of each in1 block, default 1.
        in2_var: Variance of each in2 block, default 1.
        out_var: Variance wanted of each out block, default 1.
        convention: Whose signs the coupling tensors have, "e3nn<0.5" or "e3nn>=0.5", which weights were trained with;
            default: that of the e3nn that is installed. Only some paths of odd l1+l2+l3 depend on it.

    Attributes:
        paths: The couplings, in the order of the instructions, without those that have no element (a block of
            multiplicity 0).
        weight_numel: Number of weights in a row of w.
        convention: The convention that the signs of some paths follow; None if no path depends on it.
        bfloat16_weights: Whether float32 kernels read weights that are rounded to bfloat16; see
            `with_bfloat16_weights`.
        layout: Order inside a block of x and z that kernels take; see `with_layout`.
        by_rows: Whether kernels take rows without a graph.

    Raises:
        IrrepsError: If irreps cannot be read.
        SpecError: If an instruction does not fit the irreps, or a normalisation or convention is unknown; or if a path
            depends on the convention, it is not given, and no e3nn is installed.
        UnsupportedError: If an instruction has l > 11.
    """

    irreps_in1: Irreps
    irreps_in2: Irreps
    irreps_out: Irreps
    paths: tuple[Path, ...]
    weight_numel: int
    shared_weights: bool = field(kw_only=True)
    convention: WignerConvention | None = field(kw_only=True, compare=False)  # the coefficients follow from it
    bfloat16_weights: bool = field(kw_only=True, default=False)
    layout: Layout = field(kw_only=True, default="mul_ir")
    by_rows: bool = field(kw_only=True, default=False)

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[InstructionLike],
        *,
        shared_weights: bool = False,
        irrep_normalization: str = "component",
        path_normalization: str = "element",
        in1_var: Iterable[float] | None = None,
        in2_var: Iterable[float] | None = None,
        out_var: Iterable[float] | None = None,
        convention: WignerConvention | str | None = None,
    ) -> None:
        irreps = (Irreps(irreps_in1), Irreps(irreps_in2), Irreps(irreps_out))
        parsed = [Instruction.parse(value, number) for number, value in enumerate(instructions)]
        _validate(irreps, parsed)
        variances = (in1_var, in2_var, out_var)
        coefficients = path_coefficients(irreps, parsed, irrep_normalization, path_normalization, variances)
        chosen = WignerConvention.installed() if convention is None else WignerConvention.parse(convention)
        signs = [wigner_sign(*_degrees(irreps, item), chosen) for item in parsed]
        self._set(irreps, parsed, coefficients, signs, shared_weights)

    @classmethod
    def from_e3nn(cls, module: Any, convention: WignerConvention | str | None = None) -> TensorProductSpec:
        """The spec of an e3nn `TensorProduct`, of any version of e3nn, read by its attributes.

        An e3nn module stores final coefficients (normalisation and square root included), which are taken as they
        are. The signs of coupling tensors are read from the module where it holds them. One made without compiled code
        or on the device "meta" does not: it has those of the e3nn that is installed, which made it.

        Args:
            module: The e3nn module; where its weights are kept does not matter.
            convention: Whose signs the module's coupling tensors have, "e3nn<0.5" or "e3nn>=0.5"; default: as above.

        Raises:
            SpecError: If `module` is not such a module, or its weight_numel does not follow from its instructions; if
                the convention is not that of its coupling tensors; or if a path depends on the convention and nothing
                tells it: there is no buffer, and e3nn is not installed or the module comes from a package.
            UnsupportedError: As for the class.
        """
        source = read_module(module)
        _validate(source.irreps, source.instructions)
        given = None if convention is None else WignerConvention.parse(convention)
        coefficients = [item.path_weight for item in source.instructions]
        signs = [coupling_sign(module, *_degrees(source.irreps, item), given) for item in source.instructions]
        spec = object.__new__(cls)
        spec._set(source.irreps, source.instructions, coefficients, signs, source.shared_weights)
        if spec.weight_numel != source.weight_numel:
            raise SpecError(
                f"module.weight_numel: expected {spec.weight_numel} from its instructions, got {source.weight_numel}"
            )
        return spec

    @classmethod
    def of_coefficients(
        cls,
        irreps: tuple[Irreps, Irreps, Irreps],
        instructions: Sequence[Instruction],
        coefficients: Sequence[float],
        shared_weights: bool,
    ) -> TensorProductSpec:
        """A spec whose paths have the given coefficients, which are those of `Path`; their path weights do not count.

        Args:
            irreps: in1, in2 and out.
            instructions: The couplings.
            coefficients: Of each.
            shared_weights: As for the class.

        Raises:
            SpecError: If an instruction does not fit the irreps.
            UnsupportedError: As for the class.
        """
        _validate(irreps, instructions)
        spec = object.__new__(cls)
        spec._set(irreps, instructions, coefficients, [1] * len(instructions), shared_weights)
        return spec

    @classmethod
    def channelwise(
        cls, irreps_in1: IrrepsLike, irreps_in2: IrrepsLike, irreps_out: IrrepsLike, **options: Any
    ) -> TensorProductSpec:
        """The convolution of MACE and NequIP: an out block of its own for every coupling that is wanted.

        Out blocks are sorted by irrep, then by in1 and in2 block, and so are the weights, as in MACE.

        Args:
            irreps_in1: Irreps of x.
            irreps_in2: Irreps of y.
            irreps_out: The irreps wanted; multiplicities and order do not matter.
            **options: Keyword arguments of the class, `convention` of the signs among them.

        Raises:
            SpecError: If there is no such coupling, or as for the class.
            UnsupportedError: As for the class.
        """
        in1, in2 = Irreps(irreps_in1), Irreps(irreps_in2)
        wanted = {ir for _, ir in Irreps(irreps_out)}
        found: list[tuple[Irrep, int, int]] = sorted(
            (ir, i, j)
            for i, (_, ir1) in enumerate(in1)
            for j, (_, ir2) in enumerate(in2)
            for ir in ir1 * ir2
            if ir in wanted
        )
        if not found:
            raise SpecError(
                f"irreps_out: expected an irrep in the product of {in1} and {in2}, got {Irreps(irreps_out)}"
            )
        out = Irreps((in1[i].mul, ir) for ir, i, _ in found)
        return cls(in1, in2, out, [(i, j, k, "uvu", True) for k, (_, i, j) in enumerate(found)], **options)

    def with_bfloat16_weights(self) -> TensorProductSpec:
        """The same product of weights that are rounded to bfloat16, to nearest, and take half of the memory.

        That is in float32; in float64 weights stay as they are. Everything else is computed in float32. The gradient of
        the rounded weights, in float32, is passed on as that of the weights.

        Raises:
            UnsupportedError: If the product is not channel by channel, or shares its weights, or has none.
        """
        if not self.is_channelwise or self.shared_weights or self.weight_numel == 0:
            raise UnsupportedError(
                f"spec: expected a product of mode uvu with weights of its own for each edge, to keep them in "
                f"bfloat16, got {self!r}; keep them in float32"
            )
        return self._stored(bfloat16_weights=True)

    def with_layout(self, layout: Layout, by_rows: bool = False) -> TensorProductSpec:
        """The same product of rows that are laid out otherwise, which modules ask for.

        Kernels for a GPU of products channel by channel are made for one layout, and for graphs or for rows without;
        others take all of them.

        Args:
            layout: Order inside a block of x and z: "mul_ir" (mul, 2l+1) as in e3nn, or "ir_mul" (2l+1, mul).
            by_rows: Whether kernels are to take rows without a graph, in place of graphs.

        Raises:
            OperandError: If there is no such layout.
        """
        if layout not in get_args(Layout):
            raise OperandError(f"layout: expected 'mul_ir' or 'ir_mul', got {layout!r}. e3nn's layout is 'mul_ir'.")
        return self._stored(layout=layout, by_rows=by_rows)

    def _stored(self, **storage: Any) -> TensorProductSpec:
        """The same product of operands that are stored otherwise."""
        spec = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(spec, name, storage.get(name, getattr(self, name)))
        return spec

    @property
    def x_dim(self) -> int:
        """Number of elements of a row of x."""
        return self.irreps_in1.dim

    @property
    def y_dim(self) -> int:
        """Number of elements of a row of y."""
        return self.irreps_in2.dim

    @property
    def z_dim(self) -> int:
        """Number of elements of a row of z."""
        return self.irreps_out.dim

    @cached_property
    def is_channelwise(self) -> bool:
        """Whether all paths are, as in MACE and NequIP; such products have kernels of their own."""
        degrees = (degree for path in self.paths for degree in (path.l1, path.l2, path.l3))
        return all(path.is_channelwise for path in self.paths) and max(degrees, default=0) <= _MAX_CHANNELWISE_DEGREE

    @property
    def rows_share_weights(self) -> bool:
        """Whether rows of a batch share dense matrices of weights, for which a CPU has kernels of their own."""
        return self.by_rows and self.shared_weights and any(path.has_matrix for path in self.paths)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of everything the spec computes; stable between processes and machines."""
        head = f"{self.irreps_in1}|{self.irreps_in2}|{self.irreps_out}|{self.weight_numel}|{self.shared_weights}"
        rows = [f"{p.in1},{p.in2},{p.out},{p.weight_offset},{p.coefficient.hex()}{_mode(p)}" for p in self.paths]
        storage = ["bfloat16 weights"] if self.bfloat16_weights else []
        storage += [self.layout] if self.layout != "mul_ir" else []
        storage += ["by rows"] if self.by_rows else []
        return hashlib.sha256("\n".join(["eqaccel spec 1", head, *rows, *storage]).encode()).hexdigest()

    def _set(
        self,
        irreps: tuple[Irreps, Irreps, Irreps],
        instructions: Sequence[Instruction],
        coefficients: Sequence[float],
        signs: Sequence[int],
        shared_weights: bool,
    ) -> None:
        """Sets all attributes; a sign is that of a coupling tensor relative to e3nn 0.5."""
        offsets = [blocks.offsets() for blocks in irreps]
        paths: list[Path] = []
        weight_numel = 0
        conventions = set()
        for item, coefficient, sign in zip(instructions, coefficients, signs, strict=True):
            indices = (item.i_in1, item.i_in2, item.i_out)
            block1, block2, block3 = (blocks[i] for blocks, i in zip(irreps, indices, strict=True))
            muls = (block1.mul, block2.mul, block3.mul)
            numel = math.prod(item.mode.weight_shape(*muls))
            if numel == 0:
                continue
            x, y, z = (starts[i] for starts, i in zip(offsets, indices, strict=True))
            weights = weight_numel if item.has_weight else None
            signed = sign * coefficient + 0.0  # never -0.0, which equals 0.0 and has another digest
            mode, irs = _simplest(item.mode, muls), (block1.ir, block2.ir, block3.ir)
            paths.append(Path(*indices, mode, *muls, *irs, x, y, z, weights, signed))
            weight_numel += numel if item.has_weight else 0
            if depends_on_convention(block1.ir.l, block2.ir.l, block3.ir.l):
                conventions.add(WignerConvention.E3NN_0_5 if sign > 0 else WignerConvention.E3NN_0_4)
        if len(conventions) > 1:
            raise UnsupportedError("module: expected coupling tensors with the signs of one version of e3nn, got both")
        mathematics = (*irreps, tuple(paths), weight_numel, bool(shared_weights), next(iter(conventions), None))
        values = (*mathematics, False, "mul_ir", False)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        shared = " (shared)" if self.shared_weights else ""
        signs = "" if self.convention is None else f", signs of {self.convention}"
        return (
            f"TensorProductSpec({self.irreps_in1} (x) {self.irreps_in2} -> {self.irreps_out}, "
            f"{len(self.paths)} paths, {self.weight_numel} weights{self._storage}{shared}{signs})"
        )

    def __str__(self) -> str:
        shared = "shared" if self.shared_weights else "one row a sample"
        signs = "" if self.convention is None else f"; signs of {self.convention}"
        rows = [("path", "", "blocks", "x at", "y at", "z at", "w at", "coefficient")]
        for number, path in enumerate(self.paths):
            weight = "-" if path.weight_offset is None else str(path.weight_offset)
            starts = (str(path.x_offset), str(path.y_offset), str(path.z_offset), weight)
            blocks = f"{path.in1},{path.in2}->{path.out}"
            rows.append((str(number), str(path), blocks, *starts, f"{path.coefficient:.6g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        head = f"{self.irreps_in1} (x) {self.irreps_in2} -> {self.irreps_out}"
        weights = f"weights: {self.weight_numel}{self._storage}, {shared}{signs}; digest {self.digest[:12]}"
        return "\n".join([head, weights, *table])

    @property
    def _storage(self) -> str:
        return " in bfloat16" if self.bfloat16_weights else ""


def _degrees(irreps: tuple[Irreps, Irreps, Irreps], item: Instruction) -> tuple[int, int, int]:
    in1, in2, out = irreps
    return in1[item.i_in1].ir.l, in2[item.i_in2].ir.l, out[item.i_out].ir.l


def _simplest(mode: ConnectionMode, muls: tuple[int, int, int]) -> ConnectionMode:
    """The mode uvu where that is the same: one channel of in2, and one matrix of weights for each channel."""
    of_channels = mode is ConnectionMode.UVUV and muls[1] == 1
    return ConnectionMode.UVU if of_channels or muls == (1, 1, 1) else mode


def _mode(path: Path) -> str:
    return "" if path.is_channelwise else f",{path.mode}"


def _validate(irreps: tuple[Irreps, Irreps, Irreps], instructions: Sequence[Instruction]) -> None:
    """Raises the error of the first instruction that does not fit the irreps, or that is not supported."""
    for number, item in enumerate(instructions):
        blocks = []
        for name, side, i in zip(("in1", "in2", "out"), irreps, (item.i_in1, item.i_in2, item.i_out), strict=True):
            if not 0 <= i < len(side):
                raise SpecError(
                    f"instruction {number}: expected i_{name} to be one of the {len(side)} blocks of irreps_{name} "
                    f"{side}, got {i}"
                )
            blocks.append(side[i])
        (mul1, ir1), (mul2, ir2), (mul3, ir3) = blocks
        coupling = f"{blocks[0]} (x) {blocks[1]} -> {blocks[2]}"
        if ir3 not in ir1 * ir2:
            products = Irreps(ir1 * ir2)
            raise SpecError(f"instruction {number}: {coupling} does not couple, {ir1} (x) {ir2} gives {products}")
        misfit = item.mode.misfit(mul1, mul2, mul3, item.has_weight)
        if misfit is not None:
            raise SpecError(f"instruction {number}: {coupling} in mode {item.mode}: {misfit}")
        if max(ir1.l, ir2.l, ir3.l) > MAX_DEGREE:
            raise UnsupportedError(f"instruction {number}: {coupling}: degrees above {MAX_DEGREE} are not supported")
