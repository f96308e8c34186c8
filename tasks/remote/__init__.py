"""Reaching hosts and keeping account of what lies where. No Prefect, no torch."""
