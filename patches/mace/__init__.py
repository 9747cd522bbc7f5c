"""The models of MACE: how to recognise and run them, what to replace in them, and how they become files."""

from eqaccel.patches.mace.kind import MaceKind

__all__ = ["MaceKind"]
