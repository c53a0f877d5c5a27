"""Where mlx-accel meets mlx-lm and mlx-vlm: their argument parsers and their one loading function each."""
