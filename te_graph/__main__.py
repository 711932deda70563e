"""python -m te_graph: prints what te_graph was built with."""

from te_graph._build import build_info

for name, value in build_info().items():
    print(f"{name}: {value or 'none (CPU ops only)'}")
