"""What all frameworks share: the library in C, its operations, process sets and elastic state. Knows no framework."""
