"""Child processes, clients, clusters and figures that all benchmarks share."""
