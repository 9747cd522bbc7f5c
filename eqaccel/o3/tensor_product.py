"""`e3nn.o3.TensorProduct` by eqaccel's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from eqaccel.errors import OperandError
from eqaccel.families.tensor_product import Instruction, TensorProductSpec
from eqaccel.families.tensor_product.spec.normalization import path_coefficients
from eqaccel.irreps import Irreps, IrrepsLike
from eqaccel.o3.coupling_tensors import PRODUCT, RIGHT, CouplingTensors, coupling_tensors
from eqaccel.o3.instructions import ProductInstruction
from eqaccel.o3.origins import check_class
from eqaccel.o3.rows import ProductRows
from eqaccel.o3.weights import Weighted, output_mask, weight_rules
from eqaccel.wigner import WignerConvention


class TensorProduct(Weighted):
    """The product of e3nn's `TensorProduct`: the same arguments, weights, numbers and names in state dicts.

    Kernels are compiled when they are first needed, so what to compile is not asked for.

    Args:
        irreps_in1: Irreps of x.
        irreps_in2: Irreps of y.
        irreps_out: Irreps of the output; blocks that no instruction writes to are zero.
        instructions: Tuples (i_in1, i_in2, i_out, mode, has_weight) or (..., path_weight), as in e3nn.
        in1_var: Variance of each block of x, default 1.
        in2_var: Variance of each block of y, default 1.
        out_var: Variance wanted of each block of the output, default 1.
        irrep_normalization: ``component`` (default), ``norm`` or ``none``.
        path_normalization: ``element`` (default), ``path`` or ``none``.
        internal_weights: Whether the module has weights of its own; by default if they are shared and there are some.
        shared_weights: Whether all rows have the same weights; by default they have.
        compile_left_right: Accepted as e3nn has it. It says whether state dicts hold the constants of e3nn's program.
        compile_right: The same for those of `right`, which can be called either way.
        normalization: Older name of `irrep_normalization`.
        convention: Whose signs coupling tensors have, "e3nn<0.5" or "e3nn>=0.5"; by default those of the e3nn that is
            installed. Only some paths of odd l1+l2+l3 depend on it.

    Attributes:
        instructions: The couplings, with final path weights and the shapes of their weights.
        weight: (weight_numel,), a parameter if the module has weights of its own, else an empty buffer.
        weight_numel: Number of weights, of all rows or of each.
        output_mask: (irreps_out.dim,), 1 where something is written.
        spec: What is computed.

    Raises:
        IrrepsError: If irreps cannot be read.
        SpecError: If an instruction does not fit the irreps, or arguments contradict each other; or if a path depends
            on the convention, it is not given, and no e3nn is installed.
        UnsupportedError: If there is no kernel for an instruction.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[Sequence[Any] | Instruction],
        in1_var: Iterable[float] | None = None,
        in2_var: Iterable[float] | None = None,
        out_var: Iterable[float] | None = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        compile_left_right: bool = True,
        compile_right: bool = False,
        normalization: str | None = None,
        *,
        convention: WignerConvention | str | None = None,
    ) -> None:
        super().__init__()
        parsed = [Instruction.parse(item, number) for number, item in enumerate(instructions)]
        internal, shared = weight_rules(internal_weights, shared_weights, any(item.has_weight for item in parsed))
        by_irrep, by_path = normalization or irrep_normalization or "component", path_normalization or "element"
        variances = _floats(in1_var), _floats(in2_var), _floats(out_var)
        spec = TensorProductSpec(
            irreps_in1,
            irreps_in2,
            irreps_out,
            parsed,
            shared_weights=shared,
            irrep_normalization=by_irrep,
            path_normalization=by_path,
            in1_var=variances[0],
            in2_var=variances[1],
            out_var=variances[2],
            convention=convention,
        )
        irreps = (spec.irreps_in1, spec.irreps_in2, spec.irreps_out)
        coefficients = path_coefficients(irreps, parsed, by_irrep, by_path, variances)
        programs = {PRODUCT: compile_left_right, RIGHT: compile_right}
        self._set(spec, _instructions(irreps, parsed, coefficients), programs)
        has_own = internal and spec.weight_numel > 0
        self._set_weights(internal, None, (spec.weight_numel,) if has_own else None)

    @classmethod
    def from_e3nn(cls, module: Any, convention: WignerConvention | str | None = None) -> Any:
        """The same product as an e3nn module, of any version of e3nn, with the very same parameters.

        Args:
            module: An `e3nn.o3` module of this class, or of one that derives from it.
            convention: As for `TensorProductSpec.from_e3nn`, which reads it from the module where it can.

        Raises:
            SpecError: If it is a module of another class, or as for `TensorProductSpec.from_e3nn`.
            UnsupportedError: As for the class.
        """
        check_class(cls, module, ("TensorProduct", "TensorSquare"))
        spec = TensorProductSpec.from_e3nn(module, convention)
        fields = ProductInstruction._fields
        found = [ProductInstruction(*(getattr(item, name) for name in fields)) for item in module.instructions]
        product = cls.__new__(cls)
        nn.Module.__init__(product)
        product._set(spec, found, {child: _has_buffers(module._modules.get(child)) for child in (PRODUCT, RIGHT)})
        product._set_weights(bool(module.internal_weights), module.weight, None)
        return product.to(module.output_mask).train(module.training)

    def forward(self, x: Tensor, y: Tensor, weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """Multiplies, differentiable any number of times in all operands.

        Args:
            x: (..., irreps_in1.dim) float32 or float64.
            y: (..., irreps_in2.dim), same dtype and device; leading dimensions are broadcast.
            weight: In the place of the module's own: (weight_numel,) if they are shared, else (..., weight_numel), of
                which leading dimensions are broadcast too; or a list of tensors of the shapes of the instructions.

        Returns:
            (..., irreps_out.dim)

        Raises:
            OperandError: If an operand does not fit, or weights are missing (in scripted programs: RuntimeError).
            CompileError: If a kernel does not compile.
        """
        return self.kernel(x, y, self._get_weights(weight))

    @torch.jit.export
    def right(self, y: Tensor, weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """What is left when y is known: a matrix for each row of y, by which x is multiplied.

        Args:
            y: (..., irreps_in2.dim).
            weight: As `forward` takes it.

        Returns:
            (..., irreps_in1.dim, irreps_out.dim)
        """
        unit = torch.eye(self._in1_dim, dtype=y.dtype, device=y.device)
        w = self._get_weights(weight)
        return self.kernel(unit, y.unsqueeze(-2), w if self.shared_weights else w.unsqueeze(-2))

    def _get_weights(self, weight: Optional[Tensor]) -> Tensor:  # noqa: UP045 (TorchScript)
        if not torch.jit.is_scripting():
            weight = self._joined(weight)
        if weight is None:
            if self.weight_numel > 0 and not self.internal_weights:
                raise OperandError("weight: expected weights, as the module has none of its own, got None")
            return self.weight
        fits = weight.dim() == 1 if self.shared_weights else weight.dim() > 1
        if not fits or weight.size(-1) != self.weight_numel:
            leading = "" if self.shared_weights else "..., "
            raise OperandError(f"weight: expected shape ({leading}{self.weight_numel}), got {list(weight.size())}")
        return weight

    @torch.jit.unused
    def _joined(self, weight: Any) -> Optional[Tensor]:  # noqa: UP045 (TorchScript)
        """Weights in one tensor; e3nn takes a list of those of each instruction, too."""
        if not isinstance(weight, (list, tuple)):
            return weight  # type: ignore[no-any-return]
        shapes = [item.path_shape for item in self.instructions if item.has_weight]
        leading = () if self.shared_weights else (-1,)
        parts = [w.reshape(*leading, math.prod(shape)) for w, shape in zip(weight, shapes, strict=True)]
        return torch.cat(parts, -1)

    def _set(
        self, spec: TensorProductSpec, instructions: list[ProductInstruction], has_constants: Mapping[str, bool]
    ) -> None:
        """Sets all but the weights; children that hold constants are named as e3nn's."""
        self.spec = spec
        self.irreps_in1, self.irreps_in2, self.irreps_out = spec.irreps_in1, spec.irreps_in2, spec.irreps_out
        self._in1_dim = spec.x_dim  # TorchScript does not know irreps
        self.instructions = instructions
        self.weight_numel = spec.weight_numel
        self.shared_weights = spec.shared_weights
        self.kernel = ProductRows(spec)
        irreps = (self.irreps_in1, self.irreps_in2, self.irreps_out)
        for child, has in has_constants.items():
            constants = coupling_tensors(child, irreps, instructions, spec) if has else CouplingTensors()
            self.add_module(child, constants)

    def _set_weights(self, internal: bool, weight: Tensor | None, shape: tuple[int, ...] | None) -> None:
        """Sets the weights and the mask of the output."""
        self.internal_weights = internal
        self._set_weight("weight", weight, shape)
        reached = {item.i_out for item in self.instructions if item.path_weight != 0 and 0 not in item.path_shape}
        self.register_buffer("output_mask", output_mask(self.irreps_out, reached))

    def __repr__(self) -> str:
        operands = f"{self.irreps_in1.simplify()} x {self.irreps_in2.simplify()}"
        return f"{type(self).__name__}({operands} -> {self._result()})"

    def _result(self) -> str:
        paths = sum(math.prod(item.path_shape) for item in self.instructions)
        return f"{self.irreps_out.simplify()} | {paths} paths | {self.weight_numel} weights"


def _has_buffers(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.buffers())


def _floats(values: Iterable[float] | None) -> list[float] | None:
    return None if values is None else [float(value) for value in values]


def _instructions(
    irreps: tuple[Irreps, Irreps, Irreps], parsed: Sequence[Instruction], coefficients: Sequence[float]
) -> list[ProductInstruction]:
    found = []
    for item, coefficient in zip(parsed, coefficients, strict=True):
        indices = (item.i_in1, item.i_in2, item.i_out)
        muls = [side[i].mul for side, i in zip(irreps, indices, strict=True)]
        shape = item.mode.weight_shape(*muls)
        found.append(ProductInstruction(*indices, str(item.mode), item.has_weight, coefficient, shape))
    return found
