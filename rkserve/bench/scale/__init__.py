"""A cluster on paper: real routing, admission and rollouts over boards that are formulas."""
