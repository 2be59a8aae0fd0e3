"""The recording on disk: format, manifest, and what is written there."""
