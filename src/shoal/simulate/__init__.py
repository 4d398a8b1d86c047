"""What would a search take? Scenarios, simulated with the same policies and algorithms as live."""
