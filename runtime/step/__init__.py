"""One step of a model: attention, experts, sampling, and its log."""
