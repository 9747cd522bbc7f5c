"""Patching: `patch`, `unpatch` and `report`.

Nothing here knows a particular model. A `ModelKind` says what would be swapped; this module does the swap only after
every check has passed, so a refused model is left exactly as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from eqaccel import settings
from eqaccel.errors import PatchError
from eqaccel.patches.calculator import find_calculators, find_steps, make_stepped, restore_calculator, step_state
from eqaccel.patches.comparison import Comparison
from eqaccel.patches.example import ExampleVerification
from eqaccel.patches.finder import KINDS, FoundModel, find_models
from eqaccel.patches.kind import ModelKind, ModuleKind, class_names
from eqaccel.patches.precision import LowPrecision, Options, chosen_precision, precision_of, refuse_other_dtypes
from eqaccel.patches.replacement import Entrance, UnverifiedEntrance, become, restore_all
from eqaccel.patches.report import Report
from eqaccel.patches.torch_state import cpu_by_default
from eqaccel.patches.verify import Verification
from eqaccel.patches.wrapper import find_wrapped, find_wrappers, make_wrapped, restore_wrapper
from eqaccel.prepare import warmup

T = TypeVar("T")


def patch(
    model: T,
    *,
    verify: bool = True,
    deterministic: bool = True,
    low_precision: Collection[LowPrecision] = (),
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> T:
    """Accelerates a model in place.

    Its modules stay the same objects, with their parameters, attributes and hooks, and the state dict keeps its keys,
    so optimizers, checkpoints, adapters and fine-tuning go on as before; `unpatch` takes it all back. With
    EQACCEL_TUNE=1 the kernels are tuned for energies and forces on the device that the model is on, as by
    `warmup(model, tune=True)`, before the model is verified.

    Args:
        model: A MACE, NequIP or SevenNet model, or what holds such models: an ASE calculator or a sum of calculators, a
            wrapper of torch-sim's, a training module, a container of modules, or a list of these. All models in it are
            patched. A module without such a model, of whatever library, gets its modules of e3nn replaced.
        verify: Whether to compare the model with a copy from before, on generated structures, and to refuse the patch
            if energy, forces, stress, other outputs or derivatives of theirs differ by more than rounding
            (docs/verification.md).
        deterministic: Whether sums over edges are bitwise reproducible; False allows faster atomic sums.
        low_precision: What may be less precise than a model in float32, for less memory and time (docs/precision.md):
            "weights" rounds the weights of edges to bfloat16, "products" the factors of matrix products of radial
            networks, on GPUs, to 11 bits. Nothing by default.
        example: What to verify modules of other libraries on: positional arguments in a tuple, or keyword arguments in
            a dictionary, for one call of the module in evaluation mode. Containers and objects with `clone` and
            `apply`, as those of torch_geometric, may be among them; floating-point tensors are converted to the dtype
            of the module. Without it, such a module is not verified as a whole, and the report says so.

    Returns:
        The same object.

    Raises:
        AlreadyPatchedError: If it is accelerated already, by eqaccel, cuEquivariance or OpenEquivariance.
        VerificationError: If the patched model does not reproduce the original.
        PatchError: If the kind of model is unknown and it holds nothing that can be replaced; if a model of a known
            kind holds something that cannot be; if there is an example that nothing is verified on; or
            if `low_precision` is unknown, or asked of a model that is not in float32.
        CompileError: If a kernel does not compile; MissingCompilerError if there is no compiler for it.
        WarmupError: If EQACCEL_TUNE is 1 and the model is not in float32 or float64, or not on a CPU or GPU.
        Whatever is raised, the model is as it was before the call.
    """
    tune = settings.current().tune
    # Tensors made in inference mode could never take part in gradients.
    with torch.inference_mode(False), cpu_by_default():
        models = _models(model)
        if example is not None and (not verify or all(isinstance(_known_kind(found), ModelKind) for found in models)):
            raise PatchError(
                "example: expected none, got one that nothing would be verified on: verify is False, or all models are "
                "of a known kind, which eqaccel verifies on structures of its own"
            )
        options = Options(deterministic, chosen_precision(low_precision))
        _patch(models, verify, options, tune, example)
    for _, calculator, kind in find_calculators(model, KINDS):
        make_stepped(calculator, kind)
    for _, wrapper, kind in list(find_wrappers(model, KINDS)):
        make_wrapped(wrapper, kind)
    return model


def _patch(models: list[FoundModel], verify: bool, options: Options, tune: bool, example: Any) -> None:
    plans = []
    for found in models:
        kind = _known_kind(found)
        refuse_other_dtypes(found.model, kind.dtype(found.model), options.low_precision)
        plans.append((found.model, kind, kind.swapping.swaps(found.model, options)))
    try:
        for model, kind, swaps in plans:
            verification = _verification(kind, model, example) if verify else None
            for swap in swaps:
                swap.apply()
            become(model, UnverifiedEntrance if verification is None else Entrance)
            if tune:
                warmup(model, tune=True)
            if verification is not None:
                verification.check()
    except BaseException:  # an interrupt while kernels compile must not leave half a patch behind either
        for model, _, _ in plans:
            restore_all(model)
        raise


def _verification(kind: ModuleKind, model: torch.nn.Module, example: Any) -> Comparison | None:
    """The check of a model that is about to be patched; None if there is nothing to run it on."""
    if isinstance(kind, ModelKind):
        return Verification(kind, model)
    return None if example is None else ExampleVerification(model, example)


def unpatch(model: T) -> T:
    """Takes a patch back: every module, attribute and state-dict entry is again what it was before `patch`.

    A model that is not patched is returned as it is.

    Args:
        model: A patched model, or what holds patched models.

    Returns:
        The same object.

    Raises:
        PatchError: If the model is scripted or compiled, so that its modules can no longer be swapped.
    """
    for found in _models(model):
        restore_all(found.model)
    for _, calculator, _ in find_calculators(model, KINDS):
        restore_calculator(calculator)
    for _, wrapper, _ in list(find_wrapped(model)):
        restore_wrapper(wrapper)
    return model


def report(model: Any) -> Report:
    """Lists what eqaccel replaced in a model, what it left, and why.

    Args:
        model: A model, or what holds models, patched or not.

    Raises:
        PatchError: If eqaccel does not know this kind of model.
    """
    own = step_state(model)
    has_model = own is None or own.has_model
    models = _models(model) if has_model else []
    wrapped = find_wrapped(model) if has_model else ()
    steps = [
        replace(row, path=f"{path}.{row.path}".lstrip("."))
        for path, holder, state in (*find_steps(model), *wrapped)
        for row in state.rows(holder)
    ]
    rows = [
        replace(row, path=f"{found.path}.{row.path}".strip("."))
        for found in models
        for row in _known_kind(found).swapping.rows(found.model)
    ]
    unverified = tuple(found.path for found in models if isinstance(found.model, UnverifiedEntrance))
    lowered = {name for found in models for name in precision_of(found.model)}
    lowered |= set(own.low_precision if own is not None and not has_model else ())
    return Report(type(model).__name__, (*steps, *rows), unverified, tuple(sorted(lowered)))


def _models(target: Any) -> list[FoundModel]:
    """The models in what the user handed over, none of which is frozen."""
    models = find_models(target, PatchError)
    for found in models:
        for module in (*reversed(found.holders), found.model):
            _refuse_frozen(module)
        if found.kind is not None and found.kind.has_compiled_itself(found.model):
            raise PatchError(
                f"model: {type(found.model).__name__} compiled itself when it was first evaluated, so that it cannot "
                f"be changed any more; load it again, and patch it before it is evaluated"
            )
    return models


def _known_kind(found: FoundModel) -> ModuleKind:
    if found.kind is not None:
        return found.kind
    known = ", ".join(kind.name for kind in KINDS)
    raise PatchError(
        f"model: expected a model of a known kind ({known}) or something that holds one, or holds modules of e3nn, got "
        f"{type(found.model).__name__}"
    )


def _refuse_frozen(model: torch.nn.Module) -> None:
    """Raises if the modules of a model can no longer be swapped."""
    if isinstance(model, torch.jit.ScriptModule):
        raise PatchError(
            "model: a TorchScript model cannot be changed; patch the Python model first and script it afterwards"
        )
    if "OptimizedModule" in class_names(model):
        raise PatchError(
            "model: the model is wrapped by torch.compile; patch the model inside (`model._orig_mod`) before compiling"
        )
