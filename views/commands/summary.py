"""Show a recording on one screen: speed, where the time goes, experts, NPU, scheduling, losses and the cost of tracing.

examples:
  python -m views summary recordings/run-1
  python -m views summary recordings/run-1 --json | jq .tokens.tpot_ms
"""

from analyzer.commands.summary import prepare_parser, run

__all__ = ["prepare_parser", "run"]
