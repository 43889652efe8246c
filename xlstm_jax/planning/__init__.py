"""Planning of runs: whether a run fits into memory, how long it takes and what it costs."""
