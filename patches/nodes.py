"""Which node-wise modules of a model are replaced by their dense forms, and why others are left.

The modules are e3nn's (linear maps, spherical harmonics, NequIP's product with the embedding of the atom type, which is
its self-connection, and its gate) and MACE's symmetric contraction. A form is compared with its module on a few random
rows before it is put to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from eqaccel.patches import dense
from eqaccel.patches.blocks import Block, BlockProduct, joined
from eqaccel.patches.coefficients import share_contraction, sharpen
from eqaccel.patches.contraction import ContractionPolynomial, PolynomialContraction
from eqaccel.patches.core import Row, Swap, class_names
from eqaccel.patches.dense import DenseLinear, FlatActivations, FlatGate, TypedProduct, TypeMatrices
from eqaccel.patches.harmonics import PolynomialHarmonics, harmonics_polynomial
from eqaccel.patches.replacement import ADDED, Replacement, preview
from eqaccel.patches.rounding import ROUNDING, distance
from eqaccel.patches.torch_state import default_dtype, first_not_finite, model_device, widened

from eqaccel.errors import CompileError, PatchError, VerificationError
from eqaccel.families.polynomial import MAX_POWER
from eqaccel.ops.library import translate

_Built = tuple[type[Replacement], torch.nn.Module, tuple[torch.Tensor, ...]]
"""What a module becomes, what that computes with, and operands to compare both forms on."""

_MULTIPLICATIONS = 2**19
"""Multiplications per node that a GPU does in the time of a few launches."""


def node_swaps(model: torch.nn.Module) -> Iterator[Swap]:
    """The replacements of node-wise modules that have a dense form; the model is not changed.

    Raises:
        VerificationError: If a form gives other numbers than its module.
        CompileError: If a kernel does not compile.
        MissingCompilerError: If there is no compiler for it.
    """
    for path, parent, name, module in _modules(model):
        try:
            yield Swap(parent, name, *_build(model, module))
        except VerificationError as error:
            raise VerificationError(f"{path}: {error}") from error
        except PatchError:  # the report says why
            continue


def node_rows(model: torch.nn.Module) -> Iterator[Row]:
    """A line of a report for each node-wise module, replaced or not; some replacements change nothing on a CPU."""
    prefers_dense = dense.prefers_dense(torch.empty(0, device=model_device(model)))
    for path, _, _, module in _modules(model):
        accelerated = isinstance(module, Replacement) and (prefers_dense or module.gains_on_cpu)
        if isinstance(module, Replacement):
            note = module.note + ("" if accelerated else "; left as it was on the CPU")
        else:
            try:
                _build(model, module)
                note = "left: not patched yet, eqaccel.patch(model) replaces it"
            except (PatchError, CompileError) as error:
                note = f"left: {error}"
        idle = isinstance(module, Replacement) and not accelerated
        yield Row(path, type(module).__name__, accelerated, note, idle=idle)


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, Any]]:
    """The node-wise modules that a model came with: path, owner, attribute of the owner, module."""
    for prefix, parent in model.named_modules():
        if isinstance(parent, (Replacement, torch.jit.ScriptModule)):
            continue
        for name, module in parent.named_children():
            if _kind(module):
                yield f"{prefix}.{name}".lstrip("."), parent, name, module


def _kind(module: Any) -> str:
    """Which of the kinds known here a module is, or an empty string."""
    if not any(hasattr(module, name) for name in ("irreps_in", "irreps_in1", "coupling_irreps")):
        return ""  # such as torch.nn.Linear
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _BUILDERS), "")


def _build(model: torch.nn.Module, module: Any) -> tuple[type[Replacement], torch.nn.Module]:
    """What a module becomes, and what that computes with.

    Raises:
        PatchError: If it has no dense form.
        VerificationError: If it has one that gives other numbers.
        CompileError: If a kernel of it does not compile.
    """
    kind = _kind(module)
    owner = next((cls.__name__ for cls in type(module).__mro__ if "forward" in vars(cls)), "")
    if owner not in (kind, "TensorProduct"):
        raise PatchError(f"its forward method is that of {owner}, not of e3nn's {kind}")
    if ADDED in vars(module) or ADDED in module._modules:
        raise PatchError(f"it has an attribute `{ADDED}` of its own")
    try:
        with default_dtype(torch.float64):
            replacement, added, examples = _BUILDERS[kind](model, module)
            _compare(preview(module, replacement, added), examples)
    except PatchError:
        raise
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        meant = translate(error)
        if isinstance(meant, CompileError):
            raise meant from error
        # A module of another version of e3nn may look different; the model works with it as it is.
        raise PatchError(f"its structure is unknown here ({type(error).__name__}: {error})") from error
    return replacement, added


def _compare(replacement: Any, examples: tuple[torch.Tensor, ...]) -> None:
    """Compares both forms on examples, in float64 and with the same exact coefficients.

    Raises:
        PatchError: If the module gives NaN.
        VerificationError: If they differ by more than rounding.
    """
    unprofiled = torch.jit.optimized_execution(False)  # e3nn scripts its parts; specialising them here would be slow
    with torch.inference_mode(False), torch.no_grad(), unprofiled:
        twin = widened(replacement)
        sharpen(twin)
        if isinstance(twin, PolynomialContraction):
            share_contraction(twin, twin, examples[0].dtype)
        operands = [example.double() for example in examples]
        expected, value = twin.plain_forward(*operands), twin.dense(*operands)
    if not bool(torch.isfinite(expected).all()):
        raise PatchError(f"it gives NaN or infinity itself; not finite: {first_not_finite(twin)}")
    scale = float(expected.abs().sum(1).max())  # of one row: each is computed for itself
    error, bound = distance(value, expected), ROUNDING * torch.finfo(torch.float64).eps * scale
    if not error <= bound:
        raise VerificationError(
            f"its dense form gives other numbers, by {error:.3e} where at most {bound:.3e} is rounding; the model is "
            f"as it was. Please report this with the version of e3nn"
        )


def _random(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # a generator of its own: the global RNG stays untouched
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(like)


def _check_weights(module: Any) -> None:
    if not (module.internal_weights and module.shared_weights) or module.weight.dim() != 1:
        raise PatchError("its weights are not a vector of its own")


def _linear(_: torch.nn.Module, linear: Any) -> _Built:
    _check_weights(linear)
    if any(item.i_in < 0 for item in linear.instructions):
        raise PatchError("it has biases")
    blocks, offset = [], 0
    rows, columns = linear.irreps_in.slices(), linear.irreps_out.slices()
    for item in linear.instructions:
        mul_in, mul_out = item.path_shape
        values = offset + torch.arange(mul_in * mul_out).view(mul_in, mul_out)
        offset += values.numel()
        dim = linear.irreps_in[item.i_in].ir.dim
        blocks.append(Block(rows[item.i_in].start, columns[item.i_out].start, dim, values, item.path_weight))
    product = _product(linear.irreps_in.dim, linear.irreps_out.dim, blocks, 1, linear.weight)
    return DenseLinear, product, (_random(3, linear.irreps_in.dim, linear.weight),)


def _typed(model: torch.nn.Module, product: Any) -> _Built:
    _check_weights(product)
    table = _type_embedding(model)
    num_types, num_scalars = table.weight.shape
    if str(product.irreps_in2) != f"{num_scalars}x0e":
        raise PatchError(f"its second operand is {product.irreps_in2}, not the embedding of atom types")
    blocks, gather, offset, width = [], [], 0, 0
    rows, columns = product.irreps_in1.slices(), product.irreps_out.slices()
    for item in product.instructions:
        if item.connection_mode != "uvw" or not item.has_weight:
            raise PatchError(f"it has a path of mode {item.connection_mode}")
        mul_in, _, mul_out = item.path_shape
        weights = offset + torch.arange(mul_in * num_scalars * mul_out).view(mul_in, num_scalars, mul_out)
        gather.append(weights.transpose(1, 2).flatten())
        values = width + torch.arange(mul_in * mul_out).view(mul_in, mul_out)
        offset, width = offset + weights.numel(), width + values.numel()
        dim = product.irreps_in1[item.i_in1].ir.dim
        # e3nn normalises by the components of the output, which a product with a scalar does not sum over.
        scale = item.path_weight / dim**0.5
        blocks.append(Block(rows[item.i_in1].start, columns[item.i_out].start, dim, values, scale))
    dims = (product.irreps_in1.dim, product.irreps_out.dim)
    matrices = _product(*dims, blocks, num_types, product.weight)
    usual = sum(block.values.numel() * block.components for block in blocks) * num_scalars
    if matrices.multiplications > max(usual, _MULTIPLICATIONS):
        raise PatchError(f"matrices for each of {num_types} atom types would take more operations than they save")
    index = torch.cat(gather).to(product.weight.device, torch.int32)
    atom = torch.arange(2 * num_types) % num_types
    attributes = table.weight.detach()[atom.to(table.weight.device)]
    examples = (_random(len(atom), dims[0], product.weight), attributes)
    return TypedProduct, TypeMatrices(table, index, matrices), examples


def _type_embedding(model: torch.nn.Module) -> Any:
    """The embedding whose rows are the attributes of all nodes."""
    embeds = [module for module in model.modules() if "NodeTypeEmbed" in class_names(module)]
    if len(embeds) != 1 or not isinstance(getattr(embeds[0], "embed_module", None), torch.nn.Embedding):
        raise PatchError("no kernel for species-indexed linear layers without an embedding of atom types")
    if getattr(embeds[0], "do_categorical_graph_field_embed", False):
        raise PatchError("the attributes of nodes depend on more than the atom type")
    return embeds[0].embed_module


def _product(dim_in: int, dim_out: int, blocks: list[Block], copies: int, like: Any) -> BlockProduct:
    blocks = joined([block for block in blocks if block.values.numel()])
    if not blocks:
        raise PatchError("it has no paths")
    places = [(block.row, block.column) for block in blocks]
    if len(set(places)) < len(places):
        raise PatchError("several of its paths join the same irreps")
    return BlockProduct(dim_in, dim_out, blocks, copies).to(like.device, like.dtype)


def _gate(model: torch.nn.Module, gate: Any) -> _Built:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    # The module that takes the input apart says itself which column goes where.
    width = gate.irreps_in.dim
    numbers = torch.arange(width, dtype=torch.float64, device=like.device)[None]
    scalars, gates, gated = (columns[0].long().tolist() for columns in gate.sc(numbers))
    activations: list[torch.nn.Module | None] = [None] * width
    known: dict[Any, torch.nn.Module] = {}
    for columns, activation in ((scalars, gate.act_scalars), (gates, gate.act_gates)):
        acts = [act for mul, _, act in activation.paths for _ in range(mul)]
        if None in acts or len(acts) != len(columns):
            raise PatchError("not all of its scalars have an activation")
        for column, act in zip(columns, acts, strict=True):
            activations[column] = known.setdefault((getattr(act, "f", act), getattr(act, "cst", None)), act)
    dims = [ir.dim for mul, ir in gate.irreps_gated for _ in range(mul)]
    multiplicand = [number for number, dim in enumerate(dims) for _ in range(dim)]
    if any(True for act in known.values() for _ in (*act.parameters(), *act.buffers())):
        raise PatchError("its activations have parameters or buffers")
    flat = FlatActivations(activations, scalars, gates, gated, multiplicand).to(like.device)
    flat.repeat = flat.repeat.to(like.dtype)
    return FlatGate, flat, (_random(3, width, like),)


def _contraction(_: torch.nn.Module, contraction: Any) -> _Built:
    if contraction.correlation > MAX_POWER:
        raise PatchError(f"no kernel for a correlation of {contraction.correlation}, above {MAX_POWER}")
    num_elements, _, channels = contraction.weights_max.shape
    polynomial = ContractionPolynomial(contraction)
    features = _random(2 * channels, polynomial.num_ell, contraction.weights_max).view(2, channels, -1)
    elements = torch.nn.functional.one_hot(torch.tensor([0, num_elements - 1]), num_elements)
    return PolynomialContraction, polynomial, (features, elements.to(features))


def _harmonics(model: torch.nn.Module, harmonics: Any) -> _Built:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return PolynomialHarmonics, harmonics_polynomial(harmonics).to(like.device), (_random(4, 3, like),)


_BUILDERS: Mapping[str, Callable[[torch.nn.Module, Any], _Built]] = MappingProxyType(
    {
        "Linear": _linear,
        "FullyConnectedTensorProduct": _typed,
        "Gate": _gate,
        "Contraction": _contraction,
        "SphericalHarmonics": _harmonics,
    }
)
