-- Housekeeping: removes shares that nobody released and nobody wants.
SELECT /* schema */pgxlock_reap_shares(interval '1 hour', 256)
