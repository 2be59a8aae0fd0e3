"""One module per verb that writes files to look at."""
