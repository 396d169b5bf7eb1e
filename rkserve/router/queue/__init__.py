"""The queues of a Router: admission, fairness, reservations, estimates."""
