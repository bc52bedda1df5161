-- Takes away what 000007_primitives.up.sql installed. Permits that are held stay, as the
-- leases that they are.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_change pg_catalog.record;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);
  IF to_regclass(pg_catalog.format('%I.pgxlock_step_down', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 7', coalesce(quote_ident(v_schema), 'none')
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
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 7) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  PERFORM pgxlock_check_unused();

  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(pgxlock_limit|pgxlock_reap_limits|allow_rate|reserve_rate)[^\n]*\n'),
      ('harden_locks()', ', ''?pgxlock_limits''?')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP FUNCTION allow_rate(varchar, double precision, integer, integer), reserve_rate(varchar, double precision, integer, integer, interval),
    pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[]),
    pgxlock_reap_limits(integer, integer), pgxlock_limit_clock();
  DROP TABLE pgxlock_limits;

  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(_runs?|start_run_at|pgxlock_slot)[^\n]*\n'),
      ('harden_locks()', ', ''?pgxlock_runs''?')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP FUNCTION start_run(text, interval, interval, text), start_run_at(text, timestamptz), finish_run(text, timestamptz, text), forget_run(text, timestamptz),
    pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text), pgxlock_finish_run(text, timestamptz, text, text, text),
    pgxlock_due_runs(text, interval, interval, text, integer, boolean), pgxlock_slot(timestamptz, interval, interval, text, integer);
  DROP TABLE pgxlock_runs;

  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(step_down|semaphores|permit|pgxlock_ahead|pgxlock_tried)[^\n]*\n'),
      ('harden_locks()', ', ''?pgxlock_(step_down|semaphores)''?')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP FUNCTION ask_to_step_down(varchar, text), pgxlock_ask_to_step_down(integer, text, text, text), pgxlock_step_downs(integer[], text[], text[]),
    acquire_permit(varchar, varchar, integer, integer, jsonb), pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[]),
    pgxlock_tried(text[], bigint[], boolean[], bigint[]), pgxlock_ahead(text, bigint);
  DROP TABLE pgxlock_step_down, pgxlock_semaphores;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 6::bigint;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (6, false);
END $migration$;
