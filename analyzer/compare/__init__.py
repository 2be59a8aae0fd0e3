"""Changes between groups of runs, and their certainty."""
