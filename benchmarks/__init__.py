"""Benchmarks: `python -m benchmarks.NAME [--json]`; with --json a result is kept in `results/`, which `render` puts on pages."""
