"""What models consist of, to notice any change: what computes by something made of a model asks before each call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, starmap
from typing import Any

import torch
from torch import nn

from eqaccel.patches.replacement import Entrance
from eqaccel.patches.snapshot import HOOKS, hooked_part, simple_attributes


class Watch:
    """What models consist of, to notice any change.

    Args:
        models: The models.
        trained: Whether the values of parameters may change, and whether parameters are trained and modules are in
            training mode may not.

    Attributes:
        obstacle: Why the models cannot be taken as they are; empty if they can.
    """

    def __init__(self, models: Sequence[nn.Module], trained: bool = False) -> None:
        self.obstacle = next(filter(None, map(_obstacle, models)), "")
        # Where modules and tensors are, which come in this order.
        self._holders: list[dict[Any, Any]] = []
        self._names: list[Any] = []
        self._modules: list[nn.Module] = []
        self._tensors: list[torch.Tensor] = []
        self._own: list[dict[str, Any]] = []
        self._simple: list[tuple[dict[str, Any], str]] = []  # numbers, words and functions, and where they are
        self._hooks: list[Any] = []
        everything = [module for model in models for module in model.modules()]
        for module in everything:
            if not isinstance(module, torch.jit.ScriptModule):  # those hand out what they hold in new dictionaries
                own = vars(module)
                self._own.append(own)
                self._simple += [(own, name) for name in simple_attributes(module)]
                self._hooks += [own[name] for name in HOOKS if name in own]
                self._add(own["_modules"], self._modules, nn.Module)
        for module in everything:
            if isinstance(module, torch.jit.ScriptModule):
                held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                self._add(dict(enumerate(held)), self._tensors, torch.Tensor)
            else:
                own = vars(module)  # a tensor that is neither a parameter nor a buffer is in there itself
                for holder in (own["_parameters"], own["_buffers"], own):
                    self._add(holder, self._tensors, torch.Tensor)
        # A recording may still read the memory of tensors that have been given another one.
        self._memory = [tensor.untyped_storage() for tensor in self._tensors]
        # Tensors made in inference mode count no changes.
        self._counted = [t for t in self._tensors if not t.is_inference() and not (trained and t.requires_grad)]
        self._modes = self._modules if trained else []
        self._flags = self._tensors if trained else []
        self._state = self._now()

    def _add(self, holder: dict[Any, Any], members: list[Any], kind: type) -> None:
        found = {name: member for name, member in holder.items() if isinstance(member, kind)}
        self._holders += [holder] * len(found)
        self._names += found
        members += found.values()

    def _now(self) -> list[Any]:
        # By functions of C alone: this is asked in every step.
        types, places = map(type, self._modules), map(torch.Tensor.data_ptr, self._tensors)
        sizes, simple = map(len, self._own), starmap(dict.get, self._simple)
        modes, flags = map(_training, self._modes), map(_requires_grad, self._flags)
        return [*types, *places, *map(_version, self._counted), *modes, *flags, *sizes, *simple]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        present = map(dict.get, self._holders, self._names)
        return (
            not any(self._hooks)
            and all(map(operator.is_, present, chain(self._modules, self._tensors)))
            and self._now() == self._state
        )


_version = operator.attrgetter("_version")
_training = operator.attrgetter("training")
_requires_grad = operator.attrgetter("requires_grad")


def _obstacle(model: nn.Module) -> str:
    if not isinstance(model, Entrance):
        return f"{type(model).__name__} is not patched (any more)"
    if len({t.device for t in model.parameters()}) > 1:
        return "its parameters are on several devices"
    hooked = hooked_part(model)
    return f"{hooked} has hooks, which see the ordinary calls" if hooked else ""
