"""Retraction backends in host memory."""
