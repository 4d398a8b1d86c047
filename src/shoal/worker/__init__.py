"""Trains jobs: what runs in a worker process. Import from its modules; they need torch."""
