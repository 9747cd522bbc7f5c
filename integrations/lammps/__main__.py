"""`python -m eqaccel.integrations.lammps`: compiles the LAMMPS plugin and prints its folder."""

from __future__ import annotations

import sys

from eqaccel.errors import CompileError
from eqaccel.integrations.lammps import build_plugin

try:
    print(build_plugin().parent)
except CompileError as error:
    sys.exit(f"eqaccel: {error}\n{error.log}".rstrip())
