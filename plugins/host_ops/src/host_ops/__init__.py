"""mlx-accel plugin: what lies between the linear layers, on the CPU.

`plugin` holds the hooks, `ops` the operations as callables, `reference` what they compute in numpy float64 and the
bounds on their errors, `kernels/` the C++.
"""
