"""The base of every error that a user can cause."""


class UserError(Exception):
    """An error shown as one line, exit code 2; the message gives the fact and the remedy."""
