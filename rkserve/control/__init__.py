"""The cluster's control plane, as values and rules: what shall be, and what to do next.

Everything here takes values (the desired state, an operation, an event, a clock's reading) and
returns values; nothing sends, stores, waits or reads a clock.
"""
