// Empty: see metal_stdlib.
