"""What is behind the scikit-learn estimators of `haiku_posteriors.sklearn`."""
