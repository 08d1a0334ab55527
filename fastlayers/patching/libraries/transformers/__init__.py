"""The transformers library: its losses, its attention masks, and what it wraps around a forward."""
