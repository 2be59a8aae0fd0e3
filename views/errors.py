"""Errors of the views."""

from moescope.errors import UserError


class ViewError(UserError):
    """A view cannot be made or shown; the message has the reason and the remedy."""
