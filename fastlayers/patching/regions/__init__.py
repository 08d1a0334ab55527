"""Regions: which calls of a module run which recorded program."""
