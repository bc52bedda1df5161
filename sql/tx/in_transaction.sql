-- Fails where no transaction is open, in which a lock would end at once.
SAVEPOINT pgxlock;
RELEASE SAVEPOINT pgxlock
