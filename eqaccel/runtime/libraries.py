"""Where the C++ libraries on torch lie: a folder for each minor version of torch that the package was built for."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import eqaccel

_PREFIX = "torch-"


def torch_libraries(version: str | None = None) -> Path:
    """The folder of libeqaccel_ops and libeqaccel_model for a torch, found without importing torch.

    Args:
        version: Version of torch, as `torch.__version__` has it; None for the one that is installed.

    Returns:
        Absolute path of a folder in the installed package.

    Raises:
        ImportError: If torch is not installed, or the package holds no libraries for it.
    """
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            raise ImportError("torch is not installed: pip install torch", name="torch") from None
    major, minor = version.split(".")[:2]
    folders = {path.name: path for home in eqaccel.__path__ for path in Path(home).glob(f"{_PREFIX}*")}
    if folder := folders.get(f"{_PREFIX}{major}.{minor}"):
        return folder.resolve()
    built = sorted((name.removeprefix(_PREFIX) for name in folders), key=lambda name: [*map(int, name.split("."))])
    raise ImportError(
        f"this eqaccel holds operators for torch {', '.join(built) or '(none)'}, and torch {version} is installed. "
        "Install one of these versions of torch, or build eqaccel from its source with this torch: pip install "
        "--no-build-isolation ."
    )


def include_path() -> Path:
    """Folder of the C++ headers, for `#include <eqaccel/exchange.h>`.

    Raises:
        ImportError: If the package was not built.
    """
    for home in eqaccel.__path__:
        if (folder := Path(home) / "include").is_dir():
            return folder.resolve()
    raise ImportError(f"there are no headers in {', '.join(eqaccel.__path__)}: pip install --no-build-isolation .")
