"""report.html, one module per subject."""
