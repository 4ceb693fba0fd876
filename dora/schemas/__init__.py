"""Records of a run's topics: Avro schemas, typed values and the codec between them and bytes."""
