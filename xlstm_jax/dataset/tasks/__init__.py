"""Tasks with exact answers, drawn from a seed: formal languages, parity and associative recall."""
