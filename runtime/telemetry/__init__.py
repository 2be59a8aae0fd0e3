"""The runtime's reports: USDT probes, its own log of a run, timers and profiles."""
