"""The science and the file formats of dflash-eval: no Prefect, no SSH, no environment variables.

Importing this package (or any module of it) does nothing: no logging set-up, no device query.
"""

__version__ = "0.1.0"
