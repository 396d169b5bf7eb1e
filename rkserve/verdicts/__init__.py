"""Rules about a running cluster: facts as frozen values, reasons with their commands, verdicts."""
