"""One module per verb of `python -m tracer`."""
