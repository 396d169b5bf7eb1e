"""The Coordinator's view of the boards: roster, reconcile, delivery, transfer."""
