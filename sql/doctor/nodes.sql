-- Whether Citus is in this database; the extensions by which several servers take writes of the same rows;
-- and the subscriptions that write pgxlock's tables.
-- $1 schema
SELECT pg_catalog.to_regclass('pg_catalog.pg_dist_local_group') IS NOT NULL
         AND pg_catalog.to_regclass('pg_catalog.pg_dist_node') IS NOT NULL,
       ARRAY(SELECT e.extname::text FROM pg_catalog.pg_extension e WHERE e.extname IN ('bdr', 'spock') ORDER BY 1),
       ARRAY(SELECT DISTINCT s.subname::text
               FROM pg_catalog.pg_subscription_rel r JOIN pg_catalog.pg_subscription s ON s.oid = r.srsubid
               JOIN pg_catalog.pg_class c ON c.oid = r.srrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
              WHERE n.nspname = $1::text
                AND (starts_with(c.relname::text, 'pgxlock_')
                     OR c.relname::text IN ('distributed_locks', 'distributed_lock_shares'))
              ORDER BY 1)
