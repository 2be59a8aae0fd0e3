"""What prediction can refuse; the message carries the fact and the remedy."""

from analyzer.errors import AnalysisError


class PredictError(AnalysisError):
    """The input cannot be predicted from: unreadable model config, unknown device, trace without routes."""
