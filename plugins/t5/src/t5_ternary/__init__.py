"""mlx-accel plugin: ternary weights at 1.75 bits, five to a byte.

`layout` and `convert` hold the format, `reference` says the same in plain numpy float64, `repack` and `commands`
rewrite checkpoints, `loading` and `modules` bring them into models, `plugin` holds the hooks, `kernels/` the C++.
"""
