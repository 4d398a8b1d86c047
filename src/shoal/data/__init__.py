"""Datasets, and one stream of samples for many arrays. Import from its modules; they need torch."""
