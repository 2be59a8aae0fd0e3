"""profdag.html: operators as a graph."""
