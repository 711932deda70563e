"""What the benchmarks measure, by area of te_graph."""
