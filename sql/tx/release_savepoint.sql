-- Keeps what was done since savepoint.sql.
RELEASE SAVEPOINT pgxlock
