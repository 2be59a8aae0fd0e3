"""report.html, one module a subject."""
