"""Files survive crashes, and damage is recognised and told."""

import os
import pickle

import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import checkpoint_utils

STATE = {"linear": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2)}}


def test_a_tree_comes_back_bit_for_bit(tmp_path):
    checkpoint_utils.save_tree(tmp_path / "a.safetensors", STATE, {"note": "x"})
    tensors, metadata = checkpoint_utils.load_tensors(tmp_path / "a.safetensors")
    assert sorted(tensors) == ["linear/b", "linear/w"]
    np.testing.assert_array_equal(tensors["linear/w"], STATE["linear"]["w"])
    assert tensors["linear/b"].dtype == np.float64 and metadata["note"] == "x"
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for epoch in range(6):
        checkpoint_utils.save_checkpoint(tmp_path, epoch, STATE, {})
    kept = sorted(os.listdir(tmp_path))
    assert kept == [f"epoch_{epoch:08d}.safetensors" for epoch in (3, 4, 5)]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_the_last_good_checkpoint_is_used_and_the_damage_named(tmp_path, damage):
    for epoch in (1, 2):
        checkpoint_utils.save_checkpoint(tmp_path, epoch, STATE, {"seconds": str(epoch)})
    newest = tmp_path / "epoch_00000002.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes({"cut": content[:-8], "flipped": content, "empty": b""}[damage])
    epoch, state, metadata, sentences = checkpoint_utils.load_newest_checkpoint(tmp_path, STATE)
    assert epoch == 1 and metadata["seconds"] == "1"
    np.testing.assert_array_equal(state["linear"]["w"], STATE["linear"]["w"])
    assert len(sentences) == 1 and str(newest) in sentences[0] and "damaged" in sentences[0]


def test_when_all_are_damaged_it_says_so(tmp_path):
    (tmp_path / "epoch_00000001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"No checkpoint .* can be read"):
        checkpoint_utils.load_newest_checkpoint(tmp_path, STATE)


def test_a_pickle_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = tmp_path / "epoch_00000001.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError):
        checkpoint_utils.load_tensors(path)
    assert not (tmp_path / "exploded").exists()


def test_a_foreign_checkpoint_is_refused_with_the_difference(tmp_path):
    checkpoint_utils.save_checkpoint(tmp_path, 1, STATE, {})
    with pytest.raises(UserError, match="'conv/w' is not in the file"):
        checkpoint_utils.load_newest_checkpoint(tmp_path, {**STATE, "conv": {"w": np.zeros(1)}})
    other = {"linear": {"w": np.zeros((2, 4), np.float32), "b": np.zeros(2)}}
    with pytest.raises(UserError, match=r"'linear/w' has shape \(2, 3\) there and \(2, 4\) here"):
        checkpoint_utils.load_newest_checkpoint(tmp_path, other)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    checkpoint_utils.save_tree(path, STATE)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_utils.save_tree(path, {"linear": {"w": np.ones(1)}})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.safetensors"]


def test_draws_join_in_order_and_later_ones_are_dropped(tmp_path):
    for epoch, value in ((10, 1.0), (20, 2.0), (30, 3.0)):
        checkpoint_utils.save_draws(tmp_path, epoch, {"w": np.full((2, 1, 4), value)})
    assert checkpoint_utils.load_draws(tmp_path)["w"][0, :, 0].tolist() == [1.0, 2.0, 3.0]
    checkpoint_utils.drop_draws_after(tmp_path, 20)
    assert checkpoint_utils.load_draws(tmp_path)["w"].shape == (2, 2, 4)


def test_parameters_are_found_in_runs_draws_and_checkpoints(tmp_path):
    template = {"w": np.zeros(4)}
    with pytest.raises(UserError, match="neither draws nor checkpoints"):
        checkpoint_utils.load_params(tmp_path, template)
    state = {"params": {"w": np.full((2, 4), 7.0)}, "momentum": np.zeros(2)}
    checkpoint_utils.save_checkpoint(tmp_path / "checkpoints", 5, state, {})
    assert checkpoint_utils.load_params(tmp_path, template)["w"][1, 0] == 7.0
    draws = np.arange(24.0).reshape(2, 3, 4)
    checkpoint_utils.save_draws(tmp_path / "draws", 9, {"w": draws})
    np.testing.assert_array_equal(
        checkpoint_utils.load_params(tmp_path, template)["w"], draws[:, -1]
    )
    with pytest.raises(UserError, match="There is no file"):
        checkpoint_utils.load_params(tmp_path / "nowhere", template)
