"""Changes of Haiku layers from outside: interception, noisy layers, fast convolutions."""
