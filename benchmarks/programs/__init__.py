"""Programs that benchmarks start and measure."""
