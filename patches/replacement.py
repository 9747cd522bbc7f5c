"""What a replacement is: the module that a model came with, in another class.

`become` changes the class of the very module to one that derives from a kind of replacement and from the class that the
module had, and adds one child, `eqaccel`, which holds what the kind computes with. So parameters, buffers, hooks,
parametrizations, attributes and identity are the module's own, because it is the module: whatever reads it, assigns
to it or wraps it finds what it knows. `restore` takes the class and the child away again.

What is computed with may be made from buffers, such as coupling coefficients, and stands for children that are not
called any more. Every call makes sure that these still are what they were (`Snapshot`), whatever kind of replacement it
is.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from eqaccel.errors import AlreadyPatchedError, PatchError
from eqaccel.ops.graph import sorting_scope
from eqaccel.ops.kernel_module import loses_values
from eqaccel.patches.rows import own_rows
from eqaccel.patches.scripting import like
from eqaccel.patches.snapshot import ADDED, Snapshot
from eqaccel.patches.torch_state import cpu_by_default
from eqaccel.prepare import scalar_name

_REAL = frozenset({Tensor, nn.Parameter, nn.Buffer})
"""Types of tensors that are no stand-ins."""


class _AsBefore(type):
    """Metaclass of changed classes: to call one, as in `type(module)(...)`, makes a module as the model came with."""

    _came_as: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._came_as(*args, **kwargs)


class Changed(nn.Module):
    """A module whose class eqaccel has changed.

    The class is made when it is needed (`_changed_class`) and nobody can import it, so copies and pickles name its two
    parts.
    """

    _kind: type[Changed]
    _came_as: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        if type(self) is not _changed_class(self._kind, self._came_as):  # somebody has derived from it since
            return copyreg.__newobj__, (type(self),), *state  # type: ignore[attr-defined]
        return _blank, (self._kind, self._came_as), *state


class Entrance(Changed):
    """A model with replacements in it. Layers that are called in one call of it share the sort of their edges.

    On a GPU, indices in its own code use that too (`own_rows`).

    Calls only are its own: `forward` is that of the model, for TorchScript and whatever else traces it. What stands in
    `RECORDERS` for a model is called in its place.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        _refuse_autocast(self, next(self.parameters(), None))
        recorder = RECORDERS.get(self)
        return self.call_ordinarily(*args, **kwargs) if recorder is None else recorder(*args, **kwargs)

    def call_ordinarily(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model itself."""
        with sorting_scope(), own_rows(self, _receiver_row(self)):
            return super().__call__(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model; replacements look at what was loaded at once, as programs that are compiled cannot."""
        loaded = super().load_state_dict(*args, **kwargs)
        for module in list(self.modules()):
            if isinstance(module, Replacement):
                module.update()
        return loaded

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        _refuse_to_empty(self, fn)
        return super()._apply(fn, recurse)


RECORDERS: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
"""What is called in the place of a model. It stands beside the models, so that copies and files know nothing of it."""


class UnverifiedEntrance(Entrance):
    """A model with replacements in it that was not compared as a whole with what it had been."""


class Replacement(Changed):
    """Base of the kinds of replacements: each has a `forward` that computes what the module does, faster.

    A kind reads the parameters of the module (`self.weight`) whenever it is called, so that they may be assigned,
    parametrized or written to. `self.plain_forward` is the method that the module came with. A kind owns no parameters;
    what it computes with is the child `self.eqaccel`, without parameters and persistent buffers, so that state dicts
    stay as they are. If that child is made from buffers of the module, the kind has a `remake`.
    """

    switches: Mapping[str, Any] = MappingProxyType({})
    """Attributes that the parent of the module gets along with the replacement, and loses with it."""

    calls: frozenset[str] = frozenset()
    """Names of the children that the kind calls as the module did, whatever they are."""

    receiver_row: int | None = None
    """Of a convolution, the row of the edge index that holds the receivers."""

    plain_forward: Callable[..., Any]
    if TYPE_CHECKING:
        _made_from: Snapshot

        def __getattr__(self, name: str) -> Any:
            """What the module came with, and `eqaccel`; torch says that it is a tensor or a module."""

    __e3nn_compile_mode__ = None  # TorchScript takes it along with its parent, however e3nn would treat the module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, with what belongs to the buffers that it has now."""
        if not torch.compiler.is_compiling():
            _refuse_autocast(self, args[0] if args else None)
            self.update()
        elif self._made_from.is_doubted:
            from eqaccel.patches.compiling import update_outside  # which imports the compiler

            update_outside(self)
        if not isinstance(self, Replacement):
            return self(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def update(self) -> None:
        """Makes what it computes with anew, if buffers, children or attributes of the module have changed since.

        Where the kind cannot do that, the module becomes again what it came as. While a program is traced, in which
        tensors are stand-ins, nothing is compared.

        Raises:
            PatchError: If it can neither be made anew nor taken back.
        """
        if torch._C._len_torch_dispatch_stack() == 0:
            self._compare()
        elif all(type(buffer) in _REAL for buffer in self.buffers()):
            with _disable_current_modes():  # those that count operations, or record them, have no part in this
                self._compare()

    def _compare(self) -> None:
        """`update`, of tensors that have values."""
        if self._made_from.holds():
            return
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch(), cpu_by_default():
            now = self.snapshot()
            try:
                self.check_children(now)
                if not now.equals(self._made_from):
                    setattr(self, ADDED, self.remake().train(self.training))
            except PatchError:
                if self.switches:
                    raise
                restore(self)
                return
            self._made_from = now

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.update()
        return super().__reduce_ex__(protocol) if isinstance(self, Replacement) else self.__reduce_ex__(protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # e3nn's modules add their compiled children when they are restored. What was added last stays the last, because
        # averaged models (`torch.optim.swa_utils`) go through the buffers of a model and its copy side by side.
        self._modules[ADDED] = self._modules.pop(ADDED)
        self._made_from = self.snapshot()  # e3nn may arrange buffers and children of copies in another way

    def snapshot(self) -> Snapshot:
        """What it computes from, as that is now."""
        return Snapshot(self, type(self).calls, self.elsewhere())

    def elsewhere(self) -> Mapping[str, nn.Module]:
        """Modules outside of this one that its kind computes from, by names for messages."""
        return {}

    def check_children(self, now: Snapshot) -> None:
        """Raises `PatchError` if a child would do what the kind leaves out, because it does not call it."""
        unheard = now.unheard(self._made_from)
        if unheard:
            raise PatchError(
                f"{type(self).__name__}: it has {unheard}, which eqaccel does not call; take that away, or use the "
                f"model unpatched"
            )

    def remake(self) -> nn.Module:
        """The child `eqaccel` for the buffers that the module has now.

        Raises:
            PatchError: If there is none.
        """
        raise PatchError(f"{type(self).__name__}: it has changed since it was patched")

    def share_coefficients(self, module: Any, stored: torch.dtype) -> None:
        """Puts the coefficients that this replacement computes with into a module like the one it came as.

        Verification calls it, so that both compute with the same constants. Most kinds read the constants of their
        module and do nothing here.

        Args:
            module: A copy of the module from before the patch, in float64.
            stored: The dtype that the coefficients were read in.

        Raises:
            VerificationError: If they differ by more than the rounding of what the module holds.
        """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module, in which the added child leaves no metadata either."""
        state = super().state_dict(*args, **kwargs)
        added = f"{kwargs.get('prefix', args[1] if len(args) > 1 else '')}{ADDED}"
        for name in [name for name in state._metadata if name == added or name.startswith(f"{added}.")]:
            del state._metadata[name]
        return state

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._made_from.doubt()  # also what scripted children are about to load

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        _refuse_to_empty(self, fn)
        self.update()
        if not isinstance(self, Replacement):
            return self._apply(fn, recurse)
        super()._apply(fn, recurse)
        if torch._C._len_torch_dispatch_stack() == 0:
            self._made_from = self.snapshot()  # the same coefficients elsewhere, or rounded
        return self

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by `torch.jit.script`, whose programs keep what they were made with."""
        self.update()
        return self


def _receiver_row(model: nn.Module) -> int:
    """The row of a model's edge index that holds the receivers: that of its first convolution, if it has one."""
    row = _receiver_rows.get(model)
    if row is None:
        rows = (module.receiver_row for module in model.modules() if isinstance(module, Replacement))
        row = _receiver_rows[model] = next((found for found in rows if found is not None), 1)
    return row


_receiver_rows: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def become(module: nn.Module, kind: type[Changed], added: nn.Module | None = None) -> None:
    """Changes the class of a module, in place.

    Args:
        module: A module of a model.
        kind: What it becomes besides what it is.
        added: What a kind of replacement computes with.
    """
    _become(module, kind, added)


@dataclass(frozen=True)
class Swap:
    """One sub-module to be replaced: what a kind of model proposes and `patch` carries out.

    Attributes:
        parent: Module that owns the attribute.
        name: Attribute of `parent` whose module is replaced.
        kind: What that module becomes.
        added: What the kind computes with.
    """

    parent: nn.Module
    name: str
    kind: type[Replacement]
    added: nn.Module

    @property
    def module(self) -> nn.Module:
        """The module that is replaced, and stays the same object."""
        return getattr(self.parent, self.name)

    def apply(self) -> None:
        """Makes the module a replacement; one that has several parents is changed once."""
        if not isinstance(self.module, Replacement):
            become(self.module, self.kind, self.added)
        for switch, value in self.kind.switches.items():
            setattr(self.parent, switch, value)


def preview(module: nn.Module, kind: type[Replacement], added: nn.Module) -> Any:
    """What `become` would make of a module, as another object with the very same contents; the module stays."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules=dict(module._modules))
    _become(twin, kind, added)
    return twin


def plain_class(module: nn.Module) -> type:
    """The class of a module, without what torch makes of it for parametrizations."""
    return parametrize.type_before_parametrizations(module)


def _become(module: Any, kind: type[Changed], added: nn.Module | None) -> None:
    came_as = plain_class(module)
    _set_class(module, came_as, _changed_class(kind, came_as))
    if added is not None:
        module.add_module(ADDED, added.train(module.training))
        module._made_from = module.snapshot()


def restore(module: Changed) -> None:
    """Takes the change of a module back: its class is the one that it came with, and the added child is gone."""
    changed: Any = next(cls for cls in type(module).__mro__ if "_came_as" in vars(cls))
    if isinstance(module, Replacement):
        delattr(module, ADDED)
        del module._made_from
    _set_class(module, changed, changed._came_as)


def restore_all(model: nn.Module) -> None:
    """Takes all changes of a model back, reading all that it needs from the model: it may have been unpickled."""
    for parent in model.modules():
        for child in parent._modules.values():
            for switch in child.switches if isinstance(child, Replacement) else ():
                vars(parent).pop(switch, None)  # several children may have set it
    for module in list(model.modules()):
        if isinstance(module, Changed):
            restore(module)


def refuse_patched(model: nn.Module) -> None:
    """Raises `AlreadyPatchedError` if any module of the model was replaced by eqaccel already."""
    for name, module in model.named_modules():
        if isinstance(module, Changed):
            raise AlreadyPatchedError(
                f"model: eqaccel has patched {type(model).__name__} already ({name or 'the model itself'} is changed); "
                f"use it as it is, or call eqaccel.unpatch(model) first"
            )


def _set_class(module: nn.Module, old: type, new: type) -> None:
    """Puts a class in the place of another one that a module is of, directly or through a parametrization."""

    def moved(cls: type) -> type:
        if cls is old:
            return new
        # torch gives a module with parametrizations a class of its own, and reads the class before from its bases.
        contents = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        return type(new)(cls.__name__, tuple(map(moved, cls.__bases__)), contents)

    module.__class__ = moved(type(module))


def _changed_class(kind: type[Changed], came_as: type[nn.Module]) -> type:
    """The class of a module of class `came_as` that has become a `kind`; it has the name of `came_as`."""
    parts: Any = (kind, came_as)  # as keys of a cache, for which mypy does not take classes of modules
    return _class_of(*parts)


@functools.lru_cache(maxsize=256)
def _class_of(kind: type[Changed], came_as: type[nn.Module]) -> type:
    meta = _AsBefore if type(came_as) is type else type("_AsBefore", (_AsBefore, type(came_as)), {})
    contents = {name: getattr(came_as, name) for name in ("__module__", "__qualname__", "__doc__")}
    contents |= {"_kind": kind, "_came_as": came_as, "plain_forward": _as_plain(came_as.forward)}
    return meta(came_as.__name__, (kind, came_as), contents)


def _as_plain(forward: Any) -> Any:
    return like(forward, name="plain_forward") if isinstance(forward, FunctionType) else forward


def _blank(kind: type[Changed], came_as: type[nn.Module]) -> Any:
    """An object that a copy or an unpickled one is filled into."""
    return object.__new__(_changed_class(kind, came_as))


def _refuse_to_empty(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Raises if a function for all tensors of a module leaves their values behind, before it is called for any."""
    place = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    if loses_values(function, place, as_stand_ins=True):
        raise PatchError(
            f"{type(module).__name__}: expected a function that keeps the values of tensors, got one that leaves them "
            f"behind, such as .to('meta') or .to_empty(): no state dict has what eqaccel computes with. Call "
            f"eqaccel.unpatch(model) first, and eqaccel.patch(model) when the weights are there"
        )


def _refuse_autocast(module: nn.Module, operand: Any) -> None:
    """Raises where autocast would compute parts of a model in another type."""
    device = operand.device.type if isinstance(operand, Tensor) else ""
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = scalar_name(torch.get_autocast_dtype(device))
        raise PatchError(
            f"{type(module).__name__}: expected no autocast around a patched model, got {dtype} on {device!r}, which "
            f"loses the digits that forces need; call the model inside of "
            f"`torch.autocast({device!r}, enabled=False)`, or outside of the autocast region"
        )
