"""Typed tables built from records, kept beside the recording as Parquet."""
