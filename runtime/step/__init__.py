"""One step of a model: attention, experts, sampling, and what it reports."""
