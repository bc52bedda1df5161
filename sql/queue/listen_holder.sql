-- Listens to waiters for the advisory locks of one session, and of no other.
UNLISTEN *;
LISTEN "pgxlock_/* client */";
LISTEN pgxlock_step_down;
LISTEN "pgxlock_holder_/* pid */"
