"""Records of a recording as columns: the meaning of each kind, when each level was recorded, and the joins over them."""
