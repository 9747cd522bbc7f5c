"""An ASE calculator for those who have a file and no calculator: `eqaccel.Calculator`.

Takes a file with a model, a model, or an exported file. Gives energies, forces and stresses to ASE, of one structure or
of many at once. The step itself is `eqaccel.step`; must not know a particular kind of model. This is the one folder of
the library that imports ASE.
"""

try:
    from eqaccel.integrations.ase.calculator import Calculator
except ModuleNotFoundError as error:
    if error.name != "ase":
        raise
    raise ModuleNotFoundError("eqaccel.Calculator needs ASE; install it: pip install ase", name="ase") from error

__all__ = ["Calculator"]
