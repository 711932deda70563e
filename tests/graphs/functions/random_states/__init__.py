"""Random functions over records, histories, containers and who holds them, replayed by ``graphed`` beside eager runs.

``PYTHONPATH=tests/helpers python -m tests.graphs.functions.random_states --help`` tells how to run many;
test_random_states.py runs some.
"""
