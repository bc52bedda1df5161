-- The leases, of those that are shared each of who shares them.
(SELECT 'exclusive' AS mode, a.* FROM /* schema */lock_leases a WHERE a.holder_id::text <> '*shared' COLLATE "C"
 UNION ALL
 SELECT 'shared', s.* FROM /* schema */lock_shares s)
