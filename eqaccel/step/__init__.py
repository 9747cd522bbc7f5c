"""A simulation step: neighbours that are kept for several steps, the model, and its forces, captured as one CUDA graph.

Takes arrays of positions, cells and types, and a potential: a function of the vectors of edges. Gives energies, forces
and virials. Knows torch, operators and a library of neighbour lists; must not know models, e3nn, ASE or LAMMPS.
"""

from eqaccel.step.engine import SKIN, Evaluation, Outcome, PotentialFunction, Step
from eqaccel.step.known import Given
from eqaccel.step.resident import ResidentStep
from eqaccel.step.system import System

__all__ = ["SKIN", "Evaluation", "Given", "Outcome", "PotentialFunction", "ResidentStep", "Step", "System"]
