"""The experiments of the five papers, and of every rival, as they are measured here: a file for each paper."""
