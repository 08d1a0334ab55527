"""What generated forwards call."""
