"""Which backend runs what, by measured costs."""
