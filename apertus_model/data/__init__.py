"""From text on any file system to training samples: reading documents, token files, sample order, Goldfish
masks."""
