"""BPF objects: their layouts, loading, ring and counters."""
