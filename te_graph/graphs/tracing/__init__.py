"""What is seen of the code that is captured: dispatcher calls, host work, Python functions."""
