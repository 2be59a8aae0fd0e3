"""One module per verb of `moescope`."""
