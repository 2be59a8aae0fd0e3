"""Recording → typed tables, ProfDAG, statistics. Needs no root, no kernel and no engine."""
