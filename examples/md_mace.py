"""Molecular dynamics with a MACE model, before and after `eqaccel.patch`.

    python examples/md_mace.py                                  # the small Cu-Au model that comes with the examples
    python examples/md_mace.py --model medium --atoms 1000      # a foundation model by name (downloaded by MACE)
    python examples/md_mace.py --model my.model --structure my.xyz --ensemble langevin

The model is loaded as always, through MACE's own ASE calculator; `md.py` says what is done with it.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from mace.calculators import MACECalculator, mace_mp
from md import add_arguments, compare, parse, thermalize
from train_alloy import ROOT, alloy


def load_calculator(model: str, device: str, dtype: str) -> MACECalculator:
    """Returns MACE's calculator for a ``.model`` file, or for the name of a foundation model that MACE downloads."""
    if Path(model).is_file():
        return MACECalculator(model_paths=model, device=device, default_dtype=dtype)
    if Path(model).suffix:
        raise FileNotFoundError(f"--model: expected a .model file or the name of a foundation model, got {model!r}")
    return mace_mp(model=model, device=device, default_dtype=dtype)


def start_frame(options: argparse.Namespace) -> Atoms:
    """Returns the structure from the file, or a Cu3Au solid solution of about ``--atoms`` atoms, with velocities."""
    rng = np.random.default_rng(options.seed)
    if options.structure:
        atoms = ase.io.read(options.structure)
    else:
        atoms = alloy(max(1, round((options.atoms / 4) ** (1 / 3))), gold=0.25, strain=np.zeros((3, 3)), rng=rng)
    # Atoms at rest on their sites take up half of the kinetic energy within the first vibration.
    thermalize(atoms, 2 * options.temperature, rng)
    return atoms


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Runs the comparison and returns what is written to ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=str(ROOT / "models" / "cuau_emt.model"), help="file, or foundation model name"
    )
    parser.add_argument("--structure", type=Path, help="any file that ASE reads (default: a Cu3Au solid solution)")
    parser.add_argument("--atoms", type=int, default=256, help="size of the Cu3Au crystal, to the nearest whole cube")
    add_arguments(parser)
    options = parse(parser, arguments)
    logging.getLogger().setLevel(logging.ERROR)  # MACE logs every choice it makes while loading
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|e3nn|mace")

    calculator = load_calculator(options.model, options.device, options.dtype)
    return compare(calculator, start_frame(options), options, Path(options.model).stem, ("torch", "mace-torch", "ase"))


if __name__ == "__main__":
    main()
