"""What profiled steps did: ranges of torch's profiler with the user's names, merged over ranks."""
