"""What can go wrong in this room."""

from moescope.errors import UserError


class ViewError(UserError):
    """A view cannot be made or shown; the message carries the fact and the remedy."""
