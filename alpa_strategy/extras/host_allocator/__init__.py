"""Tunes the C library's allocator where tensors are in host memory, and prices what it costs."""
