"""Problems: made from a key, or read from files."""
