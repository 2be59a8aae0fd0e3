"""Unwinding of recorded stacks."""
