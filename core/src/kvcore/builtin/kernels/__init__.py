"""Kernels of torch: the exact reference of any format, and tuned ones for the plain formats."""
