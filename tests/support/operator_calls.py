"""Which operators of eqaccel are called, below autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "eqaccel":
            self.names.append(function._schema.name.removeprefix("eqaccel::"))
        return function(*args, **(kwargs or {}))


@contextmanager
def called() -> Iterator[list[str]]:
    """The names of what is called as long as the context lasts, in order."""
    with _Called() as mode:
        yield mode.names
