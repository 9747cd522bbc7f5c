"""Kinds of model, and what is made of their models: `patch`, `unpatch` and `report` in place, potentials for files.

Takes a model, or what holds models (an ASE calculator, a training module), and swaps the sub-modules that eqaccel has
kernels for. Gives back the same object, with the same parameters and the same state-dict keys. A patched model can be
turned into a `Potential`, which `eqaccel.integrations.export` writes to a file. Must not know simulation programs and
formats of files, and must not import e3nn, mace or nequip: a model is recognised by the class names in its MRO and read
by attribute, so that subclasses, old pickles and packaged copies of those libraries all work.

All that is known of one kind of model is in one folder, `mace` and `nequip`, behind a `ModelKind` (`kind.py`). Networks
of all other libraries are of the kind in `e3nn`, by whose modules they are known. The table of kinds, and how models
are found in what a user hands over, are in `finder.py`. The rest is shared by all kinds.
"""

from eqaccel.patches.core import patch, report, unpatch
from eqaccel.patches.finder import register
from eqaccel.patches.kind import ModelKind
from eqaccel.patches.replacement import Replacement, Swap
from eqaccel.patches.report import Report, ReportRow

__all__ = ["ModelKind", "Replacement", "Report", "ReportRow", "Swap", "patch", "register", "report", "unpatch"]
