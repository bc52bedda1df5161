-- Turns that last: who was woken for an advisory lock and asked in vain keeps its place
-- in the queue. And views of who has what, and who waits for whom.
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
  v_new      boolean;

  -- Asked before anything is made, and again when all is made and nothing was
  -- read or written but definitions.
  v_check  pg_catalog.text := $check$
    SELECT string_agg(o.name || ' (owned by ' || quote_ident(pg_get_userbyid(o.owner)::text) || ')', ', ')
      FROM (SELECT c.relname::text AS name, c.relowner AS owner FROM pg_class c
             WHERE c.relnamespace = to_regnamespace(quote_ident($1))::oid
               AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares', 'lock_holders', 'lock_waiters') OR left(c.relname::text, 8) = 'pgxlock_')
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
                            "pgxlock_publish_names(text[])", "pgxlock_refused_batch(integer[], text[], bigint[])", "pgxlock_waited_for(integer[], text[])",
                            "pgxlock_take_in_turn(text[], text[], bigint[], text[], bigint[])"}'::text[]) f (signature)
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

  ------------------------------------------------------------------- views --
  -- Who has what, and who waits for whom, for psql. They read the tables as their owner,
  -- and the server's views as whoever asks: what those show of other roles' sessions is
  -- up to them. So they call nothing that is ours: that would need a right of its own.
  v_new := to_regclass('lock_holders') IS NULL;

  -- Names of keys, tokens and sessions are joined to the lock table as sets: to look one
  -- up for each lock takes too long where there are thousands.
  CREATE OR REPLACE VIEW lock_holders AS
    WITH granted AS MATERIALIZED (
      SELECT e.objsubid::integer AS key_space, e.classid::bigint << 32 | e.objid::bigint AS key_id, e.mode = 'ShareLock' AS shared, e.pid
        FROM pg_locks e
       WHERE e.locktype = 'advisory' AND e.granted AND e.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ), session AS MATERIALIZED (
      SELECT a.pid, a.application_name, a.client_addr FROM pg_stat_activity a
    ), token AS (                           -- whose session that is, says what pgxlock_session_key() returns
      SELECT s.key_space, s.key_id, o.pid, s.token
        FROM pgxlock_session_locks s
        JOIN granted o ON o.key_space = 1 AND NOT o.shared
                      AND o.key_id = ('x' || encode(substr(sha256(decode('0073657373696f6e00', 'hex') || int8send(s.session)), 1, 8), 'hex'))::bit(64)::bigint
       WHERE NOT s.shared
    )
    SELECT 'lease' AS kind, l.lock_name::text COLLATE "C" AS lock_name, CASE WHEN l.shared THEN 'shared' ELSE 'exclusive' END AS mode,
           l.holder_id::text AS holder_id, NULL::integer AS pid, NULL::text AS application_name, NULL::inet AS client_addr,
           l.held_for, l.remaining, l.fencing_token, l.acquired_at, l.expires_at, NULL::integer AS key_space, NULL::bigint AS key_id
      FROM (SELECT false AS shared, a.lock_name, a.state, a.holder_id, a.fencing_token, a.held_for, a.remaining, a.acquired_at, a.expires_at
              FROM lock_leases a WHERE a.holder_id::text <> '*shared' COLLATE "C"
            UNION ALL
            SELECT true, b.lock_name, b.state, b.holder_id, b.fencing_token, b.held_for, b.remaining, b.acquired_at, b.expires_at FROM lock_shares b) l
     WHERE l.state = 'live'
    UNION ALL
    SELECT 'advisory',
           coalesce(n.name, CASE g.key_space WHEN 2 THEN '#' || (g.key_id >> 32)::text || ',' || (g.key_id << 32 >> 32)::text ELSE '#' || g.key_id::text END COLLATE "C"),
           CASE WHEN g.shared THEN 'shared' ELSE 'exclusive' END,
           CASE WHEN g.pid IS NULL THEN 'prepared transaction'
                ELSE coalesce(nullif(regexp_replace(a.application_name, '^pgxlock '::text, ''::text), '') || ':', '') || g.pid::text END,
           g.pid, a.application_name, a.client_addr, NULL, NULL, t.token, NULL, NULL, g.key_space, g.key_id
      FROM granted g
      LEFT JOIN session a ON a.pid = g.pid
      LEFT JOIN pgxlock_names n ON g.key_space = 1 AND n.key_id = g.key_id
      LEFT JOIN token t ON t.key_space = g.key_space AND t.key_id = g.key_id AND t.pid = g.pid AND NOT g.shared;

  -- A ticket is a process with all that wait in it. It counts for as long as one that
  -- listens has the session that does; which session that is, says what
  -- pgxlock_waiter_key() returns. Who wants a permit stands in the queue of all permits.
  CREATE OR REPLACE VIEW lock_waiters AS
    WITH session AS MATERIALIZED (
      SELECT a.pid, a.application_name, a.client_addr FROM pg_stat_activity a
    ), held AS MATERIALIZED (
      SELECT coalesce(h.key_space, 0) AS key_space, CASE WHEN h.key_space IS NULL THEN h.lock_name ELSE h.key_id::text END COLLATE "C" AS name,
             h.mode, h.holder_id, h.pid
        FROM lock_holders h
    ), holder AS MATERIALIZED (
      SELECT u.key_space, u.name, pg_catalog.array_agg(DISTINCT u.holder_id) AS ids, pg_catalog.array_agg(DISTINCT u.pid) FILTER (WHERE u.pid IS NOT NULL) AS pids
        FROM (SELECT h.key_space, h.name, h.holder_id, h.pid FROM held h
              UNION ALL
              SELECT 0, regexp_replace(h.name, '#[0-9]+$'::text, '#'::text), h.holder_id, h.pid FROM held h WHERE h.key_space = 0 AND h.name ~ '#[0-9]+$') u
       GROUP BY u.key_space, u.name
    ), waiting AS (
      SELECT w.kind AS key_space, w.name,
             CASE WHEN w.kind <> 0 AND w.name ~ '^-?[0-9]{1,19}$'
                  THEN CASE WHEN w.name::numeric BETWEEN -9223372036854775808::numeric AND 9223372036854775807::numeric THEN w.name::bigint END END AS key_id,
             NULL::text AS mode, w.owner, l.pid, w.waiters, w.since, w.ticket
        FROM pgxlock_waiters w
        LEFT JOIN held l ON l.key_space = 1 AND l.mode = 'exclusive'
                        AND l.name = ('x' || encode(substr(sha256(decode('0077616974657200', 'hex') || int8send(w.client)), 1, 8), 'hex'))::bit(64)::bigint::text COLLATE "C"
       WHERE w.live_until > clock_timestamp() AND (w.client IS NULL OR l.pid IS NOT NULL)
      UNION ALL
      SELECT e.objsubid::integer, (e.classid::bigint << 32 | e.objid::bigint)::text COLLATE "C", e.classid::bigint << 32 | e.objid::bigint,
             CASE e.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END, NULL, e.pid, 1, e.waitstart, NULL
        FROM pg_locks e
       WHERE e.locktype = 'advisory' AND NOT e.granted AND e.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    )
    SELECT CASE w.key_space WHEN 0 THEN 'lease' ELSE 'advisory' END AS kind,
           CASE w.key_space WHEN 0 THEN w.name
                            WHEN 2 THEN '#' || (w.key_id >> 32)::text || ',' || (w.key_id << 32 >> 32)::text
                            ELSE coalesce(n.name, '#' || w.key_id::text) END COLLATE "C" AS lock_name,
           w.mode,
           coalesce(w.owner, coalesce(nullif(regexp_replace(a.application_name, '^pgxlock '::text, ''::text), '') || ':', '') || w.pid::text) AS owner,
           w.pid, a.application_name, a.client_addr, w.waiters,
           clock_timestamp() - w.since AS waiting_for,
           CASE WHEN w.ticket IS NULL THEN pg_blocking_pids(w.pid) ELSE coalesce(h.pids, '{}'::integer[]) END AS blocked_by,
           coalesce(h.ids, '{}'::text[]) AS held_by,
           w.since, w.ticket, nullif(w.key_space, 0) AS key_space, w.key_id
      FROM waiting w
      LEFT JOIN session a ON a.pid = w.pid
      LEFT JOIN pgxlock_names n ON w.key_space = 1 AND n.key_id = w.key_id
      LEFT JOIN holder h ON h.key_space = w.key_space AND h.name = w.name
     WHERE w.key_space = 0 OR w.key_id IS NOT NULL;       -- else it is nobody's

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

  -- Whether somebody waits for each lock who lives and was not passed by: what a try that
  -- shares an advisory lock asks first, because the server grants it beside other readers
  -- whatever writer waits. It writes nothing, and waits for nothing.
  CREATE OR REPLACE FUNCTION pgxlock_waited_for(p_kinds integer[], p_names text[]) RETURNS boolean[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names)) IS NOT TRUE THEN
      RAISE EXCEPTION 'every name needs a kind' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'there is no queue on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'who waits is looked for in READ COMMITTED: an older snapshot does not show it' USING ERRCODE = 'active_sql_transaction';
    END IF;
    RETURN (
      SELECT coalesce(pg_catalog.array_agg(EXISTS (
               SELECT FROM (SELECT a.client, a.live_until FROM pgxlock_waiters a
                             WHERE a.kind = w.kind AND a.name = w.name COLLATE "C" AND NOT pgxlock_waiter_passed(a.woken)
                             ORDER BY a.ticket OFFSET 0) q
                WHERE NOT pgxlock_waiter_gone(q.client, q.live_until)) ORDER BY w.n), '{}'::boolean[])
        FROM unnest(p_kinds, p_names) WITH ORDINALITY AS w (kind, name, n));
  END $$;

  ------------------------------------------------------------------ leases --
  -- All tokens of a batch in one statement: to look at the epoch takes longer than to draw.
  -- SECURITY DEFINER: roles that were granted the table long ago have no grant on the
  -- sequence.
  CREATE OR REPLACE FUNCTION pgxlock_next_tokens(p_count bigint) RETURNS bigint[]
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_epoch    record;
    v_timeline bigint := pgxlock_timeline();
  BEGIN
    -- By its key: where callers switch sequential scans off, one would cost so
    -- much in the planner's eyes that it compiled the query each time (4 ms).
    SELECT e.system_identifier, e.epoch_base, e.timeline,
           ARRAY(SELECT ((e.epoch_base + v_timeline) << 40) + nextval('pgxlock_tokens'::regclass) FROM generate_series(1::bigint, p_count)) AS tokens
      INTO v_epoch FROM pgxlock_epoch e WHERE e.singleton;
    IF NOT FOUND OR v_epoch.system_identifier <> pgxlock_system_identifier() OR v_timeline < v_epoch.timeline
       OR v_epoch.epoch_base + v_timeline NOT BETWEEN 1 AND 8388607 THEN          -- 2^23 - 1: bits above the sequence
      RAISE EXCEPTION 'pgxlock: this database was moved to another cluster or restored; fencing tokens drawn now could repeat earlier ones'
        USING ERRCODE = 'LK003',
              HINT = 'Run migrations.Up, or pgxlock migrate up, or SELECT repair_lock_tokens() once, as the owner of the functions.';
    END IF;
    IF v_timeline > v_epoch.timeline THEN
      -- The first token after a failover. Remembered for the day a pg_upgrade
      -- starts again at timeline 1; whoever holds that row does it instead of us.
      PERFORM FROM pgxlock_epoch FOR UPDATE SKIP LOCKED;
      IF FOUND THEN
        UPDATE pgxlock_epoch SET timeline = v_timeline;
      END IF;
    END IF;
    RETURN v_epoch.tokens;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_next_token() RETURNS bigint
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    RETURN (pgxlock_next_tokens(1::bigint))[1];
  END $$;

  -- What took leases until now goes on with those that are not just free: somebody has
  -- them, waits for them, or had them until they ran out. Whether somebody waits is asked
  -- by each name: for ANY name a plan from when nobody waited reads everybody's tickets.
  IF position('pgxlock_take_in_turn' IN pg_get_functiondef('pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])'::regprocedure::oid)) = 0 THEN
    EXECUTE replace(replace(pg_get_functiondef('pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])'::regprocedure::oid),
                            '.pgxlock_take_batch(', '.pgxlock_take_in_turn('),
                    '(SELECT FROM pgxlock_waiters w WHERE w.kind = 0 AND w.name = ANY (p_names COLLATE "C"))',
                    '(SELECT FROM pg_catalog.unnest(p_names) AS e (name) WHERE EXISTS (SELECT FROM pgxlock_waiters w WHERE w.kind = 0 AND w.name = e.name COLLATE "C" OFFSET 0))');
    ALTER FUNCTION pgxlock_take_in_turn(text[], text[], bigint[], text[], bigint[]) SECURITY INVOKER;  -- where it was hardened when the files ran again
  END IF;

  -- Nearly every lease that is asked for has no row, and nobody waits for it. All of
  -- those take two statements; each statement costs as much to start as some entries.
  CREATE OR REPLACE FUNCTION pgxlock_take_batch(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[], p_tickets bigint[])
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint, ahead boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_count  integer := pg_catalog.cardinality(p_names);
    v_new    bigint[];                      -- entries that have no row
    v_tokens bigint[];
    v_made   bigint[];                      -- tokens of those that were given one
    v_now    timestamptz;
  BEGIN
    IF (pg_catalog.cardinality(p_holders) = v_count AND pg_catalog.cardinality(p_ttls) = v_count
        AND pg_catalog.cardinality(p_metadata) = v_count AND pg_catalog.cardinality(p_tickets) = v_count) IS NOT TRUE THEN
      RAISE EXCEPTION 'every name needs a holder, a ttl, metadata and a ticket' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot acquire a lock on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'leases are taken in turn in READ COMMITTED: an older snapshot does not show who waits' USING ERRCODE = 'active_sql_transaction';
    END IF;

    -- The guard is what two inserters of one name meet on: a second INSERT would
    -- wait for the first one's transaction. Read again under it, in a snapshot that
    -- was taken after it. OFFSET 0: else the planner may make a hash of all there is.
    v_new := ARRAY(
      SELECT w.n
        FROM unnest(p_names, p_holders, p_ttls, p_metadata) WITH ORDINALITY AS w (name, holder, ttl, metadata, n)
       WHERE CASE WHEN EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = w.name COLLATE "C" OFFSET 0)
                    OR EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = w.name COLLATE "C" OFFSET 0)
                    OR (char_length(w.name) BETWEEN 1 AND 255 AND char_length(w.holder) BETWEEN 1 AND 255 AND left(w.holder, 1) <> '*'
                        AND w.ttl BETWEEN 1::bigint AND 3110400000000::bigint         -- 100 years of 360 days, as intervals compare
                        AND CASE WHEN w.metadata IS NULL THEN true ELSE octet_length(w.metadata::jsonb::text) <= 65536 END) IS NOT TRUE
                  THEN false
                  ELSE pg_try_advisory_xact_lock(pgxlock_key('guard', w.name)) END);
    IF pg_catalog.cardinality(v_new) > 0 THEN
      IF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM pgxlock_durable();
      END IF;
      v_now := clock_timestamp();
      -- Drawn when the snapshot is there that shows who had a name: somebody may have come
      -- before the guard, and its lease been taken over under a token that is drawn before.
      WITH drawn AS MATERIALIZED (
        SELECT d.n, d.token FROM unnest(v_new, pgxlock_next_tokens(pg_catalog.cardinality(v_new)::bigint)) AS d (n, token)
      ), made AS (
        INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
        SELECT p_names[d.n], p_holders[d.n], v_now, v_now + p_ttls[d.n]::float8 * interval '1 millisecond', coalesce(p_metadata[d.n]::jsonb, jsonb '{}'), d.token
          FROM drawn d
         WHERE CASE WHEN EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = p_names[d.n] COLLATE "C" OFFSET 0)
                    THEN false
                    ELSE pg_try_advisory_xact_lock(pgxlock_key('pin', p_names[d.n])) END
        ON CONFLICT DO NOTHING              -- a name that comes twice, or was written behind our back
        RETURNING distributed_locks.fencing_token
      )
      SELECT (SELECT pg_catalog.array_agg(d.token ORDER BY d.n) FROM drawn d), pg_catalog.array_agg(m.fencing_token) INTO v_tokens, v_made FROM made m;
      IF pg_catalog.cardinality(v_made) = v_count THEN
        RETURN QUERY SELECT true, w.token, w.holder, w.ttl, false FROM unnest(p_holders, p_ttls, v_tokens) AS w (holder, ttl, token);
        RETURN;
      END IF;
    END IF;

    IF v_made IS NULL THEN
      RETURN QUERY SELECT t.* FROM pgxlock_take_in_turn(p_names, p_holders, p_ttls, p_metadata, p_tickets) t;
      RETURN;
    END IF;
    RETURN QUERY
    WITH made AS MATERIALIZED (
      SELECT d.n, d.token FROM unnest(v_new, v_tokens) AS d (n, token) WHERE d.token = ANY (v_made)
    ), rest AS MATERIALIZED (
      SELECT pg_catalog.array_agg(w.n ORDER BY w.n) AS entries, pg_catalog.array_agg(p_names[w.n] ORDER BY w.n) AS names,
             pg_catalog.array_agg(p_holders[w.n] ORDER BY w.n) AS holders, pg_catalog.array_agg(p_ttls[w.n] ORDER BY w.n) AS ttls,
             pg_catalog.array_agg(p_metadata[w.n] ORDER BY w.n) AS metadata, pg_catalog.array_agg(p_tickets[w.n] ORDER BY w.n) AS tickets
        FROM generate_series(1, v_count) AS w (n) WHERE NOT EXISTS (SELECT FROM made m WHERE m.n = w.n)
    )
    SELECT a.acquired, a.token, a.held_by, a.ms, a.ahead
      FROM (SELECT m.n, true AS acquired, m.token, p_holders[m.n] AS held_by, p_ttls[m.n] AS ms, false AS ahead FROM made m
            UNION ALL
            SELECT r.entries[t.i], t.acquired, t.token, t.held_by, t.ms, t.ahead
              FROM rest r, pgxlock_take_in_turn(r.names, r.holders, r.ttls, r.metadata, r.tickets) WITH ORDINALITY AS t (acquired, token, held_by, ms, ahead, i)) a
     ORDER BY a.n;
  END $$;

  -- What 000006_shares.up.sql says of it holds; now it is three statements.
  CREATE OR REPLACE FUNCTION pgxlock_give_back_batch(p_names text[], p_holders text[], p_tokens bigint[])
  RETURNS TABLE (outcome text, wanted boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET enable_tidscan = on AS $$
  DECLARE
    v_fresh    boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_count    integer := pg_catalog.cardinality(p_names);
    v_mine     bigint[];                    -- entries whose row is there,
    v_left     bigint[];                    -- expired: whoever has the pin keeps or takes them,
    v_pinned   bigint[];                    -- those that no transaction has asserted,
    v_tokens   bigint[];                    -- and theirs: a token is of one grant
    v_released text[];
    v_expired  text[];
  BEGIN
    IF (pg_catalog.cardinality(p_holders) = v_count AND pg_catalog.cardinality(p_tokens) = v_count) IS NOT TRUE THEN
      RAISE EXCEPTION 'every name needs a holder and a token, which may be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot release a lock on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;

    SELECT pg_catalog.array_agg(m.n), pg_catalog.array_agg(m.n) FILTER (WHERE NOT m.pinned AND NOT m.live),
           pg_catalog.array_agg(m.n) FILTER (WHERE m.pinned), pg_catalog.array_agg(m.token) FILTER (WHERE m.pinned)
      INTO v_mine, v_left, v_pinned, v_tokens
      FROM (SELECT w.n, l.token, l.live, pg_try_advisory_xact_lock(pgxlock_key('pin', w.name)) AS pinned
              FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n),
                   LATERAL (SELECT l.fencing_token AS token, l.expires_at > clock_timestamp() AS live FROM distributed_locks l
                             WHERE l.lock_name::text = w.name COLLATE "C" AND l.holder_id::text = w.holder COLLATE "C"
                               AND l.fencing_token = coalesce(w.token, l.fencing_token) OFFSET 0) l
             WHERE left(w.holder, 1) <> '*' OFFSET 0) m;
    -- Also where there is nothing to do: who may not release is told so. In the order of
    -- the names: SKIP LOCKED waits, too, for who locks a row's new version at the wrong
    -- moment. A row that moved since the snapshot was taken is locked, but not found: it
    -- is skipped, to be tried again.
    WITH removed AS (
      DELETE FROM distributed_locks l
       WHERE l.ctid = ANY (ARRAY(
               SELECT k.id
                 FROM (SELECT p_names[m.n] AS name, m.token
                         FROM unnest(v_pinned, v_tokens) AS m (n, token) ORDER BY p_names[m.n] COLLATE "C" OFFSET 0) p,
                      LATERAL (SELECT l.ctid AS id FROM distributed_locks l
                                WHERE l.lock_name::text = p.name COLLATE "C" AND l.fencing_token = p.token
                                  FOR UPDATE OF l SKIP LOCKED) k))
      RETURNING l.lock_name::text AS name, l.expires_at > clock_timestamp() AS live
    )
    SELECT pg_catalog.array_agg(r.name) FILTER (WHERE r.live), pg_catalog.array_agg(r.name) FILTER (WHERE NOT r.live)
      INTO v_released, v_expired FROM removed r;
    -- Who waits is looked for in a statement that comes later: who asked before the row
    -- was touched has a ticket that this one sees, and who asks after finds it touched.
    RETURN QUERY
    SELECT CASE WHEN pg_catalog.cardinality(v_released) = v_count THEN 'released'
                WHEN w.n = ANY (v_pinned) AND w.name = ANY (v_released COLLATE "C") THEN 'released'
                WHEN w.n = ANY (v_pinned) AND w.name = ANY (v_expired COLLATE "C") THEN 'expired'
                WHEN w.n = ANY (v_left) THEN 'expired'
                WHEN w.n = ANY (v_mine) THEN 'skipped'
                ELSE 'gone' END,
           NOT v_fresh OR EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = w.name COLLATE "C" OFFSET 0)
      FROM pg_catalog.unnest(p_names) WITH ORDINALITY AS w (name, n)
     ORDER BY w.n;
  END $$;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION pgxlock_refused_batch(integer[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_waited_for(integer[], text[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_take_in_turn(text[], text[], bigint[], text[], bigint[])', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_holders', '{monitoring,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_waiters', '{monitoring,administration}'::text[]),
$rights$),
      ('pgxlock_objects()', '''lock_leases''', '''lock_holders'', ''lock_waiters'', '),
      ('harden_locks()', '''lock_leases''', '''lock_holders'', ''lock_waiters'', ')) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  -- Who may see the leases by a right on their view sees who has what, and who waits.
  IF v_new AND NOT v_hardened THEN
    FOR v_change IN SELECT DISTINCT CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END AS grantee
                      FROM pg_class c, aclexplode(c.relacl) x
                     WHERE c.oid = 'lock_leases'::regclass::oid AND x.grantee <> c.relowner AND x.privilege_type = 'SELECT' LOOP
      EXECUTE 'GRANT SELECT ON lock_holders, lock_waiters TO ' || v_change.grantee;
    END LOOP;
  END IF;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 9::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON VIEW lock_holders IS 'pgxlock: who has what now: leases and permits that are live, each of those who share one, and the advisory locks of this database, whoever has them. Of other roles'' sessions it shows what pg_stat_activity shows the role that asks. It looks at the whole lock table: ask no more often than every few seconds.';
  COMMENT ON COLUMN lock_holders.kind IS 'lease or advisory. A permit is the lease name#number.';
  COMMENT ON COLUMN lock_holders.lock_name IS 'Of an advisory lock, the name that its holder published within the last hour, else # and the key, or the two keys.';
  COMMENT ON COLUMN lock_holders.mode IS 'exclusive or shared.';
  COMMENT ON COLUMN lock_holders.holder_id IS 'Of a lease, as in lock_leases; of an advisory lock, the application and the process id, as Lock.Holder says it.';
  COMMENT ON COLUMN lock_holders.pid IS 'Of the session that has an advisory lock; NULL: a prepared transaction, or a lease, which has no session.';
  COMMENT ON COLUMN lock_holders.application_name IS 'Of that session.';
  COMMENT ON COLUMN lock_holders.client_addr IS 'Of that session; NULL: a local one, or this role may not know.';
  COMMENT ON COLUMN lock_holders.held_for IS 'NULL of an advisory lock: the server does not know.';
  COMMENT ON COLUMN lock_holders.remaining IS 'Until the lease runs out unless it is renewed; NULL: for good, or an advisory lock, which lasts as long as its session or transaction.';
  COMMENT ON COLUMN lock_holders.fencing_token IS 'NULL of an advisory lock that was taken without.';
  COMMENT ON COLUMN lock_holders.key_space IS 'Of an advisory lock, as objsubid in pg_locks: 1 of one bigint, 2 of two integers; what evict_session_lock() calls p_key_space.';
  COMMENT ON COLUMN lock_holders.key_id IS 'Of an advisory lock, the key; of two integers with the first one in the high half.';
  COMMENT ON VIEW lock_waiters IS 'pgxlock: who waits, for how long and for whom: processes with a ticket in pgxlock_waiters that live, and sessions that wait for an advisory lock of this database in the server. It looks at the whole lock table twice: ask no more often than every few seconds.';
  COMMENT ON COLUMN lock_waiters.kind IS 'lease or advisory.';
  COMMENT ON COLUMN lock_waiters.lock_name IS 'As in lock_holders. Who waits for a permit of jobs waits for jobs#.';
  COMMENT ON COLUMN lock_waiters.mode IS 'exclusive or shared; NULL: a ticket does not say.';
  COMMENT ON COLUMN lock_waiters.owner IS 'Who waits, as it calls itself; or the application and the process id.';
  COMMENT ON COLUMN lock_waiters.pid IS 'Of the session that waits, or of a ticket''s process, that listens; NULL: it cannot listen.';
  COMMENT ON COLUMN lock_waiters.application_name IS 'Of that session.';
  COMMENT ON COLUMN lock_waiters.client_addr IS 'Of that session; NULL: a local one, or this role may not know.';
  COMMENT ON COLUMN lock_waiters.waiters IS 'How many wait in the process.';
  COMMENT ON COLUMN lock_waiters.blocked_by IS 'The processes that keep a session from the lock, 0 for a prepared transaction; for a ticket, the sessions that have the advisory lock.';
  COMMENT ON COLUMN lock_waiters.held_by IS 'Who has the lock, as holder_id in lock_holders.';
  COMMENT ON COLUMN lock_waiters.since IS 'When the ticket was published, or the session began to wait.';
  COMMENT ON COLUMN lock_waiters.ticket IS 'The place in the queue: the lowest is first. NULL: it waits in the server.';
  COMMENT ON COLUMN lock_waiters.key_space IS 'As in lock_holders.';
  COMMENT ON COLUMN lock_waiters.key_id IS 'As in lock_holders.';
  COMMENT ON FUNCTION pgxlock_refused_batch(integer[], text[], bigint[]) IS
    'pgxlock, internal: is told of tickets whose lines asked for advisory locks in vain, which keep their precedence. In a transaction of its own, after they have asked.';
  COMMENT ON FUNCTION pgxlock_waited_for(integer[], text[]) IS
    'pgxlock, internal: whether a live waiter has a ticket for each lock. A try that shares an advisory lock asks first.';
  COMMENT ON FUNCTION pgxlock_take_in_turn(text[], text[], bigint[], text[], bigint[]) IS 'pgxlock, internal: of pgxlock_take_batch(), what takes leases that are not just free.';
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
