-- Takes away what 000001_leases.up.sql installed. A table and functions that were there
-- before are given back as they were, rows included.
--
-- Each down file refuses while leases are live, claims stand or runs are remembered, before
-- it removes anything, unless the session says SET pgxlock.force = on.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_undo   pg_catalog.text[];
  v_statement pg_catalog.text;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  IF NOT EXISTS (SELECT FROM pg_proc p WHERE p.oid = to_regprocedure(quote_ident(v_schema) || '.pgxlock_migrate(text, integer, text)')::oid
                                         AND pg_get_userbyid(p.proowner) = current_user) THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 1, or it belongs to another role', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'insufficient_privilege', HINT = 'Name the schema first in search_path, SET ROLE to the owner, and run the files in order.';
  END IF;
  PERFORM set_config('search_path', format('%I, pg_temp', v_schema), true);
  PERFORM pgxlock_migrate('down'::text, 1, v_path);

  SELECT e.undo INTO v_undo FROM pgxlock_epoch e;   -- ours alone, because it is executed

  DROP VIEW lock_leases;
  DROP FUNCTION pgxlock_migrate(text, integer, text), try_acquire_lock(varchar, varchar, interval, jsonb), renew_lock(varchar, varchar, bigint, interval),
    extend_lock(varchar, varchar, integer), pgxlock_renew(text, text, bigint, interval), release_lock_fenced(varchar, varchar, bigint),
    pgxlock_release(text, text, bigint), assert_lock_held(varchar, varchar, bigint, boolean),
    pgxlock_acquire_each(text[], text[], bigint[], text[]), pgxlock_renew_batch(text[], text[], bigint[], bigint[]), pgxlock_holders(text),
    reap_expired_locks(interval, integer), pgxlock_check_unused(), repair_lock_tokens(), pgxlock_next_tokens(bigint), pgxlock_timeline(),
    pgxlock_system_identifier(), advisory_lock_key(text), pgxlock_key(text, text), pgxlock_is_own_key(integer, bigint),
    pgxlock_own_key(boolean, bytea), pgxlock_check(text, text), pgxlock_require(boolean, text),
    pgxlock_check_primary(text), pgxlock_check_read_committed(text), pgxlock_ttl(interval), pgxlock_durable(boolean), pgxlock_version();
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
  DROP TABLE pgxlock_epoch, pgxlock_since_crash;
  DROP SEQUENCE pgxlock_tokens;
  -- Not the version table: the tool that runs this file writes into it. Where
  -- nothing but psql runs, an empty table says that nothing is installed.
  DELETE FROM pgxlock_migrations;
END $migration$;
