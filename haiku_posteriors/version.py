"""The version; random streams belong to it, so runs and checkpoints record it."""

__version__ = "0.3.0"
