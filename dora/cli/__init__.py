"""The command line: thin commands over producers and consumers."""
