"""Errors of the analyzer."""

from moescope.errors import UserError


class AnalysisError(UserError):
    """The recording does not allow this analysis; the message has the reason and the remedy."""


class PredictError(AnalysisError):
    """The input does not allow a prediction: unreadable model config, unknown device, trace without routes."""
