"""The command line shared by all rooms, and the command `moescope`. Only `terminal` needs more than the standard library."""
