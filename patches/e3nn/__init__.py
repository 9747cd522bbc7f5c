"""Modules of whatever library that hold modules of e3nn: these are replaced, one by one."""

from eqaccel.patches.e3nn.kind import E3nnKind

__all__ = ["E3nnKind"]
