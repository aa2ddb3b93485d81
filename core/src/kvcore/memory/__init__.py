"""Device memory of one rank: pools, the batch of a step, and what kernels read and write."""
