"""The passes over a recorded program, and the generated kernels."""
