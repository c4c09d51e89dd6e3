"""Steering of a running run: which keys of a recipe may change, and how control takes changes and orders of people. It
imports no other wing: how policies are made is given to it."""
