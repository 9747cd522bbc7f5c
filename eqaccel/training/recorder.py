"""What is called in the place of a model that is trained: it replays what was recorded for batches of such a size."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eqaccel.errors import PatchError, StepWarning
from eqaccel.ops import GivenEdges, given_edges
from eqaccel.patches.batch import Batch, Extent, PaddedBatch
from eqaccel.patches.finder import find_models
from eqaccel.patches.kind import ModelKind, Training
from eqaccel.patches.replacement import RECORDERS, Entrance
from eqaccel.patches.torch_state import model_device, rounding_unit
from eqaccel.patches.watch import Watch
from eqaccel.training.recording import Gradients, Recording

_MOST = 24
"""Recordings that are kept; the one that was used longest ago goes first."""

_ROOMY = 1.125
"""Room that a batch may have, of what it would get, before it gets a recording of its own."""

_ROUNDINGS = 1024
"""Units of rounding that two right evaluations may be apart, relative to the sum of absolute values."""


def capture(model: Any) -> Recorder:
    """Has steps of training of a patched model recorded as CUDA graphs, which takes the host out of them.

    The model is called as before, and so are loss, `backward`, clipping of gradients, averages of weights and the
    optimizer: only what happens in the model, and in its share of the backward pass, is replayed. Losses and gradients
    are those of the ordinary calls, but for rounding. A batch is put into memory that is a little larger, with blank
    atoms behind it that nothing depends on; for a size of memory a recording is made when it is needed the second time,
    and compared with the ordinary call. What cannot be recorded runs the ordinary way, and the recorder says why.

    Args:
        model: A patched MACE or NequIP model, or what holds one such model.

    Returns:
        What is called in the place of the model from now on, until `release`.

    Raises:
        PatchError: If it holds no patched model, or several.
    """
    found = find_models(model, PatchError)
    if len(found) != 1 or not isinstance(found[0].model, Entrance):
        raise PatchError(
            "model: expected one patched model, or what holds one; call eqaccel.patch(model) first, and "
            "eqaccel.training.capture for each model"
        )
    kind = found[0].kind
    training = kind.training if isinstance(kind, ModelKind) else None
    recorder = Recorder(found[0].model, training)
    RECORDERS[found[0].model] = recorder
    return recorder


class Recorder:
    """Calls a model, and its backward pass, by recordings where it has them. `str` of it says what it did, and why.

    One thread at a time.

    Args:
        model: The patched model.
        training: How its kind is called; None if that cannot be recorded.

    Attributes:
        replays: Calls that recordings have computed.
        recordings: How many recordings were made.
        ordinary: Calls of training that were computed the ordinary way, by the reason.
        not_captured: Why nothing is recorded (any more); empty if it is.
    """

    devices = ("cuda",)
    """Where models are recorded."""

    def __init__(self, model: nn.Module, training: Training | None) -> None:
        self._model = ref(model)
        self._training = training
        self.replays = self.recordings = 0
        self.ordinary: Counter[str] = Counter()
        self.not_captured = "" if training is not None else f"{type(model).__name__} is of a kind that is not recorded"
        self._watch: Watch | None = None
        self._parameters: list[nn.Parameter] = []
        self._rooms: OrderedDict[tuple[Any, ...], _Room] = OrderedDict()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._pool: Any = None
        self._pending: ref[_Replay] | None = None

    def release(self) -> None:
        """Has the model called itself again, and gives the memory of the recordings back."""
        self._forget()
        model = self._model()
        if model is not None and RECORDERS.get(model) is self:
            del RECORDERS[model]

    def report(self) -> str:
        """What it did: calls by recordings, and those that went the ordinary way, with the reasons."""
        lines = [f"{self.replays} calls replayed, {self.recordings} recordings made"]
        if self.not_captured:
            lines.append(f"nothing is recorded: {self.not_captured}")
        lines += [f"{count} calls the ordinary way: {reason}" for reason, count in self.ordinary.most_common()]
        return "\n".join(lines)

    __str__ = report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, which has this in its place."""
        model: Any = self._model()
        training = self._training
        if training is None or not torch.is_grad_enabled():
            return model.call_ordinarily(*args, **kwargs)
        batch = training.batch(model, args, kwargs)
        if batch is None:  # no step of training
            return model.call_ordinarily(*args, **kwargs)
        reason = self.not_captured or (batch if isinstance(batch, str) else self._follow(model))
        if not reason and self._is_waiting():
            reason = "outputs of another batch wait for their backward pass"
        if not reason:
            assert isinstance(batch, Batch)
            room = self._room_of(batch)
            if room is None:
                reason = "the first batch of its size"
            else:
                outputs = self._replay(model, room, batch)
                if outputs is not None:
                    return outputs
                reason = self.not_captured
        self.ordinary[reason] += 1
        return model.call_ordinarily(*args, **kwargs)

    def _follow(self, model: nn.Module) -> str:
        """Forgets recordings of a model that has changed; returns what keeps the model from being recorded."""
        device = model_device(model).type
        if device not in self.devices:
            return f"the model is on a {device.upper()}"
        if self._watch is None or self._watch.obstacle or not self._watch.holds():
            self._forget()
            self._watch = Watch([model], trained=True)
            self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert self._training is not None
        obstacle = self._watch.obstacle or self._training.obstacle(model)
        return obstacle or ("" if self._parameters else "nothing is trained")

    def _forget(self) -> None:
        self._rooms.clear()
        self._seen.clear()
        self._watch = self._pending = self._pool = None

    def _is_waiting(self) -> bool:
        """Whether outputs of a recording are about that may still be differentiated."""
        replay = self._pending() if self._pending is not None else None
        return replay is not None and not replay.is_used

    def _room_of(self, batch: Batch) -> _Room | None:
        """Where a batch is computed: a recording with room for it, and not too much, or a new one; None if none yet."""
        assert self._training is not None
        signature = batch.signature(self._training.fields)
        fitting = [
            (key, room)
            for key, room in self._rooms.items()
            if room.signature == signature and batch.extent.fits(room.extent) and room.suits(batch.extent)
        ]
        if fitting:
            key, room = min(fitting, key=lambda entry: entry[1].extent.edges)
            self._rooms.move_to_end(key)
            return room
        extent = batch.extent.grown()
        key = (*signature, extent)
        self._seen[key] += 1
        if self._seen[key] < 2:
            return None
        model = self._model()
        assert model is not None
        blank = self._training.blank(model, batch, extent)
        room = _Room(extent, signature, PaddedBatch(blank, self._training.fields))
        if len(self._rooms) >= _MOST:
            self._rooms.popitem(last=False)
        self._rooms[key] = room
        return room

    def _replay(self, model: Any, room: _Room, batch: Batch) -> dict[str, Any] | None:
        """The outputs of a model, recorded first where they have to be; None where that failed."""
        reference: dict[str, Tensor] | None = None
        versions = [parameter._version for parameter in self._parameters]
        # The gradient of what was recorded before parameters have changed cannot be recorded any more.
        is_stale = room.recording is not None and room.recording.wanted is None and room.versions != versions
        if room.recording is None or is_stale:
            room.versions = versions
            reference = self._record(model, room, batch)
            if reference is None:
                return None
        assert room.recording is not None
        replay = _Replay(self, room, batch, versions, reference)
        self._pending = ref(replay)
        outputs: Sequence[Tensor] = _Replayed.apply(replay, *self._parameters)
        self.replays += 1
        assert self._training is not None
        read = batch.inputs if self._training.gives_inputs else {}
        return {**read, **room.others, **dict(zip(room.names, outputs, strict=True))}

    def _record(self, model: Any, room: _Room, batch: Batch) -> dict[str, Tensor] | None:
        """Records for a room; returns what the ordinary call gives, or None if it cannot be done."""
        try:
            return self._try_to_record(model, room, batch)
        except (RuntimeError, NotImplementedError) as error:
            self._give_up(f"recording failed ({type(error).__name__}: {str(error).splitlines()[0]})")
            return None

    def _try_to_record(self, model: Any, room: _Room, batch: Batch) -> dict[str, Tensor]:
        training = self._training
        assert training is not None
        device = model_device(model)
        room.memory.fill(batch)
        inputs, receiver = room.memory.inputs, training.receiver_row
        aliases = [nn.Parameter(parameter.detach()) for parameter in self._parameters]

        def run(check: bool) -> list[Tensor]:
            edges, nodes = inputs["edge_index"], room.extent.nodes
            by_row = edges.flip(0) if receiver == 0 else edges
            index = torch.ops.eqaccel.graph(by_row[1], by_row[0], nodes, nodes)
            stand_ins = _standing_in(model, self._parameters, aliases)
            with stand_ins, given_edges(GivenEdges(by_row, index, nodes, check, read=edges)):
                outputs = self._call(model, {n: v.detach() for n, v in inputs.items()}, batch)
            room.names = [name for name in training.outputs if _is_floating_point(outputs.get(name))]
            room.others = {name: None for name, value in outputs.items() if value is None}
            return [outputs[name] for name in room.names]

        if self._pool is None and device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        room.recording = Recording(run, aliases, device, self._pool)
        self.recordings += 1
        # When the memory of the runs before has been given back.
        reference = self._call(model, {name: value.clone() for name, value in batch.inputs.items()}, batch)
        found = [out[: len(reference[name])] for name, out in zip(room.names, room.recording.forward(), strict=True)]
        self._compare(found, [reference[name].detach() for name in room.names], room.names)
        return {name: reference[name] for name in room.names}

    def _call(self, model: Any, inputs: dict[str, Tensor], batch: Batch) -> Mapping[str, Any]:
        assert self._training is not None
        return self._training.call(model.call_ordinarily, inputs, dict(batch.options))

    def _compare(self, found: Sequence[Tensor], right: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises `RuntimeError` unless what a recording gives is what the ordinary call gives, but for rounding."""
        for name, value, expected in zip(names, found, right, strict=True):
            bound = _ROUNDINGS * self._rounding(value.device) * expected.abs().sum()
            error = (value - expected).abs().max() if value.numel() else expected.new_zeros(())
            if bool(expected.isfinite().all()) and not bool(error <= bound):
                raise RuntimeError(f"{name}: a recording differs by {float(error):.3e} from the ordinary call")

    def _rounding(self, device: torch.device) -> float:
        """Of the narrowest dtype of the parameters: sums in a wider one may be of terms in this one."""
        return max(rounding_unit(parameter.dtype, device) for parameter in self._parameters)

    def _give_up(self, reason: str) -> None:
        """Records nothing any more; says so once."""
        self._forget()
        self.not_captured = reason
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        warnings.warn(
            f"training runs without CUDA graphs from now on, which costs time: {reason}", StepWarning, stacklevel=6
        )

    def gradients(self, replay: _Replay, cotangents: Sequence[Tensor | None]) -> Gradients:
        """The gradients of the parameters, for the outputs of a replay.

        Raises:
            RuntimeError: If they were asked for before, or parameters have changed since the outputs were computed.
        """
        wanted = tuple(cotangent is not None for cotangent in cotangents)
        if not any(wanted):
            return (None,) * len(self._parameters)
        if replay.is_used:
            raise RuntimeError(
                "backward: expected one backward pass of the outputs of a captured model, got another one; call the "
                "model again, or release the recorder"
            )
        if [parameter._version for parameter in self._parameters] != replay.versions:
            raise RuntimeError(
                "backward: expected parameters as they were when the model was called, got changed ones; call the "
                "optimizer after backward"
            )
        replay.is_used = True
        recording = replay.room.recording
        assert recording is not None
        if recording.wanted is not None and recording.wanted != wanted:
            self.ordinary["the gradient of other outputs than before"] += 1
            return self._ordinary_gradients(replay, cotangents)
        try:
            gradients = recording.backward(cotangents)
            if replay.reference is not None:
                self._check_gradients(gradients, self._ordinary_gradients(replay, cotangents))
        except RuntimeError as error:
            self._give_up(f"recording failed ({type(error).__name__}: {str(error).splitlines()[0]})")
            return self._ordinary_gradients(replay, cotangents)
        finally:
            replay.reference = None
        return gradients

    def _ordinary_gradients(self, replay: _Replay, cotangents: Sequence[Tensor | None]) -> Gradients:
        outputs: Mapping[str, Tensor] | None = replay.reference
        with torch.enable_grad():
            if outputs is None:
                inputs = {name: value.clone() for name, value in replay.batch.inputs.items()}
                outputs = self._call(self._model(), inputs, replay.batch)
        names = replay.room.names
        given = [(outputs[n], c) for n, c in zip(names, cotangents, strict=True) if c is not None]
        values, along = zip(*given, strict=True)
        found: Gradients = torch.autograd.grad(values, self._parameters, along, allow_unused=True, retain_graph=True)
        return found

    def _check_gradients(self, found: Gradients, right: Gradients) -> None:
        pairs = [(f, r) for f, r in zip(found, right, strict=True) if f is not None or r is not None]
        if any(f is None or r is None for f, r in pairs):
            raise RuntimeError("a recording gives gradients of other parameters than the ordinary call")
        ours, theirs = (torch.cat([g.reshape(-1).double() for g in side if g is not None]) for side in (found, right))
        error, bound = (ours - theirs).abs().max(), _ROUNDINGS * self._rounding(ours.device) * theirs.abs().sum()
        if bool(theirs.isfinite().all()) and not bool(error <= bound):
            raise RuntimeError(f"gradients: a recording differs by {float(error):.3e} from the ordinary call")


@dataclass
class _Room:
    """Memory for batches up to a size, and what was recorded on it.

    Attributes:
        extent: The size.
        signature: What the batches have in common.
        memory: Their inputs.
        names: Outputs that are given.
        others: What the model gives besides, where that is None.
        recording: None until it is made.
        versions: Of the parameters, when it was made.
    """

    extent: Extent
    signature: tuple[Any, ...]
    memory: PaddedBatch
    names: list[str] = field(default_factory=list)
    others: dict[str, None] = field(default_factory=dict)
    recording: Recording | None = None
    versions: list[int] = field(default_factory=list)

    def suits(self, extent: Extent) -> bool:
        """Whether a batch leaves not too much of it empty."""
        return all(own <= _ROOMY * needed for own, needed in zip(self.extent, extent.grown(), strict=True))


@dataclass(eq=False)
class _Replay:
    """The outputs of a recording for a batch, as long as they may still be differentiated.

    Attributes:
        recorder: Whose they are.
        room: Where they were computed.
        batch: What of.
        versions: Of the parameters, at that time.
        reference: What the ordinary call gave, where the gradient of the recording is still to be compared.
        is_used: Whether they have been differentiated.
    """

    recorder: Recorder
    room: _Room
    batch: Batch
    versions: list[int]
    reference: dict[str, Tensor] | None
    is_used: bool = False


@contextmanager
def _standing_in(
    model: nn.Module, parameters: Sequence[nn.Parameter], aliases: Sequence[nn.Parameter]
) -> Iterator[None]:
    """Has a model compute with others that share the memory of its parameters, inside of it.

    What autograd adds up the gradient of a parameter with works on the stream on which it was made, and lasts as long
    as any outputs that depend on the parameter: that of an earlier call would end a recording.
    """
    others = dict(zip(map(id, parameters), aliases, strict=True))
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in others
    ]
    for holder, name, parameter in places:
        holder[name] = others[id(parameter)]
    try:
        yield
    finally:
        for holder, name, parameter in places:
            holder[name] = parameter


def _is_floating_point(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point()


class _Replayed(torch.autograd.Function):
    """Outputs of a replay as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, *_parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        room, extent = replay.room, replay.batch.extent
        room.memory.fill(replay.batch)
        assert room.recording is not None
        training = replay.recorder._training
        assert training is not None
        # Copies: the next replay computes in the same memory.
        return tuple(
            output[: getattr(extent, training.outputs[name])].clone()
            for name, output in zip(room.names, room.recording.forward(), strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.replay.recorder.gradients(ctx.replay, cotangents)
