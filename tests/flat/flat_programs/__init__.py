"""Random training programs on flat parameters that run beside plain eager execution:
``PYTHONPATH=tests/helpers python -m tests.flat.flat_programs --help``."""
