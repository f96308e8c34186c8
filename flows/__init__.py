"""What happens, in order, and the command line."""
