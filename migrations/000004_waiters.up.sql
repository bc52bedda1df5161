-- The queue of waiters: one ticket per process and lock, served in order; the calls with which a
-- process publishes a ticket, acquires a lease in turn, releases it and wakes the next waiter; and
-- the detection of deadlocks among waiters that hold locks. The locks do not depend on the queue: a
-- caller without a ticket, by acquire_lock() or pg_advisory_lock(), passes all waiters.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
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
  PERFORM pgxlock_migrate('up'::text, 4, v_path);

  ------------------------------------------------------------------- table --
  -- A ticket is the position of one process in the queue of one lock; the lowest is first. A
  -- process commits its ticket, then tries; a holder commits its release, then checks for waiters.
  -- So no waiter is missed. The queue never decides which caller gets a lock: a lost or wrong queue
  -- costs order and time.
  --
  -- Unlogged, because a crash also ends all listeners, and they publish again. The sequence is
  -- logged: a number that comes twice would be the position of two processes.
  CREATE SEQUENCE IF NOT EXISTS pgxlock_tickets;
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_waiters (
    kind       integer NOT NULL,            -- 0 a lease; 1, 2 an advisory key, as objsubid in pg_locks
    name       text COLLATE "C" NOT NULL,   -- of an advisory key, the number; of two integers, the first one in the high half
    ticket     bigint NOT NULL,
    client     bigint,                      -- pgxlock_waiter_key() makes a key of it; NULL: it cannot listen
    owner      text NOT NULL,
    waiters    integer NOT NULL,
    since      timestamptz NOT NULL,
    live_until timestamptz NOT NULL,
    woken      timestamptz,                 -- NULL: not since its last try
    holds      text[] NOT NULL DEFAULT '{}' CHECK (pg_catalog.array_ndims(holds) = 1),    -- readers unnest it
    role       text COLLATE "C" NOT NULL DEFAULT session_user,
    protocol   integer NOT NULL DEFAULT 1,  -- a claim: any role may write any number
    PRIMARY KEY (kind, name, ticket)
  ) USING heap;
  ALTER TABLE pgxlock_waiters SET (fillfactor = 50, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
  -- Few waiters hold locks, and only they can deadlock.
  CREATE INDEX IF NOT EXISTS pgxlock_waiters_holds ON pgxlock_waiters (ticket) WHERE holds OPERATOR(pg_catalog.<>) '{}'::text[];
  COMMENT ON TABLE pgxlock_waiters IS
    'pgxlock: the queue, a ticket for each lock of each process or SQL caller. It orders and wakes waiters, and grants '
    'nothing. Write it only through the functions. Rows: one for each ticket, until it acquires the lock or leaves; others, '
    'and pgxlock_reap_waiters(), remove dead ones.';
  COMMENT ON COLUMN pgxlock_waiters.kind IS
    '0 for a lease; for an advisory key as objsubid in pg_locks: 1 for one bigint, 2 for two integers.';
  COMMENT ON COLUMN pgxlock_waiters.name IS
    'The lease; or the key as a number, for two integers with the first one in the high half.';
  COMMENT ON COLUMN pgxlock_waiters.ticket IS 'The position in the queue: the lowest is first.';
  COMMENT ON COLUMN pgxlock_waiters.client IS
    'The number that the process drew for the session with which it listens on the channel pgxlock_<client>; NULL: it '
    'cannot listen.';
  COMMENT ON COLUMN pgxlock_waiters.owner IS 'The name that the waiting process gave itself.';
  COMMENT ON COLUMN pgxlock_waiters.waiters IS 'The number of waiters in the process.';
  COMMENT ON COLUMN pgxlock_waiters.since IS 'When the ticket was first published.';
  COMMENT ON COLUMN pgxlock_waiters.live_until IS 'The ticket is void from then on unless it is refreshed.';
  COMMENT ON COLUMN pgxlock_waiters.woken IS
    'When the process was woken; NULL: not since its last try. After the wake timeout, 250 ms, other waiters pass it.';
  COMMENT ON COLUMN pgxlock_waiters.holds IS
    'What its waiters hold while they wait: holder ids of leases, and advisory:pid:kind:key.';
  COMMENT ON COLUMN pgxlock_waiters.role IS
    'The role whose session published it: only sessions of that role refresh, withdraw or use it.';
  COMMENT ON COLUMN pgxlock_waiters.protocol IS
    'The protocol that its process says it speaks. Whatever the number, it waits and is woken as a ticket of 1.';
  COMMENT ON SEQUENCE pgxlock_tickets IS 'pgxlock: numbers of tickets.';

  ----------------------------------------------------------------- publish --
  CREATE OR REPLACE FUNCTION pgxlock_publish_batch(p_kinds integer[], p_names text[], p_tickets bigint[],
    p_waiters integer[], p_holds text[],
    p_client bigint, p_owner text, p_live_ms bigint, p_protocol integer)
  RETURNS TABLE (ticket bigint, ask boolean, deadlock text, behind bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET lock_timeout = '100ms' AS $$
  DECLARE
    v_count   integer := pg_catalog.cardinality(p_names);
    v_live    interval;
    v_last    bigint;
    v_tickets bigint[];
    v_asks    boolean[];
    v_firsts  bigint[];                     -- the ticket ahead of each, where the lock may be free
    v_walked  bigint;                       -- up to which number a queue was read
    v_victims bigint[];
    v_circles text[];
    v_holds   text[];
    v_other   boolean;                      -- another role has a ticket of this number
    v_fresh   boolean;
    v_free    boolean;
    e record;                               -- a ticket
  BEGIN
    -- What one role publishes, every publisher compares and every Monitor reads, until it is void.
    IF (v_count <= 1000
        AND pg_catalog.cardinality(p_kinds) = v_count
        AND pg_catalog.cardinality(p_tickets) = v_count
        AND pg_catalog.cardinality(p_waiters) = v_count
        AND pg_catalog.cardinality(p_holds) = v_count
        AND char_length(p_owner) <= 255
        AND p_live_ms BETWEEN 1::bigint AND 60000::bigint
        AND p_protocol > 0) IS NOT TRUE
       OR EXISTS (SELECT FROM unnest(p_kinds, p_names, p_waiters, p_holds) AS w (kind, name, waiters, holds)
                   WHERE (w.kind BETWEEN 0 AND 2
                          AND char_length(w.name) BETWEEN 1 AND 255
                          AND coalesce(w.waiters, 1) BETWEEN 0 AND 1000000
                          AND CASE WHEN w.holds IS NULL THEN true WHEN octet_length(w.holds) > 65536 THEN false
                                   WHEN octet_length(w.holds::jsonb::text) > 66560 THEN false      -- 1e65000; a blank an element
                                   WHEN jsonb_typeof(w.holds::jsonb) = 'array'
                                   THEN jsonb_array_length(w.holds::jsonb) <= 1000
                                   ELSE true END) IS NOT TRUE) THEN
      RAISE EXCEPTION 'p_names must have at most 1000 elements, p_owner at most 255 characters, p_live_ms must be 1 to '
                      '60000, and p_protocol positive; every ticket needs a kind, 0 to 2, a name of 1 to 255 characters, '
                      'at most 1000000 waiters, and at most 1000 holds in 65536 bytes of p_holds'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('there is no queue on a standby server');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      PERFORM pgxlock_check_read_committed('tickets are published in READ COMMITTED: an older snapshot does not show other '
                                           'waiters');
    END IF;
    v_live := p_live_ms::float8 * interval '1 millisecond';
    v_last := pg_sequence_last_value('pgxlock_tickets'::regclass);

    -- As in pgxlock_wake_batch(), one statement for all would cost one ticket, for which nearly every call is, three
    -- times as much.
    --
    -- A number that the sequence has not given, or that is another role's in this queue, is replaced. A crash or a
    -- failover may have lost the last ones. Rows are locked in the order of their keys, new ones last.
    FOR e IN SELECT w.kind, w.name COLLATE "C" AS name,
                    CASE WHEN w.ticket BETWEEN 1::bigint AND v_last THEN w.ticket END AS ticket,
                    coalesce(w.waiters, 1) AS waiters, w.holds, w.n
               FROM unnest(p_kinds, p_names, p_tickets, p_waiters, p_holds)
                    WITH ORDINALITY AS w (kind, name, ticket, waiters, holds, n)
              ORDER BY 1, 2, 3, 6 LOOP
      v_holds := '{}'::text[];
      IF jsonb_typeof(e.holds::jsonb) = 'array' THEN
        v_holds := ARRAY(SELECT h.hold FROM jsonb_array_elements_text(e.holds::jsonb) AS h (hold) WHERE h.hold IS NOT NULL);
      END IF;
      v_fresh := false;
      IF e.ticket IS NULL THEN
        e.ticket := nextval('pgxlock_tickets'::regclass);
      ELSE
        SELECT q.role <> session_user::text,
               q.client IS NOT DISTINCT FROM p_client
               AND q.waiters = e.waiters
               AND q.holds COLLATE "C" OPERATOR(pg_catalog.=) v_holds
               AND q.live_until >= clock_timestamp() + v_live / 2::float8
          INTO v_other, v_fresh
          FROM pgxlock_waiters q WHERE q.kind = e.kind AND q.name = e.name AND q.ticket = e.ticket;
        IF v_other THEN
          e.ticket := nextval('pgxlock_tickets'::regclass);
          v_fresh := false;
        END IF;
      END IF;
      IF v_fresh IS NOT TRUE THEN           -- a ticket that is up to date is not touched: locking it would be a write too
        INSERT INTO pgxlock_waiters AS q (kind, name, ticket, client, owner, waiters, since, live_until, holds, role, protocol)
        VALUES (e.kind, e.name, e.ticket, p_client, p_owner, e.waiters, clock_timestamp(), clock_timestamp() + v_live, v_holds,
                session_user::text, p_protocol)
        ON CONFLICT ON CONSTRAINT pgxlock_waiters_pkey
        DO UPDATE SET client = excluded.client, waiters = excluded.waiters, live_until = excluded.live_until,
                      holds = excluded.holds
         WHERE q.role = excluded.role;
      END IF;
      v_tickets[e.n] := e.ticket;

      v_free := e.kind <> 0;
      IF NOT v_free THEN
        v_free := NOT EXISTS (SELECT FROM distributed_locks l
                               WHERE l.lock_name::text = e.name COLLATE "C" AND l.expires_at > clock_timestamp());
      END IF;
      v_firsts[e.n] := CASE WHEN v_free THEN pgxlock_first_ahead(e.kind, e.name, e.ticket) END;
      v_asks[e.n] := v_free AND v_firsts[e.n] IS NULL;
      v_walked := CASE WHEN v_free THEN coalesce(v_firsts[e.n], e.ticket) END;
      IF v_walked > (SELECT q.ticket FROM pgxlock_waiters q
                      WHERE q.kind = e.kind AND q.name = e.name ORDER BY q.ticket LIMIT 1) THEN
        PERFORM pgxlock_remove_dead(ARRAY[e.kind], ARRAY[e.name], ARRAY[v_walked]);
      END IF;
    END LOOP;

    -- It learns so when it is published or refreshed.
    IF EXISTS (SELECT FROM pg_catalog.unnest(p_holds) h (hold) WHERE h.hold IS NOT NULL) THEN
      SELECT pg_catalog.array_agg(d.n), pg_catalog.array_agg(d.hold) INTO v_victims, v_circles
        FROM pgxlock_deadlocks(p_kinds, p_names, v_tickets) d;
    END IF;

    FOR n IN 1 .. v_count LOOP
      ticket := v_tickets[n];
      ask := v_asks[n];
      deadlock := v_circles[pg_catalog.array_position(v_victims, n::bigint)];
      behind := v_firsts[n];
      RETURN NEXT;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint, integer) IS
    'pgxlock, internal: publishes or refreshes tickets; a NULL ticket gets a new number, and so does a number that the '
    'sequence has not given or another role has. Answers in order: the ticket; whether to try now; for the last ticket in '
    'a cycle of tickets that wait for each other, its hold that another one waits for; and the ticket ahead of it, unless '
    'the lease is held. In a transaction of its own; after a new ticket has committed, try whatever the answer.';

  -- A ticket waits for another one if a waiter of that ticket holds its lock. A ticket for permits waits for
  -- the semaphore, and that for any of its holders: it is stuck only if none of them can go on, and while no
  -- permit is free, because it is not known how many a ticket is for. Of all that are stuck with a semaphore the
  -- last ticket gives up.
  CREATE OR REPLACE FUNCTION pgxlock_deadlocks(p_kinds integer[], p_names text[], p_tickets bigint[])
  RETURNS TABLE (n bigint, hold text)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET jit = off AS $$
  DECLARE
    v_advisory boolean;
  BEGIN
    v_advisory := EXISTS (SELECT FROM pgxlock_waiters w, pg_catalog.unnest(w.holds) h (hold)
                           WHERE w.holds OPERATOR(pg_catalog.<>) '{}'::text[] AND left(h.hold, 9) = 'advisory:');
    RETURN QUERY
    WITH RECURSIVE waiting AS MATERIALIZED (
      SELECT row_number() OVER (ORDER BY w.ticket, w.kind, w.name) AS id, w.kind, w.name, w.ticket, w.holds, w.role
        FROM pgxlock_waiters w
       WHERE w.holds OPERATOR(pg_catalog.<>) '{}'::text[] AND NOT pgxlock_waiter_dead(w.client, w.live_until)
    ), granted AS MATERIALIZED (
      SELECT DISTINCT l.objsubid::integer AS kind, (l.classid::bigint << 32 | l.objid::bigint)::text AS name, l.pid,
             a.usename::text AS role
        FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
       WHERE v_advisory
         AND l.locktype = 'advisory'
         AND l.granted
         AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ), wanted AS MATERIALIZED (           -- what tickets wait for; permits: of a semaphore, how many it has
      SELECT row_number() OVER () AS lock, l.kind, l.name,
             CASE WHEN l.kind = 0 AND right(l.name, 1) = '#'
                  THEN (SELECT max(s.permits) FROM pgxlock_semaphores s
                         WHERE s.name = left(l.name, -1) COLLATE "C"
                           AND s.used_at > (SELECT max(u.used_at) FROM pgxlock_semaphores u WHERE u.name = s.name)
                                             - interval '1 minute') END AS permits    -- it may have had more before
        FROM (SELECT DISTINCT w.kind, w.name FROM waiting w) l
    ), holder AS MATERIALIZED (           -- of each lock that a ticket waits for
      SELECT w.lock, l.holder AS name, NULL::text AS role FROM wanted w, LATERAL (
          SELECT l.holder_id::text AS holder FROM distributed_locks l
           WHERE w.kind = 0 AND l.lock_name::text = w.name COLLATE "C" AND l.holder_id::text <> '*shared' COLLATE "C"
             AND l.expires_at > clock_timestamp() OFFSET 0) l
      UNION ALL
      SELECT w.lock, s.holder, NULL::text FROM wanted w, LATERAL pgxlock_holders(w.name) s WHERE w.kind = 0 AND s.shared
      UNION ALL
      SELECT f.lock, l.holder, NULL::text
        FROM (SELECT w.lock, w.name, w.permits FROM wanted w
               WHERE w.permits IS NOT NULL  -- and none is free
                 AND NOT EXISTS (SELECT FROM (SELECT generate_series(1, w.permits) AS at OFFSET 0) p
                                  WHERE NOT EXISTS (SELECT FROM distributed_locks l
                                                     WHERE l.lock_name::text = (w.name || p.at::text) COLLATE "C"
                                                       AND l.expires_at > clock_timestamp() OFFSET 0) OFFSET 0)) f,
             LATERAL generate_series(1, f.permits) p (at), LATERAL (
          SELECT l.holder_id::text AS holder FROM distributed_locks l
           WHERE l.lock_name::text = (f.name || p.at::text) COLLATE "C" AND l.expires_at > clock_timestamp() OFFSET 0) l
      UNION ALL
      SELECT w.lock, 'advisory:' || g.pid::text || ':' || g.kind::text || ':' || g.name, g.role
        FROM wanted w JOIN granted g ON g.kind = w.kind AND g.name = w.name COLLATE "C"
    ), held AS MATERIALIZED (
      SELECT h.lock, h.name, h.role, dense_rank() OVER (ORDER BY h.name COLLATE "C", h.role COLLATE "C") AS holder FROM holder h
    ), hold AS MATERIALIZED (             -- what a session has counts only with tickets of its role
      SELECT w.id, l.lock, h.holder
        FROM (SELECT w.id, w.kind, w.name, w.role, x.hold FROM waiting w, pg_catalog.unnest(w.holds) x (hold)) w
        JOIN (SELECT DISTINCT h.name, h.role, h.holder FROM held h) h
          ON h.name = w.hold COLLATE "C" AND w.role = coalesce(h.role, w.role) COLLATE "C"
        JOIN wanted l ON l.kind = w.kind AND l.name = w.name
    ), moving (lock) AS (                 -- what a holder that does not wait can let go on, perhaps through others
      SELECT w.lock FROM wanted w LEFT JOIN held h ON h.lock = w.lock
       WHERE EXISTS (SELECT FROM wanted s WHERE s.permits IS NOT NULL)
         AND NOT EXISTS (SELECT FROM hold d WHERE d.holder = h.holder)
      UNION
      SELECT h.lock
        FROM (SELECT DISTINCT d.holder FROM moving m JOIN hold d ON d.lock = m.lock) d JOIN held h ON h.holder = d.holder
    ), stuck AS MATERIALIZED (
      SELECT h.lock, h.name, h.holder, w.permits IS NOT NULL AS any_of
        FROM held h JOIN wanted w ON w.lock = h.lock
       WHERE NOT EXISTS (SELECT FROM moving m WHERE m.lock = h.lock AND w.permits IS NOT NULL)
    -- From lock to holder to lock, because there can be as many pairs of tickets as the square of their number.
    ), reached (root, lock) AS (
      SELECT w.id, l.lock
        FROM unnest(p_kinds, p_names, p_tickets) AS e (kind, name, ticket)
        JOIN waiting w ON w.kind = e.kind AND w.name = e.name COLLATE "C" AND w.ticket = e.ticket
        JOIN wanted l ON l.kind = w.kind AND l.name = w.name
      UNION
      SELECT h.root, w.lock
        FROM (SELECT DISTINCT r.root, h.holder FROM reached r JOIN stuck h ON h.lock = r.lock) h
        JOIN hold w ON w.holder = h.holder AND w.id < h.root
    ), circle AS (
      SELECT r.root, min(r.name) AS holder
        FROM (SELECT r.root, h.name, h.holder FROM reached r JOIN stuck h ON h.lock = r.lock OFFSET 0) r
        JOIN hold w ON w.holder = r.holder AND w.id = r.root
       WHERE NOT EXISTS (SELECT FROM reached x JOIN stuck y ON y.lock = x.lock AND y.any_of
                           JOIN (SELECT w.holder, max(w.id) AS last FROM hold w GROUP BY w.holder) z ON z.holder = y.holder
                          WHERE x.root = r.root AND z.last > r.root)
       GROUP BY r.root
    )
    SELECT e.n, c.holder
      FROM circle c JOIN waiting w ON w.id = c.root
      JOIN unnest(p_kinds, p_names, p_tickets) WITH ORDINALITY AS e (kind, name, ticket, n)
        ON e.kind = w.kind AND e.name = w.name COLLATE "C" AND e.ticket = w.ticket;
  END $$;
  COMMENT ON FUNCTION pgxlock_deadlocks(integer[], text[], bigint[]) IS
    'pgxlock, internal: which of these tickets are the last in a cycle of tickets that wait for each other, and the hold of '
    'each that another one waits for.';

  CREATE OR REPLACE FUNCTION pgxlock_withdraw_batch(p_kinds integer[], p_names text[], p_tickets bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET lock_timeout = '100ms' AS $$
  DECLARE
    e record;                               -- a ticket
  BEGIN
    PERFORM pgxlock_require(pg_catalog.cardinality(p_names) <= 1000
                            AND pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names)
                            AND pg_catalog.cardinality(p_tickets) = pg_catalog.cardinality(p_names),
                            'p_names must have at most 1000 elements, and every ticket needs a kind and a name');
    PERFORM pgxlock_check_primary('there is no queue on a standby server');
    FOR e IN SELECT w.kind, w.name COLLATE "C" AS name, w.ticket
               FROM unnest(p_kinds, p_names, p_tickets) AS w (kind, name, ticket)
              ORDER BY w.kind, w.name COLLATE "C", w.ticket LOOP
      DELETE FROM pgxlock_waiters w
       WHERE w.kind = e.kind AND w.name = e.name AND w.ticket = e.ticket AND w.role = session_user::text;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_withdraw_batch(integer[], text[], bigint[]) IS
    'pgxlock, internal: removes tickets of the session''s role. The caller then wakes the next waiter, in another transaction.';

  ----------------------------------------------------------------- acquire --
  -- Nearly every requested lease has no row and no waiter. Two statements acquire all of those:
  -- starting a statement costs as much as some entries. They draw the tokens themselves, because a
  -- function that does so costs a batch of one a sixth of its time. The others go on in turn; and all
  -- of them where a token must not be drawn before that was recorded, or may not be drawn by the caller.
  CREATE OR REPLACE FUNCTION pgxlock_acquire_batch(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[],
    p_tickets bigint[],
    OUT tokens bigint[], OUT held_by text[], OUT remaining_ms bigint[], OUT ahead boolean[])
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_count    integer := pg_catalog.cardinality(p_names);
    v_dims     text := CASE WHEN v_count > 0 THEN pg_catalog.format('[1:%s]', v_count) END;
    v_timeline bigint;
    v_base     bigint;                      -- of all tokens: the bits above the sequence; NULL: see pgxlock_next_tokens()
    v_new      bigint[];                    -- entries without a row
    v_names    text[];                      -- of the rows that were inserted, and their holders
    v_holds    text[];
    v_now      timestamptz;
  BEGIN
    -- Entry n is checked by unnest, and read by its subscript: they agree where subscripts begin with 1.
    IF (v_count <= 1000
        AND pg_catalog.array_dims(p_names) IS NOT DISTINCT FROM v_dims
        AND pg_catalog.array_dims(p_holders) IS NOT DISTINCT FROM v_dims
        AND pg_catalog.array_dims(p_ttls) IS NOT DISTINCT FROM v_dims
        AND pg_catalog.array_dims(p_metadata) IS NOT DISTINCT FROM v_dims
        AND pg_catalog.array_dims(p_tickets) IS NOT DISTINCT FROM v_dims) IS NOT TRUE THEN
      PERFORM pgxlock_require(false,
                              'p_names must have at most 1000 elements, and every name needs a holder, a ttl, metadata '
                              'and a ticket');
    END IF;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('cannot acquire a lock on a standby server');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      PERFORM pgxlock_check_read_committed('leases are acquired in turn in READ COMMITTED: an older snapshot does not '
                                           'show the waiters');
    END IF;

    IF has_table_privilege('pgxlock_epoch'::regclass::oid, 'SELECT')
       AND has_table_privilege('pgxlock_since_crash'::regclass::oid, 'SELECT')
       AND has_sequence_privilege('pgxlock_tokens'::regclass::oid, 'USAGE') THEN
      v_timeline := pgxlock_timeline();
      -- Two inserters of one name meet on the guard, as in try_acquire_lock(). The next statement
      -- reads again, in a snapshot newer than the guard. OFFSET 0 keeps the planner from hashing
      -- whole tables. A repair of the tokens waits until this transaction ends.
      SELECT e.epoch_base + v_timeline * 64 << 40, ARRAY(
          SELECT w.n
            FROM unnest(p_names, p_holders, p_ttls, p_metadata) WITH ORDINALITY AS w (name, holder, ttl, metadata, n)
           WHERE CASE WHEN EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = w.name COLLATE "C" OFFSET 0)
                        OR EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = w.name COLLATE "C" OFFSET 0)
                        OR (char_length(w.name) BETWEEN 1 AND 255
                            AND char_length(w.holder) BETWEEN 1 AND 255
                            AND left(w.holder, 1) <> '*'
                            -- 100 years of 360 days, as intervals compare
                            AND w.ttl BETWEEN 1::bigint AND 3110400000000::bigint
                            AND CASE WHEN w.metadata IS NULL THEN true
                                     ELSE octet_length(w.metadata::jsonb::text) <= 2000 END) IS NOT TRUE
                      THEN false
                      ELSE pg_try_advisory_xact_lock(pgxlock_key('guard', w.name)) END)
        INTO v_base, v_new
        FROM pgxlock_epoch e JOIN pgxlock_since_crash c ON c.singleton      -- none: the epoch is to be raised first
       WHERE e.singleton AND e.system_identifier = pgxlock_system_identifier() AND e.timeline = v_timeline
         AND e.epoch_base + v_timeline * 64 BETWEEN 1 AND 8388607;
    END IF;
    IF pg_catalog.cardinality(v_new) > 0 THEN
      IF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM pgxlock_durable(false);
      END IF;
      v_now := clock_timestamp();
      -- Tokens are drawn under a snapshot that shows earlier holders: a token drawn before it could
      -- be smaller than that of a holder that came and went before the guard. No other acquire can
      -- be between the two looks, so that the pin is tried only where the row is going to be made:
      -- a loser that had it would fail the fences of the winner.
      WITH made AS (
        INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
        SELECT p_names[d.n], p_holders[d.n], v_now, v_now + p_ttls[d.n]::float8 * interval '1 millisecond',
               coalesce(p_metadata[d.n]::jsonb, jsonb '{}'),
               v_base + nextval('pgxlock_tokens'::regclass)
          FROM pg_catalog.unnest(v_new) AS d (n)
         WHERE CASE WHEN EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = p_names[d.n] COLLATE "C" OFFSET 0)
                    THEN false
                    ELSE pg_try_advisory_xact_lock(pgxlock_key('pin', p_names[d.n])) END
        ON CONFLICT DO NOTHING              -- a name that comes twice, or was written without the guard
        RETURNING distributed_locks.fencing_token, distributed_locks.lock_name::text AS name,
                  distributed_locks.holder_id::text AS holder
      )
      SELECT pg_catalog.array_agg(m.fencing_token), pg_catalog.array_agg(m.name), pg_catalog.array_agg(m.holder)
        INTO tokens, v_names, v_holds
        FROM made m;
      IF pg_catalog.cardinality(tokens) = v_count THEN
        RETURN;
      END IF;
    END IF;

    -- Of entries with one name, an earlier one may have found the pin taken that a later one got.
    WITH made AS MATERIALIZED (
      SELECT min(d.n) AS n, m.token
        FROM unnest(v_names, v_holds, tokens) AS m (name, holder, token)
        JOIN pg_catalog.unnest(v_new) AS d (n)
          ON p_names[d.n] = m.name COLLATE "C" AND p_holders[d.n] = m.holder COLLATE "C"
       GROUP BY m.token
    ), rest AS MATERIALIZED (
      SELECT pg_catalog.array_agg(w.n ORDER BY w.n) AS entries, pg_catalog.array_agg(p_names[w.n] ORDER BY w.n) AS names,
             pg_catalog.array_agg(p_holders[w.n] ORDER BY w.n) AS holders, pg_catalog.array_agg(p_ttls[w.n] ORDER BY w.n) AS ttls,
             pg_catalog.array_agg(p_metadata[w.n] ORDER BY w.n) AS metadata,
             pg_catalog.array_agg(p_tickets[w.n] ORDER BY w.n) AS tickets
        FROM generate_series(1, v_count) AS w (n)
       WHERE NOT EXISTS (SELECT FROM made m WHERE m.n = w.n)
      HAVING count(*) > 0::bigint
    )
    SELECT coalesce(pg_catalog.array_agg(a.token ORDER BY a.n), '{}'::bigint[]), pg_catalog.array_agg(a.held_by ORDER BY a.n),
           pg_catalog.array_agg(a.ms ORDER BY a.n), pg_catalog.array_agg(a.ahead ORDER BY a.n)
      INTO tokens, held_by, remaining_ms, ahead
      FROM (SELECT m.n, m.token, p_holders[m.n] AS held_by, p_ttls[m.n] AS ms, false AS ahead FROM made m
            UNION ALL
            SELECT r.entries[t.i], CASE WHEN t.acquired THEN t.token END, t.held_by, t.ms, t.ahead
              FROM rest r,
                   pgxlock_try_in_turn(r.names, r.holders, r.ttls, r.metadata, r.tickets, false)
                     WITH ORDINALITY AS t (acquired, token, held_by, ms, ahead, i)) a;
  END $$;
  COMMENT ON FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[], bigint[]) IS
    'pgxlock, internal: acquires leases in turn. A NULL ticket ignores the queue; 0 has no position yet. Returns for each '
    'entry, in order, its token, NULL if it was refused; and held_by, remaining_ms and ahead (refused because a waiter is '
    'ahead), which are NULL where all entries were simply free. Each call in a transaction of its own.';

  -- The same for a lone caller, for whom arrays and sets would cost a quarter of the server's time, and for
  -- a lone waiter that is first in line, for whom they would cost five times as much. A loop of such
  -- statements would cost a batch six times as much as its own.
  CREATE OR REPLACE FUNCTION pgxlock_acquire_one(p_name text, p_holder text, p_ttl bigint, p_metadata text, p_ticket bigint,
    OUT token bigint, OUT held_by text, OUT remaining_ms bigint, OUT ahead boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_timeline bigint;
    v_base     bigint;
    v_refused  boolean;
    v_first    bigint;                      -- the ticket ahead
    v_walked   bigint;                      -- up to which number the queue was read
    v_now      timestamptz;
  BEGIN
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('cannot acquire a lock on a standby server');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      PERFORM pgxlock_check_read_committed('leases are acquired in turn in READ COMMITTED: an older snapshot does not '
                                           'show the waiters');
    END IF;
    IF has_table_privilege('pgxlock_epoch'::regclass::oid, 'SELECT')
       AND has_table_privilege('pgxlock_since_crash'::regclass::oid, 'SELECT')
       AND has_sequence_privilege('pgxlock_tokens'::regclass::oid, 'USAGE') THEN
      v_timeline := pgxlock_timeline();
      SELECT e.epoch_base + v_timeline * 64 << 40 INTO v_base
        FROM pgxlock_epoch e JOIN pgxlock_since_crash c ON c.singleton
       WHERE e.singleton AND e.system_identifier = pgxlock_system_identifier() AND e.timeline = v_timeline
         AND e.epoch_base + v_timeline * 64 BETWEEN 1 AND 8388607
         AND CASE WHEN EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = p_name COLLATE "C" OFFSET 0)
                    OR EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = p_name COLLATE "C" OFFSET 0)
                       AND CASE WHEN p_ticket > 0::bigint THEN pgxlock_first_ahead(0, p_name, p_ticket) IS NOT NULL
                                ELSE p_ticket IS NOT NULL END
                    OR (char_length(p_name) BETWEEN 1 AND 255
                        AND char_length(p_holder) BETWEEN 1 AND 255
                        AND left(p_holder, 1) <> '*'
                        AND p_ttl BETWEEN 1::bigint AND 3110400000000::bigint
                        AND CASE WHEN p_metadata IS NULL THEN true
                                 ELSE octet_length(p_metadata::jsonb::text) <= 2000 END) IS NOT TRUE
                  THEN false
                  ELSE pg_try_advisory_xact_lock(pgxlock_key('guard', p_name)) END;
      IF v_base IS NOT NULL THEN
        IF current_setting('synchronous_commit') IN ('off', 'local') THEN
          PERFORM pgxlock_durable(false);
        END IF;
        v_now := clock_timestamp();
        INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
        SELECT p_name, p_holder, v_now, v_now + p_ttl::float8 * interval '1 millisecond', coalesce(p_metadata::jsonb, jsonb '{}'),
               v_base + nextval('pgxlock_tokens'::regclass)
         WHERE CASE WHEN EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = p_name COLLATE "C" OFFSET 0)
                    THEN false
                    ELSE pg_try_advisory_xact_lock(pgxlock_key('pin', p_name)) END
        ON CONFLICT DO NOTHING
        RETURNING distributed_locks.fencing_token INTO token;
        IF FOUND THEN
          IF p_ticket > 0::bigint THEN      -- who wakes the next waiter removes the dead tickets before it
            DELETE FROM pgxlock_waiters w
             WHERE w.kind = 0 AND w.name = p_name COLLATE "C" AND w.ticket = p_ticket AND w.role = session_user::text;
          END IF;
          RETURN;
        END IF;
      END IF;
    END IF;
    -- Most tries that come this far are refused. One that read a lease which is just being released is repeated, see
    -- pgxlock_try_in_turn().
    v_now := clock_timestamp();
    SELECT l.holder_id::text, CASE WHEN isfinite(l.expires_at)
                                   THEN (date_part('epoch'::text, l.expires_at - v_now) * 1000::float8)::bigint END,
           l.holder_id::text <> p_holder COLLATE "C" AND NOT pgxlock_change_pending(l.xmax)
      INTO held_by, remaining_ms, v_refused
      FROM distributed_locks l WHERE l.lock_name::text = p_name COLLATE "C" AND l.expires_at > v_now;
    ahead := false;
    IF EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = p_name COLLATE "C" AND p_ticket IS NOT NULL) THEN
      v_walked := CASE WHEN p_ticket > 0::bigint THEN p_ticket ELSE 9223372036854775807 END;
      v_first := pgxlock_first_ahead(0, p_name, v_walked);
      ahead := v_first IS NOT NULL;
      IF ahead OR v_refused THEN
        PERFORM pgxlock_settle_tickets(ARRAY[p_name], ARRAY[p_ticket], ARRAY[false], ARRAY[coalesce(v_first, v_walked)]);
      END IF;
    END IF;
    IF ahead OR v_refused THEN
      RETURN;
    END IF;
    SELECT CASE WHEN t.acquired THEN t.fencing_token END, t.held_by, t.remaining_ms, t.ahead
      INTO token, held_by, remaining_ms, ahead
      FROM pgxlock_try_in_turn(ARRAY[p_name], ARRAY[p_holder], ARRAY[p_ttl], ARRAY[p_metadata], ARRAY[p_ticket], false) AS t;
  END $$;
  COMMENT ON FUNCTION pgxlock_acquire_one(text, text, bigint, text, bigint) IS
    'pgxlock, internal: as pgxlock_acquire_batch(), for one lease.';

  -- Acquires leases that are not simply free: held, waited for, expired or to be shared. Waiters
  -- are looked up name by name: with = ANY (names) a plan from an empty queue reads all tickets.
  --
  -- A waiter that is refused with no waiter ahead sleeps until it is woken. It may miss that wake
  -- if the row that refused it is just being deleted, by a transaction that may have checked for
  -- tickets before this one existed, or if the row has gone meanwhile. Then remaining_ms makes it
  -- try again soon, after half of its ticket's age, and so a few times while a release takes long.
  -- Any lock that showed this would hinder the release.
  CREATE OR REPLACE FUNCTION pgxlock_try_in_turn(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[],
    p_tickets bigint[], p_shared boolean)
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint, ahead boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_count    integer := pg_catalog.cardinality(p_names);
    v_dims     text := CASE WHEN v_count > 0 THEN pg_catalog.format('[1:%s]', v_count) END;
    v_queued   boolean;                     -- one of them has waiters
    v_below    bigint[];                    -- up to which number each queue is read
    v_firsts   bigint[];                    -- the ticket ahead of each entry, if any
    v_go       bigint[];                    -- the other entries, and their results
    v_acquired boolean[];
    v_tokens   bigint[];
    v_held_by  text[];
    v_ms       bigint[];
    v_now      timestamptz;
  BEGIN
    PERFORM pgxlock_require(v_count <= 1000
                            AND pg_catalog.array_dims(p_names) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_holders) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_ttls) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_metadata) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_tickets) IS NOT DISTINCT FROM v_dims,
                            'p_names must have at most 1000 elements, and every name needs a holder, a ttl, metadata and '
                            'a ticket');
    PERFORM pgxlock_check_primary('cannot acquire a lock on a standby server');
    PERFORM pgxlock_check_read_committed('leases are acquired in turn in READ COMMITTED: an older snapshot does not show '
                                         'the waiters');
    v_queued := EXISTS (SELECT FROM pg_catalog.unnest(p_names) AS e (name)
                         WHERE EXISTS (SELECT FROM pgxlock_waiters w WHERE w.kind = 0 AND w.name = e.name COLLATE "C" OFFSET 0));
    IF v_queued THEN
      SELECT pg_catalog.array_agg(b.below ORDER BY b.n),
             pg_catalog.array_agg(CASE WHEN b.below IS NOT NULL THEN pgxlock_first_ahead(0, b.name, b.below) END ORDER BY b.n)
        INTO v_below, v_firsts
        FROM (SELECT w.n, w.name, CASE WHEN w.ticket = 0 THEN 9223372036854775807 ELSE w.ticket END AS below
                FROM unnest(p_names, p_tickets) WITH ORDINALITY AS w (name, ticket, n)) b;
    END IF;

    SELECT pg_catalog.array_agg(e.n ORDER BY e.n) INTO v_go
      FROM generate_series(1::bigint, v_count::bigint) e (n)
     WHERE v_firsts[e.n] IS NULL;
    IF v_go IS NOT NULL THEN
      SELECT pg_catalog.array_agg(t.acquired ORDER BY t.n), pg_catalog.array_agg(t.fencing_token ORDER BY t.n),
             pg_catalog.array_agg(t.held_by ORDER BY t.n), pg_catalog.array_agg(t.remaining_ms ORDER BY t.n)
        INTO v_acquired, v_tokens, v_held_by, v_ms
        FROM (SELECT pg_catalog.array_agg(p_names[g.i] ORDER BY g.i) AS names,
                     pg_catalog.array_agg(p_holders[g.i] ORDER BY g.i) AS holders,
                     pg_catalog.array_agg(p_ttls[g.i] ORDER BY g.i) AS ttls,
                     pg_catalog.array_agg(p_metadata[g.i] ORDER BY g.i) AS metadata
                FROM pg_catalog.unnest(v_go) g (i)) g,
             LATERAL (SELECT e.*
                        FROM pgxlock_acquire_each(g.names, g.holders, g.ttls, g.metadata)
                             WITH ORDINALITY AS e (acquired, fencing_token, held_by, remaining_ms, n)
                       WHERE NOT p_shared
                      UNION ALL
                      SELECT s.acquired, s.fencing_token, s.held_by::text,
                             (date_part('epoch'::text, s.remaining) * 1000::float8)::bigint, e.n
                        FROM unnest(g.names, g.holders, g.ttls, g.metadata)
                             WITH ORDINALITY AS e (name, holder, ttl, metadata, n),
                             try_acquire_shared_lock(e.name::varchar, e.holder::varchar, e.ttl::float8 * interval '1 millisecond',
                                                     e.metadata::jsonb) s
                       WHERE p_shared) t;
    END IF;
    IF NOT v_queued THEN
      RETURN QUERY SELECT w.acquired, w.token, w.held_by, w.ms, false
                     FROM unnest(v_acquired, v_tokens, v_held_by, v_ms) AS w (acquired, token, held_by, ms);
      RETURN;
    END IF;
    PERFORM pgxlock_settle_tickets(p_names, p_tickets,
      (SELECT pg_catalog.array_agg(g.acquired ORDER BY e.n)
         FROM generate_series(1::bigint, v_count::bigint) e (n)
         LEFT JOIN unnest(v_go, v_acquired) AS g (i, acquired) ON g.i = e.n),
      (SELECT pg_catalog.array_agg(coalesce(b.first, b.below) ORDER BY b.n)
         FROM unnest(v_firsts, v_below) WITH ORDINALITY AS b (first, below, n)));

    v_now := clock_timestamp();
    RETURN QUERY
    SELECT coalesce(g.acquired, false), g.token, coalesce(g.held_by, l.holder),
           least(s.ms, coalesce(CASE WHEN s.ms IS NULL OR g.ms > 0::bigint THEN g.ms END, l.ms)),
           v_firsts[w.n] IS NOT NULL
      FROM pg_catalog.unnest(p_names) WITH ORDINALITY AS w (name, n)
      LEFT JOIN unnest(v_go, v_acquired, v_tokens, v_held_by, v_ms) AS g (i, acquired, token, held_by, ms) ON g.i = w.n
      LEFT JOIN LATERAL (
        SELECT l.holder_id::text AS holder,
               CASE WHEN isfinite(l.expires_at)
                    THEN (date_part('epoch'::text, l.expires_at - v_now) * 1000::float8)::bigint END AS ms
          FROM distributed_locks l
         WHERE v_firsts[w.n] IS NOT NULL AND l.lock_name::text = w.name COLLATE "C" AND l.expires_at > v_now OFFSET 0) l ON true
      LEFT JOIN LATERAL (
        SELECT greatest(2::bigint, (date_part('epoch'::text, v_now - q.since) * 500::float8)::bigint) AS ms
          FROM pgxlock_waiters q
         WHERE NOT g.acquired AND q.kind = 0 AND q.name = w.name COLLATE "C" AND q.ticket = p_tickets[w.n]
           AND NOT EXISTS (SELECT FROM distributed_locks l
                            WHERE l.lock_name::text = w.name COLLATE "C"
                              AND l.expires_at > v_now
                              AND NOT pgxlock_change_pending(l.xmax) OFFSET 0) OFFSET 0) s ON true
     ORDER BY w.n;
  END $$;
  COMMENT ON FUNCTION pgxlock_try_in_turn(text[], text[], bigint[], text[], bigint[], boolean) IS
    'pgxlock, internal: acquires leases in turn, exclusively or shared. A NULL ticket ignores the queue; 0 has no '
    'position yet. ahead: refused because a waiter is ahead. A shared request refused with no waiter ahead, and held_by '
    '*shared or NULL: the group is being changed; try again. Each call in a transaction of its own.';

  -- STABLE: a VOLATILE function would read a snapshot of its own.
  CREATE OR REPLACE FUNCTION pgxlock_full_xid(p_xid xid) RETURNS xid8
  LANGUAGE sql STABLE
  RETURN greatest(0::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 2147483648::bigint
                  + (p_xid::text::bigint - pg_snapshot_xmax(pg_current_snapshot())::text::bigint
                     + 2147483648::bigint & 4294967295::bigint))::text::xid8;
  COMMENT ON FUNCTION pgxlock_full_xid(xid) IS
    'pgxlock, internal: the transaction id of a row that the snapshot shows, with its epoch.';

  CREATE OR REPLACE FUNCTION pgxlock_change_pending(p_xmax xid) RETURNS boolean
  LANGUAGE sql STABLE
  RETURN p_xmax <> '0'::xid AND NOT pg_visible_in_snapshot(pgxlock_full_xid(p_xmax), pg_current_snapshot());
  COMMENT ON FUNCTION pgxlock_change_pending(xid) IS
    'pgxlock, internal: whether the transaction that deleted, changed or locked a row (its xmax) is in progress in the '
    'snapshot that shows the row.';

  -- One statement looks, pins, locks and deletes: a row that another transaction changes meanwhile
  -- is skipped, to be tried again, and so is one that moved since the snapshot: it is locked and not
  -- found. Rows are deleted by ctid, which no other row can get as long as this snapshot lives. CASE
  -- tries the pin after the row was found to be the holder's, or callers would pin leases of others.
  -- Rows are locked in the order of the names: SKIP LOCKED waits too, if another session locks a new
  -- version of a row at the wrong moment. Nearly all releases end there; what became of the others
  -- is looked up afterwards.
  CREATE OR REPLACE FUNCTION pgxlock_release_batch(p_names text[], p_holders text[], p_tokens bigint[]) RETURNS text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET enable_tidscan = on AS $$
  DECLARE
    v_count    integer := pg_catalog.cardinality(p_names);
    v_outcomes text;                        -- a letter for each entry
    v_tokens   bigint[];                    -- of the rows that were removed
    v_names    text[];
    v_holds    text[];
    v_lives    boolean[];
  BEGIN
    IF (v_count <= 1000
        AND pg_catalog.cardinality(p_holders) = v_count
        AND pg_catalog.cardinality(p_tokens) = v_count) IS NOT TRUE THEN
      PERFORM pgxlock_require(false,
                              'p_names must have at most 1000 elements, and every name needs a holder and a token, which '
                              'may be NULL');
    END IF;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('cannot release a lock on a standby server');
    END IF;

    WITH removed AS (
      DELETE FROM distributed_locks l
       WHERE l.ctid = ANY (ARRAY(
               SELECT k.id
                 FROM (SELECT w.name, w.holder, w.token FROM unnest(p_names, p_holders, p_tokens) AS w (name, holder, token)
                        WHERE left(w.holder, 1) <> '*' ORDER BY w.name COLLATE "C" OFFSET 0) w,
                      LATERAL (SELECT l.ctid AS id FROM distributed_locks l
                                WHERE l.lock_name::text = w.name COLLATE "C"
                                  AND CASE WHEN l.lock_name::text = w.name COLLATE "C"
                                                AND l.holder_id::text = w.holder COLLATE "C"
                                             AND l.fencing_token = coalesce(w.token, l.fencing_token)
                                           THEN pg_try_advisory_xact_lock(pgxlock_key('pin', w.name)) END
                                  FOR UPDATE OF l SKIP LOCKED) k))
      RETURNING l.fencing_token AS token, l.lock_name::text AS name, l.holder_id::text AS holder,
                l.expires_at > clock_timestamp() AS live
    )
    SELECT CASE WHEN count(*) FILTER (WHERE r.live) = v_count THEN repeat('r', v_count) END,
           pg_catalog.array_agg(r.token), pg_catalog.array_agg(r.name), pg_catalog.array_agg(r.holder),
           pg_catalog.array_agg(r.live)
      INTO v_outcomes, v_tokens, v_names, v_holds, v_lives FROM removed r;
    IF v_outcomes IS NULL THEN
      v_outcomes := (
        SELECT string_agg(CASE WHEN r.live THEN 'r'
                               WHEN r.token IS NOT NULL THEN 'e'
                               WHEN l.live IS NULL THEN 'g'
                               WHEN l.live THEN 's'
                               -- and not kept: the lease may be another's by now
                               WHEN pg_try_advisory_lock(pgxlock_key('pin', w.name)) THEN
                                 CASE WHEN pg_advisory_unlock(pgxlock_key('pin', w.name)) THEN 's' END
                               ELSE 'e' END, '' ORDER BY w.n)       -- the owner of the pin keeps or removes it
          FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n)
          LEFT JOIN unnest(v_tokens, v_names, v_holds, v_lives) AS r (token, name, holder, live)
            ON r.name = w.name COLLATE "C" AND r.holder = w.holder COLLATE "C" AND r.token = coalesce(w.token, r.token)
          LEFT JOIN LATERAL (SELECT l.expires_at > clock_timestamp() AS live FROM distributed_locks l
                              WHERE l.lock_name::text = w.name COLLATE "C" AND l.holder_id::text = w.holder COLLATE "C"
                                AND l.fencing_token = coalesce(w.token, l.fencing_token)
                                AND left(w.holder, 1) <> '*' OFFSET 0) l ON true);
    END IF;

    -- This later statement sees every ticket committed before the rows were touched; a process with
    -- a later ticket finds its row touched, see pgxlock_try_in_turn(). Above READ COMMITTED it
    -- could see too little, so it says that a waiter may exist.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RETURN upper(v_outcomes);
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.unnest(p_names) AS w (name),
                   LATERAL (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = w.name COLLATE "C" OFFSET 0) q) THEN
      RETURN v_outcomes;
    END IF;
    RETURN pg_catalog.array_to_string(ARRAY(
      SELECT CASE WHEN EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = w.name COLLATE "C" OFFSET 0)
                  THEN upper(substr(v_outcomes, w.n::integer, 1)) ELSE substr(v_outcomes, w.n::integer, 1) END
        FROM pg_catalog.unnest(p_names) WITH ORDINALITY AS w (name, n)), '');
  END $$;
  COMMENT ON FUNCTION pgxlock_release_batch(text[], text[], bigint[]) IS
    'pgxlock, internal: releases leases; a NULL token is any of the holder''s. Returns a letter for each entry, in order: '
    'r released (it was live), e expired (its row goes, unless another transaction has the pin), g gone (released before, '
    'or taken over), s skipped (asserted by an open transaction, or its row is locked: try again); in upper case if the '
    'lease has waiters, which pgxlock_wake_batch() wakes after this has committed. Each call in a transaction of its '
    'own.';

  -- The same for a lone caller.
  CREATE OR REPLACE FUNCTION pgxlock_release_one(p_name text, p_holder text, p_token bigint) RETURNS text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET enable_tidscan = on AS $$
  DECLARE
    v_outcome text;
  BEGIN
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('cannot release a lock on a standby server');
    END IF;
    DELETE FROM distributed_locks l
     WHERE l.ctid = (SELECT l.ctid FROM distributed_locks l
                      WHERE l.lock_name::text = p_name COLLATE "C"
                        AND CASE WHEN l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = p_holder COLLATE "C"
                                   AND l.fencing_token = coalesce(p_token, l.fencing_token) AND left(p_holder, 1) <> '*'
                                 THEN pg_try_advisory_xact_lock(pgxlock_key('pin', p_name)) END
                        FOR UPDATE OF l SKIP LOCKED)
    RETURNING CASE WHEN l.expires_at > clock_timestamp() THEN 'r' ELSE 'e' END INTO v_outcome;
    IF v_outcome IS NULL THEN
      RETURN pgxlock_release_batch(ARRAY[p_name], ARRAY[p_holder], ARRAY[p_token]);
    END IF;
    RETURN CASE WHEN current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
                  OR EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = 0 AND q.name = p_name COLLATE "C" OFFSET 0)
                THEN upper(v_outcome) ELSE v_outcome END;
  END $$;
  COMMENT ON FUNCTION pgxlock_release_one(text, text, bigint) IS
    'pgxlock, internal: as pgxlock_release_batch(), for one lease.';

  -------------------------------------------------------------------- wake --
  -- The stamp in woken stays until the ticket's process tries: if every wake renewed it, a frozen
  -- process would keep its precedence while others come and go. If all waiters have been passed,
  -- they are woken all the same, one after the other.
  --
  -- After the wake timeout a caller checks again, with the ticket that it woke. If that was passed,
  -- the next one is woken. If it has no stamp and the lock is free, a try in flight removed the
  -- stamp, or the row was locked; then it is woken once more.
  CREATE OR REPLACE FUNCTION pgxlock_wake_batch(p_kinds integer[], p_names text[], p_tickets bigint[])
  RETURNS TABLE (n bigint, woken_ticket bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET enable_tidscan = on SET lock_timeout = '100ms' AS $$
  DECLARE
    v_count integer := pg_catalog.cardinality(p_names);
    v_kind  integer;                        -- of the last lock whose first ticket was woken
    v_name  text;
    e record;                               -- a lock
    f record;                               -- its first ticket
  BEGIN
    IF (v_count <= 1000
        AND pg_catalog.cardinality(p_kinds) = v_count
        AND pg_catalog.cardinality(p_tickets) = v_count) IS NOT TRUE THEN
      PERFORM pgxlock_require(false, 'p_names must have at most 1000 elements, and every lock needs a kind, a name and a '
                                     'ticket, which may be NULL');
    END IF;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('there is no queue on a standby server');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      PERFORM pgxlock_check_read_committed('waiters are woken in READ COMMITTED: an older snapshot does not show them');
    END IF;

    -- One statement for all locks would cost one lock, which nearly every call is for, three times as much.
    FOR e IN SELECT w.kind, w.name COLLATE "C" AS name, w.ticket, w.n
               FROM unnest(p_kinds, p_names, p_tickets) WITH ORDINALITY AS w (kind, name, ticket, n)
              ORDER BY w.kind, w.name COLLATE "C", w.n LOOP
      CONTINUE WHEN e.kind = v_kind AND e.name = v_name COLLATE "C";
      IF e.ticket IS NOT NULL THEN
        CONTINUE WHEN NOT EXISTS (SELECT FROM pgxlock_waiters q
                                   WHERE q.kind = e.kind AND q.name = e.name AND q.ticket = e.ticket
                                     AND CASE WHEN q.woken IS NOT NULL THEN pgxlock_wake_timed_out(q.woken)
                                              WHEN e.kind = 0 THEN NOT EXISTS (
                                                SELECT FROM distributed_locks l
                                                 WHERE l.lock_name::text = e.name COLLATE "C"
                                                   AND l.expires_at > clock_timestamp())
                                              ELSE NOT EXISTS (
                                                SELECT FROM pg_locks l
                                                 WHERE l.locktype = 'advisory'
                                                   AND l.granted
                                                   AND l.database = (SELECT d.oid FROM pg_database d
                                                                      WHERE d.datname = current_database())
                                                   AND l.objsubid::integer = e.kind
                                                   AND (l.classid::bigint << 32 | l.objid::bigint)::text = e.name COLLATE "C")
                                              END);
      END IF;
      v_kind := e.kind;
      v_name := e.name;
      SELECT q.ticket, q.client, q.woken, q.n > 1::bigint OR q.any_passed AS after_others INTO f
        FROM (SELECT a.ticket, a.client, a.live_until, a.woken, row_number() OVER (ORDER BY a.passed, a.ticket) AS n,
                     bool_or(a.passed) OVER () AS any_passed
                FROM (SELECT b.ticket, b.client, b.live_until, b.woken, pgxlock_wake_timed_out(b.woken) AS passed
                        FROM pgxlock_waiters b WHERE b.kind = e.kind AND b.name = e.name OFFSET 0) a
               WHERE NOT a.passed OR e.ticket IS NULL OR a.ticket > e.ticket
               ORDER BY a.passed, a.ticket LIMIT 10001) q
       WHERE q.n > 10000::bigint OR NOT pgxlock_waiter_dead(q.client, q.live_until)     -- as pgxlock_first_ahead() does
       LIMIT 1;
      IF FOUND AND f.woken IS NULL THEN
        UPDATE pgxlock_waiters q
           SET woken = clock_timestamp()
         WHERE q.ctid = (SELECT w.ctid FROM pgxlock_waiters w
                          WHERE w.kind = e.kind AND w.name = e.name AND w.ticket = f.ticket AND w.woken IS NULL
                            FOR NO KEY UPDATE OF w SKIP LOCKED);
      END IF;
      IF f.client IS NOT NULL THEN
        PERFORM pg_notify('pgxlock_' || f.client::text, '1:' || e.kind::text || ':' || e.name);
      END IF;
      IF f.after_others
         OR f.ticket IS NULL AND EXISTS (SELECT FROM pgxlock_waiters q WHERE q.kind = e.kind AND q.name = e.name) THEN
        PERFORM pgxlock_remove_dead(ARRAY[e.kind], ARRAY[e.name], ARRAY[coalesce(f.ticket, 9223372036854775807)]);
      END IF;
      IF f.ticket IS NOT NULL THEN
        n := e.n;
        woken_ticket := f.ticket;
        RETURN NEXT;
      END IF;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_wake_batch(integer[], text[], bigint[]) IS
    'pgxlock, internal: wakes the first waiter of each lock and returns its ticket; with p_tickets, only if that ticket '
    'was woken and has not tried within the wake timeout. In a transaction of its own, after the release has committed.';

  CREATE OR REPLACE FUNCTION wake_lock_waiter(p_lock_name varchar) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_require(p_lock_name IS NOT NULL, 'p_lock_name must not be NULL');
    PERFORM FROM pgxlock_wake_batch('{0}'::integer[], ARRAY[p_lock_name::text], ARRAY[NULL]::bigint[]);
    RETURN FOUND;
  END $$;
  COMMENT ON FUNCTION wake_lock_waiter(varchar) IS
    'Wakes the first waiter of a lease; true if there is one. Call it in a transaction of its own after release_lock() '
    'has committed, which notifies no waiter: a NOTIFY in a transaction that writes makes commits wait for each other and '
    'PREPARE TRANSACTION fail. Without this call waiters notice the release later. READ COMMITTED only.';

  -- pgxlock_acquire_batch() does this for leases. A process that was woken, tried and was refused
  -- has shown that it lives: else other waiters would pass its ticket for good.
  CREATE OR REPLACE FUNCTION pgxlock_refused_batch(p_kinds integer[], p_names text[], p_tickets bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET lock_timeout = '100ms' AS $$
  BEGIN
    PERFORM pgxlock_require(pg_catalog.cardinality(p_names) <= 1000
                            AND pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names)
                            AND pg_catalog.cardinality(p_tickets) = pg_catalog.cardinality(p_names),
                            'p_names must have at most 1000 elements, and every ticket needs a kind and a name');
    PERFORM pgxlock_check_primary('there is no queue on a standby server');
    WITH locked AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_kinds, p_names, p_tickets) AS e (kind, name, ticket)
        JOIN pgxlock_waiters w ON w.kind = e.kind AND w.name = e.name COLLATE "C" AND w.ticket = e.ticket
       WHERE w.woken IS NOT NULL AND w.kind <> 0 AND w.role = session_user::text
       ORDER BY w.kind, w.name, w.ticket
         FOR NO KEY UPDATE OF w SKIP LOCKED
    )
    UPDATE pgxlock_waiters w SET woken = NULL FROM locked k WHERE w.kind = k.kind AND w.name = k.name AND w.ticket = k.ticket;
  END $$;
  COMMENT ON FUNCTION pgxlock_refused_batch(integer[], text[], bigint[]) IS
    'pgxlock, internal: clears the stamps of tickets whose try of an advisory lock was refused, so that they keep their '
    'precedence. In a transaction of its own, after the try. Never waits.';

  -- The server grants a shared lock beside other readers, whatever writer waits.
  CREATE OR REPLACE FUNCTION pgxlock_waited_for(p_kinds integer[], p_names text[]) RETURNS boolean[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    PERFORM pgxlock_require(pg_catalog.cardinality(p_names) <= 1000
                            AND pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names),
                            'p_names must have at most 1000 elements, and every name needs a kind');
    PERFORM pgxlock_check_primary('there is no queue on a standby server');
    PERFORM pgxlock_check_read_committed('waiters are looked up in READ COMMITTED: an older snapshot does not show them');
    RETURN (
      SELECT coalesce(pg_catalog.array_agg(
                        pgxlock_first_ahead(w.kind, w.name, 9223372036854775807) IS NOT NULL ORDER BY w.n), '{}'::boolean[])
        FROM unnest(p_kinds, p_names) WITH ORDINALITY AS w (kind, name, n));
  END $$;
  COMMENT ON FUNCTION pgxlock_waited_for(integer[], text[]) IS
    'pgxlock, internal: whether each lock has a live waiter that was not passed. A shared try of an advisory lock checks '
    'this first. Writes nothing and never waits.';

  CREATE OR REPLACE FUNCTION pgxlock_notify_holders(p_kinds integer[], p_ids bigint[]) RETURNS integer[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  AS $$
  BEGIN
    PERFORM pgxlock_require(pg_catalog.cardinality(p_ids) <= 1000
                            AND pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_ids),
                            'p_ids must have at most 1000 elements, and every key needs a kind');
    PERFORM pgxlock_check_primary('a standby server cannot notify');
    RETURN (
      WITH granted AS MATERIALIZED (
        SELECT DISTINCT l.objsubid::integer AS kind, l.classid::bigint << 32 | l.objid::bigint AS id, l.pid
          FROM pg_locks l
         WHERE l.locktype = 'advisory'
           AND l.granted
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      ), told AS MATERIALIZED (
        SELECT e.n, CASE WHEN g.pid IS NOT NULL       -- else it is a prepared transaction
                         THEN pg_notify('pgxlock_holder_' || g.pid::text, '1:' || e.kind::text || ':' || e.id::text) IS NULL
                         ELSE false END AS done
          FROM unnest(p_kinds, p_ids) WITH ORDINALITY AS e (kind, id, n)
          JOIN granted g ON g.kind = e.kind AND g.id = e.id
      )
      SELECT coalesce(pg_catalog.array_agg((SELECT count(*)::integer FROM told t
                                             WHERE t.n = e.n AND t.done IS NOT NULL) ORDER BY e.n), '{}'::integer[])
        FROM generate_series(1::bigint, pg_catalog.cardinality(p_ids)::bigint) e (n));
  END $$;
  COMMENT ON FUNCTION pgxlock_notify_holders(integer[], bigint[]) IS
    'pgxlock, internal: notifies the sessions that hold advisory keys, on the channel pgxlock_holder_<pid>, that a waiter '
    'exists; returns how many hold each.';

  ------------------------------------------------------------- SQL callers --
  -- The caller sleeps, because a function that slept would keep its snapshot, and a procedure that commits
  -- cannot be SECURITY DEFINER, nor run in a driver's transaction; and both would grant the lease to a client
  -- that died meanwhile. So a ticket of a SQL caller has no listener: what wakes it is its next call. That
  -- comes within ask_again_ms, which stays below the wake timeout.
  --
  -- A quarter of the time for which the lease has been held keeps both bounded: the time that a free lease
  -- waits for its first waiter, to a quarter of a hold; and the calls for one grant, to a few and the
  -- logarithm of the hold. A waiter further back sleeps as often longer as there are tickets ahead.
  CREATE OR REPLACE FUNCTION acquire_in_turn(
    p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30, p_ticket bigint DEFAULT NULL,
    p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT fencing_token bigint, OUT ticket bigint, OUT ask_again_ms integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    SELECT t.tokens IS NOT NULL, t.tokens[1], t.ticket, t.ask_again_ms INTO acquired, fencing_token, ticket, ask_again_ms
      FROM pgxlock_wait_in_turn(p_lock_name::text, p_holder_id::text, p_ttl_seconds, p_ticket, p_metadata, false,
                                NULL::integer, NULL::integer) t;
  END $$;
  COMMENT ON FUNCTION acquire_in_turn(varchar, varchar, integer, bigint, jsonb) IS
    'Acquires the lease in turn with all that wait for it. acquired: as acquire_lock(), with the token. Else the holder '
    'has a ticket in the queue: sleep ask_again_ms milliseconds, and call again with that ticket. A ticket that is not used '
    'for 3 seconds is void, and the next call joins at the end. Never waits itself. Each call in a transaction of its own.';

  -- p_wanted: how many permits of a semaphore with p_permits are wanted together; NULL for a lease.
  CREATE OR REPLACE FUNCTION pgxlock_wait_in_turn(p_name text, p_holder text, p_ttl_seconds integer, p_ticket bigint,
    p_metadata jsonb, p_shared boolean, p_permits integer, p_wanted integer,
    OUT tokens bigint[], OUT permits varchar[], OUT ticket bigint, OUT ask_again_ms integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_queue   text := p_name || CASE WHEN p_wanted IS NULL THEN '' ELSE '#' END;
    v_ttl     interval;
    v_ttl_ms  bigint := p_ttl_seconds::bigint * 1000::bigint;
    v_held_by text[];                       -- who has the live lease, or permits; NULL: it is free
    v_since   timestamptz;                  -- when the last of them acquired it
    v_has     boolean;                      -- the caller is one of them
    v_free    boolean;                      -- nothing but the queue may keep the caller out
    v_mine    record;                       -- the caller's ticket
    v_due     boolean;                      -- it is new, or to be refreshed
    v_tries   boolean;
    v_first   bigint;                       -- the ticket ahead of it
    v_ahead   bigint;
    v_hold    text;
    v_now     timestamptz;
    v_life    interval := interval '3 seconds';      -- as long as a ticket of a Locker that cannot listen
    v_sees    boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
  BEGIN
    v_ttl := pgxlock_check_try(p_name, p_holder, pg_catalog.make_interval(secs => p_ttl_seconds), p_metadata);
    PERFORM pgxlock_require(p_ticket IS NULL OR p_ticket > 0::bigint,
                            'p_ticket must be the ticket of the last answer, or NULL in the first call');
    IF p_wanted IS NULL THEN
      SELECT ARRAY[l.holder_id::text], CASE WHEN isfinite(l.acquired_at) THEN l.acquired_at END INTO v_held_by, v_since
        FROM distributed_locks l WHERE l.lock_name::text = p_name COLLATE "C" AND l.expires_at > clock_timestamp();
      v_free := v_held_by IS NULL;
      IF NOT p_shared THEN
        v_has := v_held_by[1] = p_holder COLLATE "C";
      ELSIF v_held_by[1] = '*shared' THEN
        v_free := true;
        v_has := EXISTS (SELECT FROM distributed_lock_shares s, distributed_locks l
                          WHERE s.lock_name::text = p_name COLLATE "C"
                            AND s.holder_id::text = p_holder COLLATE "C"
                            AND s.expires_at > clock_timestamp()
                            AND l.lock_name::text = p_name COLLATE "C"
                            AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token);
      END IF;
    ELSE
      PERFORM pgxlock_check_read_committed('permits are acquired in turn in READ COMMITTED: an older snapshot does not show '
                                           'what an unanswered call has acquired');
      -- With the pin, and read after it: an unanswered call may still be running.
      v_free := pg_try_advisory_xact_lock(pgxlock_share_pin(v_queue, p_holder));
      SELECT pg_catalog.array_agg(l.holder), max(l.since),
             pg_catalog.array_agg(l.name ORDER BY s.at) FILTER (WHERE l.holder = p_holder COLLATE "C")
        INTO v_held_by, v_since, permits
        FROM generate_series(1, p_permits) s (at),          -- one by one: a join could read the whole table
             LATERAL (SELECT l.holder_id::text AS holder, l.lock_name AS name,
                             CASE WHEN isfinite(l.acquired_at) THEN l.acquired_at END AS since
                        FROM distributed_locks l
                       WHERE l.lock_name::text = (v_queue || s.at::text) COLLATE "C"
                         AND l.expires_at > clock_timestamp() OFFSET 0) l;
      v_has := permits IS NOT NULL;
      IF pg_catalog.cardinality(permits) <> p_wanted THEN
        RAISE EXCEPTION 'p_holder_id "%" has % permits of "%", and p_wanted is %', p_holder, pg_catalog.cardinality(permits),
            p_name, p_wanted
          USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Use another holder for another acquisition, or release these first.';
      END IF;
      v_free := v_free AND p_permits - coalesce(pg_catalog.cardinality(v_held_by), 0) >= p_wanted;
    END IF;
    SELECT w.ticket, w.woken, w.live_until, w.xmin AS changed INTO v_mine
      FROM pgxlock_waiters w
     WHERE w.kind = 0 AND w.name = v_queue COLLATE "C"
       AND w.ticket BETWEEN coalesce(p_ticket, 1::bigint) AND coalesce(p_ticket, 9223372036854775807)
       AND w.owner = p_holder COLLATE "C" AND w.role = session_user::text AND w.client IS NULL
       AND w.live_until > clock_timestamp()
     ORDER BY w.ticket LIMIT 1;

    -- It may be the caller's by a call whose answer was lost. A ticket that cannot be removed is being
    -- stamped by a waker: with it left behind, the caller would stand ahead of others without waiting.
    v_tries := v_has;
    IF v_has IS NOT TRUE AND v_free THEN
      v_first := pgxlock_first_ahead(0, v_queue, coalesce(v_mine.ticket, 9223372036854775807));
      v_tries := v_first IS NULL;
      IF v_tries AND v_mine.ticket IS NOT NULL THEN
        PERFORM FROM pgxlock_waiters w
          WHERE w.kind = 0 AND w.name = v_queue COLLATE "C" AND w.ticket = v_mine.ticket FOR UPDATE SKIP LOCKED;
        v_tries := FOUND;
      END IF;
    END IF;
    IF v_tries THEN
      IF p_wanted IS NULL AND p_shared THEN
        tokens := (SELECT ARRAY[t.fencing_token]
                     FROM try_acquire_shared_lock(p_name::varchar, p_holder::varchar, v_ttl, p_metadata) t WHERE t.acquired);
      ELSIF p_wanted IS NULL THEN
        tokens := (SELECT ARRAY[t.fencing_token]
                     FROM try_acquire_lock(p_name::varchar, p_holder::varchar, v_ttl, p_metadata) t WHERE t.acquired);
      ELSIF v_has THEN
        tokens := (SELECT pg_catalog.array_agg(t.fencing_token ORDER BY t.n)
                     FROM pgxlock_acquire_each(permits::text[], pg_catalog.array_fill(p_holder, ARRAY[p_wanted]),
                                               pg_catalog.array_fill(v_ttl_ms, ARRAY[p_wanted]),
                                               pg_catalog.array_fill(p_metadata::text, ARRAY[p_wanted]))
                            WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, n)
                   HAVING bool_and(t.acquired));
      ELSE
        SELECT pg_catalog.array_agg(t.fencing_token ORDER BY t.permit),
               pg_catalog.array_agg((v_queue || t.permit::text)::varchar ORDER BY t.permit)
          INTO tokens, permits
          FROM pgxlock_permit_batch(ARRAY[p_name], ARRAY[p_permits], ARRAY[p_holder], ARRAY[v_ttl_ms], ARRAY[p_metadata::text],
                                    ARRAY[NULL]::bigint[], ARRAY[p_wanted]) t
        HAVING bool_and(t.acquired);
      END IF;
      IF tokens IS NOT NULL THEN
        DELETE FROM pgxlock_waiters w
         WHERE w.kind = 0 AND w.name = v_queue COLLATE "C"
           AND w.ticket = (SELECT q.ticket FROM pgxlock_waiters q
                            WHERE q.kind = 0 AND q.name = v_queue COLLATE "C" AND q.ticket = v_mine.ticket
                              FOR UPDATE SKIP LOCKED);
        -- The next one may share it as well, or find permits enough.
        IF FOUND AND v_sees AND (p_shared OR p_permits - coalesce(pg_catalog.cardinality(v_held_by), 0) > p_wanted) THEN
          PERFORM FROM pgxlock_wake_batch('{0}'::integer[], ARRAY[v_queue], ARRAY[NULL]::bigint[]);
        END IF;
        RETURN;
      END IF;
      v_since := NULL;                      -- another transaction was faster, or is about to end
    END IF;

    permits := NULL;
    v_now := clock_timestamp();
    v_due := (v_mine.live_until >= v_now + v_life / 2::float8) IS NOT TRUE;          -- every second and a half
    ticket := v_mine.ticket;
    IF ticket IS NULL THEN
      IF EXISTS (SELECT FROM pgxlock_waiters w
                  WHERE w.ticket = p_ticket AND w.live_until > v_now
                    AND NOT (w.kind = 0 AND w.name = v_queue COLLATE "C" AND w.owner = p_holder COLLATE "C"
                             AND w.role = session_user::text AND w.client IS NULL)) THEN
        RAISE EXCEPTION 'p_ticket % is not a ticket of holder "%" for lock "%"', p_ticket, p_holder, p_name
          USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Pass the ticket that the last call with this name and this holder returned, or NULL.';
      END IF;
      INSERT INTO pgxlock_waiters AS w (kind, name, ticket, owner, waiters, since, live_until, holds, role)
      VALUES (0, v_queue, nextval('pgxlock_tickets'::regclass), p_holder, 1, v_now, v_now + v_life, ARRAY[p_holder],
              session_user::text)
      ON CONFLICT DO NOTHING                -- a number that was written without the sequence: the next call draws another
      RETURNING w.ticket INTO ticket;
    ELSIF pg_current_xact_id_if_assigned() IS NOT NULL AND pg_xact_status(pgxlock_full_xid(v_mine.changed)) = 'in progress' THEN
      RAISE EXCEPTION 'ticket % for lock "%" is not committed, and has no position in the queue before', ticket, p_name
        USING ERRCODE = 'active_sql_transaction',
              HINT = 'Make each call in a transaction of its own (autocommit), and sleep after it has committed.';
    ELSIF v_mine.woken IS NOT NULL OR v_due THEN
      UPDATE pgxlock_waiters w
         SET woken = NULL, live_until = v_now + v_life
       WHERE w.kind = 0 AND w.name = v_queue COLLATE "C"
         AND w.ticket = (SELECT q.ticket FROM pgxlock_waiters q
                          WHERE q.kind = 0 AND q.name = v_queue COLLATE "C" AND q.ticket = v_mine.ticket
                            FOR NO KEY UPDATE SKIP LOCKED);
    END IF;

    IF v_due THEN
      PERFORM pgxlock_remove_dead('{0}'::integer[], ARRAY[v_queue], ARRAY[ticket]);
      IF (v_has OR v_free AND v_first IS NULL) IS NOT TRUE           -- else another transaction keeps it out
         AND (v_held_by[1] IN ('*shared', p_holder)
              OR EXISTS (SELECT FROM pgxlock_waiters w, pg_catalog.unnest(w.holds) h (hold)
                          WHERE w.holds OPERATOR(pg_catalog.<>) '{}'::text[]
                            AND w.ticket < pgxlock_wait_in_turn.ticket
                            AND (h.hold COLLATE "C" IN (SELECT b.holder FROM pg_catalog.unnest(v_held_by) b (holder)))
                                IS TRUE)) THEN           -- IS TRUE, so that it is hashed: there may be 10000 permits
        v_hold := (SELECT d.hold FROM pgxlock_deadlocks('{0}'::integer[], ARRAY[v_queue], ARRAY[ticket]) d);
        IF v_hold IS NOT NULL THEN
          RAISE EXCEPTION 'deadlock: lock "%" is held by a holder that waits, directly or through others, for what "%" holds',
              p_name, v_hold
            USING ERRCODE = 'deadlock_detected',
                  HINT = 'Release what this holder holds, then try again. Acquire locks in one order everywhere.';
        END IF;
      END IF;
    END IF;

    -- A release that woke no waiter is noticed here, so that a ticket of a dead caller is passed. The first one
    -- may also wait for readers, or for more permits than are free: then it is not woken at every call.
    IF v_first IS NOT NULL AND v_sees AND (v_due OR v_held_by IS NULL AND p_wanted IS NULL)
       AND EXISTS (SELECT FROM pgxlock_waiters w
                    WHERE w.kind = 0 AND w.name = v_queue COLLATE "C" AND w.ticket = v_first AND w.woken IS NULL) THEN
      PERFORM FROM pgxlock_wake_batch('{0}'::integer[], ARRAY[v_queue], ARRAY[NULL]::bigint[]);
    END IF;

    v_ahead := (SELECT count(*)
                  FROM (SELECT FROM pgxlock_waiters w
                         WHERE w.kind = 0 AND w.name = v_queue COLLATE "C" AND w.ticket < pgxlock_wait_in_turn.ticket
                           AND w.live_until > v_now AND NOT pgxlock_wake_timed_out(w.woken)
                         LIMIT 30) a);
    ask_again_ms := least(150::float8, (v_ahead + 1::bigint)::float8
                          * greatest(5::float8, coalesce(date_part('epoch'::text, v_now - v_since) * 250::float8,
                                                         10::float8)))::integer;
  END $$;
  COMMENT ON FUNCTION pgxlock_wait_in_turn(text, text, integer, bigint, jsonb, boolean, integer, integer) IS
    'pgxlock, internal: acquire_in_turn() for a lease, a share of it, or p_wanted of p_permits permits. tokens: NULL if it was '
    'refused; permits: their names.';

  CREATE OR REPLACE FUNCTION leave_queue(p_lock_name varchar, p_holder_id varchar) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name text := p_lock_name;
    v_me   text := p_holder_id;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    PERFORM pgxlock_check_primary('there is no queue on a standby server');
    PERFORM pgxlock_check_read_committed('the queue is left in READ COMMITTED: an older snapshot does not show other waiters');
    DELETE FROM pgxlock_waiters w
     WHERE w.kind = 0 AND w.name = v_name COLLATE "C"
       AND w.ticket = ANY (ARRAY(SELECT q.ticket FROM pgxlock_waiters q
                                  WHERE q.kind = 0 AND q.name = v_name COLLATE "C"
                                    AND q.owner = v_me COLLATE "C" AND q.role = session_user::text AND q.client IS NULL
                                  ORDER BY q.ticket FOR UPDATE SKIP LOCKED));
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM FROM pgxlock_wake_batch('{0}'::integer[], ARRAY[v_name], ARRAY[NULL]::bigint[]);
    RETURN true;
  END $$;
  COMMENT ON FUNCTION leave_queue(varchar, varchar) IS
    'Removes the ticket of acquire_in_turn(), and wakes the next waiter; true if p_holder_id had one. It releases no '
    'lease. In a transaction of its own. READ COMMITTED only.';

  ------------------------------------------------------------ housekeeping --
  -- For queues that no caller reads any more.
  CREATE OR REPLACE FUNCTION pgxlock_reap_waiters(p_limit integer DEFAULT 1000) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_count bigint;
  BEGIN
    PERFORM pgxlock_require(p_limit BETWEEN 1 AND 10000, 'p_limit must be between 1 and 10000');
    WITH lost AS MATERIALIZED (
      SELECT c.client
        FROM (SELECT DISTINCT w.client FROM pgxlock_waiters w
               WHERE w.client IS NOT NULL AND w.live_until > clock_timestamp()) c
       WHERE pgxlock_waiter_dead(c.client, 'infinity')
    ), dead AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket FROM pgxlock_waiters w
       WHERE w.live_until <= clock_timestamp() OR w.client IN (SELECT l.client FROM lost l)
       LIMIT p_limit FOR UPDATE OF w SKIP LOCKED
    )
    DELETE FROM pgxlock_waiters w USING dead d WHERE w.kind = d.kind AND w.name = d.name AND w.ticket = d.ticket;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
  END $$;
  COMMENT ON FUNCTION pgxlock_reap_waiters(integer) IS
    'Housekeeping only: removes up to p_limit tickets of dead processes; returns how many. Waiting never needs it.';

  ----------------------------------------------------------------- helpers --
  -- A caller asks about 10000 processes at most, because a queue can have any number of dead tickets:
  -- the next ticket then counts, and the caller removes those before it.
  CREATE OR REPLACE FUNCTION pgxlock_first_ahead(p_kind integer, p_name text, p_below bigint) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    RETURN (
      SELECT q.ticket
        FROM (SELECT a.ticket, a.client, a.live_until, row_number() OVER (ORDER BY a.ticket) AS n FROM pgxlock_waiters a
               WHERE a.kind = p_kind
                 AND a.name = p_name COLLATE "C"
                 AND a.ticket < p_below
                 AND NOT pgxlock_wake_timed_out(a.woken)
               ORDER BY a.ticket LIMIT 10001) q
       WHERE q.n > 10000::bigint OR NOT pgxlock_waiter_dead(q.client, q.live_until) LIMIT 1);
  END $$;
  COMMENT ON FUNCTION pgxlock_first_ahead(integer, text, bigint) IS
    'pgxlock, internal: the first live ticket below p_below in a queue, other than those that were passed; or the '
    '10001st, if 10000 dead ones are ahead of it.';

  CREATE OR REPLACE FUNCTION pgxlock_settle_tickets(p_names text[], p_tickets bigint[], p_acquired boolean[],
    p_walked bigint[])
  RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off SET enable_tidscan = on AS $$
  DECLARE
    e record;                               -- a ticket
  BEGIN
    -- The kind is a column here: for a constant one the planner may read the index of all leases.
    FOR e IN SELECT 0 AS kind, m.name, m.ticket
               FROM unnest(p_names, p_tickets, p_acquired) AS m (name, ticket, acquired)
              WHERE m.acquired
              ORDER BY m.name COLLATE "C", m.ticket LOOP
      DELETE FROM pgxlock_waiters w
       WHERE w.kind = e.kind AND w.name = e.name COLLATE "C" AND w.ticket = e.ticket AND w.role = session_user::text;
    END LOOP;

    -- From here on it waits for no row.
    FOR e IN SELECT 0 AS kind, m.name, m.ticket, m.walked, m.acquired
               FROM unnest(p_names, p_tickets, p_acquired, p_walked) AS m (name, ticket, acquired, walked)
              ORDER BY m.name COLLATE "C", m.ticket LOOP
      IF e.walked > (SELECT w.ticket FROM pgxlock_waiters w
                      WHERE w.kind = e.kind AND w.name = e.name COLLATE "C" ORDER BY w.ticket LIMIT 1) THEN
        PERFORM pgxlock_remove_dead(ARRAY[e.kind], ARRAY[e.name], ARRAY[e.walked]);
      END IF;
      IF e.acquired IS NOT TRUE THEN
        UPDATE pgxlock_waiters q
           SET woken = NULL
         WHERE q.ctid = (SELECT w.ctid FROM pgxlock_waiters w
                          WHERE w.kind = e.kind AND w.name = e.name COLLATE "C" AND w.ticket = e.ticket
                            AND w.woken IS NOT NULL AND w.role = session_user::text
                            FOR NO KEY UPDATE OF w SKIP LOCKED);
      END IF;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_settle_tickets(text[], bigint[], boolean[], bigint[]) IS
    'pgxlock, internal: after a try, removes the tickets that acquired their lock, dead tickets below p_walked, and the '
    'stamps of the others, which have shown that they live.';

  -- Rows are locked in key order, as in a refresh: SKIP LOCKED can still wait, if the transaction
  -- that changed a row commits after the row is read and before its lock is tried, and another
  -- session has locked the new version by then.
  CREATE OR REPLACE FUNCTION pgxlock_remove_dead(p_kinds integer[], p_names text[], p_before bigint[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  BEGIN
    WITH dead AS MATERIALIZED (
      SELECT w.kind, w.name, w.ticket
        FROM unnest(p_kinds, p_names, p_before) AS b (kind, name, before)
        JOIN pgxlock_waiters w ON w.kind = b.kind AND w.name = b.name COLLATE "C" AND w.ticket < b.before
       WHERE pgxlock_waiter_dead(w.client, w.live_until)
       ORDER BY w.kind, w.name, w.ticket
         FOR UPDATE OF w SKIP LOCKED
    )
    DELETE FROM pgxlock_waiters w USING dead d WHERE w.kind = d.kind AND w.name = d.name AND w.ticket = d.ticket;
  END $$;
  COMMENT ON FUNCTION pgxlock_remove_dead(integer[], text[], bigint[]) IS
    'pgxlock, internal: removes dead tickets below p_before from each queue.';

  -- IMMUTABLE, so that hardening leaves it as it is and the planner can inline it.
  --
  -- Where the key of another living session equals it (see pgxlock_key() for the odds), a process
  -- that begins to listen fails and draws another number, and the ticket of a dead process counts
  -- until it is void: others pass it once it was woken, after the wake timeout.
  CREATE OR REPLACE FUNCTION pgxlock_waiter_key(p_client bigint) RETURNS bigint
  LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN pgxlock_own_key(true, decode('0077616974657200', 'hex') || int8send(p_client));          -- waiter, between zero bytes
  COMMENT ON FUNCTION pgxlock_waiter_key(bigint) IS
    'pgxlock, internal: the liveness key, which the session with which a process listens holds exclusively for as long as '
    'it lives. Nothing else of the queue may run in that session.';

  -- Tried shared: an exclusive lock would make a dead process look alive. Not kept: the server has
  -- room for few locks, and a queue may have any number of dead tickets.
  CREATE OR REPLACE FUNCTION pgxlock_waiter_dead(p_client bigint, p_live_until timestamptz) RETURNS boolean
  LANGUAGE sql VOLATILE
  RETURN p_live_until <= clock_timestamp() OR p_client IS NOT NULL
    AND CASE WHEN pg_try_advisory_lock_shared(pgxlock_waiter_key(p_client))
             THEN pg_advisory_unlock_shared(pgxlock_waiter_key(p_client))
             ELSE false END;
  COMMENT ON FUNCTION pgxlock_waiter_dead(bigint, timestamptz) IS 'pgxlock, internal: whether a ticket''s process is dead.';

  CREATE OR REPLACE FUNCTION pgxlock_wake_timed_out(p_woken timestamptz) RETURNS boolean
  LANGUAGE sql VOLATILE
  RETURN p_woken IS NOT NULL AND p_woken < clock_timestamp() - interval '250 milliseconds';
  COMMENT ON FUNCTION pgxlock_wake_timed_out(timestamptz) IS
    'pgxlock, internal: whether other waiters pass a ticket woken at p_woken, because it has not tried within the wake timeout.';

  PERFORM pgxlock_migrate('made'::text, 4, v_path);
END $migration$;
