"""Verbs of the command line itself: `prepare_parser` and `run` of each."""
