"""Products of any connection mode: pairs of channels are coupled, and then mixed into the channels of the output.

What is not channel by channel, as in MACE and NequIP, is planned and printed here. Specs, operators, modules and
payloads are the same.
"""

from eqaccel.families.tensor_product.pairs.plan import PairPlan, WeightCopies, plan_pairs
from eqaccel.families.tensor_product.pairs.reference import execute_pairs

__all__ = ["PairPlan", "WeightCopies", "execute_pairs", "plan_pairs"]
