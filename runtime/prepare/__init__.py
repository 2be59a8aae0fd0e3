"""Work done once before generation: compiling, measuring, training."""
