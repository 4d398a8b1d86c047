"""The simulator: scenarios of searches on a cluster, with the engine, policies and algorithms of live studies."""
