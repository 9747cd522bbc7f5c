"""Neighbours within a cutoff, out of candidates, and forces from gradients of edges: one text for each scalar."""

from eqaccel.families.neighbors.family import NEIGHBORS

__all__ = ["NEIGHBORS"]
