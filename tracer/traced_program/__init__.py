"""The traced process, and which model its command runs."""
