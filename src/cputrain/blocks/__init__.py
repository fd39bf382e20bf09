"""What the parts of a model compute with our operators: one file for each kind of part."""
