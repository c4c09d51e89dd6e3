"""Rewards that come with streamrl: ``catalog`` lists them, one file defines each."""
