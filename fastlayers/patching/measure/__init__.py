"""What a patched model computes, how fast, and in how much memory."""
