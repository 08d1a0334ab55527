"""Recorded programs: what they are made of, the tape that records them, and what runs them."""
