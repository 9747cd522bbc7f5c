"""The mechanics of patching: finding the family of a model, swapping sub-modules, undoing it, reporting.

Nothing here knows a particular model. A `ModelFamily` says what would be swapped; this module does the swap only after
every check has passed, so a refused model is left exactly as it was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from eqaccel.patches.replacement import Changed, Entrance, Replacement, become, restore
from eqaccel.patches.verify import Runnable, Verification

from eqaccel import settings
from eqaccel.errors import AlreadyPatchedError, PatchError
from eqaccel.prepare import held_modules, warmup

T = TypeVar("T")


@dataclass(frozen=True)
class Swap:
    """One sub-module to be replaced: what a family proposes and `patch` carries out.

    Attributes:
        parent: Module that owns the attribute.
        name: Attribute of `parent` whose module is replaced.
        kind: What that module becomes.
        added: What the kind computes with.
    """

    parent: torch.nn.Module
    name: str
    kind: type[Replacement]
    added: torch.nn.Module

    @property
    def module(self) -> torch.nn.Module:
        """The module that is replaced, and stays the same object."""
        return getattr(self.parent, self.name)

    def apply(self) -> None:
        """Makes the module a replacement; one that has several parents is changed once."""
        if not isinstance(self.module, Replacement):
            become(self.module, self.kind, self.added)
        for switch, value in self.kind.switches.items():
            setattr(self.parent, switch, value)


@dataclass(frozen=True)
class Row:
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

    `str()` gives a table: what was accelerated, then what was left; rows that are idle share its last line.
    """

    model: str
    rows: tuple[Row, ...]

    @property
    def accelerated(self) -> int:
        """Number of modules that eqaccel replaced."""
        return sum(row.accelerated for row in self.rows)

    def __str__(self) -> str:
        table = [("module", "kind", "accelerated", "paths", "weights", "mul", "note")]
        shown = [row for row in self.rows if not row.idle]
        table += [row.cells() for row in sorted(shown, key=lambda row: not row.accelerated)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        idle = Counter(row.kind for row in self.rows if row.idle)
        if idle:
            kinds = ", ".join(f"{count} {kind}" for kind, count in idle.items())
            lines.append(f"{idle.total()} more run as they came, where nothing is faster on this device: {kinds}")
        return "\n".join([f"{self.model}: {self.accelerated} modules accelerated", *lines])


class ModelFamily(Runnable, Protocol):
    """One kind of model: how to recognise it, what to swap in it, and how to run it for verification.

    Attributes:
        name: What users call it.
    """

    name: str

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether the model is of this family; must not raise."""
        ...

    def swaps(self, model: torch.nn.Module, deterministic: bool) -> list[Swap]:
        """Checks the whole model and builds the replacements, changing nothing; raises `PatchError` to refuse."""
        ...

    def rows(self, model: torch.nn.Module) -> list[Row]:
        """What is and what is not accelerated in a model, patched or not."""
        ...


FAMILIES: list[ModelFamily] = []
"""The kinds of model that `patch` knows, asked in this order."""

_COMPILED_VARIANTS = "_compiled_cache"
"""Attribute in which a model that compiles itself (NequIP's `CompileGraphModel`) keeps what it has compiled."""


def register(family: ModelFamily) -> None:
    """Makes a family of models known to `patch`, `unpatch` and `report`."""
    FAMILIES.append(family)


def class_names(module: object) -> set[str]:
    """Names of the class of an object and of all its bases: how models are recognised without importing theirs."""
    return {cls.__name__ for cls in type(module).__mro__}


def patch(model: T, *, verify: bool = True, deterministic: bool = True) -> T:
    """Accelerates a model in place.

    Its modules stay the same objects, with their parameters, attributes and hooks, and the state dict keeps its keys,
    so optimizers, checkpoints, adapters and fine-tuning go on as before; `unpatch` takes it all back. With
    EQACCEL_TUNE=1 the kernels are tuned for energies and forces on the device that the model is on, as by
    `warmup(model, tune=True)`, before the model is verified.

    Args:
        model: A MACE or NequIP model, or what holds such models: an ASE calculator or a sum of calculators, a training
            module, a container of modules, or a list of these. All models in it are patched.
        verify: Whether to compare the model with a copy from before, on generated structures, and to refuse the patch
            if energy, forces, stress, other outputs or derivatives of theirs differ by more than rounding
            (docs/verification.md).
        deterministic: Whether sums over edges are bitwise reproducible; False allows faster atomic sums.

    Returns:
        The same object.

    Raises:
        AlreadyPatchedError: If it is accelerated already, by eqaccel, cuEquivariance or OpenEquivariance.
        VerificationError: If the patched model does not reproduce the original.
        PatchError: If the kind of model is unknown, or it holds something that cannot be replaced.
        CompileError: If a kernel does not compile; MissingCompilerError if there is no compiler for it.
        WarmupError: If EQACCEL_TUNE is 1 and the model is not in float32 or float64, or not on a CPU or GPU.
        Whatever is raised, the model is as it was before the call.
    """
    tune = settings.current().tune
    with torch.inference_mode(False):  # tensors made inside of it could never take part in gradients
        _patch(_members(model), verify, deterministic, tune)
    return model


def _patch(members: list[tuple[str, torch.nn.Module]], verify: bool, deterministic: bool, tune: bool) -> None:
    plans = []
    for _, member in members:
        family = _family(member)
        plans.append((member, family, family.swaps(member, deterministic)))
    try:
        for member, family, swaps in plans:
            verification = Verification(family, member) if verify else None
            for swap in swaps:
                swap.apply()
            become(member, Entrance)
            if tune:
                warmup(member, tune=True)
            if verification is not None:
                verification.check()
    except BaseException:  # an interrupt while kernels compile must not leave half a patch behind either
        for member, _, _ in plans:
            _restore(member)
        raise


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
    for _, member in _members(model):
        _refuse_frozen(member)
        _restore(member)
    return model


def report(model: Any) -> Report:
    """Lists what eqaccel replaced in a model, what it left, and why.

    Args:
        model: A model, or what holds models, patched or not.

    Raises:
        PatchError: If eqaccel does not know this kind of model.
    """
    rows = [
        replace(row, path=(prefix + row.path).rstrip("."))
        for prefix, member in _members(model)
        for row in _family(member).rows(member)
    ]
    return Report(type(model).__name__, tuple(rows))


def _members(target: Any) -> list[tuple[str, torch.nn.Module]]:
    """The models in what the user handed over, each once, with the prefix of their paths."""
    unique: dict[int, tuple[str, torch.nn.Module]] = {}
    for held, module in held_modules(target, PatchError):
        for path, member in _models_in(module) or [("", module)]:
            unique.setdefault(id(member), (f"{held}.{path}" if held else path, member))
    return list(unique.values())


def _models_in(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The models of a known kind in a module, which may be one itself, with the prefixes of their paths."""
    if any(family.recognises(module) for family in FAMILIES):
        return [("", module)]
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, child in module.named_children():
        for path, model in _models_in(child):
            found.setdefault(id(model), (f"{name}.{path}", model))
    if found:
        _refuse_frozen(module)
    return list(found.values())


def _family(model: torch.nn.Module) -> ModelFamily:
    _refuse_frozen(model)
    for family in FAMILIES:
        if family.recognises(model):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise PatchError(
        f"model: expected a model of a known kind ({known}) or something that holds one, got {type(model).__name__}"
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
    if any(getattr(model, _COMPILED_VARIANTS, ())):
        raise PatchError(
            f"model: {type(model).__name__} compiled itself when it was first evaluated, so that it cannot be changed "
            f"any more; load it again, and patch it before it is evaluated"
        )


def _restore(model: torch.nn.Module) -> None:
    """Takes all changes back, reading all that it needs from the model itself (it may have been unpickled)."""
    for parent in model.modules():
        for child in parent._modules.values():
            for switch in child.switches if isinstance(child, Replacement) else ():
                vars(parent).pop(switch, None)  # several children may have set it
    for module in list(model.modules()):
        if isinstance(module, Changed):
            restore(module)


def refuse_patched(model: torch.nn.Module) -> None:
    """Raises `AlreadyPatchedError` if any module of the model was replaced by eqaccel already."""
    for name, module in model.named_modules():
        if isinstance(module, Changed):
            raise AlreadyPatchedError(
                f"model: eqaccel has patched {type(model).__name__} already ({name or 'the model itself'} is changed); "
                f"use it as it is, or call eqaccel.unpatch(model) first"
            )
