-- Begins what may fail without aborting the caller's transaction.
SAVEPOINT pgxlock
