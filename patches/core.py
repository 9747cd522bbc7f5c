"""The mechanics of patching: finding the family of a model, swapping sub-modules, undoing it, reporting.

Nothing here knows a particular model. A `ModelFamily` says what would be swapped; this module does the swap only after
every check has passed, so a refused model is left exactly as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from eqaccel.patches.verify import Runnable, Verification

from eqaccel import settings
from eqaccel.errors import AlreadyPatchedError, PatchError
from eqaccel.ops import warmup

T = TypeVar("T")


class Replacement(torch.nn.Module):
    """Base of the modules that stand in for one of a model's own; it keeps the module it stands in for.

    The original stays a sub-module, so it follows the model through `.to()`, `.double()`, pickling and `deepcopy`, but
    the state dict shows its entries under the replaced module's own name: keys and their order do not change, and
    checkpoints load into patched and unpatched models alike. The original's own parameters, and those children of it
    that have any, are registered here too, so that their names stay as well. A subclass must own no others, and no
    persistent buffers.

    Args:
        original: The module to stand in for; `unpatch` puts it back.
        conv: The accelerated convolution, if it is one that is replaced.
        switches: Attributes that the swap sets on the parent module, and that `unpatch` removes again.
    """

    def __init__(
        self, original: torch.nn.Module, conv: torch.nn.Module | None = None, switches: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        # Before the original, because parameters go by the first name under which they are found.
        for name, child in original.named_children():
            if any(True for _ in child.parameters()):
                self.add_module(name, child)
        self.owning = tuple(self._modules)
        self.original = original
        Replacement.share_parameters(self)
        if conv is not None:
            self.conv = conv.train(original.training)
        self.switches = switches
        self.training = original.training
        self.register_load_state_dict_post_hook(_after_loading)

    def share_parameters(self) -> None:
        """Registers the parameters that the original has now, those of its children left out."""
        for name, parameter in self.original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of the original module, under the prefix of this one."""
        return self.original.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_args: Any, **_kwargs: Any) -> None:
        # torch descends into the children with a prefix made of their names: move our entries to where it will look.
        # It hands every module a dict of its own, so renaming in place is seen by nobody else. Nothing is left to load
        # here, since what is registered here is the original's.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            state_dict[f"{prefix}original.{name}"] = state_dict[key]
            if name.partition(".")[0] not in self.owning:
                del state_dict[key]


def _after_loading(replacement: Replacement, _keys: Any) -> None:
    """`load_state_dict(..., assign=True)` has put other parameters in the place of the original's."""
    replacement.share_parameters()


@dataclass(frozen=True)
class Swap:
    """One sub-module to be swapped: what a family proposes and `patch` carries out.

    Attributes:
        parent: Module that owns the attribute.
        name: Attribute of `parent` that is replaced.
        module: What goes there.
        switches: Attributes to set on `parent` along with it.
    """

    parent: torch.nn.Module
    name: str
    module: Replacement
    switches: Mapping[str, Any]

    def apply(self) -> None:
        """Puts the replacement in; assigning to an existing name keeps the order of the state dict."""
        setattr(self.parent, self.name, self.module)
        for switch, value in self.switches.items():
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
    """

    path: str
    kind: str
    accelerated: bool
    note: str
    paths: int | None = None
    weight_numel: int | None = None
    mul: tuple[int, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """The row as text, a cell per column of the printed table."""
        numbers = ["" if n is None else str(n) for n in (self.paths, self.weight_numel)]
        mark = "yes" if self.accelerated else "no"
        return (self.path, self.kind, mark, *numbers, ",".join(map(str, self.mul)), self.note)


@dataclass(frozen=True)
class Report:
    """What eqaccel replaced in a model, what it left, and why; `str()` gives a table."""

    model: str
    rows: tuple[Row, ...]

    @property
    def accelerated(self) -> int:
        """Number of modules that eqaccel replaced."""
        return sum(row.accelerated for row in self.rows)

    def __str__(self) -> str:
        table = [("module", "kind", "accelerated", "paths", "weights", "mul", "note")]
        table += [row.cells() for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
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

    Parameters stay the same objects and the state dict keeps its keys, so optimizers, checkpoints and fine-tuning go
    on as before; `unpatch` takes it all back. With EQACCEL_TUNE=1 the kernels are tuned for energies and forces on the
    device that the model is on, as by `warmup(model, tune=True)`, before the model is verified.

    Args:
        model: A MACE or NequIP model, or what holds such models: an ASE calculator, a training module, a container of
            modules. All models in it are patched.
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
    plans = []
    for _, member in _members(model):
        family = _family(member)
        plans.append((member, family, family.swaps(member, deterministic)))
    try:
        for member, family, swaps in plans:
            verification = Verification(family, member) if verify else None
            for swap in swaps:
                swap.apply()
            if tune:
                warmup(member, tune=True)
            if verification is not None:
                verification.check()
    except BaseException:  # an interrupt while kernels compile must not leave half a patch behind either
        for member, _, _ in plans:
            _restore(member)
        raise
    return model


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
    if isinstance(target, torch.nn.Module):
        return list(_models_in(target)) or [("", target)]
    held = {"models": getattr(target, "models", None), "model": getattr(target, "model", None)}
    if isinstance(held["models"], (list, tuple)):
        held = {f"models.{number}": module for number, module in enumerate(held["models"])}
    modules = {name: module for name, module in held.items() if module is not None}
    if not modules or not all(isinstance(module, torch.nn.Module) for module in modules.values()):
        raise PatchError(
            f"model: expected a torch.nn.Module, or an ASE calculator with one in `model` or a list of them in "
            f"`models`, got {type(target).__name__}"
        )
    unique: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, module in modules.items():
        for path, member in _models_in(module) or [("", module)]:
            unique.setdefault(id(member), (f"{name}.{path}", member))
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


def _replacements(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Replacement]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Replacement):
                yield parent, name, child


def _restore(model: torch.nn.Module) -> None:
    """Puts the original modules back, reading all that it needs from the model itself (it may have been unpickled)."""
    for parent, name, replacement in list(_replacements(model)):
        setattr(parent, name, replacement.original)
        for switch in replacement.switches:
            delattr(parent, switch)


def refuse_patched(model: torch.nn.Module) -> None:
    """Raises `AlreadyPatchedError` if any module of the model was replaced by eqaccel already."""
    for _, name, replacement in _replacements(model):
        raise AlreadyPatchedError(
            f"model: eqaccel has patched {type(model).__name__} already ({name} is a {type(replacement).__name__}); "
            f"use it as it is, or call eqaccel.unpatch(model) first"
        )
