"""The machines of a study: discovery, health and sharing of their devices."""
