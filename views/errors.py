"""What can go wrong in this room."""


class ViewError(Exception):
    """A view cannot be made or shown; the message carries the fact and the remedy."""
