"""An engine for Mixture-of-Experts models on CPU and NPU: `from runtime import MoE`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.errors import MoEError
    from runtime.moe import MoE, Token

__all__ = ["MoE", "MoEError", "Token"]


def __getattr__(name: str) -> Any:
    """Import ONNX Runtime only when the engine is used, so that `--help` is instant."""
    if name == "MoEError":
        from runtime.errors import MoEError

        return MoEError
    if name in ("MoE", "Token"):
        from runtime import moe

        return getattr(moe, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
