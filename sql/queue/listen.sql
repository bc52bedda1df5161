-- Listens to what is sent to one process, and to who asks leaders to step down.
LISTEN "pgxlock_/* client */";
LISTEN pgxlock_step_down
