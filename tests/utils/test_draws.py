"""The store of a run's draws: what it holds in memory, and what comes back."""

import gc
import weakref

import jax
import numpy as np
import pytest

from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils import draws
from haiku_posteriors.utils.draws import DrawStore

TEMPLATE = {"linear": {"w": jax.ShapeDtypeStruct((3,), np.float32)}}


def draw(number):
    return {"linear": {"w": np.full((2, 1, 3), number, np.float32)}}


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return DrawStore(tmp_path if request.param == "folder" else None, TEMPLATE, 5)


def test_draws_come_back_in_order_however_they_were_written(store):
    for number in range(5):
        store.append(draw(number))
        if number in (1, 2):
            store.flush(number)
    np.testing.assert_array_equal(store.load()["linear"]["w"][1, :, 2], np.arange(5))
    (few,) = store.chosen(np.array([0, 2, 4]))
    np.testing.assert_array_equal(few["linear"]["w"][0, :, 0], [0, 2, 4])


def test_blocks_of_chosen_draws_have_one_size(store, monkeypatch):
    monkeypatch.setattr(draws, "PART_BYTES", 2 * 2 * 12)  # two draws of two chains
    for number in range(5):
        store.append(draw(number))
        store.flush(number)
    blocks = [block["linear"]["w"].shape[1] for block in store.chosen(np.arange(5))]
    assert blocks == [2, 2, 1]


def test_what_is_on_disk_is_not_in_memory(tmp_path):
    store = DrawStore(tmp_path, TEMPLATE, 5)
    added = draw(0)
    alive = weakref.ref(added["linear"]["w"])
    store.append(added)
    del added
    assert alive() is not None
    store.flush(1)
    gc.collect()
    assert alive() is None


def test_parts_are_read_one_at_a_time(tmp_path):
    store = DrawStore(tmp_path, TEMPLATE, 5)
    for number in range(3):
        store.append(draw(number))
        store.flush(number)
    before = None
    for part in store.parts():
        gc.collect()
        assert before is None or before() is None, "the part before is still held"
        before = weakref.ref(part["linear"]["w"])
        del part


def test_predictions_come_back_by_chain(store):
    rng = np.random.default_rng(0)
    outputs, likelihoods = rng.normal(size=(2, 5, 7, 2)), rng.normal(size=(2, 5, 7))
    assert store.predictions(np.zeros(7)) is None
    for part in (slice(0, 2), slice(2, 5)):
        store.append_predictions(Predictions("regression", outputs[:, part], likelihoods[:, part]))
        found = store.predictions(np.zeros(7))
        np.testing.assert_array_equal(found.outputs, outputs[:, : part.stop])
        np.testing.assert_array_equal(found.log_likelihoods, likelihoods[:, : part.stop])
    store.clear()
    assert store.predictions(np.zeros(7)) is None
