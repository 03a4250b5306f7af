"""R-hat and effective sample size of arrays (chains, draws, quantities), and what they build on.

Sections are those of Vehtari, Gelman, Simpson, Carpenter & Buerkner (2021, arXiv 1903.08008).
"""

import numpy as np
import scipy.fft
import scipy.special
import scipy.stats


def halve_chains(x: np.ndarray) -> np.ndarray:
    """Halves each chain; the middle one of an odd number of draws is left out."""
    half = x.shape[1] // 2
    return np.concatenate([x[:, :half], x[:, -half:]])


def rank_normalise(x: np.ndarray) -> np.ndarray:
    """Normal scores of the ranks over all chains, ties sharing their mean rank (Blom 1958)."""
    ranks = scipy.stats.rankdata(x.reshape(-1, x.shape[2]), axis=0).reshape(x.shape)
    return scipy.special.ndtri((ranks - 0.375) / (x.shape[0] * x.shape[1] + 0.25))


def plain_rhat(x: np.ndarray) -> np.ndarray:
    """Variance of all draws over the variance within chains, as a ratio of deviations."""
    num_draws = x.shape[1]
    within = x.var(axis=1, ddof=1).mean(axis=0)
    between = x.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((num_draws - 1) / num_draws + between / within)


def plain_nested_rhat(x: np.ndarray) -> np.ndarray:
    """The same for groups of chains, of (superchains, chains, draws, quantities).

        sqrt(1 + B / W),   B the variance between the means of superchains,
        W the mean over superchains of (variance between its chains' means + mean variance in them)

    (Margossian et al. 2024, arXiv 2110.13017, section 2). A single chain in a superchain, or a
    single draw of a chain, has no variance of its own: that part of W is 0. With one chain a
    superchain its square is that of `plain_rhat` plus 1 / draws.
    """
    _, num_chains, num_draws = x.shape[:3]
    chain_means = x.mean(axis=2)
    zero = np.zeros((1, x.shape[3]))
    between_chains = chain_means.var(axis=1, ddof=1) if num_chains > 1 else zero
    within_chains = x.var(axis=2, ddof=1).mean(axis=1) if num_draws > 1 else zero
    within = (between_chains + within_chains).mean(axis=0)
    between = chain_means.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(1 + between / within)


def effective_sample_size(x: np.ndarray) -> np.ndarray:
    """M n / (1 + 2 sum_t rho_t), truncated by Geyer's initial monotone sequence (section 3.2)."""
    num_chains, num_draws = x.shape[:2]
    total = num_chains * num_draws
    autocovariance = _autocovariance(x).mean(axis=1)  # (lags, quantities)
    within = autocovariance[0] * num_draws / (num_draws - 1)
    variance = autocovariance[0] + (x.mean(axis=1).var(axis=0, ddof=1) if num_chains > 1 else 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = 1 - (within - autocovariance) / variance
    rho[0] = 1
    num_pairs = max(1, (num_draws - 1) // 2)
    pairs = rho[: 2 * num_pairs].reshape(num_pairs, 2, -1)
    sums = pairs.sum(axis=1)
    kept = np.cumprod(sums > 0, axis=0, dtype=bool)
    kept[-1] = False  # a sequence that never ends is cut here: the last lags hold few products
    kept[0] = True
    monotone = np.minimum.accumulate(sums, axis=0)
    # The even lag after the last pair still counts if positive: it lowers the variance of tau.
    after = kept.sum(axis=0)
    following = np.take_along_axis(
        np.concatenate([pairs[:, 0], np.zeros_like(pairs[:1, 0])]), after[None], axis=0
    )[0]
    tau = -1 + 2 * np.sum(monotone * kept, axis=0) + np.maximum(following, 0)
    # Antithetic chains beat independent draws, but by no more than can be told from M n of them.
    return total / np.maximum(tau, 1 / np.log10(total))


def _autocovariance(x: np.ndarray) -> np.ndarray:
    """(chains, draws, quantities) -> (lags, chains, quantities), the biased estimate, by FFT."""
    num_draws = x.shape[1]
    length = scipy.fft.next_fast_len(2 * num_draws, real=True)
    spectrum = np.fft.rfft(x - x.mean(axis=1, keepdims=True), length, axis=1)
    products = np.fft.irfft(np.abs(spectrum) ** 2, length, axis=1)[:, :num_draws]
    return np.moveaxis(products, 1, 0) / num_draws
