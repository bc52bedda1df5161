-- Housekeeping: removes tickets of processes that are no more.
SELECT /* schema */pgxlock_reap_waiters(256)
