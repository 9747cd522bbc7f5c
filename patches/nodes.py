"""Which node-wise modules of a model are replaced by their dense forms, and why others are left.

The forms here are those of e3nn's modules: linear maps, spherical harmonics, and the gate. A kind of model adds those
of modules that only its library has, or that only its models use in a special way. A form is compared with its module
on a few random rows before it is put to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from eqaccel.errors import CompileError, PatchError, VerificationError
from eqaccel.o3 import Linear, SphericalHarmonics, TensorProduct
from eqaccel.o3.origins import forward_owner, full_name, is_of_e3nn
from eqaccel.ops import Gate
from eqaccel.ops.library import translate
from eqaccel.patches import dense
from eqaccel.patches.coefficients import sharpen
from eqaccel.patches.copying import widened
from eqaccel.patches.gate import FusedGate, gate_spec
from eqaccel.patches.harmonics import PolynomialHarmonics, polynomial_of
from eqaccel.patches.linear import AttributeProduct, LinearMap, attribute_product, linear_map
from eqaccel.patches.replacement import Replacement, Swap, preview
from eqaccel.patches.report import ReportRow
from eqaccel.patches.rounding import ROUNDING, distance
from eqaccel.patches.snapshot import ADDED
from eqaccel.patches.torch_state import default_dtype, first_not_finite, model_device

OWN = (Linear, SphericalHarmonics, TensorProduct)
"""Classes of eqaccel's own that are named as those of e3nn."""

Form = tuple[type[Replacement], torch.nn.Module, tuple[Any, ...]]
"""What a module becomes, what that computes with, and operands to compare both forms on: tensors, or trees of them."""


@dataclass(frozen=True)
class NodeForm:
    """How the modules of one class are replaced.

    Attributes:
        attribute: What a module of this class has, unlike others of the same name, such as torch.nn.Linear.
        build: Takes the model and the module; gives the form, or raises `PatchError` if the module has none.
    """

    attribute: str
    build: Callable[[torch.nn.Module, Any], Form]


NOT_YET = "left: not patched yet, eqaccel.patch(model) replaces it"
"""What a report says of a module that a patch replaces."""

NodeForms = Mapping[str, NodeForm]
"""The forms of a kind of model, by the names of classes."""


def node_swaps(model: torch.nn.Module, forms: NodeForms) -> Iterator[Swap]:
    """The replacements of node-wise modules that have a dense form; the model is not changed.

    Raises:
        VerificationError: If a form gives other numbers than its module.
        CompileError: If a kernel does not compile.
        MissingCompilerError: If there is no compiler for it.
    """
    for path, parent, name, module in _modules(model, forms):
        try:
            yield Swap(parent, name, *build_form(model, module, forms))
        except VerificationError as error:
            raise VerificationError(f"{path}: {error}") from error
        except PatchError:  # the report says why
            continue


def node_rows(model: torch.nn.Module, forms: NodeForms) -> Iterator[ReportRow]:
    """A line of a report for each node-wise module, replaced or not; some replacements change nothing on a CPU."""
    prefers_dense = dense.prefers_dense(torch.empty(0, device=model_device(model)))
    for path, _, _, module in _modules(model, forms):
        accelerated = isinstance(module, Replacement) and (prefers_dense or module.gains_on_cpu)
        if isinstance(module, Replacement):
            note = module.note + ("" if accelerated else "; left as it was on the CPU")
        else:
            try:
                build_form(model, module, forms)
                note = NOT_YET
            except (PatchError, CompileError) as error:
                note = f"left: {error}"
        idle = isinstance(module, Replacement) and not accelerated
        yield ReportRow(path, type(module).__name__, accelerated, note, idle=idle)


def _modules(model: torch.nn.Module, forms: NodeForms) -> Iterator[tuple[str, torch.nn.Module, str, Any]]:
    """The node-wise modules that a model came with: path, owner, attribute of the owner, module."""
    for prefix, parent in model.named_modules():
        if isinstance(parent, (Replacement, torch.jit.ScriptModule)):
            continue
        for name, module in parent.named_children():
            if _class_with_form(module, forms):
                yield f"{prefix}.{name}".lstrip("."), parent, name, module


def _class_with_form(module: Any, forms: NodeForms) -> str:
    """Name of the class of a module that there is a form for, or an empty string."""
    if isinstance(module, OWN):
        return ""
    name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in forms), "")
    return name if name and hasattr(module, forms[name].attribute) else ""


def derives_from_e3nn(module: torch.nn.Module) -> bool:
    """Whether the class of a module, or one that it derives from, is of e3nn."""
    return any(map(is_of_e3nn, type(module).__mro__))


