"""Random programs of ops over views of few storages have the bits of plain PyTorch, whatever runs them."""

import pytest
import torch
from op_programs import WAYS, run_program
from seeds import first_seed

COUNTS = {"compiled": 1, "graphed": 6}


@pytest.mark.parametrize("way", WAYS)
def test_random_programs_of_ops_have_the_values_of_plain_pytorch(way):
    first = first_seed("programs of ops")
    for seed in range(first, first + COUNTS.get(way, 25)):
        run_program(seed, [way])
    torch._dynamo.reset()
