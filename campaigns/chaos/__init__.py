"""Real runs whose real processes are killed: the shots, their witnesses and the judge."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # how benchmarks start a run
