"""Reports on a study from its journal: progress, tables, grid, data frame."""
