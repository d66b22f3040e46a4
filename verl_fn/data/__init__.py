"""Problems to train and evaluate on: generated from a key, or read from files."""
