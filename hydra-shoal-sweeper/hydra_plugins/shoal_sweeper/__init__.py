"""Sweeper of Hydra that runs a multirun as a study of Shoal."""
