"""Child processes, clients, clusters and tables that all benchmarks share."""
