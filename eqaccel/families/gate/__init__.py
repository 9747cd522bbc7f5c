"""Gates: activations of scalars, and of gates that multiply the channels of other irreps."""

from eqaccel.families.gate.family import GATE
from eqaccel.families.gate.payload import gate_payload
from eqaccel.families.gate.reference import execute_gate
from eqaccel.families.gate.spec import Activation, GatedChannels, GateSpec, Scalars

__all__ = ["GATE", "Activation", "GateSpec", "GatedChannels", "Scalars", "execute_gate", "gate_payload"]
