"""Flags, help, exit statuses and preflight checks of all commands."""
