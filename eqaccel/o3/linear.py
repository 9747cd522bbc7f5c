"""`e3nn.o3.Linear` by eqaccel's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from eqaccel.errors import OperandError, SpecError
from eqaccel.irreps import Irreps, IrrepsLike
from eqaccel.o3.linear_rows import LinearInstruction, LinearRows
from eqaccel.o3.origins import check_class
from eqaccel.o3.weights import Weighted, output_mask, weight_rules


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

    if TYPE_CHECKING:  # TorchScript does not understand this
        bias: Tensor

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
                dimensions, whatever their shape: a row for each of `features`, one after another, or one for all.
            bias: In the place of the module's own, of the shape of `bias`.

        Returns:
            (..., irreps_out.dim), or (..., f_out, irreps_out.dim)

        Raises:
            OperandError: If an operand does not fit, or weights are missing (in scripted programs: RuntimeError).
            CompileError: If a kernel does not compile.
        """
        w = self._own_or_given("weight", weight, self.weight, self.weight_numel)
        b = self._own_or_given("bias", bias, self.bias, self.bias_numel)
        return self.kernel(features, w, b)

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
        self.kernel = LinearRows(*irreps, instructions, shared, f_in, f_out)
        self.weight_numel, self.bias_numel = self.kernel.weight_numel, self.kernel.bias_numel

    def _set_weights(self, internal: bool, weight: Tensor | None, bias: Tensor | None) -> None:
        """Sets weights, biases, and the mask of the output."""
        self.internal_weights = internal
        f_in, f_out = self.kernel.f_in, self.kernel.f_out
        channels = [(f_in, f_out), (f_out,)] if f_in else [(), ()]
        numels, fills = (self.weight_numel, self.bias_numel), (torch.randn, torch.zeros)
        for name, value, numel, more, fill in zip(
            ("weight", "bias"), (weight, bias), numels, channels, fills, strict=True
        ):
            self._set_weight(name, value, (*more, numel) if internal and numel else None, fill)
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
    are_scalars = [ir.is_scalar() for _, ir in irreps_out]
    chosen = (
        [bool(biases) and scalar for scalar in are_scalars] if biases is None or isinstance(biases, bool) else biases
    )
    if len(chosen) != len(irreps_out) or any(b and not scalar for b, scalar in zip(chosen, are_scalars, strict=True)):
        raise SpecError(
            f"biases: expected a value for each block of {irreps_out}, True for 0e only, got {list(chosen)}"
        )
    return [LinearInstruction(-1, o, (block.dim,), 1.0) for o, block in enumerate(irreps_out) if chosen[o]]
