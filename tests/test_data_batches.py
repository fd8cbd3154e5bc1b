"""Training batches and evaluation windows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella.data import Batches, DataError, Tokens, windows


def counting(n: int) -> Tokens:
    """Token i is the number i, so that a batch shows which positions it holds."""
    return Tokens(np.arange(n, dtype=np.uint16), num_bytes=n, vocab_size=max(n, 1))


@given(n=st.integers(20, 400), context=st.integers(1, 9), seed=st.integers(0, 2**64 - 1))
def test_an_epoch_predicts_every_token_once_but_for_the_remainder(n, context, seed):
    per_epoch = n // context
    batches = Batches(counting(n), batch_size=1, context=context, seed=seed)
    for epoch in range(2):
        rows = [batches.at(epoch * per_epoch + i)[0] for i in range(per_epoch)]
        predicted = torch.cat([row[1:] for row in rows]).tolist()
        assert len(predicted) == len(set(predicted)) == n - n % context
        assert all((row[1:] == (row[:-1] + 1) % n).all() for row in rows)


@given(n=st.integers(60, 200), batch=st.integers(1, 7), seed=st.integers(0, 99))
def test_batches_that_straddle_epochs_lose_no_window(n, batch, seed):
    context = 5
    batches = Batches(counting(n), batch_size=batch, context=context, seed=seed)
    per_epoch = n // context
    steps = -(-2 * per_epoch // batch)
    firsts = torch.cat([batches.at(step)[:, 0] for step in range(steps)]).tolist()
    for epoch in range(2):
        assert len(set(firsts[epoch * per_epoch : (epoch + 1) * per_epoch])) == per_epoch


@given(step=st.integers(0, 10**6), seed=st.integers(0, 99), world=st.sampled_from([2, 4]))
def test_ranks_together_see_the_batch_of_one_process(step, seed, world):
    sizes = {"batch_size": 8, "context": 7, "seed": seed}
    alone = Batches(counting(500), **sizes).at(step)
    parts = [Batches(counting(500), **sizes, rank=rank, world=world).at(step) for rank in range(world)]
    assert all(part.shape == (8 // world, 8) for part in parts)
    assert torch.equal(torch.cat(parts), alone)


def test_a_step_does_not_depend_on_the_steps_before():
    sizes = {"batch_size": 6, "context": 4, "seed": 3}
    straight = Batches(counting(101), **sizes)
    expected = [straight.at(step) for step in range(30)]
    jumping = Batches(counting(101), **sizes)
    for step in (29, 0, 17, 4, 17, 28, 3):
        assert torch.equal(jumping.at(step), expected[step])


def test_seeds_and_epochs_differ_in_order_and_phase():
    def epoch(seed, number):
        batches = Batches(counting(1000), batch_size=10, context=10, seed=seed)
        return torch.cat([batches.at(10 * number + i)[:, 0] for i in range(10)])

    orders = [epoch(0, 0), epoch(0, 1), epoch(0, 2), epoch(1, 0)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert len({int(order[0]) % 10 for order in orders}) > 1


def test_the_order_of_a_seed_is_pinned():
    # A changed order would make resumed runs see other batches than they would have.
    batches = Batches(counting(64), batch_size=4, context=8, seed=1)
    assert batches.at(0)[:, 0].tolist() == [47, 63, 39, 15]
    assert batches.at(5)[:, 0].tolist() == [41, 1, 57, 25]


def test_batches_are_int64_and_context_plus_one_long():
    batch = Batches(counting(100), batch_size=3, context=6, seed=0).at(0)
    assert batch.dtype == torch.int64
    assert batch.shape == (3, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: it must be at least 1"),
        ({"context": -1}, "context=-1: it must be at least 1"),
        ({"world": 0}, "world=0: it must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"rank": 2, "world": 2}, "rank=2 with world=2"),
        ({"world": 3}, "batch_size=4 must be a multiple of world=3"),
        (
            {"context": 30},
            "100 tokens, which is 3 windows of context=30: fewer than one batch of batch_size=4",
        ),
        ({"context": 100, "batch_size": 1}, "the text has 100 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Batches(counting(100), **{"batch_size": 4, "context": 8, "seed": 0, **change})


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="step=-1"):
        Batches(counting(100), batch_size=1, context=8, seed=0).at(-1)


def test_ids_outside_the_vocabulary_are_refused_when_they_are_read():
    tokens = Tokens(np.full(50, 300, dtype=np.uint16), num_bytes=50, vocab_size=256, name="x.bin")
    with pytest.raises(DataError, match=r"x.bin holds token id 300, but its vocabulary has 256"):
        Batches(tokens, batch_size=1, context=8, seed=0).at(0)


@given(n=st.integers(2, 100), context=st.integers(1, 120), limit=st.none() | st.integers(1, 120))
def test_windows_predict_every_token_but_the_first_once_in_order(n, context, limit):
    rows = list(windows(counting(n), context, limit))
    predicted = [int(token) for row in rows for token in row[1:]]
    assert predicted == list(range(1, n))[:limit]
    assert all(len(row) == context + 1 for row in rows[:-1])
    assert all((row[1:] == row[:-1] + 1).all() for row in rows)


def test_windows_refuse_numbers_that_do_not_fit():
    with pytest.raises(ValueError, match="context=0"):
        windows(counting(10), 0)
    with pytest.raises(ValueError, match="limit_tokens=0"):
        windows(counting(10), 4, 0)
    with pytest.raises(ValueError, match="has 1 tokens"):
        windows(counting(1), 4)
