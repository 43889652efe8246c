"""Work that happens ahead of the consumer: a thread that prefetches batches, processes that tokenise."""
