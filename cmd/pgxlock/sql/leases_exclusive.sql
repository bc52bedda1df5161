-- The leases where none can be shared.
(SELECT 'exclusive' AS mode, a.* FROM /* schema */lock_leases a)
