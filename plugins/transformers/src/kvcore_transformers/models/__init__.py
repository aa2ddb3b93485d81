"""Models: their configurations as layer groups, and their weights."""
