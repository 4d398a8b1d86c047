"""Jobs on many machines: an agent on each node around a local back end, and a back end that routes jobs to agents."""
