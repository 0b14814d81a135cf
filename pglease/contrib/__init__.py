"""Adapters for other people's libraries. Each module imports the one it is for; nothing here is imported unasked."""
