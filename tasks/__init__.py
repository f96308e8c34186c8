"""How Prefect runs one stage: a decorator, a docstring, a call. The work itself lies in tasks/remote and dflash_model."""
