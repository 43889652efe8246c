"""The parts of a run that outlive a step: its plan, its progress, its data position, its time and its signals."""
