"""From responses to scores."""
