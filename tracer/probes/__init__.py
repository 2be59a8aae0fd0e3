"""Where probes stand, why there, and how they are attached."""
