"""The kinds of model that eqaccel knows, and where models are in what a user hands over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from eqaccel.errors import EqaccelError
from eqaccel.patches.e3nn import E3nnKind
from eqaccel.patches.kind import ModelKind, ModuleKind
from eqaccel.patches.mace import MaceKind
from eqaccel.patches.nequip import NequipKind
from eqaccel.patches.sevennet import SevennetKind
from eqaccel.prepare import held_modules

KINDS: list[ModelKind] = [MaceKind(), NequipKind(), SevennetKind()]
"""The kinds of model that eqaccel knows, asked in this order: the table to which a new kind is added."""

OTHERS: ModuleKind = E3nnKind()
"""The kind of modules that hold no model of these kinds."""


def register(kind: ModelKind) -> None:
    """Makes a kind of model known that another package brings."""
    KINDS.append(kind)


@dataclass(frozen=True)
class FoundModel:
    """A model in what a user handed over.

    Attributes:
        path: Where it is, e.g. `models.0`; empty for what was handed over itself.
        model: The model; or a module that holds no model of a known kind.
        kind: Its kind; None if that is unknown, and it holds nothing that could be replaced.
        holders: The modules around the model, wherever it was found, outer ones first.
    """

    path: str
    model: nn.Module
    kind: ModuleKind | None
    holders: tuple[nn.Module, ...] = ()


def find_models(target: Any, error: type[EqaccelError]) -> list[FoundModel]:
    """Finds the models in what a user handed over.

    Args:
        target: A model, or what holds models: an ASE calculator of a library of models, a combination of calculators, a
            module such as a wrapper of torch-sim's, a training module or a container, or a list or tuple of any of
            these.
        error: Class of the error that is raised.

    Returns:
        The models, each once; a module without a model of a known kind stands for itself.

    Raises:
        EqaccelError: If something holds no module; of class `error`.
    """
    unique: dict[int, FoundModel] = {}
    for path, module in held_modules(target, error):
        for found in _models_in(module, path, ()) or [FoundModel(path, module, _other_kind(module))]:
            known = unique.get(id(found.model), found)
            unique[id(found.model)] = replace(known, holders=tuple(dict.fromkeys((*known.holders, *found.holders))))
    return list(unique.values())


def _other_kind(module: nn.Module) -> ModuleKind | None:
    return OTHERS if OTHERS.recognises(module) else None


def _models_in(module: nn.Module, path: str, holders: tuple[nn.Module, ...]) -> list[FoundModel]:
    """The models of a known kind in a module, which may be one itself."""
    kind = next((kind for kind in KINDS if kind.recognises(module)), None)
    if kind is not None:
        return [FoundModel(path, module, kind, holders)]
    children = module.named_children()
    inside = [_models_in(child, f"{path}.{name}".lstrip("."), (*holders, module)) for name, child in children]
    return [found for models in inside for found in models]
