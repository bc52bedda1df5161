-- The queue of who waits for a lock in which process: tickets, which are served
-- in order, and the calls by which a process publishes one, takes a lease in turn,
-- and wakes the next; and deadlocks among those who wait with locks in hand.
--
-- The locks themselves stay what they are: who asks for one without a ticket, by
-- acquire_lock() or pg_advisory_lock(), passes all who wait.
--
-- Needs 000004_session_fences.up.sql. What is said in 000001_leases.up.sql and there
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
               AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
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
                            "pgxlock_waiter_gone(bigint, timestamptz)", "pgxlock_waiter_passed(timestamptz)"}'::text[]) f (signature)
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
  IF to_regclass(pg_catalog.format('%I.pgxlock_session_locks', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 4', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files 000001 to 000004 first.';
  END IF;
  v_hardened := pgxlock_hardened();

  ------------------------------------------------------------------- table --
  -- A ticket is the place of one process in the queue of one lock; who came first
  -- has the lower number. A process publishes it (commits), then tries; who gives
  -- a lock back commits that, then looks who waits: so nobody is missed.
  --
  -- Nothing in here decides who has a lock. A queue that is lost, or wrong, costs
  -- order and time.
  --
  -- Unlogged, because a crash ends all who listen, too, and they publish again. The
  -- numbers are logged: one that comes twice would be the place of two.
  v_new := to_regclass('pgxlock_waiters') IS NULL;
  CREATE SEQUENCE IF NOT EXISTS pgxlock_tickets;
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_waiters (
    kind       integer NOT NULL,            -- 0 a lease; 1, 2 an advisory key, as objsubid in pg_locks
    name       text COLLATE "C" NOT NULL,   -- of an advisory key, the number; of two integers, the first one in the high half
    ticket     bigint NOT NULL,
    client     bigint,                      -- what pgxlock_waiter_key() makes the key of; NULL: it cannot listen
    owner      text NOT NULL,
    waiters    integer NOT NULL,
    since      timestamptz NOT NULL,
    live_until timestamptz NOT NULL,
    woken      timestamptz,                 -- NULL: not since it last tried
    holds      text[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (kind, name, ticket)
  );
  ALTER TABLE pgxlock_waiters SET (fillfactor = 50, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
  -- Few wait with a lock in hand, and only among them can be a deadlock.
  CREATE INDEX IF NOT EXISTS pgxlock_waiters_holds ON pgxlock_waiters (ticket) WHERE holds <> '{}'::text[];

  -------------------------------------------------------------- life, turn --
  -- The liveness key: the session that listens for the process has it locked
  -- exclusively for as long as it lives. Immutable, so that hardening leaves it as
  -- it is and it can be expanded where it is called.
  CREATE OR REPLACE FUNCTION pgxlock_waiter_key(p_client bigint) RETURNS bigint
  LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(decode('0077616974657200', 'hex') || int8send(p_client)), 1, 8), 'hex'))::bit(64)::bigint;

  -- Tried shared: whoever had it exclusively would make a dead one look alive.
  CREATE OR REPLACE FUNCTION pgxlock_waiter_gone(p_client bigint, p_live_until timestamptz) RETURNS boolean
  LANGUAGE sql VOLATILE
  RETURN p_live_until <= clock_timestamp() OR p_client IS NOT NULL AND pg_try_advisory_xact_lock_shared(pgxlock_waiter_key(p_client));

  -- Who was woken and has not tried for the turn time has lost its precedence:
  -- others go past it.
  CREATE OR REPLACE FUNCTION pgxlock_waiter_passed(p_woken timestamptz) RETURNS boolean
  LANGUAGE sql VOLATILE
  RETURN p_woken IS NOT NULL AND p_woken < clock_timestamp() - interval '250 milliseconds';

  -- What is called on a connection that renews leases waits for no lock for long: a
  -- queue that cannot be used must cost nobody a lease.
  -- The functions below look into the queue by scans of its index, which mark what they
  -- find dead. Bitmap scans do not: each would read again all tickets that the lock
  -- has had since the last vacuum.

  -- Removes the dead that stand before a number in each of the queues. Never waits.
  -- To be called when no more row lock will be waited for, because those that
  -- it takes are in no order.
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

  ----------------------------------------------------------------- publish --
  -- One answer per entry, in order.
  CREATE OR REPLACE FUNCTION pgxlock_publish_batch(p_kinds integer[], p_names text[], p_tickets bigint[], p_waiters integer[], p_holds text[],
    p_client bigint, p_owner text, p_live_ms bigint)
  RETURNS TABLE (ticket bigint, ask boolean, deadlock text)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET lock_timeout = '100ms' AS $$
  DECLARE
    v_count   integer := pg_catalog.cardinality(p_names);
    v_live    interval;
    v_tickets bigint[];
    v_asks    boolean[];
    v_walked  bigint[];                     -- up to which number each queue was looked at
    v_advisory boolean;
    v_victims bigint[];
    v_circles text[];
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = v_count AND pg_catalog.cardinality(p_tickets) = v_count AND pg_catalog.cardinality(p_waiters) = v_count
        AND pg_catalog.cardinality(p_holds) = v_count AND p_owner IS NOT NULL AND p_live_ms BETWEEN 1::bigint AND 3110400000000::bigint) IS NOT TRUE
       OR EXISTS (SELECT FROM unnest(p_kinds, p_names) AS w (kind, name)
                   WHERE (w.kind BETWEEN 0 AND 2 AND char_length(w.name) BETWEEN 1 AND 255) IS NOT TRUE) THEN
      RAISE EXCEPTION 'every ticket needs a kind, 0 to 2, and a name of 1 to 255 characters; and all of them one owner, and a time to live in milliseconds'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'there is no queue on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'tickets are published in READ COMMITTED: an older snapshot does not show who else waits' USING ERRCODE = 'active_sql_transaction';
    END IF;
    v_live := p_live_ms::float8 * interval '1 millisecond';

    v_tickets := (SELECT pg_catalog.array_agg(coalesce(w.ticket, nextval('pgxlock_tickets'::regclass)) ORDER BY w.n)
                    FROM pg_catalog.unnest(p_tickets) WITH ORDINALITY AS w (ticket, n));
    -- What is as it should be is not touched: to lock it would be a write as well.
    WITH want AS MATERIALIZED (
      SELECT DISTINCT ON (w.kind, w.name COLLATE "C", w.ticket) w.kind, w.name COLLATE "C" AS name, w.ticket, coalesce(w.waiters, 1) AS waiters,
             CASE WHEN jsonb_typeof(w.holds) = 'array'
                  THEN ARRAY(SELECT h.hold FROM jsonb_array_elements_text(w.holds) AS h (hold) WHERE h.hold IS NOT NULL) ELSE '{}'::text[] END AS holds
        FROM (SELECT e.kind, e.name, e.ticket, e.waiters, e.holds::jsonb AS holds, e.n
                FROM unnest(p_kinds, p_names, v_tickets, p_waiters, p_holds) WITH ORDINALITY AS e (kind, name, ticket, waiters, holds, n)) w
       ORDER BY w.kind, w.name COLLATE "C", w.ticket, w.n DESC
    ), due AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket, w.waiters, w.holds
        FROM want w
       WHERE NOT EXISTS (SELECT FROM pgxlock_waiters q
                          WHERE q.kind = w.kind AND q.name = w.name AND q.ticket = w.ticket
                            AND q.client IS NOT DISTINCT FROM p_client AND q.waiters = w.waiters AND q.holds COLLATE "C" = w.holds
                            AND q.live_until >= clock_timestamp() + v_live / 2::float8 OFFSET 0)
    )
    INSERT INTO pgxlock_waiters AS q (kind, name, ticket, client, owner, waiters, since, live_until, holds)
    SELECT d.kind, d.name, d.ticket, p_client, p_owner, d.waiters, clock_timestamp(), clock_timestamp() + v_live, d.holds
      FROM due d ORDER BY d.kind, d.name, d.ticket
    ON CONFLICT ON CONSTRAINT pgxlock_waiters_pkey
    DO UPDATE SET client = excluded.client, waiters = excluded.waiters, live_until = excluded.live_until, holds = excluded.holds;

    WITH want AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket, w.n,
             w.kind <> 0 OR NOT EXISTS (SELECT FROM distributed_locks l
                                         WHERE l.lock_name::text = w.name COLLATE "C" AND l.expires_at > clock_timestamp() OFFSET 0) AS free
        FROM unnest(p_kinds, p_names, v_tickets) WITH ORDINALITY AS w (kind, name, ticket, n)
    )
    SELECT pg_catalog.array_agg(w.free AND f.ticket IS NULL ORDER BY w.n),
           pg_catalog.array_agg(CASE WHEN w.free THEN coalesce(f.ticket, w.ticket) ELSE 0::bigint END ORDER BY w.n)
      INTO v_asks, v_walked
      FROM want w
      LEFT JOIN LATERAL (
        SELECT q.ticket
          FROM (SELECT a.ticket, a.client, a.live_until FROM pgxlock_waiters a
                 WHERE w.free AND a.kind = w.kind AND a.name = w.name COLLATE "C" AND a.ticket < w.ticket AND NOT pgxlock_waiter_passed(a.woken)
                 ORDER BY a.ticket OFFSET 0) q
         WHERE NOT pgxlock_waiter_gone(q.client, q.live_until) LIMIT 1) f ON true;
    PERFORM pgxlock_bury_waiters(p_kinds, p_names, v_walked);

    -- A ticket waits for another one if who has its lock waits there. Of each
    -- circle, the ticket that came last has to leave; it finds out when it is
    -- published, or refreshed.
    IF EXISTS (SELECT FROM pg_catalog.unnest(p_holds) h (hold) WHERE h.hold IS NOT NULL) THEN
      v_advisory := EXISTS (SELECT FROM pgxlock_waiters w, pg_catalog.unnest(w.holds) h (hold)
                             WHERE w.holds <> '{}'::text[] AND left(h.hold, 9) = 'advisory:');
      WITH RECURSIVE waiting AS MATERIALIZED (
        SELECT row_number() OVER (ORDER BY w.ticket, w.kind, w.name) AS id, w.kind, w.name, w.ticket, w.holds
          FROM pgxlock_waiters w WHERE w.holds <> '{}'::text[] AND NOT pgxlock_waiter_gone(w.client, w.live_until)
      ), granted AS MATERIALIZED (
        SELECT DISTINCT l.objsubid::integer AS kind, (l.classid::bigint << 32 | l.objid::bigint)::text AS name, l.pid
          FROM pg_locks l
         WHERE v_advisory AND l.locktype = 'advisory' AND l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      ), held AS MATERIALIZED (             -- by whom the lock is held that a ticket waits for
        SELECT w.id, l.holder FROM waiting w, LATERAL (
            SELECT l.holder_id::text AS holder FROM distributed_locks l
             WHERE w.kind = 0 AND l.lock_name::text = w.name COLLATE "C" AND l.expires_at > clock_timestamp() OFFSET 0) l
        UNION ALL
        SELECT w.id, 'advisory:' || g.pid::text || ':' || g.kind::text || ':' || g.name
          FROM waiting w JOIN granted g ON g.kind = w.kind AND g.name = w.name COLLATE "C"
      ), edge AS MATERIALIZED (
        SELECT h.id, w.id AS waits_for, h.holder
          FROM held h JOIN (SELECT w.id, x.hold FROM waiting w, pg_catalog.unnest(w.holds) x (hold)) w ON w.hold = h.holder COLLATE "C"
      ), reached (root, id) AS (
        SELECT w.id, w.id
          FROM unnest(p_kinds, p_names, v_tickets) AS e (kind, name, ticket)
          JOIN waiting w ON w.kind = e.kind AND w.name = e.name COLLATE "C" AND w.ticket = e.ticket
        UNION
        SELECT r.root, e.waits_for FROM reached r JOIN edge e ON e.id = r.id WHERE e.waits_for < r.root
      ), circle AS (
        SELECT r.root, min(e.holder) AS holder FROM reached r JOIN edge e ON e.id = r.id AND e.waits_for = r.root GROUP BY r.root
      )
      SELECT pg_catalog.array_agg(e.n), pg_catalog.array_agg(c.holder) INTO v_victims, v_circles
        FROM circle c JOIN waiting w ON w.id = c.root
        JOIN unnest(p_kinds, p_names, v_tickets) WITH ORDINALITY AS e (kind, name, ticket, n)
          ON e.kind = w.kind AND e.name = w.name COLLATE "C" AND e.ticket = w.ticket;
    END IF;

    RETURN QUERY
    SELECT w.ticket, w.ask, v.hold
      FROM unnest(v_tickets, v_asks) WITH ORDINALITY AS w (ticket, ask, n)
      LEFT JOIN unnest(v_victims, v_circles) AS v (n, hold) ON v.n = w.n
     ORDER BY w.n;
  END $$;

  -------------------------------------------------------------------- take --
  -- pgxlock_acquire_batch() for those before whom nobody stands; p_tickets says
  -- who asks: NULL does not look at the queue, 0 has no place in it yet.
  --
  -- What it does where nobody waits, all acquires pay for.
  CREATE OR REPLACE FUNCTION pgxlock_take_batch(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[], p_tickets bigint[])
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint, ahead boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_count    integer := pg_catalog.cardinality(p_names);
    v_firsts   bigint[];                    -- who stands before each entry, if anybody does
    v_walked   bigint[];
    v_go       bigint[];                    -- the other entries, and what became of them
    v_acquired boolean[];
    v_tokens   bigint[];
    v_held_by  text[];
    v_ms       bigint[];
    v_now      timestamptz;
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
    IF NOT EXISTS (SELECT FROM pgxlock_waiters w WHERE w.kind = 0 AND w.name = ANY (p_names COLLATE "C")) THEN
      RETURN QUERY SELECT t.acquired, t.fencing_token, t.held_by, t.remaining_ms, false FROM pgxlock_acquire_batch(p_names, p_holders, p_ttls, p_metadata) t;
      RETURN;
    END IF;

    WITH want AS MATERIALIZED (
      SELECT w.name, CASE WHEN w.ticket = 0 THEN 9223372036854775807 ELSE w.ticket END AS below, w.n
        FROM unnest(p_names, p_tickets) WITH ORDINALITY AS w (name, ticket, n)
    )
    SELECT pg_catalog.array_agg(f.ticket ORDER BY w.n), pg_catalog.array_agg(coalesce(f.ticket, w.below) ORDER BY w.n),
           pg_catalog.array_agg(w.n ORDER BY w.n) FILTER (WHERE f.ticket IS NULL)
      INTO v_firsts, v_walked, v_go
      FROM want w
      LEFT JOIN LATERAL (
        SELECT q.ticket
          FROM (SELECT a.ticket, a.client, a.live_until FROM pgxlock_waiters a
                 WHERE a.kind = 0 AND a.name = w.name COLLATE "C" AND a.ticket < w.below AND NOT pgxlock_waiter_passed(a.woken)
                 ORDER BY a.ticket OFFSET 0) q
         WHERE NOT pgxlock_waiter_gone(q.client, q.live_until) LIMIT 1) f ON true;

    IF v_go IS NOT NULL THEN
      SELECT pg_catalog.array_agg(t.acquired ORDER BY t.n), pg_catalog.array_agg(t.fencing_token ORDER BY t.n),
             pg_catalog.array_agg(t.held_by ORDER BY t.n), pg_catalog.array_agg(t.remaining_ms ORDER BY t.n)
        INTO v_acquired, v_tokens, v_held_by, v_ms
        FROM (SELECT pg_catalog.array_agg(p_names[g.i] ORDER BY g.i) AS names, pg_catalog.array_agg(p_holders[g.i] ORDER BY g.i) AS holders,
                     pg_catalog.array_agg(p_ttls[g.i] ORDER BY g.i) AS ttls, pg_catalog.array_agg(p_metadata[g.i] ORDER BY g.i) AS metadata
                FROM pg_catalog.unnest(v_go) g (i)) g,
             pgxlock_acquire_batch(g.names, g.holders, g.ttls, g.metadata) WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, n);

      WITH mine AS MATERIALIZED (
        SELECT 0 AS kind, p_names[g.i] AS name, p_tickets[g.i] AS ticket FROM unnest(v_go, v_acquired) AS g (i, acquired) WHERE g.acquired AND p_tickets[g.i] > 0
      ), locked AS MATERIALIZED (
        SELECT w.kind, w.name, w.ticket
          FROM mine m JOIN pgxlock_waiters w ON w.kind = m.kind AND w.name = m.name COLLATE "C" AND w.ticket = m.ticket
         ORDER BY w.kind, w.name, w.ticket
           FOR UPDATE OF w
      )
      DELETE FROM pgxlock_waiters w USING locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;
    END IF;

    -- From here on it waits for no row. Who asked and did not get it has shown
    -- that it lives.
    PERFORM pgxlock_bury_waiters(pg_catalog.array_fill(0, ARRAY[v_count]), p_names, v_walked);
    WITH waits AS MATERIALIZED (
      SELECT 0 AS kind, w.name, w.ticket
        FROM unnest(p_names, p_tickets) WITH ORDINALITY AS w (name, ticket, n)
        LEFT JOIN unnest(v_go, v_acquired) AS g (i, acquired) ON g.i = w.n
       WHERE w.ticket > 0 AND g.acquired IS NOT TRUE
    ), locked AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM waits m JOIN pgxlock_waiters w ON w.kind = m.kind AND w.name = m.name COLLATE "C" AND w.ticket = m.ticket
       WHERE w.woken IS NOT NULL
         FOR NO KEY UPDATE OF w SKIP LOCKED
    )
    UPDATE pgxlock_waiters w SET woken = NULL FROM locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;

    v_now := clock_timestamp();
    RETURN QUERY
    SELECT coalesce(g.acquired, false), g.token, coalesce(g.held_by, l.holder), coalesce(g.ms, l.ms), v_firsts[w.n] IS NOT NULL
      FROM pg_catalog.unnest(p_names) WITH ORDINALITY AS w (name, n)
      LEFT JOIN unnest(v_go, v_acquired, v_tokens, v_held_by, v_ms) AS g (i, acquired, token, held_by, ms) ON g.i = w.n
      LEFT JOIN LATERAL (
        SELECT l.holder_id::text AS holder, CASE WHEN isfinite(l.expires_at) THEN (date_part('epoch'::text, l.expires_at - v_now) * 1000::float8)::bigint END AS ms
          FROM distributed_locks l
         WHERE v_firsts[w.n] IS NOT NULL AND l.lock_name::text = w.name COLLATE "C" AND l.expires_at > v_now OFFSET 0) l ON true
     ORDER BY w.n;
  END $$;

  -- It looks leases up as sql/session.sql has it: the other functions here use scans
  -- that mark what is dead in the index, and these could read all of it instead.
  ALTER FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[]) SET enable_indexscan = off;
  ALTER FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[]) SET enable_bitmapscan = on;

  -------------------------------------------------------------------- wake --
  -- Wakes who is first in each queue, and says who that is.
  --
  -- A stamp stays until the ticket's process has tried: were it renewed by every
  -- wake, a frozen process would keep its precedence while others come and go.
  -- Where all were passed by, they are woken all the same, one after the other.
  --
  -- With the ticket that was woken before it looks again, when its turn time
  -- is over: if it was passed by, who is next is woken. If it has no stamp and the
  -- lock is free, a try that was under way then took the stamp away, or the
  -- row was locked; then it is woken once more.
  CREATE OR REPLACE FUNCTION pgxlock_wake_batch(p_kinds integer[], p_names text[], p_tickets bigint[])
  RETURNS TABLE (n bigint, woken_ticket bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET lock_timeout = '100ms' AS $$
  DECLARE
    v_count   integer := pg_catalog.cardinality(p_names);
    v_entries bigint[];
    v_firsts  bigint[];
    v_clients bigint[];
    v_all     bigint := 9223372036854775807;
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = v_count AND pg_catalog.cardinality(p_tickets) = v_count) IS NOT TRUE THEN
      RAISE EXCEPTION 'every lock needs a kind, a name and a ticket, which may be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'there is no queue on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'waiters are woken in READ COMMITTED: an older snapshot does not show who waits' USING ERRCODE = 'active_sql_transaction';
    END IF;
    IF NOT EXISTS (SELECT FROM unnest(p_kinds, p_names) AS e (kind, name)
                    WHERE EXISTS (SELECT FROM pgxlock_waiters w WHERE w.kind = e.kind AND w.name = e.name COLLATE "C" OFFSET 0)) THEN
      RETURN;
    END IF;

    WITH want AS MATERIALIZED (
      SELECT w.kind, w.name COLLATE "C" AS name, w.ticket, w.n FROM unnest(p_kinds, p_names, p_tickets) WITH ORDINALITY AS w (kind, name, ticket, n)
    ), called AS MATERIALIZED (
      SELECT DISTINCT ON (w.kind, w.name) w.n, f.ticket, f.client
        FROM want w,
             LATERAL (
               SELECT q.ticket, q.client
                 FROM (SELECT a.ticket, a.client, a.live_until, a.passed
                         FROM (SELECT b.ticket, b.client, b.live_until, pgxlock_waiter_passed(b.woken) AS passed
                                 FROM pgxlock_waiters b WHERE b.kind = w.kind AND b.name = w.name OFFSET 0) a
                        ORDER BY a.passed, a.ticket OFFSET 0) q
                WHERE (NOT q.passed OR w.ticket IS NULL OR q.ticket > w.ticket) AND NOT pgxlock_waiter_gone(q.client, q.live_until)
                LIMIT 1) f
       WHERE w.ticket IS NULL
          OR EXISTS (SELECT FROM pgxlock_waiters q
                      WHERE q.kind = w.kind AND q.name = w.name AND q.ticket = w.ticket
                        AND CASE WHEN q.woken IS NOT NULL THEN pgxlock_waiter_passed(q.woken)
                                 WHEN w.kind = 0 THEN NOT EXISTS (
                                   SELECT FROM distributed_locks l WHERE l.lock_name::text = w.name AND l.expires_at > clock_timestamp() OFFSET 0)
                                 ELSE NOT EXISTS (
                                   SELECT FROM pg_locks l
                                    WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                                      AND l.objsubid::integer = w.kind AND (l.classid::bigint << 32 | l.objid::bigint)::text = w.name OFFSET 0) END OFFSET 0)
       ORDER BY w.kind, w.name, w.n
    ), locked AS MATERIALIZED (
      SELECT q.kind, q.name, q.ticket
        FROM called c JOIN want w ON w.n = c.n JOIN pgxlock_waiters q ON q.kind = w.kind AND q.name = w.name AND q.ticket = c.ticket
       WHERE q.woken IS NULL
         FOR NO KEY UPDATE OF q SKIP LOCKED
    ), stamped AS (
      UPDATE pgxlock_waiters q SET woken = clock_timestamp() FROM locked k WHERE q.kind = k.kind AND q.name = k.name AND q.ticket = k.ticket
    )
    SELECT pg_catalog.array_agg(c.n ORDER BY c.n), pg_catalog.array_agg(c.ticket ORDER BY c.n), pg_catalog.array_agg(c.client ORDER BY c.n)
      INTO v_entries, v_firsts, v_clients FROM called c;

    PERFORM pg_notify('pgxlock_' || w.client::text, p_kinds[w.n]::text || ':' || p_names[w.n])
       FROM unnest(v_entries, v_clients) AS w (n, client) WHERE w.client IS NOT NULL;
    PERFORM pgxlock_bury_waiters(p_kinds, p_names, (
        SELECT pg_catalog.array_agg(coalesce(w.ticket, v_all) ORDER BY e.n)
          FROM generate_series(1::bigint, v_count::bigint) e (n) LEFT JOIN unnest(v_entries, v_firsts) AS w (n, ticket) ON w.n = e.n));
    RETURN QUERY SELECT w.n, w.ticket FROM unnest(v_entries, v_firsts) AS w (n, ticket);
  END $$;

  -- For callers in SQL, who have committed their release_lock() by then.
  CREATE OR REPLACE FUNCTION wake_lock_waiter(p_lock_name varchar) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    IF p_lock_name IS NULL THEN
      RAISE EXCEPTION 'p_lock_name must not be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM FROM pgxlock_wake_batch('{0}'::integer[], ARRAY[p_lock_name::text], '{NULL}'::bigint[]);
    RETURN FOUND;
  END $$;

  ---------------------------------------------------------------- withdraw --
  CREATE OR REPLACE FUNCTION pgxlock_withdraw_batch(p_kinds integer[], p_names text[], p_tickets bigint[]) RETURNS void
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
       ORDER BY w.kind, w.name, w.ticket
         FOR UPDATE OF w
    )
    DELETE FROM pgxlock_waiters w USING locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;
  END $$;

  ----------------------------------------------------------------- holders --
  -- Tells the sessions that have an advisory key that somebody waits for it; says
  -- of each entry how many there are.
  CREATE OR REPLACE FUNCTION pgxlock_tell_holders(p_kinds integer[], p_ids bigint[]) RETURNS integer[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    IF (pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_ids)) IS NOT TRUE THEN
      RAISE EXCEPTION 'every key needs a kind' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'a standby server cannot notify' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    RETURN (
      WITH granted AS MATERIALIZED (
        SELECT DISTINCT l.objsubid::integer AS kind, l.classid::bigint << 32 | l.objid::bigint AS id, l.pid
          FROM pg_locks l
         WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      ), told AS MATERIALIZED (
        SELECT e.n, CASE WHEN g.pid IS NOT NULL       -- else it is a prepared transaction
                         THEN pg_notify('pgxlock_holder_' || g.pid::text, e.kind::text || ':' || e.id::text) IS NULL ELSE false END AS done
          FROM unnest(p_kinds, p_ids) WITH ORDINALITY AS e (kind, id, n)
          JOIN granted g ON g.kind = e.kind AND g.id = e.id
      )
      SELECT coalesce(pg_catalog.array_agg((SELECT count(*)::integer FROM told t WHERE t.n = e.n AND t.done IS NOT NULL) ORDER BY e.n), '{}'::integer[])
        FROM generate_series(1::bigint, pg_catalog.cardinality(p_ids)::bigint) e (n));
  END $$;

  ------------------------------------------------------------ housekeeping --
  -- For queues at which nobody looks any more.
  CREATE OR REPLACE FUNCTION pgxlock_reap_waiters(p_limit integer DEFAULT 1000) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_count bigint;
  BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
      RAISE EXCEPTION 'p_limit must be between 1 and 10000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH clients AS MATERIALIZED (
      SELECT DISTINCT w.client FROM pgxlock_waiters w WHERE w.client IS NOT NULL
    ), lost AS MATERIALIZED (
      SELECT c.client FROM clients c WHERE pg_try_advisory_xact_lock_shared(pgxlock_waiter_key(c.client))
    ), dead AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket FROM pgxlock_waiters w
       WHERE w.live_until <= clock_timestamp() OR w.client IN (SELECT l.client FROM lost l)
       LIMIT p_limit FOR UPDATE OF w SKIP LOCKED
    )
    DELETE FROM pgxlock_waiters w USING dead d WHERE w.kind = d.kind AND w.name = d.name AND w.ticket = d.ticket;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
  END $$;

  ----------------------------------------------------------- session locks --
  -- An unlock looks for its session as a column, like the key: where the planner
  -- takes the table for one row it would as soon look for a constant alone, which
  -- reads the whole index, with all that died since the last vacuum, for each unlock.
  FOR v_change IN SELECT * FROM (VALUES
      (E'unnest(p_ops, p_ids) AS w (op, id)\n        JOIN',
       E'unnest(p_ops, p_ids, pg_catalog.array_fill(p_session, ARRAY[pg_catalog.cardinality(p_ops)])) AS w (op, id, session)\n        JOIN'),
      (E'AND s.key_id = w.id AND s.session = p_session\n', E'AND s.key_id = w.id AND s.session = w.session\n'),
      (E'SELECT s.key_space, s.key_id\n            FROM pg_catalog.unnest(v_rows)', E'SELECT s.key_space, s.key_id, s.session\n            FROM pg_catalog.unnest(v_rows)'),
      ('AND s.key_id = r.key_id AND s.session = p_session', 'AND s.key_id = r.key_id AND s.session = r.session'),
      ('AND s.key_id = o.key_id AND s.session = p_session', 'AND s.key_id = o.key_id AND s.session = o.session')) c (before, now) LOOP
    EXECUTE replace(pg_get_functiondef('pgxlock_session_batch(integer[], bigint[], bigint)'::regprocedure::oid), v_change.before, v_change.now);
  END LOOP;

  ------------------------------------------------------------------ rights --
  -- Into the functions that know all of ours goes what is new here.
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '           (NULL, ''SELECT'', ''TABLE lock_leases''',
$rights$           (true, 'EXECUTE', 'FUNCTION pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_wake_batch(integer[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_withdraw_batch(integer[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION wake_lock_waiter(varchar)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_tell_holders(integer[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_waiter_key(bigint)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_reap_waiters(integer)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_bury_waiters(integer[], text[], bigint[])', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_waiter_gone(bigint, timestamptz)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_waiter_passed(timestamptz)', '{}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_waiters', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_waiters', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_waiters', '{administration}'::text[]),
           (false, 'USAGE', 'SEQUENCE pgxlock_tickets', '{application}'::text[]),
$rights$),
      ('harden_locks()', ' IN SHARE UPDATE EXCLUSIVE', ', pgxlock_waiters'),
      ('harden_locks()', ', ''pgxlock_tokens''', ', ''pgxlock_waiters'', ''pgxlock_tickets''')) c (signature, before, added) LOOP
    IF position(v_change.added IN pg_get_functiondef(v_change.signature::regprocedure::oid)) = 0 THEN         -- else this runs again
      EXECUTE replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.before, v_change.added || v_change.before);
    END IF;
  END LOOP;

  -- Who may write the leases by a right on the table takes them in turn from
  -- now on, and needs the queue for that.
  IF v_new AND NOT v_hardened THEN
    FOR v_change IN SELECT DISTINCT CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END AS grantee
                      FROM pg_class c, aclexplode(c.relacl) x
                     WHERE c.oid = 'distributed_locks'::regclass::oid AND x.grantee <> c.relowner AND x.privilege_type = 'INSERT' LOOP
      EXECUTE 'GRANT SELECT, INSERT, UPDATE, DELETE ON pgxlock_waiters TO ' || v_change.grantee;
      EXECUTE 'GRANT USAGE ON SEQUENCE pgxlock_tickets TO ' || v_change.grantee;
    END LOOP;
  END IF;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 5::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON TABLE pgxlock_waiters IS 'pgxlock: who waits for which lock, one row per process and lock. It orders those who wait and tells them when to try; it decides nothing. Write it only through the functions.';
  COMMENT ON COLUMN pgxlock_waiters.kind IS '0 a lease; an advisory key as objsubid in pg_locks: 1 of one bigint, 2 of two integers.';
  COMMENT ON COLUMN pgxlock_waiters.name IS 'The lease; or the key as a number, of two integers with the first one in the high half.';
  COMMENT ON COLUMN pgxlock_waiters.ticket IS 'The place in the queue: the lowest is first.';
  COMMENT ON COLUMN pgxlock_waiters.client IS 'The number that the process drew for the session in which it listens, on the channel pgxlock_<client>; NULL: it cannot listen.';
  COMMENT ON COLUMN pgxlock_waiters.owner IS 'Who waits, as it calls itself.';
  COMMENT ON COLUMN pgxlock_waiters.waiters IS 'How many wait in the process.';
  COMMENT ON COLUMN pgxlock_waiters.since IS 'When the ticket was published first.';
  COMMENT ON COLUMN pgxlock_waiters.live_until IS 'After that it counts for nothing, unless it is refreshed.';
  COMMENT ON COLUMN pgxlock_waiters.woken IS 'When it was told to try; NULL: not since it last did. 250 ms later others go past it.';
  COMMENT ON COLUMN pgxlock_waiters.holds IS 'What its waiters hold while they wait: holder ids of leases, and advisory:pid:kind:key.';
  COMMENT ON SEQUENCE pgxlock_tickets IS 'pgxlock: the numbers of tickets.';
  COMMENT ON FUNCTION wake_lock_waiter(varchar) IS
    'Wakes the first who waits for a lease; true if there is one. For callers of release_lock(), in a transaction of its own after the release has committed: release_lock() itself notifies nobody, because a NOTIFY in a transaction that writes makes commits wait for each other and PREPARE TRANSACTION fail. Without it who waits finds out by itself, later. READ COMMITTED only.';
  COMMENT ON FUNCTION pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint) IS
    'pgxlock, internal: publishes or refreshes tickets; a ticket that is NULL is drawn. Answers in order: the ticket, whether to try now, and, for the last one in a circle of tickets that wait for each other, the hold by which it is in it. A transaction of its own, and a try after a new ticket''s commit whatever the answer.';
  COMMENT ON FUNCTION pgxlock_take_batch(text[], text[], bigint[], text[], bigint[]) IS
    'pgxlock, internal: pgxlock_acquire_batch() in turn. A ticket of NULL does not look at the queue; 0 has none yet. ahead: refused because somebody stands before it. Each call in a transaction of its own.';
  COMMENT ON FUNCTION pgxlock_wake_batch(integer[], text[], bigint[]) IS
    'pgxlock, internal: notifies the first who waits for each lock, and says who that is; with a ticket only if that one was woken and has not tried for the turn time. In a transaction of its own, after the release has committed.';
  COMMENT ON FUNCTION pgxlock_withdraw_batch(integer[], text[], bigint[]) IS 'pgxlock, internal: removes tickets. Who withdraws wakes the next one, in another transaction.';
  COMMENT ON FUNCTION pgxlock_tell_holders(integer[], bigint[]) IS 'pgxlock, internal: notifies the sessions that have advisory keys, on the channel pgxlock_holder_<pid>; says how many have each.';
  COMMENT ON FUNCTION pgxlock_reap_waiters(integer) IS 'Housekeeping only: removes up to p_limit tickets of dead processes; returns how many. Waiting never needs it.';
  COMMENT ON FUNCTION pgxlock_bury_waiters(integer[], text[], bigint[]) IS 'pgxlock, internal: removes the dead that stand before a number in each queue.';
  COMMENT ON FUNCTION pgxlock_waiter_key(bigint) IS 'pgxlock, internal: the advisory key that the session in which a process listens has locked for as long as it lives. Nothing else of the queue may run in that session.';
  COMMENT ON FUNCTION pgxlock_waiter_gone(bigint, timestamptz) IS 'pgxlock, internal: whether a ticket''s process is dead.';
  COMMENT ON FUNCTION pgxlock_waiter_passed(timestamptz) IS 'pgxlock, internal: whether others go past a ticket that was woken then.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 5) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (5, false);
END $migration$;
