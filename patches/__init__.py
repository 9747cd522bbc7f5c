"""Acceleration of whole models in place: `patch`, `unpatch` and `report`.

Takes a model, or what holds models (an ASE calculator, a training module), and swaps the sub-modules that eqaccel has
kernels for. Gives back the same object, with the same parameters and the same state-dict keys. Must not know e3nn, mace
or nequip: a model is recognised by the class names in its MRO and read by attribute, so that subclasses, old pickles
and packaged copies of those libraries all work. A further kind of model is one more file here that implements
`ModelFamily`.
"""

from eqaccel.patches.core import (
    ModelFamily,
    Replacement,
    Report,
    Row,
    Swap,
    patch,
    register,
    report,
    unpatch,
)
from eqaccel.patches.mace import MaceFamily
from eqaccel.patches.nequip import NequipFamily

register(MaceFamily())
register(NequipFamily())

__all__ = ["ModelFamily", "Replacement", "Report", "Row", "Swap", "patch", "register", "report", "unpatch"]
