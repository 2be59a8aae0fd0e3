"""The verbs of moescope."""
