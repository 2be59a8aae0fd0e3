"""One module per verb that records."""
