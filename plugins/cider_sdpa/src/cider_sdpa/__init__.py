"""mlx-accel plugin: scaled dot-product attention on the CPU.

`plugin` holds the hooks, `reference` the attention in numpy float64 with its error bound, `kernels/` the C++.
"""
