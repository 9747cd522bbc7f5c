"""Which modules of e3nn are replaced in a network that eqaccel knows nothing else about."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eqaccel.errors import PatchError
from eqaccel.patches.e3nn.forms import FORMS
from eqaccel.patches.kind import Swapping, class_names
from eqaccel.patches.nodes import NOT_YET, derives_from_e3nn, node_rows, node_swaps
from eqaccel.patches.precision import Options
from eqaccel.patches.replacement import Swap, refuse_patched
from eqaccel.patches.report import ReportRow


class E3nnSwapping(Swapping):
    """Products, linear maps, spherical harmonics and gates of e3nn, wherever they are."""

    def swaps(self, model: torch.nn.Module, options: Options) -> list[Swap]:
        """See `Swapping.swaps`; a module that there is no form for is left."""
        refuse_patched(model)
        if options.low_precision:
            raise PatchError(
                f"low_precision: expected none for {type(model).__name__}, whose modules of e3nn make no weights of "
                f"edges that eqaccel knows of; leave it out"
            )
        if _has_form(model):
            raise PatchError(
                f"model: {type(model).__name__} is itself a module of e3nn, expected one that holds some; for this "
                f"one, use from_e3nn(module) of the class of that name in eqaccel.o3"
            )
        found = list(node_swaps(model, FORMS))
        inside = {id(module) for swap in found for module in swap.module.modules()}
        swaps = [swap for swap in found if id(swap.parent) not in inside]  # what holds others replaces them as well
        if not swaps:
            reasons = "; ".join(f"{row.path} ({row.kind}): {row.note}" for row in self.rows(model))
            raise PatchError(f"model: {type(model).__name__} holds nothing that can be replaced: {reasons}")
        return swaps

    def rows(self, model: torch.nn.Module) -> list[ReportRow]:
        """The modules with a form, replaced or not, then the other ones of e3nn that are not inside of another."""
        left = [
            ReportRow(path, type(module).__name__, False, "left: eqaccel has no kernel for it")
            for path, module in _without_form(model, "")
        ]
        rows = list(node_rows(model, FORMS))
        replaced = [f"{row.path}." for row in rows if row.accelerated or row.idle or row.note == NOT_YET]
        return [*(row for row in rows if not row.path.startswith(tuple(replaced))), *left]


def _without_form(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of e3nn that have no form and hold none that has one, not those inside of such; with their paths."""
    for name, child in module.named_children():
        place = f"{path}.{name}".lstrip(".")
        if _has_form(child) or isinstance(child, torch.jit.ScriptModule):
            continue
        if derives_from_e3nn(child) and not any(map(_has_form, child.modules())):
            yield place, child
        else:
            yield from _without_form(child, place)


def _has_form(module: torch.nn.Module) -> bool:
    return bool(class_names(module) & FORMS.keys()) and derives_from_e3nn(module)
