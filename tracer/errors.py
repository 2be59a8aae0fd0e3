"""The tracer's errors; each message is one line with the fact and the remedy."""

from moescope.errors import FAILED as FAILED
from moescope.errors import UserError


class TracerError(UserError):
    """Base of all tracer errors: shown as one line, exit code 2."""


class RequirementError(TracerError):
    """The machine or the user lacks something; `moescope doctor` lists everything."""


class ProbeError(TracerError):
    """A probe cannot be resolved, loaded or attached."""


class TargetError(TracerError):
    """The traced command cannot be started or followed."""


class EngineError(TracerError):
    """An engine declaration is unknown or wrong."""
