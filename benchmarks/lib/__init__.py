"""What the benchmarks share: command lines, timing, processes, counts of launches, words of the tables."""
