"""Replicas of the server on Ray Serve, which places, restarts, scales and drains them."""
