"""Getting kernels ready before they are needed: compiled ahead of time and, if wished, tuned by timing their plans.

Takes what a user hands over (a model, a calculator, a list of these); gives compiled and loaded kernels, and modules
that know which plans to follow. Knows torch, modules with kernels, and the runtime; must not know models, e3nn, or what
any family of kernels computes. The name is not that of the function `eqaccel.warmup`, which a room would hide.
"""

from eqaccel.prepare.compilation import WarmKernel, Warmup, warmup
from eqaccel.prepare.held import combined_calculators, held_modules, model_dtype
from eqaccel.prepare.task import scalar_name
from eqaccel.prepare.tuning import Choice

__all__ = [
    "Choice",
    "WarmKernel",
    "Warmup",
    "combined_calculators",
    "held_modules",
    "model_dtype",
    "scalar_name",
    "warmup",
]
