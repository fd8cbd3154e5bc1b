"""A model that an earlier version saved still loads and computes the same."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lamella
from lamella.hub import load_model
from lamella.hub.quiet import no_progress_bars

# NEVER regenerate these files. They are the promise that whatever format version 1 wrote can be read: if this test
# fails, the code is what has to change.
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("load", [load_model, AutoModelForCausalLM.from_pretrained], ids=["ours", "theirs"])
def test_the_golden_checkpoint_loads_and_its_logits_agree(load: object) -> None:
    with no_progress_bars():
        model = load(GOLDEN)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, lamella.StructuredLinear)}
    assert {name: repr(layer.structure) for name, layer in layers.items()} == {
        "model.layers.0.mlp.c_fc": "LowRank(rank=4)",
        "model.layers.0.mlp.c_proj": "LowRank(rank=4)",
        "model.layers.1.mlp.c_fc": "BTT(rho=2)",
        "model.layers.1.mlp.c_proj": "BlockShuffle(num_blocks=2)",
    }
    expected = load_file(GOLDEN / "expected.safetensors")
    with torch.no_grad():
        found = model(expected["input_ids"]).logits
    assert found.dtype == torch.float32
    # float32 sums round differently from one processor to another
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=1e-5)
