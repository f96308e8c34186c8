"""Stage programs: `python -m dflash_model.stages NAME REQUEST.json`. See protocol.py for what they promise."""
