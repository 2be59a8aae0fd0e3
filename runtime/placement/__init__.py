"""Chooses backends by measured costs."""
