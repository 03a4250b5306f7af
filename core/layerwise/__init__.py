"""A posterior whose layers know each other, by global inducing points."""
