"""What is compiled, measured or learnt once, ahead of generation."""
