"""The base of every error that a user can cause, and the exit code of a program that runs others."""

FAILED = 125
"""The exit code of `run` if the tracer fails, as that of env, timeout and docker: all others are the command's."""


class UserError(Exception):
    """An error shown as one line, exit code 2; the message gives the fact and the remedy."""
