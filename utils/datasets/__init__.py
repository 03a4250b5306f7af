"""Data sets by their sources, and what is done to their rows."""
