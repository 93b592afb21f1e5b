"""The server as replicas on Ray Serve, which places, restarts, scales and drains them."""
