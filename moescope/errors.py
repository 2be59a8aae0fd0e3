"""The base of every error that a user can cause."""


class UserError(Exception):
    """Shown as one line, exit code 2; the message carries the fact and the remedy."""
