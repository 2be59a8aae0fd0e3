"""Stacks of a recording: unwinding, and the tables made from it."""
