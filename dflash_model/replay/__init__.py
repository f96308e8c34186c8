"""Offline verify walks: which anchors, which records, which steps. tau is counted here and nowhere else."""
