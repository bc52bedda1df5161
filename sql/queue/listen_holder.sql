-- Listens to who waits for the advisory locks of one session, and to no other one's.
UNLISTEN *;
LISTEN "pgxlock_/* client */";
LISTEN pgxlock_step_down;
LISTEN "pgxlock_holder_/* pid */"
