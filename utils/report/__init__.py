"""Finished runs opened again, and the reports on them."""
