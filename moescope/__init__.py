"""The command line that all rooms share, and the one command `moescope`. Only `terminal` needs more than the standard library."""
