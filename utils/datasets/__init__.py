"""Data sets by their sources, and shifts of their rows."""
