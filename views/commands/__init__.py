"""The verbs of python -m views."""
