"""mlx-accel plugin: matrix products with affine quantized weights on the CPU.

`plugin` holds the hooks, `reference` the format and the product in numpy float64, `kernels/` the C++.
"""
