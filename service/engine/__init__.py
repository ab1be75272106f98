"""Engines: what turns a chat into events."""
