"""Random programs of graphed and eager pieces that run beside eager execution: ``python -m tests.programs --help``."""
