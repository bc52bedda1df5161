-- Indexes of ours whose order may have changed since they were built.
-- $1 schema
SELECT DISTINCT i.indexrelid::regclass::text,
       format('collation %I: version %s, now %s', k.collname, k.collversion,
              coalesce(pg_collation_actual_version(k.oid), 'none'))
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_index i ON i.indrelid = c.oid
       CROSS JOIN unnest(i.indcollation) AS ordered (by) JOIN pg_collation k ON k.oid = ordered.by
 WHERE n.nspname = $1::text AND (starts_with(c.relname, 'pgxlock_') OR starts_with(c.relname, 'distributed_lock'))
   AND k.collversion <> coalesce(pg_collation_actual_version(k.oid), '')
 ORDER BY 1
