"""graphed(): functions that replay whole."""
