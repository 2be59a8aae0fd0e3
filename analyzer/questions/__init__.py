"""Analyses of the tables, one question per module."""
