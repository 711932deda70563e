"""Random sequences of collectives have the values of an exact sum in the order of the ranks."""

import pytest
from collective_ranks import WORLDS
from collective_sequences import run_sequence
from ranks import ranks_of
from seeds import first_seed

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
COUNT = 4


def test_random_sequences_of_collectives_have_the_values_of_the_reference(ranks, seed):
    first = first_seed("sequences of collectives")
    for number in range(first, first + (COUNT if ranks.is_cpu else 5 * COUNT)):
        ranks.run(run_sequence, seed, number, 12, not ranks.is_cpu)
