"""Watches inference engines through eBPF and writes what it sees to a recording."""
