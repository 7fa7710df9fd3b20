"""What tests of the benchmarks share: a card that was never there."""

from __future__ import annotations

from benchmarks.ceilings import Ceilings

CEILINGS = Ceilings(4000.0, {"float8": 1300.0, "float16": 700.0, "bfloat16": 700.0, "tf32": 350.0, "ieee": 50.0})
MACHINE = {"gpu": "NVIDIA H200", "driver": "1.0", "cuda": "13.0", "torch": "2.11.0"}
