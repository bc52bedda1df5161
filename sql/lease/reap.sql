-- Housekeeping: removes leases that nobody released and nobody wants.
SELECT /* schema */reap_expired_locks(interval '1 hour', 256)
