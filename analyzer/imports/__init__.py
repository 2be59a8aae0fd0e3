"""Profiles and routes written by other programs, as tables."""
