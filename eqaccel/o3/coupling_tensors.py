"""The constants of e3nn's products, which stand in its state dicts: with them, checkpoints are the same both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eqaccel.families.tensor_product import TensorProductSpec
from eqaccel.irreps import Irreps
from eqaccel.o3.instructions import ProductInstruction
from eqaccel.wigner import WignerConvention, wigner_3j

PRODUCT, RIGHT = "_compiled_main_left_right", "_compiled_main_right"
"""e3nn's children that hold them, and compute with them: the product, and its method `right`."""


class CouplingTensors(nn.Module):
    """Buffers named as in e3nn's programs; nothing is computed with them.

    State dicts that are loaded may lack them, or have more of them. But their signs have to be those of the module.

    Args:
        buffers: By name.
    """

    def __init__(self, buffers: Mapping[str, Tensor] = {}) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, own in self._buffers.items():
            given = state_dict.get(prefix + name)
            # Loose enough for a checkpoint in bfloat16: only signs are in question.
            if own is None or given is None or own.is_meta or given.is_meta or not own.is_floating_point():
                continue
            if given.shape != own.shape or float((given.to(own) - own).abs().max()) > 0.01:
                error_msgs.append(
                    f"{prefix}{name}: expected the coupling tensor of the module, got another one: the checkpoint has "
                    f"the signs of another version of e3nn; make the module with convention='e3nn<0.5' or 'e3nn>=0.5'"
                )


def coupling_tensors(
    child: str,
    irreps: tuple[Irreps, Irreps, Irreps],
    instructions: Iterable[ProductInstruction],
    spec: TensorProductSpec,
) -> CouplingTensors:
    """The constants that e3nn keeps in a child of a product, in torch's default dtype."""
    is_kept = {PRODUCT: _is_kept, RIGHT: _is_kept_by_right}[child]
    convention = spec.convention or WignerConvention.E3NN_0_5  # either, where none is said
    buffers = {}
    for item in instructions:
        blocks = [side[i] for side, i in zip(irreps, (item.i_in1, item.i_in2, item.i_out), strict=True)]
        l1, l2, l3 = (block.ir.l for block in blocks)
        if 0 in item.path_shape:
            continue
        if is_kept(item, (l1, l2, l3)):
            tensor = torch.tensor(wigner_3j(l1, l2, l3, convention), dtype=torch.get_default_dtype())
            buffers[f"_w3j_{l1}_{l2}_{l3}"] = tensor
        if "<" in item.connection_mode and child == PRODUCT:
            mul = blocks[0].mul
            buffers[f"_triu_indices_{mul}"] = torch.triu_indices(mul, mul, 1)
    return CouplingTensors(buffers)


def _is_kept(item: ProductInstruction, degrees: tuple[int, ...]) -> bool:
    """Whether e3nn multiplies by the tensor, rather than by code of its own for degrees of zero and cross products."""
    if item.connection_mode in ("uvuv", "uvu<v", "u<vw"):
        return True
    if not item.has_weight and item.connection_mode in ("uvu", "uuw"):
        return True
    return 0 not in degrees and not (item.connection_mode == "uuu" and degrees == (1, 1, 1))


def _is_kept_by_right(item: ProductInstruction, degrees: tuple[int, ...]) -> bool:
    """The same for the method `right`, which e3nn has not got for every mode."""
    if "<" in item.connection_mode:
        return False
    if item.connection_mode in ("uuw", "uvuv") or (not item.has_weight and item.connection_mode in ("uvu", "uvv")):
        return True
    return 0 not in degrees
