"""Where probes are placed, why there, and how they are attached."""
