"""Benchmarks: `python -m benchmarks.NAME [--json FILE]`; results are kept in `results/` and rendered by `render`."""
