"""Adapters: the recovery runtime inside agent frameworks whose applications know nothing of it."""
