-- Takes away what 000001_leases.up.sql installed. A table and functions that were there
-- before are given back as they were, rows included.
--
-- Each down file refuses while leases are live, claims stand or runs are remembered, before
-- it removes anything, unless the session says SET pgxlock.force = on.
DO $migration$
DECLARE
  v_path     pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema   pg_catalog.text := pg_catalog.current_schema();
  v_restores pg_catalog.bool;               -- there was a table before
  r          pg_catalog.record;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  IF NOT EXISTS (SELECT FROM pg_proc p
                  WHERE p.oid = to_regprocedure(quote_ident(v_schema) || '.pgxlock_migrate(text, integer, text)')::oid
                                         AND pg_get_userbyid(p.proowner) = current_user) THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 1, or it belongs to another role',
        coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'Name the schema first in search_path, SET ROLE to the owner, and run the files in order.';
  END IF;
  PERFORM set_config('search_path', format('%I, pg_temp', v_schema), true);
  PERFORM pgxlock_migrate('down'::text, 1, v_path);

  -- Only what is this role's: another one may make such a table or function at any time.
  v_restores := EXISTS (SELECT FROM pg_class c
                         WHERE c.oid = to_regclass(pg_catalog.format('%I.pgxlock_adopted', v_schema))::oid
                           AND pg_get_userbyid(c.relowner) = current_user);

  DROP VIEW lock_leases;
  DROP FUNCTION pgxlock_migrate(text, integer, text), try_acquire_lock(varchar, varchar, interval, jsonb),
    renew_lock(varchar, varchar, bigint, interval), extend_lock(varchar, varchar, integer),
    pgxlock_renew(text, text, bigint, interval), release_lock_fenced(varchar, varchar, bigint),
    pgxlock_release(text, text, bigint), assert_lock_held(varchar, varchar, bigint, boolean),
    pgxlock_acquire_each(text[], text[], bigint[], text[]), pgxlock_renew_batch(text[], text[], bigint[], bigint[]),
    reap_expired_locks(interval, integer), pgxlock_check_unused(), repair_lock_tokens(),
    pgxlock_next_tokens(bigint), pgxlock_timeline(), pgxlock_system_identifier(), advisory_lock_key(text),
    advisory_lock_key_in(text, text),
    pgxlock_key(text, text), pgxlock_is_own_key(integer, bigint), pgxlock_own_key(boolean, bytea),
    pgxlock_check(text, text), pgxlock_require(boolean, text), pgxlock_check_primary(text),
    pgxlock_check_read_committed(text), pgxlock_check_try(text, text, interval, jsonb),
    pgxlock_ttl(text, interval), pgxlock_before(text, interval), pgxlock_durable(boolean), pgxlock_version();
  IF NOT v_restores THEN
    DROP FUNCTION acquire_lock(varchar, varchar, integer, jsonb), release_lock(varchar, varchar);
    DROP TABLE distributed_locks;
  ELSE
    ALTER TABLE distributed_locks DROP COLUMN fencing_token;
    DROP INDEX IF EXISTS distributed_locks_lock_name_c;
    ALTER TABLE distributed_locks RESET (fillfactor, vacuum_truncate, autovacuum_vacuum_scale_factor,
                                         autovacuum_vacuum_threshold);
    COMMENT ON TABLE distributed_locks IS NULL;
    COMMENT ON FUNCTION acquire_lock(varchar, varchar, integer, jsonb) IS NULL;
    COMMENT ON FUNCTION release_lock(varchar, varchar) IS NULL;
    FOR r IN
      SELECT CASE WHEN c.oid IS NULL THEN 'DROP FUNCTION ' || f.name || '(' || f.arguments || ')'
                  ELSE pgxlock_rename(pg_get_functiondef(c.oid),
                                      pg_catalog.format('CREATE OR REPLACE FUNCTION %I.pgxlock_adopted_%s(',
                                                        v_schema, f.name),
                                      pg_catalog.format('CREATE OR REPLACE FUNCTION %s(', f.name)) END AS statement
        FROM (VALUES ('acquire_lock', 'varchar, varchar, integer, jsonb'), ('release_lock', 'varchar, varchar'))
               f (name, arguments),
             LATERAL (SELECT (SELECT p.oid FROM pg_proc p
                               WHERE p.oid = to_regprocedure('pgxlock_adopted_' || f.name || '(' || f.arguments || ')')::oid
                                 AND pg_get_userbyid(p.proowner) = current_user) AS oid) c
      UNION ALL
      SELECT pgxlock_rename(pg_get_indexdef(i.indexrelid),
                            pg_catalog.format('CREATE %sINDEX pgxlock_adopted_expires ON %I.pgxlock_adopted ', u.word,
                                              v_schema),
                            pg_catalog.format('CREATE %sINDEX idx_locks_expires ON distributed_locks ', u.word))
        FROM pg_index i, LATERAL (SELECT CASE WHEN i.indisunique THEN 'UNIQUE ' ELSE '' END AS word) u
       WHERE i.indexrelid = to_regclass('pgxlock_adopted_expires')::oid
      UNION ALL
      SELECT pg_catalog.format('ALTER TABLE distributed_locks ALTER COLUMN %I DROP NOT NULL', a.attname)
        FROM pg_attribute a
       WHERE a.attrelid = 'pgxlock_adopted'::regclass::oid
         AND a.attname::text IN ('holder_id', 'expires_at')
         AND NOT a.attnotnull
      UNION ALL
      SELECT pg_catalog.format('ALTER TABLE distributed_locks ALTER COLUMN lock_name TYPE %s COLLATE %s',
                               format_type(a.atttypid, a.atttypmod), a.attcollation::regcollation)
        FROM pg_attribute a WHERE a.attrelid = 'pgxlock_adopted'::regclass::oid AND a.attname = 'lock_name'
      UNION ALL
      SELECT 'ALTER TABLE distributed_locks SET (' || pg_catalog.array_to_string(c.reloptions, ', ') || ')'
        FROM pg_class c WHERE c.oid = 'pgxlock_adopted'::regclass::oid AND c.reloptions IS NOT NULL
    LOOP
      BEGIN
        EXECUTE r.statement;
      EXCEPTION WHEN feature_not_supported THEN
        NULL;                               -- a view uses lock_name: its collation was never changed
      END;
    END LOOP;
    DROP FUNCTION IF EXISTS pgxlock_adopted_acquire_lock(varchar, varchar, integer, jsonb),
      pgxlock_adopted_release_lock(varchar, varchar);
    DROP TABLE pgxlock_adopted;
  END IF;
  DROP FUNCTION pgxlock_check_code(text[]), pgxlock_rename(text, text, text);
  DROP TABLE pgxlock_epoch, pgxlock_since_crash;
  DROP SEQUENCE pgxlock_tokens;
  -- Not the version table: the tool that runs this file writes into it. Where
  -- nothing but psql runs, an empty table says that nothing is installed.
  DELETE FROM pgxlock_migrations;
END $migration$;
