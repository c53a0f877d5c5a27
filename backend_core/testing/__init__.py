"""Tools for testing kernels and plugins."""
