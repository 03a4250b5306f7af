"""Functional inference for Bayesian neural networks in JAX and Haiku, measured against HMC."""

from haiku_posteriors.version import __version__ as __version__
