-- Takes away what 000001_leases.up.sql installed. Refuses while leases are
-- live, unless the session says SET pgxlock.force = on. A table and functions
-- that were there before are given back as they were, rows included.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_undo   pg_catalog.text[];
  v_statement pg_catalog.text;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  IF to_regclass(pg_catalog.format('%I.pgxlock_epoch', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock is not installed in the schema %', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_table', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, what pgxlock_epoch says is executed.
  IF EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user))
     OR EXISTS (SELECT FROM pg_proc p WHERE p.oid = to_regprocedure('pgxlock_check_unused()')::oid
                   AND p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 1) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  LOCK TABLE distributed_locks IN ACCESS EXCLUSIVE MODE;
  PERFORM pgxlock_check_unused();
  SELECT e.undo INTO v_undo FROM pgxlock_epoch e;

  DROP VIEW lock_leases;
  DROP FUNCTION try_acquire_lock(varchar, varchar, interval, jsonb), renew_lock(varchar, varchar, bigint, interval),
    extend_lock(varchar, varchar, integer), release_lock_fenced(varchar, varchar, bigint), release_all_locks(varchar),
    assert_lock_held(varchar, varchar, bigint, boolean), reap_expired_locks(interval, integer), repair_lock_tokens(),
    advisory_lock_key(text), pgxlock_schema_version(), pgxlock_renew(text, text, bigint, interval), pgxlock_release(text, text, bigint),
    pgxlock_durable(), pgxlock_check_unused(), pgxlock_ttl(interval), pgxlock_check(text, text), pgxlock_next_token(), pgxlock_key(text, text),
    pgxlock_timeline(), pgxlock_system_identifier();
  IF v_undo IS NULL THEN
    DROP FUNCTION acquire_lock(varchar, varchar, integer, jsonb), release_lock(varchar, varchar);
    DROP TABLE distributed_locks;
  ELSE
    ALTER TABLE distributed_locks DROP COLUMN fencing_token;
    DROP INDEX IF EXISTS distributed_locks_lock_name_c;
    ALTER TABLE distributed_locks RESET (fillfactor, vacuum_truncate, autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold);
    COMMENT ON TABLE distributed_locks IS NULL;
    COMMENT ON FUNCTION acquire_lock(varchar, varchar, integer, jsonb) IS NULL;
    COMMENT ON FUNCTION release_lock(varchar, varchar) IS NULL;
    FOREACH v_statement IN ARRAY v_undo LOOP
      BEGIN
        EXECUTE v_statement;
      EXCEPTION WHEN feature_not_supported THEN
        NULL;                               -- a view uses lock_name: its collation was never changed
      END;
    END LOOP;
  END IF;
  DROP TABLE pgxlock_epoch;
  DROP SEQUENCE pgxlock_tokens;
  -- Not the version table: the tool that runs this file writes into it. Where
  -- nothing but psql runs, an empty table says that nothing is installed.
  DELETE FROM pgxlock_migrations;
END $migration$;
