"""What runs before and after the loop."""
