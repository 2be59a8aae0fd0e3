"""Answers computed from the tables, one question a module."""
