"""Eight GPUs of two kinds on three nodes that do not exist, and what is trained there on the CPU."""
