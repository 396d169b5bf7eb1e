"""Dashboards of Grafana and alert rules of Prometheus, as Python; not in the wheel."""
