"""What replacements do outside of the programs that `torch.compile` makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eqaccel.errors import PatchError

if TYPE_CHECKING:  # that file imports this one when it is needed
    from eqaccel.patches.replacement import Replacement


@torch.compiler.disable(reason="eqaccel has to look at what was loaded: call the model once before")  # type: ignore[untyped-decorator]
def update_outside(module: Replacement) -> None:
    """Updates a replacement where a program is about to be made of it; that of `torch.compile` breaks here, once.

    Args:
        module: The replacement; it may become again what it came as.

    Raises:
        PatchError: In `torch.export`, which puts stand-ins in the place of values.
    """
    module.update()
    made_from = getattr(module, "_made_from", None)
    if made_from is not None and made_from.is_doubted:
        raise PatchError(
            f"{type(module).__name__}: expected values that eqaccel has seen, got others that were loaded since, not "
            f"by model.load_state_dict; call the model once before you export it"
        )
