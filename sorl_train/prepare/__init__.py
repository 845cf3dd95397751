"""Data preparation: published data sets to one schema, with hashes, a card, and a check of train against test."""
