"""What a replacement was made from, to notice at each call when that is no longer what the module holds."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from eqaccel.errors import PatchError

ADDED = "eqaccel"
"""Name of the child that a replacement adds to a module."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module has its hooks."""

_SIMPLE = frozenset({bool, int, float, str, FunctionType, BuiltinFunctionType, torch.jit.ScriptFunction})
_OF_TORCH = frozenset({"training", "_is_full_backward_hook", "_compiled_call_impl", "forward"})
"""Attributes of every module that no result depends on, and the one that is looked at by itself."""


@dataclass(frozen=True)
class _Buffer:
    """A buffer as it was: where it stands, the tensor, its version and address, and on a CPU a copy of its values.

    Versions count what torch writes, but not what is written through `.data`, NumPy or shared memory; comparing values
    finds that too. On a GPU it would wait for the device.
    """

    holder: Mapping[str, Any]
    name: str
    tensor: Tensor
    version: int
    address: int
    values: Tensor | None

    @classmethod
    def of(cls, holder: Mapping[str, Any], name: str, tensor: Tensor) -> _Buffer:
        version = 0 if tensor.is_inference() else tensor._version
        values = tensor.detach().clone() if tensor.is_cpu else None
        return cls(holder, name, tensor, version, tensor.data_ptr(), values)

    def holds(self) -> bool:
        return (
            self.holder.get(self.name) is self.tensor
            and self.tensor._version == self.version
            and self.tensor.data_ptr() == self.address
            and (self.values is None or torch.jit.is_tracing() or torch.equal(self.tensor, self.values))
        )


