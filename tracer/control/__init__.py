"""What is recorded when: levels switched by the target's speed and the probes' cost."""
