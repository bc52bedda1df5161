-- Takes away what 000008_monitor.up.sql installed. What was evicted stays so.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_change pg_catalog.record;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);
  IF to_regclass(pg_catalog.format('%I.pgxlock_evictions', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 8', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_table', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, some of the functions are called, and others are changed.
  IF EXISTS (SELECT FROM pg_catalog.unnest('{"pgxlock_check_unused()", "pgxlock_session_key(bigint)", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()",
                    "pgxlock_owner()", "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "grant_locks(text, text)"}'::text[]) f (signature)
               JOIN pg_proc p ON p.oid = to_regprocedure(f.signature)::oid
              WHERE p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) OR EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 8) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  PERFORM pgxlock_check_unused();

  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(evict|pgxlock_names|pgxlock_publish_names)[^\n]*\n'),
      ('harden_locks()', ', ''?pgxlock_(evictions|names)''?')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP FUNCTION evict_lock(varchar, varchar, bigint, text), evict_session_lock(integer, bigint, text, integer),
    pgxlock_record_eviction(integer, text, text, bigint, text), pgxlock_evicted(integer[], text[], text[], bigint[]), pgxlock_publish_names(text[]);
  DROP TABLE pgxlock_evictions, pgxlock_names;

  CREATE OR REPLACE FUNCTION pgxlock_bury_waiters(p_kinds integer[], p_names text[], p_before bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    WITH dead AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_kinds, p_names, p_before) AS b (kind, name, before)
        JOIN pgxlock_waiters w ON w.kind = b.kind AND w.name = b.name COLLATE "C" AND w.ticket < b.before
       WHERE pgxlock_waiter_gone(w.client, w.live_until)
         FOR UPDATE OF w SKIP LOCKED
    )
    DELETE FROM pgxlock_waiters w USING dead d WHERE w.kind = d.kind AND w.name = d.name AND w.ticket = d.ticket;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 7::bigint;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (7, false);
END $migration$;
