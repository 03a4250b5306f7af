"""What a picture must be: a whole PNG file with something in it, alone in its folder."""

import numpy as np
from matplotlib import image

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def check_picture(path) -> np.ndarray:
    """The picture is the only file of its folder, and is not blank; returns its pixels."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes().startswith(SIGNATURE)
    pixels = image.imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 250
    assert len(np.unique(pixels @ np.array([1.0, 256.0, 65536.0]))) > 20  # One number per colour.
    # Nothing runs out of the frame: its outermost pixels are background.
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (border == 1).all()
    return pixels
