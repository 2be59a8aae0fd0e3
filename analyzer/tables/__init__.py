"""Typed tables built from records and cached beside the recording as Parquet."""
