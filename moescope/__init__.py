"""The command line shared by all packages, and the command `moescope`. Only `terminal` needs more than the standard library."""
