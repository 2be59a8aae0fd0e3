"""Experts in memory: cache, loading, routing, prediction and prefetch."""
