-- Listens to what is sent to one process, and to requests that leaders step down.
LISTEN "pgxlock_/* client */";
LISTEN pgxlock_step_down
