"""Readers of the files that trainers write. Nothing here imports torch or executes what a file says."""
