"""What carries accelerated models into simulation programs.

Takes models that `eqaccel.patch` has accelerated. Gives what a simulation program outside Python needs to run them.
Must not know how a kernel is made, nor how a particular model is patched: that is what the rooms to the left are for.

ASE needs nothing from here: `eqaccel.patch(calculator)` accelerates a calculator of MACE or NequIP in place. nequip
loads `nequip_extension` by itself.
"""
