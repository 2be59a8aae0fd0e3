"""The Perfetto trace."""
