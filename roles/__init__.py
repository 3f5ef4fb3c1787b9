"""Roles: one room per subject of a node."""
