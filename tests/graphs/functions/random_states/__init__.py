"""Random functions over records, histories, containers and who holds them, replayed by ``graphed`` beside eager runs.

``python -m tests.graphs.functions.random_states --help`` runs many; test_random_states.py some.
"""
