"""mlx-accel plugin: matrix products with dense and microscaling (mxfp4, nvfp4, mxfp8) weights on the CPU.

`plugin` holds the hooks, `reference` the formats and the product in numpy float64, `kernels/` the C++.
"""
