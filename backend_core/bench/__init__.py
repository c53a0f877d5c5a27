"""The benchmark harness behind ``mlx-accel bench``: ours, stock and a peer, interleaved in one run.

Everything compared with each other is measured in one process within seconds, round by round in alternating
order, and so are the two limits of the machine (:mod:`.floors`). Weights rotate over copies that no cache
holds. A result is plain data (:mod:`.measure`), which :mod:`.output` prints and writes and :mod:`.plot` draws.
"""
