"""Every exception and warning that eqaccel raises on purpose.

All errors derive from `EqaccelError`; those caused by a wrong argument are `ValueError`s too, so that code which knows
nothing of eqaccel can still catch them by their usual meaning.
"""

from __future__ import annotations


class EqaccelError(Exception):
    """Base class of all eqaccel errors; raised itself by nothing."""


class IrrepsError(EqaccelError, ValueError):
    """Raised when irreps, or the degrees of a coupling, cannot be read or do not make sense."""


class SpecError(EqaccelError, ValueError):
    """Raised when a tensor product is not well defined (indices, triangle rule, parity, multiplicities)."""


class UnsupportedError(SpecError, NotImplementedError):
    """Raised when a tensor product is well defined but outside of what eqaccel implements."""


class OperandError(EqaccelError, ValueError):
    """Raised when a tensor handed to an operation has the wrong shape, dtype, device or layout."""


class GraphError(EqaccelError, ValueError):
    """Raised when an edge list is malformed (shape, dtype, or an index outside of the nodes)."""


class SettingsError(EqaccelError, ValueError):
    """Raised when an environment variable of `eqaccel.settings` holds a value that cannot be understood."""


class PatchError(EqaccelError, ValueError):
    """Raised when a model cannot be patched: unknown kind, or nothing in it to replace."""


class VerificationError(PatchError):
    """Raised when a patched model does not reproduce the original one; the model has been restored."""


class AlreadyPatchedError(PatchError):
    """Raised when a model, or a part of it, is accelerated already, by eqaccel or by another library."""


class TuningError(EqaccelError, ValueError):
    """Raised when a tuning asks for what a processor cannot run, or a tensor product is not aligned to."""


class WarmupError(EqaccelError, ValueError):
    """Raised when there is nothing to warm up or to tune, or a direction, dtype or device is not one for kernels."""


class ExportError(EqaccelError, ValueError):
    """Raised when a model cannot be exported, or an exported file cannot be opened."""


class CalculatorError(EqaccelError, ValueError):
    """Raised when no calculator can be made of what was handed over, or its model has become one without energies."""


class StructureError(EqaccelError, ValueError):
    """Raised when a structure cannot be computed: positions or cell that are not finite, a cell without a volume."""


class CompileError(EqaccelError, RuntimeError):
    """Raised when a generated kernel does not compile, or when a compiled one fails the check against its reference.

    Args:
        message: What failed, for which target, and the next step.
        log: The compiler's full output and what the check found, kept out of the message because it can be long.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class MissingCompilerError(CompileError):
    """Raised when no compiler for the target is found (NVRTC, hipRTC or a host C++ compiler)."""


class SharedMemoryError(CompileError):
    """Raised when a kernel takes more shared memory than a block of the GPU may take."""


class CacheError(EqaccelError, RuntimeError):
    """Raised when the cache on disk cannot be emptied, because it is not the user's own or not to be written."""


class CacheWarning(UserWarning):
    """Issued when the cache on disk cannot be used, so that what belongs there is kept in memory only."""


class TuningWarning(UserWarning):
    """Issued when a plan that was to be timed fails, so that it is left out."""


class VerificationWarning(UserWarning):
    """Issued when part of what a patched model gives cannot be compared with what it gave, with the reason."""


class StepWarning(UserWarning):
    """Issued when a simulation step takes a slower way than it could, with the reason."""
