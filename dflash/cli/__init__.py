"""What the commands share: flags, help, exit statuses, checks before any work."""
