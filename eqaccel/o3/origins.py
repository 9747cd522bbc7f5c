"""Whose a class is, and whose its methods are: others derive from a library's classes, and name theirs alike."""

from __future__ import annotations

from typing import Any

from torch import nn

from eqaccel.errors import SpecError


def check_class(cls: type, module: Any, owners: tuple[str, ...]) -> None:
    """Refuses to take a module for one of e3nn's: it has another class, or a forward method of its own.

    Args:
        cls: The class of e3nn's name that the module is to become.
        module: The module.
        owners: Names of the classes whose forward method it may have.

    Raises:
        SpecError: If it is something else.
    """
    names = [base.__name__ for base in type(module).__mro__ if is_of_e3nn(base)]
    if cls.__name__ not in names:
        raise SpecError(f"module: expected an e3nn.o3.{cls.__name__}, got a {full_name(type(module))}")
    owner = forward_owner(type(module))
    if "forward" in vars(module) or owner.__name__ not in owners or not is_of_e3nn(owner):
        found = "one that was put into it" if "forward" in vars(module) else f"that of {full_name(owner)}"
        raise SpecError(f"module: expected the forward method of e3nn's {cls.__name__}, got {found}")


def forward_owner(cls: type[nn.Module]) -> type:
    """The class, this one or a base, whose `forward` method a class of modules has."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def package_of(found: Any) -> str:
    """The package that a class or a function is from; of a copy in a file of torch.package, that of the original."""
    outer, _, inner = f"{found.__module__}".partition(".")
    return inner.partition(".")[0] if outer.startswith("<torch_package_") else outer


def is_of_e3nn(cls: type) -> bool:
    """Whether a class is one of e3nn's, and not one that derives from it."""
    return package_of(cls) == "e3nn"


def full_name(cls: type) -> str:
    """The name of a class after that of its module: others may have named theirs alike."""
    return f"{cls.__module__}.{cls.__qualname__}"
