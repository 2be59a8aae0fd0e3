"""Results → files that people look at. Nothing here measures or analyses."""
