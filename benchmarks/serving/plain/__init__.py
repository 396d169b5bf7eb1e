"""rkserve beside other ways to serve the same paced boards: plain Ray Serve, and gateways."""
