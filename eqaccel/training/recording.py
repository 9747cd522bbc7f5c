"""A call of a model and its backward pass, as two CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eqaccel.step.capture import recorded, warmed_stream

Gradients = tuple[Tensor | None, ...]


class Recording:
    """A function, and its gradient, recorded.

    Both graphs are in one pool of memory, which recordings share: what one of them has computed lasts until another one
    runs. The gradient is recorded when it is first asked for, since only then it is known of which outputs.

    Args:
        run: Gives outputs, from tensors that stay where they are; takes a flag, whether this is a run before.
        parameters: What the gradients are of.
        device: The GPU.
        pool: The pool, by its handle.
    """

    def __init__(
        self,
        run: Callable[[bool], Sequence[Tensor]],
        parameters: Sequence[Tensor],
        device: torch.device,
        pool: Any,
    ) -> None:
        self._parameters, self._device, self._pool = list(parameters), device, pool

        def once() -> None:
            outputs = [output for output in run(True) if output.requires_grad]
            torch.autograd.grad(outputs, self._parameters, list(map(torch.zeros_like, outputs)), allow_unused=True)

        self._stream = warmed_stream(once, device)
        self._forward = torch.cuda.CUDAGraph()
        with recorded(self._forward, self._stream, device, pool):
            self._outputs = list(run(False))
        self.wanted: tuple[bool, ...] | None = None
        """Of which outputs the gradient was recorded; None if it is still to be."""

    def forward(self) -> list[Tensor]:
        """Runs the function on the current stream; the outputs last until another recording of the pool runs."""
        self._forward.replay()
        return [output.detach() for output in self._outputs]

    def backward(self, cotangents: Sequence[Tensor | None]) -> Gradients:
        """The gradients of the parameters, once after each `forward`.

        Args:
            cotangents: Gradients of the outputs, or of their first rows; None where there is none. Those that are there
                in the first call have to be there in all, and no others.
        """
        wanted = tuple(cotangent is not None for cotangent in cotangents)
        if self.wanted is None:
            self._record(wanted)
        given = [cotangent for cotangent in cotangents if cotangent is not None]
        for to, cotangent in zip(self._cotangents, given, strict=True):
            to[: len(cotangent)].copy_(cotangent)
            to[len(cotangent) :].zero_()
        self._backward.replay()
        parts = {flat.dtype: iter(flat.clone().split(self._lengths[flat.dtype])) for flat in self._flat}
        return tuple(
            next(parts[parameter.dtype]).view_as(parameter) if is_used else None
            for parameter, is_used in zip(self._parameters, self._is_used, strict=True)
        )

    def _record(self, wanted: tuple[bool, ...]) -> None:
        outputs = [output for output, is_wanted in zip(self._outputs, wanted, strict=True) if is_wanted]
        self._cotangents = [torch.zeros_like(output) for output in outputs]
        self._backward = torch.cuda.CUDAGraph()
        with recorded(self._backward, self._stream, self._device, self._pool):
            found = torch.autograd.grad(outputs, self._parameters, self._cotangents, allow_unused=True)
            given = [gradient for gradient in found if gradient is not None]
            dtypes = dict.fromkeys(gradient.dtype for gradient in given)
            # All in one piece, which is copied at once.
            self._flat = [torch.cat([g.reshape(-1) for g in given if g.dtype == dtype]) for dtype in dtypes]
        self._lengths = {dtype: [g.numel() for g in given if g.dtype == dtype] for dtype in dtypes}
        self._is_used = [gradient is not None for gradient in found]
        # What autograd has kept for this gradient is of no more use, and its memory is one for other recordings.
        self._outputs = [output.detach() for output in self._outputs]
        self.wanted = wanted
