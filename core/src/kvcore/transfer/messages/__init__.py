"""What peers tell each other: manifests and control messages."""
