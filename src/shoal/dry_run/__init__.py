"""What a few real steps of some configurations show before a search: what each costs, and whether sharing pays."""
