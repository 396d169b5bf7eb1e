"""The project's benchmarks: ``make bench`` and its kin. Not part of the wheel."""
