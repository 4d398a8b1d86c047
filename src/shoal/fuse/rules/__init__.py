"""What a torch function becomes for all members at once, one file per family."""
