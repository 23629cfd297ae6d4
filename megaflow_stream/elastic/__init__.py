"""What lets the number of ranks change: a group for a generation, and a reduction that any number computes alike."""
