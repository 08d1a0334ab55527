"""Triton kernels, one file per family, with their launch rules. Imported only when a call is for Triton."""
