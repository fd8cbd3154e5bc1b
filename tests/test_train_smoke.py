"""Every family learns: 200 steps end below what the frequencies of the letters alone give."""

from pathlib import Path

import numpy as np
import pytest
from train_runs import SETTINGS, make_inputs

from lamella.data import open_dataset
from lamella.train import TrainConfig, train

STRUCTURES = [
    "LowRank(rank=8)",
    "BlockDense(num_blocks=2, rank=8)",
    "BlockShuffle(num_blocks=4)",
    "BTT(rho=2)",
    "Kronecker()",
    "TensorTrain(rho=4)",
    "Einsum(sizes={'alpha': 8, 'delta': 4, 'epsilon': 8, 'gamma': 4, 'phi': 2, 'rho': 4})",
]


@pytest.mark.slow
@pytest.mark.parametrize("guide", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_200_steps_end_below_the_unigram_entropy(structure: str, guide: bool, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    ids = np.asarray(open_dataset(inputs["data"]).validation.ids)
    shares = np.bincount(ids) / len(ids)
    unigram = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()  # characters are bytes here
    where = {"structure": structure, "all_blocks": True}
    if "Einsum" in structure:  # its sizes fit one of the two shapes
        where = {"rules": {"*.mlp.c_fc": structure}}
    settings = (
        SETTINGS
        | inputs
        | where
        | {"steps": 200, "batch_size": 32, "context": 32, "eval_every": 200, "guide": guide}
    )
    result = train(TrainConfig(**settings, out=str(tmp_path / "run")), progress=False)
    assert result["validation_bpb"] < unigram
