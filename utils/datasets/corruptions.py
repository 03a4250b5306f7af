"""Shifted inputs made on the fly: corruptions of images in five severities, rotations, noise.

Images are (rows, height, width, channels) with pixels from 0 to 1; the result is of the same form.
The same seed gives the same corruption. Lengths are given for images of 28 pixels and scaled to
others. The kinds follow the common benchmark of Hendrycks and Dietterich (2019, arXiv 1903.12261);
the strengths are our own.
"""

import zlib
from collections.abc import Callable

import numpy as np
from scipy import ndimage

from haiku_posteriors.core.errors import UserError, unknown_name

SEVERITIES = (1, 2, 3, 4, 5)
REFERENCE_SIDE = 28
# Added to features of unit variance.
FEATURE_NOISE = (0.1, 0.2, 0.4, 0.8, 1.6)

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def corrupt(images: np.ndarray, kind: str, severity: int, seed: int = 0) -> np.ndarray:
    """Images corrupted by one of `CORRUPTIONS` at a severity from 1 to 5."""
    if kind not in CORRUPTIONS:
        raise unknown_name("corruption", kind, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise UserError(
            f"Severities go from 1 to {len(SEVERITIES)}; {severity} is not one of them."
        )
    _check(images)
    rng = np.random.default_rng([seed, severity, zlib.crc32(kind.encode())])
    changed = CORRUPTIONS[kind](images.astype(np.float64), severity - 1, rng)
    return np.clip(changed, 0.0, 1.0).astype(images.dtype)


def rotate(images: np.ndarray, degrees: float) -> np.ndarray:
    """Images turned counter-clockwise about their centre; what comes in from outside is 0."""
    _check(images)
    turned = ndimage.rotate(
        images.astype(np.float64), degrees, axes=(1, 2), reshape=False, order=1, mode="constant"
    )
    return np.clip(turned, 0.0, 1.0).astype(images.dtype)


def add_feature_noise(inputs: np.ndarray, severity: int, seed: int = 0) -> np.ndarray:
    """Inputs of unit variance with Gaussian noise, for data that are not images."""
    rng = np.random.default_rng([seed, severity])
    noise = FEATURE_NOISE[severity - 1] * rng.standard_normal(inputs.shape)
    return (inputs + noise).astype(inputs.dtype)


def _gaussian_noise(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    return images + (0.05, 0.1, 0.2, 0.3, 0.4)[level] * rng.standard_normal(images.shape)


def _shot_noise(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    photons = (60, 25, 12, 6, 3)[level]
    return rng.poisson(images * photons) / photons


def _impulse_noise(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    hit = rng.random(images.shape) < (0.02, 0.05, 0.1, 0.2, 0.3)[level]
    return np.where(hit, rng.integers(2, size=images.shape), images)


def _gaussian_blur(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    width = (0.5, 0.8, 1.2, 1.7, 2.4)[level] * images.shape[1] / REFERENCE_SIDE
    return ndimage.gaussian_filter(images, (0, width, width, 0), mode="nearest")


def _brightness(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    return images + (0.1, 0.2, 0.3, 0.4, 0.5)[level]


def _contrast(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    mean = images.mean(axis=(1, 2), keepdims=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[level] * (images - mean)


def _pixelate(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    for axis in (1, 2):
        side = images.shape[axis]
        blocks = max(1, round(side * (0.8, 0.65, 0.5, 0.4, 0.3)[level]))
        block = np.arange(side) * blocks // side
        middle = ((np.arange(blocks) + 0.5) * side / blocks).astype(int)
        images = np.take(images, middle[block], axis=axis)
    return images


def _occlusion(images: np.ndarray, level: int, rng: np.random.Generator) -> np.ndarray:
    rows, height, width = images.shape[:3]
    share = (0.15, 0.25, 0.35, 0.45, 0.55)[level]
    covered = np.ones((rows, 1, 1), bool)
    for axis, side in ((1, height), (2, width)):
        length = max(1, round(share * side))
        start = rng.integers(side - length + 1, size=(rows, 1))
        position = np.arange(side)
        inside = (position >= start) & (position < start + length)
        covered = covered & np.expand_dims(inside, 3 - axis)
    return np.where(covered[..., None], 0.0, images)


def _check(images: np.ndarray) -> None:
    if images.ndim != 4 or not np.issubdtype(images.dtype, np.floating):
        raise UserError(
            f"Images must be floats of (rows, height, width, channels), not "
            f"{images.dtype} of {images.shape}."
        )


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "gaussian_blur": _gaussian_blur,
    "brightness": _brightness,
    "contrast": _contrast,
    "pixelate": _pixelate,
    "occlusion": _occlusion,
}
