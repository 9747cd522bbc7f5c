"""Makes every Python process that has this folder on PYTHONPATH patch the models that it builds or loads.

Test suites of other projects start programs of their own, so a pytest plugin would miss most models. Python imports
`sitecustomize` in every process; it waits here until a module that defines models is imported.

EQACCEL_SUITES_LOG names a file; every model adds a line to it: the test, the class, the modules replaced or the reason
why the model was left as it is. A model that does not pass verification, or any other error, fails the test.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_CLASSES = {
    "mace.modules.models": (
        "MACE",
        "ScaleShiftMACE",
        "AtomicDipolesMACE",
        "AtomicDielectricMACE",
        "EnergyDipolesMACE",
    ),
    "mace.modules.extensions": ("MACELES", "PolarMACE"),
    "nequip.nn.graph_model": ("GraphModel",),
    "nequip.nn.compile": ("CompileGraphModel",),
}


def _patch(model: Any) -> None:
    """Patches a model as a user does, and notes what came of it."""
    import eqaccel
    from eqaccel.errors import AlreadyPatchedError, PatchError, VerificationError

    try:
        eqaccel.patch(model)
        outcome = f"patched\t{eqaccel.report(model).accelerated}"
    except (VerificationError, AlreadyPatchedError):
        raise
    except PatchError as error:
        outcome = f"left\t{' '.join(str(error).split())}"
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with open(os.environ["EQACCEL_SUITES_LOG"], "a") as log:
        log.write(f"{test}\t{type(model).__name__}\t{outcome}\n")


def _patch_when_built(cls: type) -> None:
    """Models of exactly this class are patched at the end of their constructor; subclasses have their own."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: N807
        construct(self, *arguments, **options)
        if type(self) is cls:
            _patch(self)

    cls.__init__ = __init__


def _patch_when_loaded(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that patches whole models; those that were saved patched stay as they are."""

    @functools.wraps(load)
    def load_and_patch(*arguments: Any, **options: Any) -> Any:
        import eqaccel
        from eqaccel.errors import AlreadyPatchedError

        loaded = load(*arguments, **options)
        if type(loaded).__module__ in _CLASSES:
            try:
                _patch(loaded)
            except AlreadyPatchedError:
                assert eqaccel.report(loaded).accelerated
        return loaded

    return load_and_patch


def _prepare(module: ModuleType) -> None:
    for name in _CLASSES.get(module.__name__, ()):
        _patch_when_built(getattr(module, name))
    if module.__name__ == "mace.modules.models":
        import torch

        torch.load = _patch_when_loaded(torch.load)


class _Finder:
    """Finds the modules that define models where Python would, and prepares them once they are imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _CLASSES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _prepare(module)

        spec.loader.exec_module = exec_module
        return spec


def _run_shadowed() -> None:
    """Runs the `sitecustomize` that this one hides, if there is another."""
    here = Path(__file__).parent
    others = [folder for folder in sys.path if Path(folder).resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_shadowed()
if "EQACCEL_SUITES_LOG" in os.environ:
    sys.meta_path.insert(0, _Finder)
