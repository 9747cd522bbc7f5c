"""Errors: each is of a usual kind too, and survives a pickle."""

from __future__ import annotations

import pickle

from eqaccel import errors


def test_errors_are_of_usual_kinds() -> None:
    for name in ("IrrepsError", "SpecError", "OperandError", "GraphError", "PatchError", "VerificationError"):
        assert issubclass(getattr(errors, name), (errors.EqaccelError, ValueError))
        assert issubclass(getattr(errors, name), ValueError)
    assert issubclass(errors.UnsupportedError, errors.SpecError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.AlreadyPatchedError, errors.PatchError)
    failure = pickle.loads(pickle.dumps(errors.MissingCompilerError("none", log="searched")))
    assert (str(failure), failure.log) == ("none", "searched")
    assert isinstance(failure, RuntimeError)
