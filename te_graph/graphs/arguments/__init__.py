"""Arguments and results as flat lists: what a capture fixes and what a call must match."""
