"""Kernels for the CPU: torch, and Numba where it is installed."""
