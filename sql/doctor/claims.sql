-- How many rows and bytes the table of claims, with the answers, had when it was last vacuumed or
-- analysed. To measure it now could wait behind a lock.
-- $1 schema
SELECT greatest(c.reltuples, 0)::bigint,
       (c.relpages::bigint + coalesce(t.relpages, 0)) * current_setting('block_size')::bigint
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
 WHERE n.nspname = $1::text AND c.relname = 'pgxlock_claims' AND c.relkind = 'r'
