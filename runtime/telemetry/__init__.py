"""What the runtime reports of itself: USDT probes, its own log of a run, timers and profiles."""
