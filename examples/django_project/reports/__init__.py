"""An app that writes reports."""
