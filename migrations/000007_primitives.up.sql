-- What is built on locks and beside them: leaders that can be asked to step down,
-- semaphores, what runs once per period, and rate limits.
--
-- Needs 000006_shares.up.sql. What is said in 000001_leases.up.sql and 000004_session_fences.up.sql
-- about how to run it, and the rules that its functions keep, holds here as well.
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
                            "pgxlock_reap_limits(integer, integer)"}'::text[]) f (signature)
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
  IF to_regclass(pg_catalog.format('%I.distributed_lock_shares', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 6', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files 000001 to 000006 first.';
  END IF;
  v_hardened := pgxlock_hardened();

  v_new := to_regclass('pgxlock_step_down') IS NULL;

  --------------------------------------------------------------- step down --
  -- Who leads is asked to step down: what the request says stands here, because a
  -- notification reaches only those who listen. Unlogged: a request that a crash of
  -- the server takes away can be made again, and a leader may go on all the same.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_step_down (
    kind     integer NOT NULL,              -- as in pgxlock_waiters
    name     text COLLATE "C" NOT NULL,
    holder   text COLLATE "C" NOT NULL,     -- the holder id of a lease, advisory:pid:kind:key
    asked_at timestamptz NOT NULL,
    asked_by text NOT NULL,
    reason   text NOT NULL,
    PRIMARY KEY (kind, name, holder)
  );

  -- Asks everybody who has the lock now; says how many that are.
  CREATE OR REPLACE FUNCTION pgxlock_ask_to_step_down(p_kind integer, p_name text, p_by text, p_reason text) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '100ms' AS $$
  DECLARE
    v_count bigint;
  BEGIN
    IF (p_kind BETWEEN 0 AND 2 AND char_length(p_name) BETWEEN 1 AND 255) IS NOT TRUE THEN
      RAISE EXCEPTION 'a lock has a kind, 0 to 2, and a name of 1 to 255 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_by IS NULL OR p_reason IS NULL OR octet_length(p_by) > 1000 OR octet_length(p_reason) > 1000 THEN
      RAISE EXCEPTION 'p_reason must not be NULL, nor have more than 1000 bytes' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot ask a leader on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    INSERT INTO pgxlock_step_down AS s (kind, name, holder, asked_at, asked_by, reason)
    SELECT p_kind, p_name, h.holder, clock_timestamp(), p_by, p_reason
      FROM (SELECT l.holder_id::text AS holder FROM distributed_locks l
             WHERE p_kind = 0 AND l.lock_name::text = p_name COLLATE "C" AND l.expires_at > clock_timestamp()
            UNION
            SELECT 'advisory:' || l.pid::text || ':' || p_kind::text || ':' || p_name
              FROM pg_locks l
             WHERE p_kind <> 0 AND l.locktype = 'advisory' AND l.granted AND l.pid IS NOT NULL
               AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
               AND l.objsubid::integer = p_kind AND (l.classid::bigint << 32 | l.objid::bigint)::text = p_name COLLATE "C") h
     ORDER BY h.holder
    ON CONFLICT ON CONSTRAINT pgxlock_step_down_pkey DO UPDATE SET asked_at = excluded.asked_at, asked_by = excluded.asked_by, reason = excluded.reason;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0::bigint THEN
      PERFORM pg_notify('pgxlock_step_down', '');
    END IF;
    -- Last, so that nobody waits for others who has rows of theirs locked.
    WITH old AS MATERIALIZED (              -- which nobody heard
      SELECT s.kind, s.name, s.holder FROM pgxlock_step_down s WHERE s.asked_at < clock_timestamp() - interval '1 hour' FOR UPDATE SKIP LOCKED
    )
    DELETE FROM pgxlock_step_down s USING old o WHERE s.kind = o.kind AND s.name = o.name AND s.holder = o.holder;
    RETURN v_count;
  END $$;

  CREATE OR REPLACE FUNCTION ask_to_step_down(p_lock_name varchar, p_reason text DEFAULT '') RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF (char_length(p_lock_name::text) BETWEEN 1 AND 255) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_lock_name must have 1 to 255 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN pgxlock_ask_to_step_down(0, p_lock_name::text, session_user::text, p_reason) > 0::bigint;
  END $$;

  -- What was asked of these holders, and how many milliseconds ago; it is said once.
  CREATE OR REPLACE FUNCTION pgxlock_step_downs(p_kinds integer[], p_names text[], p_holders text[])
  RETURNS TABLE (n bigint, asked_by text, reason text, ms bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '100ms' AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names) AND pg_catalog.cardinality(p_holders) = pg_catalog.cardinality(p_names)) IS NOT TRUE THEN
      RAISE EXCEPTION 'every lock needs a kind, a name and a holder' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT EXISTS (SELECT FROM pgxlock_step_down) THEN
      RETURN;
    END IF;
    RETURN QUERY
    WITH asked AS MATERIALIZED (
      SELECT s.kind, s.name, s.holder, w.n
        FROM unnest(p_kinds, p_names, p_holders) WITH ORDINALITY AS w (kind, name, holder, n)
        JOIN pgxlock_step_down s ON s.kind = w.kind AND s.name = w.name COLLATE "C" AND s.holder = w.holder COLLATE "C"
         FOR UPDATE OF s SKIP LOCKED
    )
    DELETE FROM pgxlock_step_down s USING asked a
     WHERE s.kind = a.kind AND s.name = a.name AND s.holder = a.holder
    RETURNING a.n, s.asked_by, s.reason, (date_part('epoch'::text, clock_timestamp() - s.asked_at) * 1000::float8)::bigint;
  END $$;

  ----------------------------------------------------------------- permits --
  -- A semaphore of n permits is n leases: jobs#1 to jobs#n for jobs. So whatever
  -- holds of leases holds of permits, and there are never more than n. What is new
  -- here is to find a free one; and that who waits for any of them waits in one
  -- queue, jobs#.
  --
  -- Nothing is decided by what this table says: it tells those who use the same
  -- semaphore with different numbers of permits of each other.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_semaphores (
    name    text COLLATE "C" NOT NULL,
    permits integer NOT NULL,
    used_at timestamptz NOT NULL,
    used_by text NOT NULL,
    PRIMARY KEY (name, permits)
  );
  CREATE INDEX IF NOT EXISTS pgxlock_semaphores_used_at ON pgxlock_semaphores (used_at);

  -- Who stands before a number in the queue of a lease: the first who lives and was
  -- not passed by.
  CREATE OR REPLACE FUNCTION pgxlock_ahead(p_name text, p_below bigint) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    RETURN (
      SELECT q.ticket
        FROM (SELECT a.ticket, a.client, a.live_until FROM pgxlock_waiters a
               WHERE a.kind = 0 AND a.name = p_name COLLATE "C" AND a.ticket < p_below AND NOT pgxlock_waiter_passed(a.woken)
               ORDER BY a.ticket OFFSET 0) q
       WHERE NOT pgxlock_waiter_gone(q.client, q.live_until) LIMIT 1);
  END $$;

  -- After a try: removes the tickets of those who got their lock, and the dead up to
  -- where each queue was looked at. Who did not get it has shown that it lives.
  CREATE OR REPLACE FUNCTION pgxlock_tried(p_names text[], p_tickets bigint[], p_acquired boolean[], p_walked bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    WITH locked AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_names, p_tickets, p_acquired) AS m (name, ticket, acquired)
        JOIN pgxlock_waiters w ON w.kind = 0 AND w.name = m.name COLLATE "C" AND w.ticket = m.ticket
       WHERE m.acquired
       ORDER BY w.kind, w.name, w.ticket
         FOR UPDATE OF w
    )
    DELETE FROM pgxlock_waiters w USING locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;

    -- From here on it waits for no row.
    PERFORM pgxlock_bury_waiters(pg_catalog.array_fill(0, ARRAY[pg_catalog.cardinality(p_names)]), p_names, p_walked);
    WITH locked AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_names, p_tickets, p_acquired) AS m (name, ticket, acquired)
        JOIN pgxlock_waiters w ON w.kind = 0 AND w.name = m.name COLLATE "C" AND w.ticket = m.ticket
       WHERE m.acquired IS NOT TRUE AND w.woken IS NOT NULL
         FOR NO KEY UPDATE OF w SKIP LOCKED
    )
    UPDATE pgxlock_waiters w SET woken = NULL FROM locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;
  END $$;

  -- Tries to take a permit of each semaphore of a batch; tickets as in
  -- pgxlock_take_batch(). permit: its number. others: how many permits others say
  -- that there are, if that is another number.
  CREATE OR REPLACE FUNCTION pgxlock_permit_batch(p_names text[], p_permits integer[], p_holders text[], p_ttls bigint[], p_metadata text[], p_tickets bigint[])
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint, ahead boolean, permit integer, others integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_count    integer := pg_catalog.cardinality(p_names);
    v_queues   text[] := '{}';
    v_acquired boolean[] := '{}';
    v_walked   bigint[] := '{}';
    v_below    bigint;
    v_first    bigint;
    v_tried    integer[];
    v_now      timestamptz;
  BEGIN
    IF (pg_catalog.cardinality(p_permits) = v_count AND pg_catalog.cardinality(p_holders) = v_count AND pg_catalog.cardinality(p_ttls) = v_count
        AND pg_catalog.cardinality(p_metadata) = v_count AND pg_catalog.cardinality(p_tickets) = v_count) IS NOT TRUE THEN
      RAISE EXCEPTION 'every name needs permits, a holder, a ttl, metadata and a ticket' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF EXISTS (SELECT FROM unnest(p_names, p_permits) AS w (name, permits)
                WHERE (w.permits BETWEEN 1 AND 10000 AND char_length(w.name) BETWEEN 1 AND 254 - char_length(w.permits::text)) IS NOT TRUE) THEN
      RAISE EXCEPTION 'a semaphore has 1 to 10000 permits, and a name that leaves room for # and the number of a permit in 255 characters'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot acquire a permit on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
       AND EXISTS (SELECT FROM pg_catalog.unnest(p_tickets) t (ticket) WHERE t.ticket IS NOT NULL) THEN
      RAISE EXCEPTION 'permits are taken in turn in READ COMMITTED: an older snapshot does not show who waits' USING ERRCODE = 'active_sql_transaction';
    END IF;

    FOR i IN 1..v_count LOOP
      PERFORM pgxlock_check('p_holder_id', p_holders[i]);
      v_queues := pg_catalog.array_append(v_queues, p_names[i] || '#');
      v_below := CASE WHEN p_tickets[i] = 0::bigint THEN 9223372036854775807 ELSE p_tickets[i] END;
      v_first := CASE WHEN v_below IS NOT NULL THEN pgxlock_ahead(v_queues[i], v_below) END;
      acquired := false; fencing_token := NULL; held_by := NULL; remaining_ms := NULL; permit := NULL;
      ahead := v_first IS NOT NULL;
      v_tried := '{}';
      WHILE NOT ahead AND NOT acquired AND pg_catalog.cardinality(v_tried) < 4 LOOP      -- who loses a race tries another one
        v_now := clock_timestamp();
        -- From anywhere on, so that those who come at the same time do not all try the same one.
        permit := (SELECT s.at % p_permits[i] + 1
                     FROM (SELECT pg_catalog.floor(pg_catalog.random() * p_permits[i]::float8)::integer AS start OFFSET 0) f,
                          LATERAL generate_series(f.start, f.start + p_permits[i] - 1) s (at)
                    WHERE s.at % p_permits[i] + 1 <> ALL (v_tried)
                      AND NOT EXISTS (SELECT FROM distributed_locks l
                                       WHERE l.lock_name::text = (v_queues[i] || (s.at % p_permits[i] + 1)::text) COLLATE "C" AND l.expires_at > v_now OFFSET 0)
                    LIMIT 1);
        EXIT WHEN permit IS NULL;
        v_tried := pg_catalog.array_append(v_tried, permit);
        -- By who can be nobody else until it is committed: another call for the same
        -- holder may have taken this one since it was looked at, and would be renewed.
        SELECT t.acquired, t.fencing_token INTO acquired, fencing_token
          FROM pgxlock_acquire_batch(ARRAY[v_queues[i] || permit::text], ARRAY['permit ' || gen_random_uuid()::text], ARRAY[p_ttls[i]], ARRAY[p_metadata[i]]) t;
        IF acquired THEN
          UPDATE distributed_locks l SET holder_id = p_holders[i] WHERE l.lock_name::text = (v_queues[i] || permit::text) COLLATE "C";
        END IF;
      END LOOP;
      v_acquired := pg_catalog.array_append(v_acquired, acquired);
      v_walked := pg_catalog.array_append(v_walked, coalesce(v_first, v_below, 0::bigint));

      IF NOT acquired THEN                  -- who has the one that ends first, if nobody renews
        permit := NULL;
        v_now := clock_timestamp();
        SELECT l.holder, CASE WHEN isfinite(l.expires) THEN (date_part('epoch'::text, l.expires - v_now) * 1000::float8)::bigint END
          INTO held_by, remaining_ms
          FROM generate_series(1, p_permits[i]) s (at),           -- one by one: a join could read all of the table
               LATERAL (SELECT l.holder_id::text AS holder, l.expires_at AS expires FROM distributed_locks l
                         WHERE l.lock_name::text = (v_queues[i] || s.at::text) COLLATE "C" OFFSET 0) l
         WHERE l.expires > v_now ORDER BY l.expires LIMIT 1;
      END IF;
      others := (SELECT max(s.permits) FROM pgxlock_semaphores s
                  WHERE s.name = p_names[i] COLLATE "C" AND s.permits <> p_permits[i] AND s.used_at > clock_timestamp() - interval '1 minute');
      IF NOT EXISTS (SELECT FROM pgxlock_semaphores s
                      WHERE s.name = p_names[i] COLLATE "C" AND s.permits = p_permits[i] AND s.used_at > clock_timestamp() - interval '20 seconds')
         AND pg_try_advisory_xact_lock(pgxlock_key('semaphore', p_names[i])) THEN        -- no writer waits for another one
        INSERT INTO pgxlock_semaphores AS s (name, permits, used_at, used_by) VALUES (p_names[i], p_permits[i], clock_timestamp(), coalesce(p_holders[i], ''))
        ON CONFLICT ON CONSTRAINT pgxlock_semaphores_pkey DO UPDATE SET used_at = excluded.used_at, used_by = excluded.used_by;
        IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
          -- What nobody has said for long, of any semaphore: names may be of one use.
          v_now := clock_timestamp() - interval '1 day';
          DELETE FROM pgxlock_semaphores s
           USING (SELECT o.name, o.permits FROM pgxlock_semaphores o WHERE o.used_at < v_now ORDER BY o.used_at LIMIT 4) o
           WHERE s.name = o.name AND s.permits = o.permits AND s.used_at < v_now AND pg_try_advisory_xact_lock(pgxlock_key('semaphore', s.name));
        END IF;
      END IF;
      RETURN NEXT;
    END LOOP;
    IF EXISTS (SELECT FROM pg_catalog.unnest(p_tickets) t (ticket) WHERE t.ticket IS NOT NULL) THEN
      PERFORM pgxlock_tried(v_queues, p_tickets, v_acquired, v_walked);
    END IF;
  END $$;

  CREATE OR REPLACE FUNCTION acquire_permit(
    p_lock_name varchar, p_holder_id varchar, p_permits integer, p_ttl_seconds integer DEFAULT 30, p_metadata jsonb DEFAULT '{}') RETURNS varchar
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_permit integer;
  BEGIN
    IF p_permits IS NULL OR p_permits NOT BETWEEN 1 AND 10000 THEN
      RAISE EXCEPTION 'p_permits must be between 1 and 10000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (char_length(p_lock_name::text) BETWEEN 1 AND 254 - char_length(p_permits::text)) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_lock_name must have 1 to % characters, which leaves room for # and the number of a permit', 254 - char_length(p_permits::text)
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (char_length(p_holder_id::text) BETWEEN 1 AND 255 AND left(p_holder_id::text, 1) <> '*') IS NOT TRUE THEN
      RAISE EXCEPTION 'p_holder_id must have 1 to 255 characters, and not begin with *' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_ttl_seconds IS NULL OR p_ttl_seconds < 1 THEN
      RAISE EXCEPTION 'p_ttl_seconds must be at least 1' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_metadata IS NULL OR octet_length(p_metadata::text) > 65536 THEN
      RAISE EXCEPTION 'p_metadata must not be NULL, nor have more than 64 KiB' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_permit := (SELECT t.permit FROM pgxlock_permit_batch(ARRAY[p_lock_name::text], ARRAY[p_permits], ARRAY[p_holder_id::text],
                   ARRAY[p_ttl_seconds::bigint * 1000::bigint], ARRAY[p_metadata::text], '{NULL}'::bigint[]) t);
    RETURN p_lock_name::text || '#' || v_permit::text;
  END $$;

  ------------------------------------------------------------------- table --
  -- A run: one start of what a key names in one slot, which is a period by the
  -- server's clock, named by its beginning, or a tick that the caller gave.
  CREATE TABLE IF NOT EXISTS pgxlock_runs (
    run_key     varchar(255) COLLATE "C" NOT NULL,
    slot        timestamptz NOT NULL,
    state       text NOT NULL,              -- running, succeeded, failed; withdrawn: the start was taken back
    attempt     integer NOT NULL,
    holder      text NOT NULL,              -- unique to the attempt
    lease       text,                       -- the lease that the run holds; NULL: it holds none, and is never taken for dead
    started_at  timestamptz NOT NULL,
    finished_at timestamptz,
    error       text,
    keep_until  timestamptz NOT NULL,
    PRIMARY KEY (run_key, slot)
  );
  ALTER TABLE pgxlock_runs SET (vacuum_truncate = off);            -- it would lock out starts
  CREATE INDEX IF NOT EXISTS pgxlock_runs_keep_until ON pgxlock_runs (keep_until);

  ------------------------------------------------------------------- slots --
  -- The slot that an instant is in, or one of those before and after it. They are
  -- counted from Monday, 1 January of the year 1, as Truncate of Go's time.Time does.
  -- Periods of whole days begin at midnight, plus the offset, by the clocks of the
  -- time zone, and so last an hour less or more where these change. An offset that the
  -- clocks skip is read as before the change, one that they show twice is meant the
  -- second time: both as PostgreSQL reads them.
  CREATE OR REPLACE FUNCTION pgxlock_slot(p_at timestamptz, p_period interval, p_offset interval, p_time_zone text, p_ahead integer) RETURNS timestamptz
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  DECLARE
    c_day    CONSTANT bigint := 86400000000;                       -- microseconds, as all here
    c_epoch  CONSTANT bigint := 62135596800000000;                 -- from year 1 to 1970
    v_period bigint;
    v_offset bigint;
    v_slot   bigint;
    v_local  timestamp;
    v_begins timestamptz;
  BEGIN
    IF p_period IS NULL OR extract(month FROM p_period) <> 0::numeric OR extract(year FROM p_period) <> 0::numeric
       OR p_period < interval '1 millisecond' OR p_period > interval '36500 days' THEN
      RAISE EXCEPTION 'p_period must be between 1 ms and 36500 days, without months, it is %', coalesce(p_period::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Months have no one length: compute their beginning yourself, and call start_run_at().';
    END IF;
    IF p_offset IS NULL OR extract(month FROM p_offset) <> 0::numeric OR extract(year FROM p_offset) <> 0::numeric
       OR p_offset < interval '0' OR p_offset >= p_period THEN
      RAISE EXCEPTION 'p_offset must be at least 0 and less than p_period, it is %', coalesce(p_offset::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_time_zone IS NULL THEN
      RAISE EXCEPTION 'p_time_zone must not be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_period := (extract(epoch FROM p_period) * 1000000::numeric)::bigint;
    v_offset := (extract(epoch FROM p_offset) * 1000000::numeric)::bigint;

    IF v_period % c_day <> 0::bigint THEN
      IF p_time_zone <> 'UTC' COLLATE "C" THEN
        RAISE EXCEPTION 'p_time_zone is %, but p_period, %, is not a number of whole days', quote_literal(p_time_zone), p_period
          USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave p_time_zone out: such periods are as long in every time zone.';
      END IF;
      v_slot := ((extract(epoch FROM p_at) * 1000000::numeric)::bigint + c_epoch - v_offset) / v_period + p_ahead::bigint;
      RETURN timestamptz '1970-01-01 00:00:00+00' + (v_slot * v_period + v_offset - c_epoch)::float8 * interval '1 microsecond';
    END IF;

    v_local := timezone(p_time_zone, p_at);
    v_slot := ((extract(epoch FROM v_local) * 1000000::numeric)::bigint + c_epoch - v_offset) / v_period;
    -- Where the clocks change the day may begin an hour later than they seem to say.
    v_begins := timezone(p_time_zone, timestamp '1970-01-01 00:00:00' + (v_slot * v_period + v_offset - c_epoch)::float8 * interval '1 microsecond');
    IF v_begins > p_at THEN
      v_slot := v_slot - 1::bigint;
    END IF;
    v_slot := v_slot + p_ahead::bigint;
    RETURN timezone(p_time_zone, timestamp '1970-01-01 00:00:00' + (v_slot * v_period + v_offset - c_epoch)::float8 * interval '1 microsecond');
  END $$;

  -- The current slot, with how long it lasts yet, and before it, oldest first, those of
  -- the p_missed slots before that were missed since the first that is recorded. due:
  -- it may be started.
  CREATE OR REPLACE FUNCTION pgxlock_due_runs(p_key text, p_period interval, p_offset interval, p_time_zone text, p_missed integer, p_retry boolean)
  RETURNS TABLE (slot timestamptz, due boolean, lasts bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_now timestamptz := clock_timestamp();
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    IF (p_missed BETWEEN 0 AND 1000 AND p_retry IS NOT NULL) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_missed must be between 0 and 1000, and p_retry not NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'runs are not started on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    FOR i IN -p_missed..0 LOOP
      slot := pgxlock_slot(v_now, p_period, p_offset, p_time_zone, i);
      due := NOT EXISTS (SELECT FROM pgxlock_runs r WHERE r.run_key::text = p_key COLLATE "C" AND r.slot = pgxlock_due_runs.slot
                           AND NOT (r.state = 'withdrawn' OR p_retry AND (r.state = 'failed' OR r.state = 'running' AND r.lease IS NOT NULL)));
      IF i = 0 THEN
        lasts := (extract(epoch FROM pgxlock_slot(v_now, p_period, p_offset, p_time_zone, 1) - v_now) * 1000000::numeric)::bigint;
        RETURN NEXT;
      ELSIF due AND EXISTS (SELECT FROM pgxlock_runs r WHERE r.run_key::text = p_key COLLATE "C" AND r.slot <= pgxlock_due_runs.slot) THEN
        RETURN NEXT;
      END IF;
    END LOOP;
  END $$;

  ---------------------------------------------------------- start, finish --
  -- Starts a run, if that may be: then attempt is not NULL, and when this has committed
  -- nobody else starts it. With a lease, which p_holder must hold, what failed may be
  -- started again, and what was started under the same lease: who held it then is dead.
  -- Asked again by the same holder, the answer is the same.
  CREATE OR REPLACE FUNCTION pgxlock_start_run(
    p_key text, p_slot timestamptz, p_period interval, p_offset interval, p_time_zone text, p_keep interval, p_holder text, p_lease text,
    OUT slot timestamptz, OUT attempt integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_keep interval;
    v_now  timestamptz;
    v_mine boolean;
    r      record;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    PERFORM pgxlock_check('p_holder', p_holder);
    IF p_keep IS NULL OR p_keep <= interval '0' OR p_keep > interval '100 years' THEN
      RAISE EXCEPTION 'p_keep must be more than 0 and at most 100 years, it is %', coalesce(p_keep::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_keep := pg_catalog.make_interval(secs => pg_catalog.date_part('epoch'::text, p_keep));      -- as a ttl
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot start a run on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    v_now := clock_timestamp();
    slot := CASE WHEN p_period IS NULL THEN p_slot ELSE pgxlock_slot(v_now, p_period, p_offset, p_time_zone, 0) END;
    IF slot IS NULL OR NOT isfinite(slot) THEN
      RAISE EXCEPTION 'p_slot must be a finite time, it is %', coalesce(slot::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- A plain read: most calls come when it is started already, and write nothing.
    SELECT o.state, o.holder, o.lease, o.attempt INTO r FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = pgxlock_start_run.slot;
    v_mine := FOUND AND r.state = 'running' AND r.holder = p_holder COLLATE "C";
    IF r.state IS NOT NULL AND NOT (v_mine OR r.state = 'withdrawn' OR p_lease IS NOT NULL AND (r.state = 'failed' OR r.state = 'running' AND r.lease = p_lease COLLATE "C")) THEN
      RETURN;
    END IF;
    PERFORM pgxlock_durable();
    IF p_lease IS NOT NULL THEN
      PERFORM assert_lock_held(p_lease::varchar, p_holder::varchar, NULL::bigint, false);
    END IF;
    IF v_mine THEN                          -- an answer was lost; perhaps the commit was not replicated, so that there must be one more
      UPDATE pgxlock_runs o SET started_at = clock_timestamp()
       WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = pgxlock_start_run.slot AND o.state = 'running' AND o.holder = p_holder COLLATE "C"
      RETURNING o.attempt INTO attempt;     -- NULL: it was forgotten since
      RETURN;
    END IF;
    INSERT INTO pgxlock_runs AS o (run_key, slot, state, attempt, holder, lease, started_at, keep_until)
    VALUES (p_key, slot, 'running', 1, p_holder, p_lease, clock_timestamp(), GREATEST(slot, v_now) + v_keep)
    ON CONFLICT ON CONSTRAINT pgxlock_runs_pkey
    DO UPDATE SET state = 'running', attempt = o.attempt + CASE o.state WHEN 'withdrawn' THEN 0 ELSE 1 END, holder = excluded.holder, lease = excluded.lease,
                  started_at = excluded.started_at, finished_at = NULL, error = NULL, keep_until = excluded.keep_until
     WHERE o.state = 'withdrawn' OR p_lease IS NOT NULL AND (o.state = 'failed' OR o.state = 'running' AND o.lease = p_lease COLLATE "C")
    RETURNING o.attempt INTO attempt;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    -- Read after the row is locked: the row of a slot that is young enough now cannot
    -- have been removed before.
    v_now := clock_timestamp();
    IF slot < v_now - v_keep THEN
      RAISE EXCEPTION 'the slot % is older than what is kept, %: whether it was run is not known any more', slot, p_keep
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the tick of a run that is due now, or keep runs for longer.';
    ELSIF slot > v_now + v_keep THEN
      RAISE EXCEPTION 'the slot % is further ahead than runs are kept, %', slot, p_keep
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the tick of a run that is due now; is it in the right unit?';
    END IF;
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
      DELETE FROM pgxlock_runs o WHERE o.ctid = ANY (ARRAY(
        SELECT d.ctid FROM pgxlock_runs d WHERE d.keep_until < v_now LIMIT 16 FOR UPDATE SKIP LOCKED));
    END IF;
  END $$;

  -- Ends an attempt, and says whether it was still that one. Said again, the answer is
  -- the same.
  CREATE OR REPLACE FUNCTION pgxlock_finish_run(p_key text, p_slot timestamptz, p_holder text, p_state text, p_error text) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    IF p_slot IS NULL OR (p_state IN ('succeeded', 'failed', 'withdrawn')) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_slot must not be NULL, and p_state succeeded, failed or withdrawn, it is %', coalesce(p_state, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgxlock_durable();
    UPDATE pgxlock_runs o SET state = p_state, finished_at = clock_timestamp(), error = left(p_error, 2000)
     WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot AND o.holder = p_holder COLLATE "C" AND o.state = 'running';
    RETURN FOUND OR EXISTS (SELECT FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot
                               AND o.holder = p_holder COLLATE "C" AND o.state = p_state COLLATE "C");
  END $$;

  CREATE OR REPLACE FUNCTION start_run(p_key text, p_period interval, p_offset interval DEFAULT '0', p_time_zone text DEFAULT 'UTC') RETURNS timestamptz
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    r record;
  BEGIN
    IF p_period IS NULL THEN
      RAISE EXCEPTION 'p_period must not be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT s.slot, s.attempt INTO r
      FROM pgxlock_start_run(p_key, NULL::timestamptz, p_period, p_offset, p_time_zone, LEAST(GREATEST(interval '7 days', 3::float8 * p_period), interval '100 years'),
                             pg_catalog.format('%s:%s:%s', left(session_user::text, 63), pg_backend_pid(), gen_random_uuid()), NULL::text) s;
    RETURN CASE WHEN r.attempt IS NOT NULL THEN r.slot END;
  END $$;

  CREATE OR REPLACE FUNCTION start_run_at(p_key text, p_tick timestamptz) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT s.attempt IS NOT NULL
              FROM pgxlock_start_run(p_key, p_tick, NULL::interval, NULL::interval, NULL::text, interval '7 days',
                                     pg_catalog.format('%s:%s:%s', left(session_user::text, 63), pg_backend_pid(), gen_random_uuid()), NULL::text) s);
  END $$;

  CREATE OR REPLACE FUNCTION finish_run(p_key text, p_slot timestamptz, p_error text DEFAULT NULL) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    UPDATE pgxlock_runs o SET state = CASE WHEN p_error IS NULL THEN 'succeeded' ELSE 'failed' END, finished_at = clock_timestamp(), error = left(p_error, 2000)
     WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot AND o.state = 'running' AND o.lease IS NULL;
    RETURN FOUND;
  END $$;

  CREATE OR REPLACE FUNCTION forget_run(p_key text, p_slot timestamptz) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    DELETE FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C" AND o.slot = p_slot;
    RETURN FOUND;
  END $$;

  ------------------------------------------------------------------- table --
  -- Of each key that was used lately, when its bucket will be full again if nobody
  -- takes anything more: the "theoretical arrival time" of GCRA. What takes n events
  -- moves it by n times the time that one takes, from now if it has passed; and may
  -- do so if it is then no further ahead than a full bucket. A row whose time has
  -- passed says the same as none.
  --
  -- Nanoseconds since 1970, because at a million events a second one takes as long
  -- as the finest that a timestamp tells; whole ones, because sums of them are exact:
  -- what n calls take one by one and what one call takes for n is the same. What is
  -- rounded is the time of one event, by half a nanosecond in at least a thousand.
  -- bigint has room until 2262.
  --
  -- Unlogged: a crash empties all buckets' debts, so that each gives one burst too
  -- many at most, and no decision waits for a disk. Nothing but tat changes, and it
  -- is in no index, so that an update stays on its page.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_limits (
    limit_key text COLLATE "C" PRIMARY KEY,
    tat       bigint NOT NULL
  );
  ALTER TABLE pgxlock_limits SET (fillfactor = 50, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);

  CREATE OR REPLACE FUNCTION pgxlock_limit_clock() RETURNS bigint
  LANGUAGE sql VOLATILE
  RETURN (extract(epoch FROM clock_timestamp()) * 1000000000::numeric)::bigint;

  ------------------------------------------------------------------ decide --
  -- One answer per entry, in order. Entries of one key are decided in the order in
  -- which they stand, as if they came one after the other; keys in the order of
  -- their names, because a key's row stays locked until the transaction ends.
  -- p_unused makes an entry a return of what was taken, with the tat that it was
  -- answered. Only what was taken last can be returned, as if it had never been: who
  -- is behind keeps the promised time, by a burst that tat does not tell.
  --
  -- granted  taken, to be used when the delay is over; or given back
  -- delay    in nanoseconds; of what is refused, after how long it would not be
  -- tat      of the key, after this entry
  CREATE OR REPLACE FUNCTION pgxlock_limit_batch(p_step bigint, p_burst integer, p_keys text[], p_counts integer[], p_max_waits bigint[], p_unused bigint[])
  RETURNS TABLE (granted boolean, delay bigint, tat bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_seqscan = off SET enable_indexscan = on SET enable_bitmapscan = off SET jit = off AS $$
  DECLARE
    v_count   integer := pg_catalog.cardinality(p_keys);
    v_most    bigint := 3110400000000000000;          -- 100 years of 360 days
    v_order   integer[];
    v_from    integer := 1;                           -- the entries of one key in that order
    v_to      integer;
    v_e       integer;
    v_key     text;
    v_locked  boolean;
    v_takes   boolean;
    v_now     bigint;
    v_tat     bigint;
    v_cost    bigint;
    v_delay   bigint;
    v_granted boolean[];
    v_delays  bigint[];
    v_tats    bigint[];
  BEGIN
    IF (pg_catalog.cardinality(p_counts) = v_count AND pg_catalog.cardinality(p_max_waits) = v_count AND pg_catalog.cardinality(p_unused) = v_count
        AND p_step BETWEEN 1000::bigint AND v_most AND p_burst::bigint BETWEEN 1::bigint AND v_most / greatest(p_step, 1000::bigint)) IS NOT TRUE THEN
      RAISE EXCEPTION 'a limit needs a step of 1000 nanoseconds or more, and a burst of 1 or more that fills in 100 years; and every key a count, a wait and what is unused'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR i IN 1..v_count LOOP
      IF (char_length(p_keys[i]) BETWEEN 1 AND 255 AND p_counts[i] BETWEEN 1 AND p_burst AND p_max_waits[i] BETWEEN 0::bigint AND v_most) IS NOT TRUE THEN
        RAISE EXCEPTION 'every entry needs a key of 1 to 255 characters, a count of 1 to the burst, and a wait of 0 to 100 years' USING ERRCODE = 'invalid_parameter_value';
      END IF;
    END LOOP;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'nothing is counted on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'limits are counted in READ COMMITTED: an older snapshot does not show what others took' USING ERRCODE = 'active_sql_transaction',
        HINT = 'Ask in a transaction of its own.';
    END IF;

    v_order := '{1}';
    IF v_count > 1 THEN
      v_order := (SELECT pg_catalog.array_agg(e.n::integer ORDER BY e.key COLLATE "C", e.n) FROM pg_catalog.unnest(p_keys) WITH ORDINALITY AS e (key, n));
    END IF;
    WHILE v_from <= v_count LOOP
      v_key := p_keys[v_order[v_from]];
      v_to := v_from;
      WHILE v_to < v_count AND p_keys[v_order[v_to + 1]] = v_key COLLATE "C" LOOP
        v_to := v_to + 1;
      END LOOP;

      -- Twice: by a look, which locks and writes nothing, and is the answer if it
      -- is no; then with the row locked. The clock is read after the row each time,
      -- so that what was waited for counts, and nothing is decided by an old time.
      v_locked := false;
      LOOP
        IF v_locked THEN
          SELECT q.tat INTO v_tat FROM pgxlock_limits q WHERE q.limit_key = v_key COLLATE "C" FOR NO KEY UPDATE;
          IF NOT FOUND THEN
            INSERT INTO pgxlock_limits (limit_key, tat) VALUES (v_key, 0::bigint) ON CONFLICT DO NOTHING;
            CONTINUE;                                 -- it is ours, or another one has made it
          END IF;
        ELSE
          SELECT q.tat INTO v_tat FROM pgxlock_limits q WHERE q.limit_key = v_key COLLATE "C";
        END IF;
        v_now := pgxlock_limit_clock();
        v_tat := greatest(v_tat, v_now);
        v_takes := false;
        FOR i IN v_from..v_to LOOP
          v_e := v_order[i];
          v_cost := p_counts[v_e]::bigint * p_step;
          IF p_unused[v_e] IS NULL THEN
            v_delay := v_tat - v_now - (p_burst::bigint * p_step - v_cost);
            v_granted[v_e] := v_delay <= p_max_waits[v_e];
            v_delays[v_e] := greatest(v_delay, 0::bigint);
          ELSE                                        -- if nobody is behind it, who keeps the promised time
            v_cost := -v_cost;
            v_granted[v_e] := p_unused[v_e] = v_tat AND v_tat > v_now;     -- else the bucket has filled by itself
            v_delays[v_e] := 0;
          END IF;
          IF v_granted[v_e] THEN
            v_takes := true;
            v_tat := greatest(v_tat + v_cost, v_now);
          END IF;
          v_tats[v_e] := v_tat;
        END LOOP;
        EXIT WHEN NOT v_takes;
        IF v_locked THEN
          UPDATE pgxlock_limits q SET tat = v_tat WHERE q.limit_key = v_key COLLATE "C";
          EXIT;
        END IF;
        v_locked := true;
      END LOOP;
      v_from := v_to + 1;
    END LOOP;
    RETURN QUERY SELECT d.granted, d.delay, d.tat FROM unnest(v_granted, v_delays, v_tats) AS d (granted, delay, tat);
  END $$;

  -- For callers in SQL. What it locks for nothing, because others took the rest
  -- meanwhile, is let go with the subtransaction.
  CREATE OR REPLACE FUNCTION reserve_rate(p_key varchar, p_rate double precision, p_burst integer, p_n integer DEFAULT 1, p_max_wait interval DEFAULT NULL,
    OUT granted boolean, OUT delay interval)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_step  bigint;
    v_delay bigint;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key::text);
    IF (p_rate BETWEEN 1e-9::float8 AND 1000000::float8) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_rate must be events per second, between 1e-9 and 1000000, it is %', coalesce(p_rate::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_step := (1000000000::float8 / p_rate)::bigint;
    IF (p_burst::bigint BETWEEN 1::bigint AND 3110400000000000000 / v_step) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_burst must be at least 1, and at most what p_rate gives in 100 years, it is %', coalesce(p_burst::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (p_n BETWEEN 1 AND p_burst) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_n must be between 1 and p_burst, %, it is %: more never come at once', p_burst, coalesce(p_n::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_max_wait NOT BETWEEN interval '0' AND interval '100 years' THEN
      RAISE EXCEPTION 'p_max_wait must be between 0 and 100 years, it is %', p_max_wait USING ERRCODE = 'invalid_parameter_value';
    END IF;
    BEGIN
      SELECT d.granted, d.delay INTO granted, v_delay
        FROM pgxlock_limit_batch(v_step, p_burst, ARRAY[p_key::text], ARRAY[p_n],
               ARRAY[least(coalesce((extract(epoch FROM p_max_wait) * 1000000000::numeric)::bigint, 3110400000000000000), 3110400000000000000)], '{NULL}'::bigint[]) d;
      IF NOT granted THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      NULL;
    END;
    delay := ((v_delay + 999::bigint) / 1000::bigint)::float8 * interval '1 microsecond';
  END $$;

  CREATE OR REPLACE FUNCTION allow_rate(p_key varchar, p_rate double precision, p_burst integer, p_n integer DEFAULT 1) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT d.granted FROM reserve_rate(p_key, p_rate, p_burst, p_n, interval '0') d);
  END $$;

  ------------------------------------------------------------ housekeeping --
  -- Removes what says no more than no row, in the pages from p_page on. By pages, so
  -- that going through all of a large table costs one reading of it, in small steps.
  -- Locked in the order of the keys, as where they are decided: SKIP LOCKED can wait
  -- all the same, when whoever changed a row commits between the look at it and the
  -- try for its lock, and another one has locked the new version by then.
  CREATE OR REPLACE FUNCTION pgxlock_reap_limits(p_page integer DEFAULT 0, p_pages integer DEFAULT 128, OUT removed bigint, OUT next_page integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_tidscan = on SET enable_seqscan = off AS $$
  DECLARE
    v_now bigint := pgxlock_limit_clock();
  BEGIN
    IF (p_page >= 0 AND p_pages BETWEEN 1 AND 10000) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_page must be 0 or more, and p_pages between 1 and 10000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH idle AS MATERIALIZED (
      SELECT q.limit_key FROM pgxlock_limits q
       WHERE q.ctid >= ('(' || p_page::text || ',0)')::tid AND q.ctid < ('(' || (p_page::bigint + p_pages::bigint)::text || ',0)')::tid AND q.tat <= v_now
       ORDER BY q.limit_key
         FOR UPDATE OF q SKIP LOCKED
    )
    DELETE FROM pgxlock_limits q USING idle i WHERE q.limit_key = i.limit_key;
    GET DIAGNOSTICS removed = ROW_COUNT;
    next_page := (SELECT (p_page::bigint + p_pages::bigint)::integer
                   WHERE (p_page::bigint + p_pages::bigint) * current_setting('block_size')::bigint < pg_relation_size('pgxlock_limits'::regclass));
  END $$;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION ask_to_step_down(varchar, text)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_ask_to_step_down(integer, text, text, text)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_step_downs(integer[], text[], text[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION acquire_permit(varchar, varchar, integer, integer, jsonb)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_ahead(text, bigint)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_tried(text[], bigint[], boolean[], bigint[])', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_step_down', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_step_down', '{application,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_semaphores', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_semaphores', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_due_runs(text, interval, interval, text, integer, boolean)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_finish_run(text, timestamptz, text, text, text)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION start_run(text, interval, interval, text)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION start_run_at(text, timestamptz)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION finish_run(text, timestamptz, text)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION forget_run(text, timestamptz)', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_slot(timestamptz, interval, interval, text, integer)', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_runs', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_runs', '{application}'::text[]),
           (false, 'SELECT, DELETE', 'TABLE pgxlock_runs', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION allow_rate(varchar, double precision, integer, integer)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION reserve_rate(varchar, double precision, integer, integer, interval)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_reap_limits(integer, integer)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_limit_clock()', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_limits', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_limits', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_limits', '{administration}'::text[]),
$rights$),
      ('harden_locks()', ' IN SHARE UPDATE EXCLUSIVE', ', pgxlock_step_down, pgxlock_semaphores, pgxlock_runs, pgxlock_limits'),
      ('harden_locks()', ', ''pgxlock_tokens''', ', ''pgxlock_step_down'', ''pgxlock_semaphores'', ''pgxlock_runs'', ''pgxlock_limits''')) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  -- Who may write the leases by a right on the table may use what is made of them.
  IF v_new AND NOT v_hardened THEN
    FOR v_change IN SELECT DISTINCT CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END AS grantee
                      FROM pg_class c, aclexplode(c.relacl) x
                     WHERE c.oid = 'distributed_locks'::regclass::oid AND x.grantee <> c.relowner AND x.privilege_type = 'INSERT' LOOP
      EXECUTE 'GRANT SELECT, INSERT, UPDATE, DELETE ON pgxlock_step_down, pgxlock_semaphores, pgxlock_runs, pgxlock_limits TO ' || v_change.grantee;
    END LOOP;
  END IF;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 7::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON TABLE pgxlock_step_down IS 'pgxlock: who was asked to step down, and has not heard of it yet. Write it only through the functions.';
  COMMENT ON COLUMN pgxlock_step_down.kind IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_step_down.name IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_step_down.holder IS 'The holder id of a lease; advisory:pid:kind:key.';
  COMMENT ON COLUMN pgxlock_step_down.asked_at IS 'When it was asked last.';
  COMMENT ON COLUMN pgxlock_step_down.asked_by IS 'Who asked.';
  COMMENT ON COLUMN pgxlock_step_down.reason IS 'Why.';
  COMMENT ON TABLE pgxlock_semaphores IS 'pgxlock: how many permits those who use a semaphore say that it has. It decides nothing.';
  COMMENT ON COLUMN pgxlock_semaphores.name IS 'The semaphore: its permits are the leases name#1, name#2 and so on.';
  COMMENT ON COLUMN pgxlock_semaphores.permits IS 'How many somebody says that there are.';
  COMMENT ON COLUMN pgxlock_semaphores.used_at IS 'When that was said last, give or take 20 seconds.';
  COMMENT ON COLUMN pgxlock_semaphores.used_by IS 'Who said it: a holder id.';
  COMMENT ON FUNCTION ask_to_step_down(varchar, text) IS
    'Asks who leads by this lease to step down, which a program does that uses Locker.Lead; true if somebody holds it. The leader hears of it at once where it listens, else within seconds. In a transaction of its own: it notifies.';
  COMMENT ON FUNCTION pgxlock_ask_to_step_down(integer, text, text, text) IS 'pgxlock, internal: asks all who have a lock now to step down; returns how many. A lease is kind 0; an advisory key as in pgxlock_waiters.';
  COMMENT ON FUNCTION pgxlock_step_downs(integer[], text[], text[]) IS 'pgxlock, internal: which of these holders were asked to step down, by whom, why and how many milliseconds ago. It says so once.';
  COMMENT ON FUNCTION acquire_permit(varchar, varchar, integer, integer, jsonb) IS
    'Takes one of the permits of a semaphore, which are the leases p_lock_name#1 to p_lock_name#p_permits; returns the name of that lease, NULL if none is free. Extend it with extend_lock(), give it back with release_lock(), protect writes with assert_lock_held(). Each call takes another permit.';
  COMMENT ON FUNCTION pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[]) IS
    'pgxlock, internal: takes a permit of each semaphore, in turn: tickets as in pgxlock_take_batch(), in the queue name#. permit: the number of the one that was taken. others: the most permits that others said within a minute, if that is another number.';
  COMMENT ON FUNCTION pgxlock_ahead(text, bigint) IS 'pgxlock, internal: the first living ticket before a number in the queue of a lease that was not passed by.';
  COMMENT ON FUNCTION pgxlock_tried(text[], bigint[], boolean[], bigint[]) IS 'pgxlock, internal: removes the tickets of those who got their lock and the dead before them, and the stamps of the others.';
  COMMENT ON TABLE pgxlock_runs IS 'pgxlock: what was started for which period or tick. A row is what keeps others from starting it again; it is removed by later starts when keep_until is over. Write it only through the functions.';
  COMMENT ON COLUMN pgxlock_runs.slot IS 'The period, by its beginning; or the tick that the caller gave.';
  COMMENT ON COLUMN pgxlock_runs.state IS 'running, succeeded or failed; withdrawn: the start was taken back, and anybody may start it. A running one whose lease nobody holds has crashed.';
  COMMENT ON COLUMN pgxlock_runs.attempt IS 'How often it was started.';
  COMMENT ON COLUMN pgxlock_runs.holder IS 'Who started it last, as it calls itself, with an id of the attempt.';
  COMMENT ON COLUMN pgxlock_runs.lease IS 'The lease in distributed_locks that the run holds while it lasts; NULL: it holds none, so that nobody can tell whether it has crashed, and it is not started again.';
  COMMENT ON COLUMN pgxlock_runs.error IS 'Why it failed, as it said.';
  COMMENT ON FUNCTION start_run(text, interval, interval, text) IS
    'The beginning of the current period for exactly one caller in each period, by the server''s clock; NULL for all others, for good. In a transaction of its own, that commits before the work begins. Periods begin at midnight plus p_offset, or, of less than a day, so that they divide the time since the year 1; those of whole days by the clocks of p_time_zone, and weeks on Monday.';
  COMMENT ON FUNCTION start_run_at(text, timestamptz) IS
    'start_run() for a tick of a schedule that the caller gives: true for exactly one caller for each tick. Raises 22023 for one that is more than 7 days old or ahead.';
  COMMENT ON FUNCTION finish_run(text, timestamptz, text) IS
    'Records how a run ended that start_run() or start_run_at() started: p_error NULL: it succeeded. False if it was not running. For operators: start_run() never starts it again, whatever is recorded; a program that retries what failed may.';
  COMMENT ON FUNCTION forget_run(text, timestamptz) IS 'Removes what is known of a run, so that it can be started again; false if nothing was.';
  COMMENT ON FUNCTION pgxlock_slot(timestamptz, interval, interval, text, integer) IS 'pgxlock, internal: when the period begins that an instant is in, or one that is p_ahead periods later.';
  COMMENT ON FUNCTION pgxlock_due_runs(text, interval, interval, text, integer, boolean) IS 'pgxlock, internal: which periods may be started now: the current one, last, and those of the p_missed before that were missed since the first that is recorded. lasts: microseconds until the next one begins.';
  COMMENT ON FUNCTION pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text) IS 'pgxlock, internal: starts a run, unless attempt is NULL. In a transaction of its own.';
  COMMENT ON FUNCTION pgxlock_finish_run(text, timestamptz, text, text, text) IS 'pgxlock, internal: ends an attempt; false if it is not the current one.';
  COMMENT ON TABLE pgxlock_limits IS 'pgxlock: how far each key has used up its limit; a key without a row has used nothing. It is unlogged: a crash or a failover empties it. Deleting a row gives the key a full burst; write it else only through the functions.';
  COMMENT ON COLUMN pgxlock_limits.limit_key IS 'What is limited.';
  COMMENT ON COLUMN pgxlock_limits.tat IS 'When nothing of the burst will be used any more, in nanoseconds since 1970 by the server''s clock: SELECT to_timestamp(tat / 1e9).';
  COMMENT ON FUNCTION allow_rate(varchar, double precision, integer, integer) IS
    'Whether p_n events may happen now, and counts them if so: at p_rate per second on average, at most p_burst at once, over all callers that name the key. Each call is judged by its own rate and burst. False writes and locks nothing; true keeps the key''s row locked until the transaction ends, for which others who ask for the key wait: call it in a transaction of its own. A rollback gives the events back. READ COMMITTED only.';
  COMMENT ON FUNCTION reserve_rate(varchar, double precision, integer, integer, interval) IS
    'As allow_rate(), for events that may happen later: granted, and after which delay to act. If the delay would be longer than p_max_wait (NULL: any) nothing is counted, and delay says after how long p_n events could happen.';
  COMMENT ON FUNCTION pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[]) IS
    'pgxlock, internal: decides entries, by a limit of p_burst and one event in p_step nanoseconds; p_unused gives back what was answered that tat, if it was the last of its key.';
  COMMENT ON FUNCTION pgxlock_limit_clock() IS 'pgxlock, internal: nanoseconds since 1970.';
  COMMENT ON FUNCTION pgxlock_reap_limits(integer, integer) IS
    'Housekeeping only: removes rows of keys that have used nothing lately from p_pages pages of pgxlock_limits; says how many, and at which page to go on, NULL after the last. Counting never needs it.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 7) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (7, false);
END $migration$;
