"""The shell: data, devices, the loop, files, reports."""

if __name__ == "utils":  # a module loaded under two names is two modules
    raise ImportError("Import haiku_posteriors.utils; utils alone is not an import name.")
