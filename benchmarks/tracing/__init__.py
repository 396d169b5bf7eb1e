"""CPU time that access lines and traces cost a Router."""
