"""Implicit posteriors: the method, its generators, their Jacobians, mixtures of members."""
