"""Looking at a study, from its journal: progress, tables, grid, data frame, and the live page."""
