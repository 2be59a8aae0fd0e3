"""What prediction can refuse; the message carries the fact and the remedy."""


class PredictError(RuntimeError):
    """The input cannot be predicted from: unreadable model config, unknown device, trace without routes."""
