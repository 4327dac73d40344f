"""An error, a lost rank or a signal on one rank ends the job on all of them, with its cause."""
