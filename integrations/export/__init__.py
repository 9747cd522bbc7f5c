"""Models as files for programs without Python: `export`, and `load_exported` to open such a file in Python.

Takes a model that `eqaccel.patch` has accelerated. Gives a file that holds the model, its kernels and a description of
itself; what the module in it takes and returns is written in `potential.py`. A further kind of model is one more file
here that implements `ExportFamily`. Must not know how a kernel is made, nor import e3nn, mace or nequip.
"""

from eqaccel.integrations.export.core import ExportFamily, export, register
from eqaccel.integrations.export.loading import Exported, load_exported
from eqaccel.integrations.export.mace import MaceExport
from eqaccel.integrations.export.nequip import NequipExport
from eqaccel.integrations.export.sources import open_model

register(MaceExport())
register(NequipExport())

__all__ = ["ExportFamily", "Exported", "export", "load_exported", "open_model", "register"]
