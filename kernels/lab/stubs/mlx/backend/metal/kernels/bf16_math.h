// In place of mlx's header: the lab has these functions for bfloat already.
