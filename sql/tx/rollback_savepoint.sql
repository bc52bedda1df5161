-- Undoes what was done since savepoint.sql: locks, settings and the error.
ROLLBACK TO SAVEPOINT pgxlock;
RELEASE SAVEPOINT pgxlock
