"""`make chaos`: a real run whose processes are killed and frozen, and the proof afterwards."""
