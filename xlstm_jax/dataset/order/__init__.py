"""The order of data: batches as a function of the seed and the step, on any number of hosts and workers."""