class Snapshot:
    """What a replacement was made from: buffers, children, numbers, words and functions, in children too.

    To see that nothing has changed takes a look at identities, at hooks and classes of children, and at the versions,
    addresses and, on a CPU, values of tensors. Where these differ, the digest of all values tells whether that matters.
    A copy of a snapshot is one of nothing: what is copied takes its own.

    Args:
        module: The replacement.
        called: Names of children that it calls, so that what happens in these is done.
        others: Modules elsewhere that it was made from, by names for messages.

    Attributes:
        is_doubted: Whether other values have been loaded since, maybe, that nobody has looked at.
    """

    def __init__(
        self, module: nn.Module, called: Collection[str] = (), others: Mapping[str, nn.Module] = MappingProxyType({})
    ) -> None:
        self._children: dict[str, nn.Module] = dict(others)
        self._attributes: dict[str, Any] = {}
        self._classes: dict[str, type] = {}
        # What there is in which dictionary under which name, and dictionaries that nothing is added to.
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._dictionaries: list[Mapping[str, Any]] = []
        self._hooks: list[Any] = []
        self._silent: list[nn.Module] = []  # children that are not called
        buffers = dict(self._look_at(module, "", called))
        for name, other in others.items():
            buffers.update(self._look_at(other, f"{name}."))
        self._sizes, self._types = [*map(len, self._dictionaries)], [*map(type, self._silent)]
        self._digest = _digest({path: buffers[path][2] for path in sorted(buffers)})
        self._buffers = [_Buffer.of(*place) for place in buffers.values()]
        # Tensors made in inference mode do not count their versions.
        self._known = not self._own_forward() and not any(buffer.tensor.is_inference() for buffer in self._buffers)
        self.is_doubted = False

    def _look_at(
        self, module: nn.Module, path: str, called: Collection[str] = ()
    ) -> Iterator[tuple[str, tuple[Mapping[str, Any], str, Tensor]]]:
        """Takes down what is in a module; gives its buffers, by their paths, with the places where they stand."""
        scripted = _is_scripted(module)
        held: Any = module._buffers, module._modules
        buffers, children = map(dict, held) if scripted else held
        if not scripted:
            self._look_at_attributes(module, path)
            self._dictionaries += buffers, children
        for name, buffer in buffers.items():
            if buffer is None:
                self._hold(buffers, name, None)
            else:
                yield path + name, (buffers, name, buffer)
        for name, child in children.items():
            if name in (ADDED, "parametrizations"):
                continue
            if not scripted:  # what such a module has is given out by new objects; itself it is one of the children
                self._hold(children, name, child)
            if child is None:
                continue
            if not scripted:
                self._children[path + name] = child
            if name not in called:
                yield from self._look_at(child, f"{path}{name}.")

    def _look_at_attributes(self, module: nn.Module, path: str) -> None:
        own = vars(module)
        for name, value in simple_attributes(module).items():
            self._attributes[path + name] = value
            self._hold(own, name, value)
        if path:
            self._dictionaries.append(own)
            self._hooks += [own[name] for name in HOOKS if name in own]
            self._silent.append(module)
            self._classes[path[:-1]] = came_as(module)

    def _hold(self, holder: dict[str, Any], name: str, value: Any) -> None:
        self._holders.append(holder)
        self._names.append(name)
        self._values.append(value)

    def _own_forward(self) -> str:
        """Path of a child that is not called and has got a `forward` of its own, or an empty string."""
        return next((path for path in self._classes if "forward" in vars(self._children[path])), "")

    def holds(self) -> bool:
        """Whether nothing can have changed; False says that it is not known."""
        # By functions of C alone: this is asked in every call of every replacement.
        present = map(dict.get, self._holders, self._names)
        if (
            self.is_doubted
            or not self._known
            or any(self._hooks)
            or not all(map(operator.is_, present, self._values))
            or [*map(len, self._dictionaries)] != self._sizes
            or [*map(type, self._silent)] != self._types
        ):
            return False
        with torch._C._DisableFuncTorch():
            return all(buffer.holds() for buffer in self._buffers)

    def equals(self, earlier: Snapshot) -> bool:
        """Whether all values are those of an earlier snapshot, and all children the same objects.

        A scripted child is taken for what stood there before: compilers put it there, before they come to its parent.
        """
        scripted = tuple(f"{path}." for path, child in self._children.items() if _is_scripted(child))

        def known(entries: Mapping[str, Any]) -> dict[str, Any]:
            return {path: value for path, value in entries.items() if not path.startswith(scripted)}

        before = known(earlier._children)
        return (
            self._digest == earlier._digest
            and self._attributes == known(earlier._attributes)
            and self._children.keys() == before.keys()
            and all(before[path] is child or _is_scripted(child) for path, child in self._children.items())
        )

    def unheard(self, earlier: Snapshot) -> str:
        """What a child would do that the replacement does not call; empty if it would do what it did earlier."""
        own_forward = self._own_forward()
        if own_forward:
            return f"a forward method of its own in {own_forward}"
        for path, cls in self._classes.items():
            child = self._children[path]
            if any(vars(child).get(name) for name in HOOKS):
                return f"hooks in {path}"
            if earlier._children.get(path) is child and earlier._classes.get(path, cls) is not cls:
                return f"another class in {path}"
        return ""

    def doubt(self) -> None:
        """Has the values compared at the next look."""
        self.is_doubted = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (nn.Module(),)


def hooked_part(model: nn.Module) -> str:
    """The first module of a model that has hooks: its path, "the model", or "" if there is none."""
    paths = (path or "the model" for path, m in model.named_modules() if any(getattr(m, h, None) for h in HOOKS))
    return next(paths, "")


def simple_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module itself that are numbers, words or functions, as activations are.

    A graph of torch.fx has none: its text is written anew, in other words, by those who copy it.
    """
    if isinstance(module, torch.fx.GraphModule):
        return {}
    return {name: value for name, value in vars(module).items() if type(value) in _SIMPLE and name not in _OF_TORCH}


def came_as(module: nn.Module) -> type:
    """The class that a module came with, before it got parametrizations or was replaced."""
    plain: type = parametrize.type_before_parametrizations(module)
    return getattr(plain, "_came_as", plain)


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _digest(buffers: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for path, buffer in buffers.items():
        digest.update(f"{path} {buffer.dtype} {tuple(buffer.shape)}\n".encode())
        if not buffer.is_meta:
            digest.update(_bytes(path, buffer))
    return digest.digest()


def _bytes(name: str, tensor: Tensor) -> bytes:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise PatchError(
            f"{name}: expected an ordinary tensor in a patched model, got one that a transformation of torch.func put "
            f"there; call eqaccel.unpatch(model) before you transform its buffers"
        )
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
