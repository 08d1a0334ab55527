"""The tests, in the rooms of what they test. What they share is imported as ``tests.harness``, and so on."""

from pathlib import Path

#: The checkout.
ROOT = Path(__file__).resolve().parents[1]
