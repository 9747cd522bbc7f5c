"""Models as files for programs without Python: `export`, and `load_exported` to open such a file in Python.

Takes a model that `eqaccel.patch` has accelerated, and the `Potential` that its kind makes of it
(`eqaccel.patches.potential` says what that takes and returns). Gives a file that holds the model, its kernels and a
description of itself. Must not know how a kernel is made, nor a particular kind of model, nor import e3nn, mace or
nequip.
"""

from eqaccel.integrations.export.core import export
from eqaccel.integrations.export.loading import Exported, load_exported
from eqaccel.integrations.export.sources import open_model

__all__ = ["Exported", "export", "load_exported", "open_model"]
