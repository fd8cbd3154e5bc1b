"""What a matrix is: structures, and the einsum plans they choose."""

from lamella.structures.families import (
    BTT,
    BlockDense,
    BlockShuffle,
    Dense,
    Einsum,
    Kronecker,
    LowRank,
    Monarch,
    TensorTrain,
)
from lamella.structures.names import suggest
from lamella.structures.plan import Index, Plan, Step, dense_plan, two_factor_plan
from lamella.structures.projection import project, project_padded
from lamella.structures.structure import Structure
from lamella.structures.text import parse_structure

__all__ = [
    "BTT",
    "BlockDense",
    "BlockShuffle",
    "Dense",
    "Einsum",
    "Index",
    "Kronecker",
    "LowRank",
    "Monarch",
    "Plan",
    "Step",
    "Structure",
    "TensorTrain",
    "dense_plan",
    "parse_structure",
    "project",
    "project_padded",
    "suggest",
    "two_factor_plan",
]
