"""The flame graph page."""
