"""What the serving processes tell about themselves: metrics and decision records. Never prompt text."""
