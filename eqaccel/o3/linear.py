"""`e3nn.o3.Linear` by eqaccel's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from eqaccel import ops
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.linear import LinearPath, LinearSpec
from eqaccel.families.tensor_product import Instruction, TensorProductSpec
from eqaccel.irreps import Irreps, IrrepsLike
from eqaccel.o3.rows import as_rows, common_shape
from eqaccel.o3.tensor_product import check_class
from eqaccel.o3.weights import Weighted, output_mask, weight_rules


class LinearInstruction(NamedTuple):
    """An entry of `instructions` of a `Linear`, as e3nn has it.

    Attributes:
        i_in: Index of the block that is read; -1 for a bias.
        i_out: Index of the block that is added to.
        path_shape: Shape of its weights, or of its bias.
        path_weight: The factor of its weights.
    """

    i_in: int
    i_out: int
    path_shape: tuple[int, ...]
    path_weight: float


class Linear(Weighted):
    """The map of e3nn's `Linear`: the same arguments, weights, numbers and names in state dicts.

    Args:
        irreps_in: Irreps of the input.
        irreps_out: Irreps of the output.
        f_in: Number of further channels of the input, all of which are mixed; None for none. Then there is `f_out`.
        f_out: Number of further channels of the output.
        internal_weights: Whether the module has weights of its own; by default if they are shared.
        shared_weights: Whether all rows have the same weights; by default they have.
        instructions: Pairs (i_in, i_out) of blocks that are connected; by default all of the same irrep.
        biases: Whether scalars have a bias, or whether each block of the output has one.
        path_normalization: ``element`` or ``path``.

    Attributes:
        instructions: The connections, with final path weights, then the biases.
        weight: (weight_numel,) or (f_in, f_out, weight_numel), a parameter if the module has weights of its own, else
            an empty buffer.
        bias: (bias_numel,) or (f_out, bias_numel), likewise.
        output_mask: (irreps_out.dim,), 1 where something is written.

    Raises:
        IrrepsError: If irreps cannot be read.
        SpecError: If an instruction or a bias does not fit the irreps, or arguments contradict each other.
        UnsupportedError: If there is no kernel for it.
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike,
        *,
        f_in: int | None = None,
        f_out: int | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        instructions: Iterable[tuple[int, int]] | None = None,
        biases: bool | Sequence[bool] | None = False,
        path_normalization: str = "element",
    ) -> None:
        super().__init__()
        irreps = Irreps(irreps_in), Irreps(irreps_out)
        if (f_in is None) != (f_out is None):
            raise SpecError(f"f_in, f_out: expected both or neither, got {f_in} and {f_out}")
        internal, shared = weight_rules(internal_weights, shared_weights, True)
        paths = _paths(*irreps, instructions, path_normalization, 1 if f_in is None else f_in)
        self._set(irreps, [*paths, *_biases(irreps[1], biases)], shared, f_in, f_out)
        self._set_weights(internal, None, None)

    @classmethod
    def from_e3nn(cls, module: Any) -> Linear:
        """The same map as an `e3nn.o3.Linear`, of any version of e3nn, with the very same parameters.

        Args:
            module: The e3nn module.

        Raises:
            SpecError: If it is something else.
        """
        check_class(cls, module, ("Linear",))
        if not hasattr(module, "irreps_in"):
            raise SpecError(
                f"module: expected an e3nn.o3.Linear, got {type(module).__module__}.{type(module).__name__}"
            )
        found = [
            LinearInstruction(*(getattr(i, name) for name in LinearInstruction._fields)) for i in module.instructions
        ]
        linear = cls.__new__(cls)
        nn.Module.__init__(linear)
        # e3nn keeps the numbers of further channels in the shapes of parameters alone.
        weight, bias = module.weight, module.bias
        if weight.numel() == 0:
            _refuse_further_channels(module)
        f_in, f_out = weight.shape[:2] if weight.dim() == 3 else (None, None)
        linear._set(
            (Irreps(module.irreps_in), Irreps(module.irreps_out)), found, bool(module.shared_weights), f_in, f_out
        )
        linear._set_weights(bool(module.internal_weights), weight, bias)
        return linear.to(module.output_mask).train(module.training)

    def forward(
        self,
        features: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        bias: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Maps, differentiable any number of times in all operands.

        Args:
            features: (..., irreps_in.dim) float32 or float64, or (..., f_in, irreps_in.dim).
            weight: In the place of the module's own: of the shape of `weight` if they are shared, else with leading
                dimensions, which are broadcast.
            bias: Likewise.

        Returns:
            (..., irreps_out.dim), or (..., f_out, irreps_out.dim)

        Raises:
            OperandError: If an operand does not fit, or weights are missing (in scripted programs: RuntimeError).
            CompileError: If a kernel does not compile.
        """
        w = self._own_or_given("weight", weight, self.weight, self.weight_numel)
        b = self._own_or_given("bias", bias, self.bias, self.bias_numel)
        if self.f_in > 0:
            z = self._unfolded(self._mapped(self._folded(features), self._folded_weight(w)))
        else:
            z = self._mapped(features, w)
        if self.bias_numel > 0:
            z = z.index_add(-1, self.biased, b.expand(z.size()[:-1] + b.size()[-1:]))
        return z

    def _mapped(self, x: Tensor, w: Tensor) -> Tensor:
        """The map of (..., in) to (..., out) by weights in one row, or in one each."""
        if self.has_rows_of_weights:
            shape = common_shape(x, x, w)
            rows = as_rows(x, shape)
            z = self.kernel(rows, torch.ones_like(rows[:, :1]), as_rows(w, shape))
        else:
            shape = list(x.size()[:-1])
            z = self.kernel(as_rows(x, shape), w.reshape(-1))
        return z.view(shape + [z.size(-1)])  # noqa: RUF005 (TorchScript)

    def _folded(self, x: Tensor) -> Tensor:
        """(..., f_in, in) with the further channels beside those of each block, (..., f_in * in)."""
        return torch.cat([part.flatten(-2) for part in x.split(self.in_sizes, -1)], -1)

    def _unfolded(self, z: Tensor) -> Tensor:
        """(..., f_out * out) as (..., f_out, out): the inverse of what `_folded` does, for the output."""
        parts = z.split([self.f_out * size for size in self.out_sizes], -1)
        return torch.cat([part.unflatten(-1, [self.f_out, -1]) for part in parts], -1)

    def _folded_weight(self, w: Tensor) -> Tensor:
        """Weights (..., f_in, f_out, numel) in the order of the map between all channels, in one dimension."""
        if self.weight_numel == 0:
            return w
        parts: list[Tensor] = []
        for part, mul_in, mul_out in zip(w.split(self.path_sizes, -1), self.muls_in, self.muls_out):  # noqa: B905 (TorchScript)
            parts.append(part.unflatten(-1, [mul_in, mul_out]).transpose(-3, -2).flatten(-4))
        return torch.cat(parts, -1)

    def _own_or_given(self, name: str, given: Optional[Tensor], own: Tensor, numel: int) -> Tensor:  # noqa: UP045
        """The weights or biases that count; `numel` is the last dimension that they must have."""
        if given is None:
            if numel > 0 and not self.internal_weights:
                raise OperandError(f"{name}: expected a tensor, as the module has none of its own, got None")
            return own
        if given.size(-1) != numel:
            raise OperandError(f"{name}: expected a last dimension of {numel}, got shape {list(given.size())}")
        return given

    def _has_weight(self, item: Any) -> bool:
        return bool(item.i_in >= 0)

    def _set(
        self,
        irreps: tuple[Irreps, Irreps],
        instructions: list[LinearInstruction],
        shared: bool,
        f_in: int | None,
        f_out: int | None,
    ) -> None:
        """Sets all but weights and biases."""
        self.irreps_in, self.irreps_out = irreps
        self.instructions = instructions
        self.shared_weights = shared
        self.f_in, self.f_out = f_in or 0, f_out or 0
        paths = [item for item in instructions if item.i_in >= 0 and 0 not in item.path_shape]
        # No list is empty, because TorchScript could not tell what it is a list of.
        self.in_sizes, self.out_sizes = ([block.dim for block in side] or [0] for side in irreps)
        self.muls_in, self.muls_out = ([item.path_shape[side] for item in paths] or [0] for side in (0, 1))
        self.path_sizes = [a * b for a, b in zip(self.muls_in, self.muls_out, strict=True)]
        self.weight_numel = sum(self.path_sizes)
        self.bias_numel = sum(self.irreps_out[item.i_out].dim for item in instructions if item.i_in < 0)
        slices = self.irreps_out.slices()
        biased = [
            place for item in instructions if item.i_in < 0 for place in range(*slices[item.i_out].indices(10**9))
        ]
        self.register_buffer("biased", torch.tensor(biased, dtype=torch.int64), persistent=False)
        widened = [
            Irreps((mul * (f or 1), ir) for mul, ir in side) for side, f in zip(irreps, (f_in, f_out), strict=True)
        ]
        self.has_rows_of_weights = bool(paths) and not shared
        self.kernel = _kernel(*widened, paths, shared) if paths else _Zeros(widened[1].dim)

    def _set_weights(self, internal: bool, weight: Tensor | None, bias: Tensor | None) -> None:
        """Sets weights, biases, and the mask of the output."""
        self.internal_weights = internal
        channels = [(self.f_in, self.f_out), (self.f_out,)] if self.f_in else [(), ()]
        for name, value, numel, more in zip(
            ("weight", "bias"), (weight, bias), (self.weight_numel, self.bias_numel), channels, strict=True
        ):
            self._set_weight(name, value, (*more, numel) if internal and numel else None)
        if bias is None and internal and self.bias_numel:
            nn.init.zeros_(self.bias)
        reached = {item.i_out for item in self.instructions if 0 not in item.path_shape}
        self.register_buffer("output_mask", output_mask(self.irreps_out, reached))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in} -> {self.irreps_out} | {self.weight_numel} weights)"


def _refuse_further_channels(module: Any) -> None:
    """Raises if an e3nn linear map without weights of its own has further channels, whose numbers it does not keep."""
    like = module.output_mask
    operands = (module.irreps_in.dim, module.weight_numel, module.bias_numel)
    try:
        with torch.no_grad():
            module(*(like.new_zeros(1, size) for size in operands))
    except RuntimeError as error:
        raise SpecError(
            "module: expected a Linear without f_in and f_out, or with weights of its own, whose shape tells them; "
            "make an eqaccel.o3.Linear with the same arguments instead"
        ) from error


class _Zeros(nn.Module):
    """The map that has no paths."""

    def __init__(self, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim

    def forward(self, x: Tensor, w: Tensor, y: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """(rows, out_dim) of zeros."""
        return x.new_zeros([x.size(0), self.out_dim])


def _kernel(irreps_in: Irreps, irreps_out: Irreps, paths: list[LinearInstruction], shared: bool) -> nn.Module:
    """What maps rows: a linear map, or where rows have weights of their own a product with a scalar that is one."""
    if shared:
        found = tuple(LinearPath(item.i_in, item.i_out, item.path_weight) for item in paths)
        return ops.Linear(LinearSpec(irreps_in, irreps_out, found))
    # Normalised by components, the product is with the unit, so the variance of a path is the square of its weight.
    couplings = [Instruction(item.i_in, 0, item.i_out, "uvw", True, item.path_weight**2) for item in paths]
    return ops.TensorProduct(TensorProductSpec(irreps_in, "0e", irreps_out, couplings, path_normalization="none"))


def _paths(
    irreps_in: Irreps,
    irreps_out: Irreps,
    pairs: Iterable[tuple[int, int]] | None,
    path_normalization: str,
    f_in: int,
) -> list[LinearInstruction]:
    """The connections, normalised: all inputs of an output element have the same variance together."""
    if path_normalization not in ("element", "path"):
        raise SpecError(f"path_normalization: expected 'element' or 'path', got {path_normalization!r}")
    if pairs is None:
        pairs = [(i, o) for i, (_, a) in enumerate(irreps_in) for o, (_, b) in enumerate(irreps_out) if a == b]
    pairs = list(pairs)
    for number, (i_in, i_out) in enumerate(pairs):
        for name, index, side in (("i_in", i_in, irreps_in), ("i_out", i_out, irreps_out)):
            if not 0 <= index < len(side):
                raise SpecError(
                    f"instruction {number}: expected {name} to be one of the {len(side)} blocks of {side}, got {index}"
                )
        if irreps_in[i_in].ir != irreps_out[i_out].ir:
            raise SpecError(
                f"instruction {number}: expected equal irreps, got {irreps_in[i_in]} -> {irreps_out[i_out]}"
            )
    found = []
    for i_in, i_out in pairs:
        siblings = [source for source, target in pairs if target == i_out]
        inputs = sum(irreps_in[source if path_normalization == "element" else i_in].mul for source in siblings) * f_in
        shape = (irreps_in[i_in].mul, irreps_out[i_out].mul)
        found.append(LinearInstruction(i_in, i_out, shape, (inputs or 1) ** -0.5))
    return found


def _biases(irreps_out: Irreps, biases: bool | Sequence[bool] | None) -> list[LinearInstruction]:
    are_scalars = [ir.l == 0 and ir.p == 1 for _, ir in irreps_out]
    chosen = (
        [bool(biases) and scalar for scalar in are_scalars] if biases is None or isinstance(biases, bool) else biases
    )
    if len(chosen) != len(irreps_out) or any(b and not scalar for b, scalar in zip(chosen, are_scalars, strict=True)):
        raise SpecError(
            f"biases: expected a value for each block of {irreps_out}, True for 0e only, got {list(chosen)}"
        )
    return [LinearInstruction(-1, o, (block.dim,), 1.0) for o, block in enumerate(irreps_out) if chosen[o]]
