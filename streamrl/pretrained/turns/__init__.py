"""Chats of several turns as tokens: what continues one after a sampled turn, which calls of tools a turn has, and
what a model's template does with them. Imports pretrained and rooms before it; no torch."""
