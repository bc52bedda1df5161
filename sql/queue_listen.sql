-- Listens to what is sent to one process.
LISTEN "pgxlock_/* client */"
