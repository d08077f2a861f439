"""How one run is measured: its cell, engine counts and energy over its window, its timeline, and whether it counts."""
