"""Models and programs with known behaviour, for tests and benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
PROGRAMS = ROOT / "workloads" / "programs"
