"""The models of NequIP: how to recognise, run and open them, what to replace in them, and how they become files."""

from eqaccel.patches.nequip.kind import NequipKind

__all__ = ["NequipKind"]
