"""Ray Serve: builds the application and wraps Router, board and Coordinator."""