def build_form(model: torch.nn.Module, module: Any, forms: NodeForms) -> tuple[type[Replacement], torch.nn.Module]:
    """What a module becomes, and what that computes with.

    Raises:
        PatchError: If it has no dense form.
        VerificationError: If it has one that gives other numbers.
        CompileError: If a kernel of it does not compile.
    """
    name = _class_with_form(module, forms)
    owner = forward_owner(type(module))
    if owner.__name__ not in (name, "TensorProduct") or (derives_from_e3nn(module) and not is_of_e3nn(owner)):
        raise PatchError(f"its forward method is that of {full_name(owner)}, not of e3nn's {name}")
    if ADDED in vars(module) or ADDED in module._modules:
        raise PatchError(f"it has an attribute `{ADDED}` of its own")
    if (dtype := _dtype(model, module)) not in (torch.float32, torch.float64):
        raise PatchError(f"its numbers are {dtype}, and kernels take torch.float32 or torch.float64")
    try:
        with default_dtype(torch.float64):
            replacement, added, examples = forms[name].build(model, module)
            twin = preview(module, replacement, added)
            twin.check_children(twin.snapshot())
            _compare(twin, examples)
    except PatchError:
        raise
    except (AssertionError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        meant = translate(error)
        if isinstance(meant, CompileError):
            raise meant from error
        # A module of another version of e3nn may look different; the model works with it as it is.
        raise PatchError(f"its structure is unknown here ({type(error).__name__}: {error})") from error
    return replacement, added


def _dtype(model: torch.nn.Module, module: torch.nn.Module) -> torch.dtype:
    """The type of numbers of a module; of its model, if it has none of its own."""
    tensors = chain.from_iterable((*owner.parameters(), *owner.buffers()) for owner in (module, model))
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def _compare(replacement: Any, examples: tuple[Any, ...]) -> None:
    """Compares both forms on examples, in float64 and with the same exact coefficients.

    Raises:
        PatchError: If the module gives NaN.
        VerificationError: If they differ by more than rounding.
    """
    unprofiled = torch.jit.optimized_execution(False)  # e3nn scripts its parts; specialising them here would be slow
    with torch.inference_mode(False), torch.no_grad(), unprofiled:
        twin = widened(replacement)
        sharpen(twin)
        twin.share_coefficients(twin, tree_flatten(examples)[0][0].dtype)
        # Modules may write into what they are given, so each call has containers of its own.
        expected, values = (_tensors(form(*tree_map(_wide, examples))) for form in (twin.plain_forward, twin.dense))
    if len(expected) != len(values):
        raise VerificationError(f"its dense form gives {len(values)} results, the module {len(expected)}")
    for right, value in zip(expected, values, strict=True):
        if not bool(torch.isfinite(right).all()):
            raise PatchError(f"it gives NaN or infinity itself; not finite: {first_not_finite(twin)}")
        scale = float(right.abs().reshape(right.size(0), -1).sum(1).max())  # of one row: each is computed for itself
        # A module may give out what it has in another dtype.
        error, bound = distance(value, right), ROUNDING * torch.finfo(right.dtype).eps * scale
        if not error <= bound:
            raise VerificationError(
                f"its dense form gives other numbers, by {error:.3e} where at most {bound:.3e} is rounding; the model "
                f"is as it was. Please report this with the version of e3nn"
            )


def _wide(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of what a module gives."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def random_rows(rows: int, columns: int, like: torch.Tensor, operand: int = 0) -> torch.Tensor:
    """An operand to compare a form on, of the dtype and device of `like`; operands of other numbers are other ones."""
    generator = torch.Generator().manual_seed(operand)  # a generator of its own: the global RNG stays untouched
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(like)


def random_attributes(columns: int, like: torch.Tensor) -> torch.Tensor:
    """Attributes to compare a form on: one-hot ones, a row of zeros, and mixtures."""
    one_hot = torch.eye(columns)[[0, columns - 1]].to(like)
    return torch.cat([one_hot, torch.zeros_like(one_hot[:1]), random_rows(2, columns, like, operand=1)])


def _linear(_: torch.nn.Module, linear: Any) -> Form:
    return LinearMap, linear_map(linear), (random_rows(3, linear.irreps_in.dim, linear.weight),)


def _attribute_product(_: torch.nn.Module, product: Any) -> Form:
    """A product with attributes of nodes; a kind of model whose attributes name a type may have a form of its own."""
    kernel = attribute_product(product)
    attributes = random_attributes(product.irreps_in2.dim, product.weight)
    return AttributeProduct, kernel, (random_rows(len(attributes), product.irreps_in1.dim, product.weight), attributes)


def _gate(model: torch.nn.Module, gate: Any) -> Form:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    spec = gate_spec(gate)
    if any(True for _ in (*gate.act_scalars.parameters(), *gate.act_gates.parameters())):
        raise PatchError("its activations have parameters")
    return FusedGate, Gate(spec).to(like.device), (random_rows(3, spec.num_inputs, like),)


def _harmonics(model: torch.nn.Module, harmonics: Any) -> Form:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return PolynomialHarmonics, polynomial_of(harmonics).to(like.device), (random_rows(4, 3, like),)


E3NN_FORMS: NodeForms = MappingProxyType(
    {
        "Linear": NodeForm("irreps_in", _linear),
        "FullyConnectedTensorProduct": NodeForm("irreps_in1", _attribute_product),
        "Gate": NodeForm("irreps_in", _gate),
        "SphericalHarmonics": NodeForm("irreps_in", _harmonics),
    }
)
"""The forms of e3nn's modules."""
