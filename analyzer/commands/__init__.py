"""One module per verb that reads."""
