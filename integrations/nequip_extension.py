"""Makes `enable_eqaccel` a modifier of NequIP models: `nequip-compile --modifiers enable_eqaccel`, or in a config.

nequip imports this module by itself, through the entry point `nequip.extension`, so this is the one module of eqaccel
that may import nequip. It loads torch's operators only when the modifier is used, and a nequip that it does not fit
costs a warning, not the program.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODIFIER = "enable_eqaccel"
SEARCH = "nequip.model.modify_utils"
"""Where nequip searches a model for modifiers."""


def enable_eqaccel(
    _: type,
    model: Any,
    verify: bool = True,
    deterministic: bool = True,
    low_precision: Sequence[Any] = (),
    capture: bool = False,
) -> Any:
    """Accelerate NequIP models with eqaccel, on CPUs and GPUs, for training and inference."""
    import eqaccel

    eqaccel.unpatch(model)  # that of a checkpoint of training with this modifier is patched, with options of its own
    eqaccel.patch(model, verify=verify, deterministic=deterministic, low_precision=low_precision)
    if capture:
        eqaccel.training.capture(model)
    return model


def register() -> None:
    """Does all that can be done before nequip itself is imported, and sees to it that the rest is done later."""
    try:
        from nequip.scripts._package_utils import register_libraries_as_external_for_packaging
    except ImportError as error:  # or no nequip at all: a packaged model has a copy of it, which comes here too
        _warn(error)
        return
    register_libraries_as_external_for_packaging(extern_modules=["eqaccel"])
    if SEARCH in sys.modules:
        offer_modifier(sys.modules[SEARCH])
    else:
        sys.meta_path.insert(0, _AfterImport())


def offer_modifier(search: Any) -> None:
    """Adds the modifier to those that nequip finds in a model.

    nequip looks for modifiers on the classes of a model's modules. Those of a packaged model came with the package, so
    what can be extended for all models alike is the search.

    Args:
        search: The module `nequip.model.modify_utils`.
    """
    try:
        from nequip.nn.model_modifier_utils import model_modifier

        find: Callable[..., dict[str, Any]] = search.get_all_modifiers
        mark = model_modifier(persistent=False, private=False, supported_compile_modes=["torchscript", "aotinductor"])
        modifier = getattr(type("Modifiers", (), {MODIFIER: mark(classmethod(enable_eqaccel))}), MODIFIER)
    except (ImportError, AttributeError, TypeError) as error:
        _warn(error)
        return

    def get_all_modifiers(module: Any, _all_modifiers: dict[str, Any] | None = None) -> dict[str, Any]:
        found = find(module, _all_modifiers)
        if any(cls.__name__ == "TensorProductScatter" for cls in type(module).__mro__):
            found[MODIFIER] = modifier
        return found

    search.get_all_modifiers = get_all_modifiers


class _AfterImport(MetaPathFinder):
    """Calls `offer_modifier` when nequip's search is imported: extensions come first, and cannot import it yet."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        if name != SEARCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            offer_modifier(module)

        loader.exec_module = exec_module
        return spec


def _warn(error: Exception) -> None:
    message = (
        f"the modifier {MODIFIER} is not available with this version of nequip ({error}): use eqaccel.patch(model)"
    )
    warnings.warn(f"eqaccel: {message}", stacklevel=2)


register()
