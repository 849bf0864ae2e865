"""Small models, runs and servers that several tests share."""
