"""The files that nequip writes."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

from eqaccel.patches.kind import FileFormat

_LOADER = "nequip.model.saved_models"
"""Module of nequip that opens packages and checkpoints; imported when there is one to open."""


class NequipFiles(FileFormat):
    """Packages (".nequip.zip") and checkpoints (".ckpt") of NequIP."""

    name = "a package or checkpoint of NequIP"

    def matches(self, file: Path) -> bool:
        """Whether a file is one of torch.package, in which nequip-package writes, or named as a checkpoint."""
        if file.suffix == ".ckpt":
            return True
        if not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith(".data/extern_modules") for name in archive.namelist())

    def load(self, file: Path) -> Any:
        """See `FileFormat.load`."""
        if file.suffix != ".ckpt" and not file.name.endswith(".nequip.zip"):
            raise ValueError("a package of NequIP has to be named *.nequip.zip")
        return importlib.import_module(_LOADER).load_saved_model(file)
