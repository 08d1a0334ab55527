"""All that knows a model library."""
