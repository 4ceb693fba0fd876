"""The rules of dora, pure: no input or output, no clock, no Kafka, no torch."""
