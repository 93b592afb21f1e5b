"""The models: `common` holds the forward pass they share, each other file what differs."""
