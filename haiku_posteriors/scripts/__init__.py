"""The scripts, one module each; links to the files that `python run_hmc.py` starts."""
