"""`cputrain tune`: the ranks, threads, binding, allocator and number format that train a script fastest."""
