"""Pictures of ranks."""

import numpy as np
from picture_checks import check_picture

from haiku_posteriors.core.judging.calibration_ranks import Envelope
from haiku_posteriors.utils.plots import ranks


def test_rank_panels(tmp_path):
    """One quantity is uniform, one sits at the ends, as if draws were too narrow."""
    path = tmp_path / "ranks.png"
    values = np.random.default_rng(0).integers(0, 16, size=100)
    narrow = np.where(np.arange(100) % 2 == 0, 0, 15)
    ranks.rank_panels(path, {"good": values, "narrow": narrow}, Envelope(100, 15), "both")
    check_picture(path)
