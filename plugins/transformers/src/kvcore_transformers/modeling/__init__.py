"""What a running model needs: attention on the pools, a cache of its kind, and states in a batch."""
