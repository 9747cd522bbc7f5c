"""The files that SevenNet writes."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

from eqaccel.patches.kind import FileFormat

_LOADER = "sevenn.checkpoint"
"""Module of sevenn that opens checkpoints; imported when there is one to open."""

_KEYS = (b"config", b"model_state_dict", b"_type_map")


class SevennetFiles(FileFormat):
    """Checkpoints (".pth") of SevenNet: a configuration and the state dict of the model that is built from it."""

    name = "a checkpoint of SevenNet"

    def matches(self, file: Path) -> bool:
        """Whether a file of torch.save has what SevenNet puts into its checkpoints."""
        if not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            text = b"".join(map(archive.read, pickles))
        return all(key in text for key in _KEYS)

    def load(self, file: Path) -> Any:
        """See `FileFormat.load`; the model is one on e3nn, whatever library the checkpoint was trained with."""
        return importlib.import_module(_LOADER).SevenNetCheckpoint(file).build_model()
