"""Every test starts from the same random state, on one thread."""

import pytest
import torch
from cases import CASES, Case
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("offline", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("offline")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=CASES, ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param
