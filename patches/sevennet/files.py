"""The files that SevenNet writes."""

from __future__ import annotations

import importlib
import re
import zipfile
from pathlib import Path
from typing import Any

from eqaccel.patches.kind import FileFormat

_LOADER = "sevenn.checkpoint"
"""Module of sevenn that opens checkpoints; imported when there is one to open."""

_NAMES = "sevenn.util", "pretrained_name_to_path"
"""The function of sevenn that finds or downloads the checkpoint of a name, and its module."""

_KEYS = (b"config", b"model_state_dict", b"_type_map")


class SevennetFiles(FileFormat):
    """Checkpoints (".pth") of SevenNet: a configuration and the state dict of the model that is built from it."""

    name = "a checkpoint of SevenNet, by its name too"

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

    def pretrained(self, name: str) -> Path | None:
        """See `FileFormat.pretrained`; names are those that SevenNet's calculator takes, such as "7net-l3i5"."""
        if not re.fullmatch(r"(7net|sevennet)-[\w-]+", name, re.IGNORECASE):
            return None
        module, function = _NAMES
        try:
            return Path(getattr(importlib.import_module(module), function)(name))
        except ValueError:  # it knows no such name
            return None
