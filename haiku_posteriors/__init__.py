"""Functional inference for Bayesian neural networks in JAX and Haiku, measured against HMC."""

__version__ = "0.2.0"
