"""Random models and what is done with them in training, by ``graph_layers`` beside eager execution.

PYTHONPATH=tests/helpers python -m tests.graphs.layers.random_models.training_programs  # or with seeds: 0:200
PYTHONPATH=tests/helpers python -m tests.graphs.layers.random_models.dag_programs
"""
