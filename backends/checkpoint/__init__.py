"""A training state as a folder of safetensors under canonical names."""
