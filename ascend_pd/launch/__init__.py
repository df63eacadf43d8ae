"""From a cluster file to running processes: pure command lines, and a supervisor for one machine."""
