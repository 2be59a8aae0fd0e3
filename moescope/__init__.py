"""The command line that all rooms share, and the one command `moescope` over them. Imports the standard library alone."""
