"""The jobs of the placement benchmark, and the ways of getting them done."""
