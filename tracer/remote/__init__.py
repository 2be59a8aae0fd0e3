"""Recording on other machines, which need no Python: what to attach is planned here, and the recording comes back."""
