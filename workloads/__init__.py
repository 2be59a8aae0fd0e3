"""Models and programs of known truth that tests and benchmarks run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
PROGRAMS = ROOT / "workloads" / "programs"
