"""How good posteriors and predictions are: diagnostics, metrics, distances and their floors."""
