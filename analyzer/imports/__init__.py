"""QNN profiles written by other programs, as tables."""
