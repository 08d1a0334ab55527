"""Switches of other packages that turn fastlayers on. Each file imports its package, and nothing imports the files."""
