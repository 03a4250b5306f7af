"""What is done to Haiku layers from outside: interception, noisy layers, fast convolutions."""
