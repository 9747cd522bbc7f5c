"""What carries accelerated models into simulation programs.

Takes models that `eqaccel.patch` has accelerated. Gives what a simulation program outside Python needs to run them.
Must not know how a kernel is made, nor how a particular model is patched: that is what the rooms to the left are for.

`eqaccel.Calculator` is for those who have a file and no calculator: `eqaccel.patch(calculator)` accelerates one of MACE
or NequIP in place, and needs nothing from here. nequip loads `nequip_extension` by itself.
"""
