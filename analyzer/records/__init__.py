"""Records of a recording as columns: what each kind means, when each level was recorded, and the joins over them."""
