"""What changed between groups of runs, and how sure that is."""
