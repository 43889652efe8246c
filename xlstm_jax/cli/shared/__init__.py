"""What several commands share: output, the header of a run, GPU memory, interrupts."""
