"""Run folders opened again, and everything that is written about runs."""
