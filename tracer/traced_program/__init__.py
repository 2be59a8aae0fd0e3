"""The traced processes: starting them, watching their libraries, and what they run."""
