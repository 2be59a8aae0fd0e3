"""From a checkpoint to a package of subgraphs."""
