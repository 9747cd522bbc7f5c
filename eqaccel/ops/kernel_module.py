"""What all modules have that call a kernel: a spec, and the payload that carries its kernels into exported programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from eqaccel import runtime
from eqaccel.families import KernelFamily, TunedKernel


class KernelModule(nn.Module):
    """A module with kernels of a family; warm-up and export handle all of them alike.

    Attributes:
        family: What computes.
        spec: What is computed; None where the family has one kernel.
        tuned: Kernels of plans that are not the default ones; without a type, which TorchScript would not understand.
        key: Names the payload.
        payload: (num_bytes,) uint8.
    """

    family: ClassVar[KernelFamily]
    if TYPE_CHECKING:
        payload: torch.Tensor
        tuned: tuple[TunedKernel, ...]

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
        self.tuned = ()
        content, self.key = self.family.payload(spec)
        # A buffer follows the module to its device, as tracing wants; not persistent, so state_dict stays empty; and
        # of integers, so that .float() and .double() leave it alone.
        self.register_buffer("payload", torch.frombuffer(bytearray(content), dtype=torch.uint8), persistent=False)

    def set_payload(self, content: bytes, key: int) -> None:
        """Takes other kernels, from the next call on.

        Args:
            content: A payload of the module's spec.
            key: Its key, see `payload_key`.
        """
        self.key = key
        self.payload = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.payload.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        lost = loses_values(fn, self.payload.device)
        super()._apply(fn, recurse)
        if lost:  # no state dict has it
            self.set_payload(*self.family.payload(self.spec, self.tuned))
        return self


def loses_values(function: Callable[[Tensor], Tensor], device: torch.device, *, as_stand_ins: bool = False) -> bool:
    """Whether a function for all tensors of a module leaves their values behind, as that of `Module.to_empty` does.

    Args:
        function: What `Module._apply` is called with.
        device: Where the tensors are.
        as_stand_ins: Whether tensors without any values, on the device "meta", count as well.
    """
    if torch._C._len_torch_dispatch_stack() > 0:  # all are stand-ins
        return False
    values = torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8)
    found = function(values.to(device))
    if found.is_meta:
        return as_stand_ins and device.type != "meta"
    return not torch.equal(found.cpu(), values)


def has_cuda_kernel(family: KernelFamily, spec: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a family has a kernel of a spec for an NVIDIA GPU in float32, the only dtype of tensor cores' kernels.

    Args:
        family: The family.
        spec: What is computed.
        device: The device, of any kind.
        dtype: Of the operands.
    """
    if device.type != "cuda" or torch.version.hip or dtype != torch.float32:
        return False
    content, key = family.payload(spec)
    major, minor = torch.cuda.get_device_capability(device)
    program = runtime.register_program(key, content)
    return program.compile_arch("cuda", "float32", "forward", f"sm_{major}{minor}") is not None
