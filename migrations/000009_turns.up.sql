-- Turns that last: who was woken for an advisory lock and asked in vain keeps its place
-- in the queue.
--
-- Needs 000008_monitor.up.sql. What is said in 000001_leases.up.sql and
-- 000004_session_fences.up.sql about how to run it, and the rules that its functions
-- keep, holds here as well.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_rest   pg_catalog.text := v_path;
  v_first  pg_catalog.text;
  v_foreign pg_catalog.text;
  v_hardened boolean;
  v_change   pg_catalog.record;

  -- Asked before anything is made, and again when all is made and nothing was
  -- read or written but definitions.
  v_check  pg_catalog.text := $check$
    SELECT string_agg(o.name || ' (owned by ' || quote_ident(pg_get_userbyid(o.owner)::text) || ')', ', ')
      FROM (SELECT c.relname::text AS name, c.relowner AS owner FROM pg_class c
             WHERE c.relnamespace = to_regnamespace(quote_ident($1))::oid
               AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares') OR left(c.relname::text, 8) = 'pgxlock_')
            UNION ALL
            SELECT p.oid::regprocedure::text, p.proowner
              FROM pg_catalog.unnest('{"acquire_lock(varchar, varchar, integer, jsonb)", "try_acquire_lock(varchar, varchar, interval, jsonb)",
                            "renew_lock(varchar, varchar, bigint, interval)", "extend_lock(varchar, varchar, integer)",
                            "release_lock(varchar, varchar)", "release_lock_fenced(varchar, varchar, bigint)", "release_all_locks(varchar)",
                            "assert_lock_held(varchar, varchar, bigint, boolean)", "advisory_lock_key(text)",
                            "reap_expired_locks(interval, integer)", "repair_lock_tokens()", "pgxlock_schema_version()",
                            "pgxlock_key(text, text)", "pgxlock_next_token()", "pgxlock_renew(text, text, bigint, interval)",
                            "pgxlock_release(text, text, bigint)", "lock_tx(text, interval, boolean, boolean)",
                            "claim_once(text, interval, interval)", "purge_claims(interval, integer)",
                            "pgxlock_renew_batch(text[], text[], bigint[], bigint[])", "pgxlock_release_batch(text[], text[], bigint[])",
                            "pgxlock_holders(text)", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()", "pgxlock_owner()",
                            "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "soften_locks()", "grant_locks(text, text)",
                            "revoke_locks(text)", "pgxlock_session_batch(integer[], bigint[], bigint)", "assert_session_lock_held(integer, bigint, bigint, bigint)",
                            "pgxlock_reap_sessions(integer, bigint)", "pgxlock_session_key(bigint)", "pgxlock_session_pin(integer, bigint, bigint)",
                            "pgxlock_session_call(integer, bigint)", "pgxlock_next_tokens(bigint)",
                            "pgxlock_acquire_batch(text[], text[], bigint[], text[])",
                            "pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint)",
                            "pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])", "pgxlock_wake_batch(integer[], text[], bigint[])",
                            "pgxlock_withdraw_batch(integer[], text[], bigint[])", "wake_lock_waiter(varchar)", "pgxlock_tell_holders(integer[], bigint[])",
                            "pgxlock_reap_waiters(integer)", "pgxlock_bury_waiters(integer[], text[], bigint[])", "pgxlock_waiter_key(bigint)",
                            "pgxlock_waiter_gone(bigint, timestamptz)", "pgxlock_waiter_passed(timestamptz)",
                            "pgxlock_system_identifier()", "pgxlock_give_back_batch(text[], text[], bigint[])", "pgxlock_in_change(xid)",
                            "try_acquire_shared_lock(varchar, varchar, interval, jsonb)", "acquire_shared_lock(varchar, varchar, integer, jsonb)",
                            "extend_shared_lock(varchar, varchar, integer)", "release_shared_lock(varchar, varchar)",
                            "assert_shared_lock_held(varchar, varchar, bigint, boolean)", "pgxlock_share_each(text[], text[], bigint[], text[])",
                            "pgxlock_share_batch(text[], text[], bigint[], text[], bigint[])", "pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[])",
                            "pgxlock_release_shares_batch(text[], text[], bigint[])", "pgxlock_share_holders(text)", "pgxlock_reap_shares(interval, integer)",
                            "pgxlock_lock_shares(text, boolean)", "pgxlock_release_share(text, text, bigint, boolean)", "pgxlock_release_shares(text)", "pgxlock_share_pin(text, text)",
                            "ask_to_step_down(varchar, text)", "pgxlock_ask_to_step_down(integer, text, text, text)", "pgxlock_step_downs(integer[], text[], text[])",
                            "acquire_permit(varchar, varchar, integer, integer, jsonb)", "pgxlock_ahead(text, bigint)",
                            "pgxlock_tried(text[], bigint[], boolean[], bigint[])",
                            "pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[])",
                            "pgxlock_slot(timestamptz, interval, interval, text, integer)", "pgxlock_due_runs(text, interval, interval, text, integer, boolean)",
                            "pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text)",
                            "pgxlock_finish_run(text, timestamptz, text, text, text)", "start_run(text, interval, interval, text)",
                            "start_run_at(text, timestamptz)", "finish_run(text, timestamptz, text)", "forget_run(text, timestamptz)",
                            "allow_rate(varchar, double precision, integer, integer)", "reserve_rate(varchar, double precision, integer, integer, interval)",
                            "pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[])",
                            "pgxlock_limit_clock()",
                            "pgxlock_reap_limits(integer, integer)",
                            "evict_lock(varchar, varchar, bigint, text)", "evict_session_lock(integer, bigint, text, integer)",
                            "pgxlock_record_eviction(integer, text, text, bigint, text)", "pgxlock_evicted(integer[], text[], text[], bigint[])",
                            "pgxlock_publish_names(text[])", "pgxlock_refused_batch(integer[], text[], bigint[])"}'::text[]) f (signature)
              JOIN pg_proc p ON p.oid = to_regprocedure(pg_catalog.format('%I.', $1) || f.signature)::oid) o
     WHERE o.owner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user) $check$;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);

  -- The schema that was named must be the one that gets the objects.
  LOOP
    v_first := substring(v_rest FROM '^[[:space:]]*("(?:[^"]|"")*"|[^",[:space:]]+)');
    v_rest  := substring(v_rest FROM '^[[:space:]]*(?:"(?:[^"]|"")*"|[^",[:space:]]+)[[:space:]]*,(.*)$');
    v_first := CASE WHEN v_first LIKE '"%' THEN replace(substr(v_first, 2, length(v_first) - 2), '""', '"')
                    ELSE lower(v_first) END;
    EXIT WHEN v_first IS DISTINCT FROM '$user';
    v_first := current_user;
    EXIT WHEN EXISTS (SELECT FROM pg_namespace WHERE nspname = current_user);
  END LOOP;
  IF v_schema IS NULL OR left(v_schema, 3) = 'pg_' OR v_first IS DISTINCT FROM v_schema THEN
    RAISE EXCEPTION 'pgxlock: cannot tell which schema to install into: search_path is %, its first usable schema is %',
        quote_literal(v_path), coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'invalid_schema_name',
            HINT = 'Name an existing schema first, for example: SET search_path = public. Schemas named pg_* are refused.';
  END IF;

  -- Two migrators wait for each other here whatever tool they came with.
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'If that role is the one that owns pgxlock, SET ROLE to it and run this again; else drop them.';
  END IF;
  IF to_regclass(pg_catalog.format('%I.pgxlock_evictions', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 8', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files 000001 to 000008 first.';
  END IF;
  v_hardened := pgxlock_hardened();

  ------------------------------------------------------------------- turns --
  -- What pgxlock_take_batch() does for leases: who was woken, asked and did not get the
  -- lock has shown that it lives, and keeps its precedence. Without it others went past a
  -- ticket for good that had been woken once in vain. Never waits.
  CREATE OR REPLACE FUNCTION pgxlock_refused_batch(p_kinds integer[], p_names text[], p_tickets bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET lock_timeout = '100ms' AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names) AND pg_catalog.cardinality(p_tickets) = pg_catalog.cardinality(p_names)) IS NOT TRUE THEN
      RAISE EXCEPTION 'every ticket needs a kind and a name' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'there is no queue on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    WITH locked AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_kinds, p_names, p_tickets) AS e (kind, name, ticket)
        JOIN pgxlock_waiters w ON w.kind = e.kind AND w.name = e.name COLLATE "C" AND w.ticket = e.ticket
       WHERE w.woken IS NOT NULL
       ORDER BY w.kind, w.name, w.ticket
         FOR NO KEY UPDATE OF w SKIP LOCKED
    )
    UPDATE pgxlock_waiters w SET woken = NULL FROM locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;
  END $$;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION pgxlock_refused_batch(integer[], text[], bigint[])', '{application}'::text[]),
$rights$)) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 9::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON FUNCTION pgxlock_refused_batch(integer[], text[], bigint[]) IS
    'pgxlock, internal: is told of tickets whose lines asked for advisory locks in vain, which keep their precedence. In a transaction of its own, after they have asked.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 9) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (9, false);
END $migration$;
