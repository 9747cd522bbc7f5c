"""The models of SevenNet: how to recognise, run and open them, what to replace in them, and how they become files."""

from eqaccel.patches.sevennet.kind import SevennetKind

__all__ = ["SevennetKind"]
