"""Ways to train B models side by side, under one contract."""
