-- For operators: views of holders and waiters, eviction, requests to step down; and the rights of
-- roles. Least privilege is optional: harden_locks() makes the functions run with their owner's
-- rights and revokes all others, so that a role may lock but not write the tables; grant_locks()
-- grants a role the rights that its work needs, hardened or not.
--
-- A later migration lists its objects in pgxlock_rights(), and ends as this one does.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_grant  pg_catalog.record;
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
  PERFORM pgxlock_migrate('up'::text, 8, v_path);

  ------------------------------------------------------------------- views --
  -- A standby cannot read unlogged tables: the planner refuses a query that names one, executed or
  -- not. In a function the query is planned when it is reached. These are STABLE, so that they read
  -- the snapshot of the view.
  CREATE OR REPLACE FUNCTION pgxlock_list_names() RETURNS SETOF pgxlock_names
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    IF NOT pg_is_in_recovery() THEN
      RETURN QUERY SELECT n.* FROM pgxlock_names n;
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_list_names() IS 'pgxlock, internal: the names of advisory keys; none on a standby.';

  CREATE OR REPLACE FUNCTION pgxlock_list_tokens() RETURNS SETOF pgxlock_advisory_locks
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    IF NOT pg_is_in_recovery() THEN
      RETURN QUERY SELECT s.* FROM pgxlock_advisory_locks s;
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_list_tokens() IS 'pgxlock, internal: the rows of advisory locks with tokens; none on a standby.';

  CREATE OR REPLACE FUNCTION pgxlock_list_tickets() RETURNS SETOF pgxlock_waiters
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    IF NOT pg_is_in_recovery() THEN
      RETURN QUERY SELECT w.* FROM pgxlock_waiters w;
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_list_tickets() IS 'pgxlock, internal: the tickets; none on a standby.';

  -- Each view reads pg_locks once, because that stops the server's lock table for a moment. Names,
  -- tokens and sessions are joined to it as sets: among thousands of locks, looking one up for each
  -- takes too long. A key with the mark of pgxlock's own is shown only if it has a name: then it is
  -- a user's.
  CREATE OR REPLACE VIEW lock_holders AS
    WITH granted AS MATERIALIZED (
      SELECT e.objsubid::integer AS key_space, e.classid::bigint << 32 | e.objid::bigint AS key_id,
             e.mode = 'ShareLock' AS shared, e.pid
        FROM pg_locks e
       WHERE e.locktype = 'advisory'
         AND e.granted
         AND e.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ), session AS MATERIALIZED (
      SELECT a.pid, a.application_name, a.client_addr FROM pg_stat_activity a
    ), token AS (
      SELECT s.key_space, s.key_id, o.pid, s.token
        FROM pgxlock_list_tokens() s
        JOIN granted o ON o.key_space = 1 AND NOT o.shared AND o.key_id = pgxlock_session_key(s.session)
       WHERE NOT s.shared
    )
    SELECT 'lease' AS kind, l.lock_name::text COLLATE "C" AS lock_name,
           CASE WHEN l.shared THEN 'shared' ELSE 'exclusive' END AS mode,
           l.holder_id::text AS holder_id, NULL::integer AS pid, NULL::text AS application_name, NULL::inet AS client_addr,
           l.held_for, l.remaining, l.fencing_token, l.acquired_at, l.expires_at, NULL::integer AS key_space,
           NULL::bigint AS key_id
      FROM (SELECT false AS shared, a.lock_name, a.state, a.holder_id, a.fencing_token, a.held_for, a.remaining,
                   a.acquired_at, a.expires_at
              FROM lock_leases a WHERE a.holder_id::text <> '*shared' COLLATE "C"
            UNION ALL
            SELECT true, b.lock_name, b.state, b.holder_id, b.fencing_token, b.held_for, b.remaining, b.acquired_at,
                   b.expires_at
              FROM lock_shares b) l
     WHERE l.state = 'live'
    UNION ALL
    SELECT 'advisory',
           coalesce(n.name,
                    CASE g.key_space WHEN 2 THEN '#' || (g.key_id >> 32)::text || ',' || (g.key_id << 32 >> 32)::text
                                     ELSE '#' || g.key_id::text END COLLATE "C"),
           CASE WHEN g.shared THEN 'shared' ELSE 'exclusive' END,
           CASE WHEN g.pid IS NULL THEN 'prepared transaction'
                ELSE coalesce(nullif(regexp_replace(a.application_name, '^pgxlock '::text, ''::text), '') || ':', '')
                     || g.pid::text END,
           g.pid, a.application_name, a.client_addr, NULL, NULL, t.token, NULL, NULL, g.key_space, g.key_id
      FROM granted g
      LEFT JOIN session a ON a.pid = g.pid
      LEFT JOIN pgxlock_list_names() n ON g.key_space = 1 AND n.key_id = g.key_id
      LEFT JOIN token t ON t.key_space = g.key_space AND t.key_id = g.key_id AND t.pid = g.pid AND NOT g.shared
     WHERE n.key_id IS NOT NULL OR NOT pgxlock_is_own_key(g.key_space, g.key_id);
  COMMENT ON VIEW lock_holders IS
    'pgxlock: holders: live leases and permits, each share of a lease, and all advisory locks of this database but '
    'pgxlock''s own. Of other roles'' sessions it shows what pg_stat_activity shows the role that reads it. A standby '
    'shows leases, and its own sessions'' advisory locks. It reads the whole lock table: query it no more often than '
    'every few seconds.';
  COMMENT ON COLUMN lock_holders.kind IS 'lease or advisory. A permit is the lease name#number.';
  COMMENT ON COLUMN lock_holders.lock_name IS
    'For an advisory lock, the name that its holder published within the last hour, @namespace/name in a namespace, else # '
    'and the key, or the two keys.';
  COMMENT ON COLUMN lock_holders.mode IS 'exclusive or shared.';
  COMMENT ON COLUMN lock_holders.holder_id IS
    'For a lease, as in lock_leases; for an advisory lock, the application and the process id, as Lock.Holder returns it.';
  COMMENT ON COLUMN lock_holders.pid IS
    'The session that holds an advisory lock; NULL for a prepared transaction, and for a lease, which has no session.';
  COMMENT ON COLUMN lock_holders.application_name IS 'Of that session.';
  COMMENT ON COLUMN lock_holders.client_addr IS 'Of that session; NULL if it is local, or this role may not see it.';
  COMMENT ON COLUMN lock_holders.held_for IS 'NULL for an advisory lock: the server does not know.';
  COMMENT ON COLUMN lock_holders.remaining IS
    'Until the lease expires unless it is renewed; NULL if it never does, and for an advisory lock, which lasts as long '
    'as its session or transaction.';
  COMMENT ON COLUMN lock_holders.fencing_token IS 'NULL for an advisory lock without tokens.';
  COMMENT ON COLUMN lock_holders.key_space IS
    'For an advisory lock, as objsubid in pg_locks: 1 for one bigint, 2 for two integers; evict_advisory_lock() calls it '
    'p_key_space.';
  COMMENT ON COLUMN lock_holders.key_id IS 'For an advisory lock, the key; for two integers with the first one in the high half.';

  -- A ticket stands for all waiters of a process. The ticket of a listening process counts while
  -- its session holds the key of pgxlock_waiter_key(). Waiters for a permit are in the semaphore's
  -- queue.
  CREATE OR REPLACE VIEW lock_waiters AS
    WITH entry AS MATERIALIZED (
      SELECT e.objsubid::integer AS key_space, e.classid::bigint << 32 | e.objid::bigint AS key_id,
             CASE e.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END AS mode, e.granted, e.pid, e.waitstart
        FROM pg_locks e
       WHERE e.locktype = 'advisory' AND e.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    ), session AS MATERIALIZED (
      SELECT a.pid, a.application_name, a.client_addr,
             coalesce(nullif(regexp_replace(a.application_name, '^pgxlock '::text, ''::text), '') || ':', '')
             || a.pid::text AS owner
        FROM pg_stat_activity a
    ), held AS MATERIALIZED (
      SELECT 0 AS key_space, l.lock_name::text COLLATE "C" AS name, l.holder_id::text AS holder_id, NULL::integer AS pid
        FROM lock_leases l WHERE l.state = 'live' AND l.holder_id::text <> '*shared' COLLATE "C"
      UNION ALL
      SELECT 0, s.lock_name::text COLLATE "C", s.holder_id::text, NULL FROM lock_shares s WHERE s.state = 'live'
      UNION ALL
      SELECT g.key_space, g.key_id::text COLLATE "C",
             CASE WHEN g.pid IS NULL THEN 'prepared transaction' ELSE coalesce(a.owner, g.pid::text) END, g.pid
        FROM entry g LEFT JOIN session a ON a.pid = g.pid WHERE g.granted
    ), holder AS MATERIALIZED (
      SELECT u.key_space, u.name,         -- some, or a role could have each of many waiters show each of many holders
             (pg_catalog.array_agg(DISTINCT u.holder_id))[1:100] AS ids,
             pg_catalog.array_agg(DISTINCT u.pid) FILTER (WHERE u.pid IS NOT NULL) AS pids
        FROM (SELECT h.key_space, h.name, h.holder_id, h.pid FROM held h
              UNION ALL
              SELECT 0, regexp_replace(h.name, '#[0-9]+$'::text, '#'::text), h.holder_id, h.pid
                FROM held h
               WHERE h.key_space = 0 AND h.name ~ '#[0-9]+$') u
       GROUP BY u.key_space, u.name
    ), waiting AS (
      SELECT w.kind AS key_space, w.name,
             CASE WHEN w.kind <> 0 AND w.name ~ '^-?[0-9]{1,19}$'
                  THEN CASE WHEN w.name::numeric BETWEEN -9223372036854775808::numeric AND 9223372036854775807::numeric
                            THEN w.name::bigint END END AS key_id,
             NULL::text AS mode, w.owner, l.pid, w.waiters, w.since, w.ticket
        FROM pgxlock_list_tickets() w
        LEFT JOIN entry l ON l.granted AND l.key_space = 1 AND l.mode = 'exclusive' AND l.key_id = pgxlock_waiter_key(w.client)
       WHERE w.live_until > clock_timestamp() AND (w.client IS NULL OR l.pid IS NOT NULL)
      UNION ALL
      SELECT e.key_space, e.key_id::text COLLATE "C", e.key_id, e.mode, NULL, e.pid, 1, e.waitstart, NULL
        FROM entry e
       WHERE NOT e.granted
    )
    SELECT CASE w.key_space WHEN 0 THEN 'lease' ELSE 'advisory' END AS kind,
           CASE w.key_space WHEN 0 THEN w.name
                            WHEN 2 THEN '#' || (w.key_id >> 32)::text || ',' || (w.key_id << 32 >> 32)::text
                            ELSE coalesce(n.name, '#' || w.key_id::text) END COLLATE "C" AS lock_name,
           w.mode,
           coalesce(w.owner, a.owner, w.pid::text) AS owner,
           w.pid, a.application_name, a.client_addr, w.waiters,
           CASE WHEN isfinite(w.since) THEN clock_timestamp() - w.since END AS waiting_for,
           CASE WHEN w.ticket IS NULL THEN pg_blocking_pids(w.pid) ELSE coalesce(h.pids, '{}'::integer[]) END AS blocked_by,
           coalesce(h.ids, '{}'::text[]) AS held_by,
           w.since, w.ticket, nullif(w.key_space, 0) AS key_space, w.key_id
      FROM waiting w
      LEFT JOIN session a ON a.pid = w.pid
      LEFT JOIN pgxlock_list_names() n ON w.key_space = 1 AND n.key_id = w.key_id
      LEFT JOIN holder h ON h.key_space = w.key_space AND h.name = w.name
     WHERE w.key_space = 0
        OR w.key_id IS NOT NULL             -- else the name is no key
           AND (n.key_id IS NOT NULL OR NOT pgxlock_is_own_key(w.key_space, w.key_id));
  COMMENT ON VIEW lock_waiters IS
    'pgxlock: waiters, for how long and for which holders: live tickets of pgxlock_waiters, and sessions that wait in the '
    'server for an advisory lock. A standby has no tickets. It reads the whole lock table: query it no more often than '
    'every few seconds.';
  COMMENT ON COLUMN lock_waiters.kind IS 'lease or advisory.';
  COMMENT ON COLUMN lock_waiters.lock_name IS 'As in lock_holders. Waiters for a permit of jobs wait for jobs#.';
  COMMENT ON COLUMN lock_waiters.mode IS 'exclusive or shared; NULL for a ticket, which does not record it.';
  COMMENT ON COLUMN lock_waiters.owner IS 'The name that the waiting process gave itself; or the application and the process id.';
  COMMENT ON COLUMN lock_waiters.pid IS
    'The session that waits, or with which a ticket''s process listens; NULL: it cannot listen.';
  COMMENT ON COLUMN lock_waiters.application_name IS 'Of that session.';
  COMMENT ON COLUMN lock_waiters.client_addr IS 'Of that session; NULL if it is local, or this role may not see it.';
  COMMENT ON COLUMN lock_waiters.waiters IS 'The number of waiters in the process.';
  COMMENT ON COLUMN lock_waiters.blocked_by IS
    'The processes that block a session, 0 for a prepared transaction; for a ticket, the sessions that hold the advisory lock.';
  COMMENT ON COLUMN lock_waiters.held_by IS
    'The holders of the lock, as holder_id in lock_holders: of more than 100, the first ones.';
  COMMENT ON COLUMN lock_waiters.since IS 'When the ticket was published, or the session began to wait.';
  COMMENT ON COLUMN lock_waiters.ticket IS 'The position in the queue: the lowest is first. NULL: it waits in the server.';
  COMMENT ON COLUMN lock_waiters.key_space IS 'As in lock_holders.';
  COMMENT ON COLUMN lock_waiters.key_id IS 'As in lock_holders.';

  ---------------------------------------------------------------- eviction --
  -- A holder checks here when its lock is gone, or when it is notified.
  CREATE TABLE IF NOT EXISTS pgxlock_evictions (
    kind       integer NOT NULL,            -- as in pgxlock_waiters
    name       text COLLATE "C" NOT NULL,
    holder     text COLLATE "C" NOT NULL,   -- the holder id of a lease, advisory:pid:kind:key
    token      bigint NOT NULL,             -- 0 of an advisory lock
    evicted_at timestamptz NOT NULL,
    evicted_by text NOT NULL,
    reason     text NOT NULL,
    key_name   text,
    PRIMARY KEY (kind, name, holder, token)
  ) USING heap;
  COMMENT ON TABLE pgxlock_evictions IS
    'pgxlock: the last evictions: of which hold, by whom, when and why. Write it only through the functions. Rows: 1000 '
    'at most; the next eviction removes older ones.';
  COMMENT ON COLUMN pgxlock_evictions.kind IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_evictions.name IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_evictions.holder IS
    'The holder id of a lease; advisory:pid:kind:key of a session that was asked to release.';
  COMMENT ON COLUMN pgxlock_evictions.token IS 'Of the acquisition; 0 for an advisory lock.';
  COMMENT ON COLUMN pgxlock_evictions.evicted_at IS 'When; for an advisory lock, when the release was last asked for.';
  COMMENT ON COLUMN pgxlock_evictions.evicted_by IS 'The role that logged in, and its application_name.';
  COMMENT ON COLUMN pgxlock_evictions.reason IS 'Why, as that role said.';
  COMMENT ON COLUMN pgxlock_evictions.key_name IS 'The name of an advisory key, if that role knew it.';

  -- An evicted hold ends as if it had expired, with a holder or, for a share, a token that no
  -- caller can have: a renewal finds it gone, and a fence fails. It is not deleted, because no open
  -- transaction may have asserted a lease that is deleted: a holder that always asserts could not
  -- be evicted. Such a transaction goes on, and its pin keeps all others out until it ends.
  CREATE OR REPLACE FUNCTION evict_lock(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint, p_reason text)
  RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off
  SET lock_timeout = '2s' AS $$
  DECLARE
    v_name   text := p_lock_name;
    v_holder text := p_holder_id;
    v_shared boolean;
    v_now    timestamptz;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_holder);
    IF p_fencing_token IS NULL THEN
      RAISE EXCEPTION 'p_fencing_token must not be NULL: it says which acquisition is meant'
        USING ERRCODE = 'invalid_parameter_value',
              HINT = 'The views lock_leases and lock_shares show it.';
    END IF;
    PERFORM pgxlock_check_primary('cannot evict on a standby server');
    PERFORM pgxlock_check_read_committed('leases are evicted in READ COMMITTED: an older snapshot does not show their holders');
    PERFORM pgxlock_durable(true);
    BEGIN
      SELECT l.holder_id::text = '*shared' COLLATE "C" INTO v_shared FROM distributed_locks l
       WHERE l.lock_name::text = v_name COLLATE "C" AND l.fencing_token = p_fencing_token FOR NO KEY UPDATE;
      v_now := clock_timestamp();
      IF v_shared THEN
        UPDATE distributed_lock_shares s SET fencing_token = 0::bigint, expires_at = least(s.expires_at, v_now)
         WHERE s.lock_name::text = v_name COLLATE "C"
           AND s.holder_id::text = v_holder COLLATE "C"
           AND s.fencing_token = p_fencing_token;
      ELSE
        UPDATE distributed_locks l SET holder_id = '*evicted', expires_at = least(l.expires_at, v_now)
         WHERE l.lock_name::text = v_name COLLATE "C"
           AND l.holder_id::text = v_holder COLLATE "C"
           AND l.fencing_token = p_fencing_token;
      END IF;
      IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      IF v_shared THEN                      -- the group lasts as long as its other shares
        UPDATE distributed_locks l
           SET expires_at = coalesce((SELECT max(s.expires_at) FROM distributed_lock_shares s
                                       WHERE s.lock_name::text = v_name COLLATE "C"
                                         AND s.fencing_token = p_fencing_token
                                         AND s.expires_at > v_now),
                                     least(l.expires_at, v_now))
         WHERE l.lock_name::text = v_name COLLATE "C";
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN false;
    END;
    PERFORM pgxlock_record_eviction(0, v_name, v_holder, p_fencing_token, p_reason, NULL);
    -- Wakes waiters for this lease, or for any permit of its semaphore. In this transaction,
    -- because evictions are rare; a waiter whose ticket is not visible yet tries again anyway.
    PERFORM FROM pgxlock_wake_batch('{0,0}'::integer[],
                                    ARRAY[v_name, regexp_replace(v_name, '#[0-9]+$'::text, '#'::text)],
                                    ARRAY[NULL, NULL]::bigint[]);
    RETURN true;
  END $$;
  COMMENT ON FUNCTION evict_lock(varchar, varchar, bigint, text) IS
    'Evicts the holder of a lease, a permit or a share, and records p_reason in pgxlock_evictions. True if the holder had '
    'it with that token; else nothing happens. Others may acquire it at once, and the holder notices at its next renewal: '
    'until then only its writes under assert_lock_held(), or to a resource that checks tokens, are safe. A transaction '
    'that has asserted the lock goes on, and keeps others out until it ends. READ COMMITTED only.';

  -- Only its own session can release an advisory lock, so its Locker is notified.
  CREATE OR REPLACE FUNCTION evict_advisory_lock(p_pid integer, p_key bigint, p_reason text,
    p_key_space integer DEFAULT 1, p_key_name text DEFAULT NULL)
  RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '2s' AS $$
  BEGIN
    PERFORM pgxlock_require(p_pid IS NOT NULL AND p_key IS NOT NULL AND p_key_space BETWEEN 1 AND 2,
                            'p_pid and p_key must not be NULL, and p_key_space must be 1, or 2 for a key of two integers');
    PERFORM pgxlock_require(p_key_name IS NULL
                            OR char_length(p_key_name) <= 255 AND p_key_space = 1
                               AND (p_key = advisory_lock_key(p_key_name)
                                    OR p_key = advisory_lock_key_in(substring(p_key_name, '^@([^/]+)/'::text),
                                                                    substring(p_key_name, '^@[^/]+/(.*)$'::text))),
                            'p_key_name must be the name of p_key, of up to 255 characters');
    PERFORM pgxlock_check_primary('cannot evict on a standby server');
    PERFORM FROM pg_locks l
      WHERE l.locktype = 'advisory' AND l.granted AND l.pid = p_pid
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.objsubid::integer = p_key_space AND l.classid::bigint << 32 | l.objid::bigint = p_key;
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM pgxlock_record_eviction(p_key_space, p_key::text,
                                    'advisory:' || p_pid::text || ':' || p_key_space::text || ':' || p_key::text,
                                    0::bigint, p_reason, p_key_name);
    PERFORM pg_notify('pgxlock_holder_' || p_pid::text, '1:evict'::text);
    RETURN true;
  END $$;
  COMMENT ON FUNCTION evict_advisory_lock(integer, bigint, text, integer, text) IS
    'Asks session p_pid to release an advisory lock, and records p_reason in pgxlock_evictions; true if it holds the lock '
    'now. A Locker that listens releases it at once, and its caller''s lock is lost; other sessions ignore it. '
    'p_key_space: 2 for a key of two integers, with the first in the high half of p_key. p_key_name: for the '
    'record. In a transaction of its own: it notifies.';

  CREATE OR REPLACE FUNCTION pgxlock_evicted(p_kinds integer[], p_names text[], p_holders text[], p_tokens bigint[])
  RETURNS TABLE (n bigint, evicted_by text, reason text, ms bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    PERFORM pgxlock_require(pg_catalog.cardinality(p_names) <= 10000
                            AND pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names)
                            AND pg_catalog.cardinality(p_holders) = pg_catalog.cardinality(p_names)
                            AND pg_catalog.cardinality(p_tokens) = pg_catalog.cardinality(p_names),
                            'p_names must have at most 10000 elements, and every lock needs a kind, a name, a holder and '
                            'a token');
    RETURN QUERY
    SELECT w.n, e.evicted_by, e.reason, (date_part('epoch'::text, clock_timestamp() - e.evicted_at) * 1000::float8)::bigint
      FROM unnest(p_kinds, p_names, p_holders, p_tokens) WITH ORDINALITY AS w (kind, name, holder, token, n)
      JOIN pgxlock_evictions e
        ON e.kind = w.kind AND e.name = w.name COLLATE "C" AND e.holder = w.holder COLLATE "C" AND e.token = w.token;
  END $$;
  COMMENT ON FUNCTION pgxlock_evicted(integer[], text[], text[], bigint[]) IS
    'pgxlock, internal: which of these holds were evicted, by whom, why and how many milliseconds ago.';

  CREATE OR REPLACE FUNCTION pgxlock_record_eviction(p_kind integer, p_name text, p_holder text, p_token bigint,
    p_reason text, p_key_name text)
  RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    PERFORM pgxlock_require(octet_length(p_reason) BETWEEN 1 AND 1000,
                            'p_reason must have 1 to 1000 bytes: the holder and later readers want to know why');
    INSERT INTO pgxlock_evictions AS e (kind, name, holder, token, evicted_at, evicted_by, reason, key_name)
    VALUES (p_kind, p_name, p_holder, p_token, clock_timestamp(),
            session_user::text || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', ''), p_reason,
            p_key_name)
    ON CONFLICT ON CONSTRAINT pgxlock_evictions_pkey
    DO UPDATE SET evicted_at = excluded.evicted_at, evicted_by = excluded.evicted_by, reason = excluded.reason,
                  key_name = excluded.key_name;
    IF pg_try_advisory_xact_lock(pgxlock_key('evictions', '')) THEN          -- one cleaner is enough
      WITH old AS MATERIALIZED (
        SELECT e.kind, e.name, e.holder, e.token FROM pgxlock_evictions e
         WHERE e.evicted_at < (SELECT n.evicted_at FROM pgxlock_evictions n ORDER BY n.evicted_at DESC OFFSET 999 LIMIT 1)
           FOR UPDATE OF e SKIP LOCKED
      )
      DELETE FROM pgxlock_evictions e USING old o
       WHERE e.kind = o.kind AND e.name = o.name AND e.holder = o.holder AND e.token = o.token;
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_record_eviction(integer, text, text, bigint, text, text) IS
    'pgxlock, internal: records an eviction.';

  --------------------------------------------------------------- step down --
  -- Requests to leaders to step down. They are stored, because a notification reaches only sessions
  -- that listen. Unlogged: a request lost in a crash can be repeated, and the leader may go on
  -- meanwhile.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_step_down (
    kind     integer NOT NULL,              -- as in pgxlock_waiters
    name     text COLLATE "C" NOT NULL,
    holder   text COLLATE "C" NOT NULL,     -- the holder id of a lease, advisory:pid:kind:key
    asked_at timestamptz NOT NULL,
    asked_by text NOT NULL,
    reason   text NOT NULL,
    PRIMARY KEY (kind, name, holder)
  ) USING heap;
  COMMENT ON TABLE pgxlock_step_down IS
    'pgxlock: requests to step down of the last hour. Write it only through the '
    'functions. Rows: one for each holder that was asked; the next request removes older ones.';
  COMMENT ON COLUMN pgxlock_step_down.kind IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_step_down.name IS 'As in pgxlock_waiters.';
  COMMENT ON COLUMN pgxlock_step_down.holder IS 'The holder id of a lease; advisory:pid:kind:key.';
  COMMENT ON COLUMN pgxlock_step_down.asked_at IS 'When it was last asked.';
  COMMENT ON COLUMN pgxlock_step_down.asked_by IS 'The login role that asked, and in parentheses how the caller named itself.';
  COMMENT ON COLUMN pgxlock_step_down.reason IS 'Why, as the caller said.';

  CREATE OR REPLACE FUNCTION ask_to_step_down(p_lock_name varchar, p_reason text DEFAULT '') RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_require(char_length(p_lock_name::text) BETWEEN 1 AND 255, 'p_lock_name must have 1 to 255 characters');
    RETURN pg_catalog.cardinality(pgxlock_ask_to_step_down(0, p_lock_name::text, session_user::text, p_reason)) > 0;
  END $$;
  COMMENT ON FUNCTION ask_to_step_down(varchar, text) IS
    'Asks the leader that holds this lease to step down, if its program uses Locker.Lead; true if the lease is held, and '
    'not shared. A leader that listens is notified at once, others notice within seconds. In a transaction of its own: it '
    'notifies.';

  CREATE OR REPLACE FUNCTION pgxlock_ask_to_step_down(p_kind integer, p_name text, p_by text, p_reason text) RETURNS text[]
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '100ms' AS $$
  DECLARE
    v_asked text[];
  BEGIN
    PERFORM pgxlock_require(p_kind BETWEEN 0 AND 2 AND char_length(p_name) BETWEEN 1 AND 255,
                            'a lock has a kind, 0 to 2, and a name of 1 to 255 characters');
    PERFORM pgxlock_require(octet_length(p_by) <= 1000 AND octet_length(p_reason) <= 1000,
                            'p_reason must not be NULL, nor have more than 1000 bytes');
    PERFORM pgxlock_check_primary('cannot ask a leader on a standby server');
    v_asked := ARRAY(
      SELECT h.holder
        FROM (SELECT l.holder_id::text AS holder FROM distributed_locks l
               WHERE p_kind = 0 AND l.lock_name::text = p_name COLLATE "C" AND l.expires_at > clock_timestamp()
                 AND l.holder_id::text <> '*shared' COLLATE "C"            -- leaders share nothing
              UNION
              SELECT 'advisory:' || l.pid::text || ':' || p_kind::text || ':' || p_name
                FROM pg_locks l
               WHERE p_kind <> 0 AND l.locktype = 'advisory' AND l.granted AND l.pid IS NOT NULL
                 AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                 AND l.objsubid::integer = p_kind AND (l.classid::bigint << 32 | l.objid::bigint)::text = p_name COLLATE "C") h
       ORDER BY h.holder);
    INSERT INTO pgxlock_step_down AS s (kind, name, holder, asked_at, asked_by, reason)
    SELECT p_kind, p_name, a.holder, clock_timestamp(),
           session_user::text || CASE WHEN p_by = session_user::text THEN '' ELSE ' (' || p_by || ')' END, p_reason
      FROM pg_catalog.unnest(v_asked) a (holder)
    ON CONFLICT ON CONSTRAINT pgxlock_step_down_pkey
    DO UPDATE SET asked_at = excluded.asked_at, asked_by = excluded.asked_by, reason = excluded.reason;
    IF pg_catalog.cardinality(v_asked) > 0 THEN
      PERFORM pg_notify('pgxlock_step_down', '1:');
    END IF;
    -- Last, so that this transaction waits for no other one while it has rows of others locked.
    WITH old AS MATERIALIZED (
      SELECT s.kind, s.name, s.holder FROM pgxlock_step_down s
       WHERE s.asked_at < clock_timestamp() - interval '1 hour'
         FOR UPDATE SKIP LOCKED
    )
    DELETE FROM pgxlock_step_down s USING old o WHERE s.kind = o.kind AND s.name = o.name AND s.holder = o.holder;
    RETURN v_asked;
  END $$;
  COMMENT ON FUNCTION pgxlock_ask_to_step_down(integer, text, text, text) IS
    'pgxlock, internal: asks all holders of a lock to step down; returns them. Kind 0 is a lease; an advisory key is '
    'as in pgxlock_waiters.';

  CREATE OR REPLACE FUNCTION pgxlock_step_downs(p_kinds integer[], p_names text[], p_holders text[])
  RETURNS TABLE (n bigint, asked_by text, reason text, ms bigint, asked_us bigint)
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    PERFORM pgxlock_require(pg_catalog.cardinality(p_names) <= 10000
                            AND pg_catalog.cardinality(p_kinds) = pg_catalog.cardinality(p_names)
                            AND pg_catalog.cardinality(p_holders) = pg_catalog.cardinality(p_names),
                            'p_names must have at most 10000 elements, and every lock needs a kind, a name and a holder');
    RETURN QUERY
    SELECT w.n, s.asked_by, s.reason, (date_part('epoch'::text, clock_timestamp() - s.asked_at) * 1000::float8)::bigint,
           (extract(epoch FROM s.asked_at) * 1000000::numeric)::bigint
      FROM unnest(p_kinds, p_names, p_holders) WITH ORDINALITY AS w (kind, name, holder, n)
      JOIN pgxlock_step_down s ON s.kind = w.kind AND s.name = w.name COLLATE "C" AND s.holder = w.holder COLLATE "C";
  END $$;
  COMMENT ON FUNCTION pgxlock_step_downs(integer[], text[], text[]) IS
    'pgxlock, internal: which of these holders were asked to step down, by whom, why, how many milliseconds ago, and '
    'when, in microseconds since 1970, by which the leader knows a request that it has followed: a caller that removed '
    'requests could remove those of others.';

  ------------------------------------------------------------------- reset --
  -- What applications leave behind, one kind of rows at a time. Leases and shares are evicted or
  -- released instead, because they have holders.
  CREATE OR REPLACE FUNCTION reset_lock_state(p_what text, p_key text) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '2s' AS $$
  DECLARE
    v_names text[] := ARRAY[p_key, advisory_lock_key(p_key)::text];
    v_count bigint;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    CASE p_what
      WHEN 'waiters' THEN
        DELETE FROM pgxlock_waiters w WHERE w.name = ANY (v_names COLLATE "C");
      WHEN 'limit' THEN
        DELETE FROM pgxlock_limits l WHERE l.limit_key = p_key COLLATE "C";
      WHEN 'claim' THEN
        DELETE FROM pgxlock_claims c WHERE c.claim_key::text = p_key COLLATE "C";
      WHEN 'runs' THEN
        DELETE FROM pgxlock_runs o WHERE o.run_key::text = p_key COLLATE "C";
      WHEN 'step_down' THEN
        DELETE FROM pgxlock_step_down s WHERE s.name = ANY (v_names COLLATE "C");
      ELSE
        PERFORM pgxlock_require(false, 'p_what must be waiters, limit, claim, runs or step_down');
    END CASE;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
  END $$;
  COMMENT ON FUNCTION reset_lock_state(text, text) IS
    'Removes what callers recorded under a key, and returns how many rows. p_what: ''waiters'', its tickets in the queue, '
    'which processes that still wait publish again within seconds; ''limit'', what is used of its rate limit, so that it '
    'has a full burst; ''claim'', so that it can be claimed again; ''runs'', so that each of them can be started again; '
    '''step_down'', requests to its leader to step down. The key of an advisory lock is its name, or its number. Raises '
    '55P03 after 2 s where an open transaction has a row locked.';

  ------------------------------------------------------------------ rights --
  CREATE OR REPLACE FUNCTION grant_locks(p_role text, p_as text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    v_schema oid := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid);
    v_role   oid := (SELECT u.oid FROM pg_roles u WHERE u.rolname::text = p_role);
    r record;
  BEGIN
    PERFORM pgxlock_check_owner();
    IF v_role IS NULL THEN
      RAISE EXCEPTION 'role % does not exist', coalesce(quote_ident(p_role), 'NULL') USING ERRCODE = 'undefined_object';
    END IF;
    IF p_as IS NULL OR p_as NOT IN ('application', 'monitoring', 'administration') THEN
      RAISE EXCEPTION 'p_as must be application, monitoring or administration, it is %', coalesce(p_as, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgxlock_check_code(NULL::text[]);
    IF NOT has_schema_privilege(v_role, v_schema, 'USAGE'::text) THEN
      EXECUTE 'GRANT USAGE ON SCHEMA ' || v_schema::regnamespace::text || ' TO ' || quote_ident(p_role);
    END IF;
    FOR r IN SELECT g.privileges, g.object FROM pgxlock_rights() g
              WHERE p_as = ANY (g.kinds) AND coalesce(g.hardened = pgxlock_hardened(), true) LOOP
      EXECUTE 'GRANT ' || r.privileges || ' ON ' || r.object || ' TO ' || quote_ident(p_role);
    END LOOP;
  END $$;
  COMMENT ON FUNCTION grant_locks(text, text) IS
    'Grants a role the rights that it needs as ''application'' (locks, fences, claims, runs, rate '
    'limits), ''monitoring'' (reads the four views, claims, runs, limits, queues and evictions) or ''administration'' '
    '(reads the same, releases and evicts locks of any holder, reaps, purges claims, forgets runs, resets what callers '
    'recorded; hardened also repairs tokens), and USAGE on the schema. A role may be several. For the owner of the '
    'functions.';

  CREATE OR REPLACE FUNCTION revoke_locks(p_role text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  BEGIN
    PERFORM pgxlock_check_owner();
    IF NOT EXISTS (SELECT FROM pg_roles u WHERE u.rolname::text = p_role) THEN
      RAISE EXCEPTION 'role % does not exist', coalesce(quote_ident(p_role), 'NULL') USING ERRCODE = 'undefined_object';
    END IF;
    PERFORM pgxlock_revoke(quote_ident(p_role), false);
  END $$;
  COMMENT ON FUNCTION revoke_locks(text) IS
    'Revokes all rights of a role on objects of pgxlock, however they were granted; not USAGE on the schema. For the '
    'owner of the functions.';

  -- The planner expects far more rows of these catalogs than there are: compiling its query took
  -- 1.5 s, running it 0.02 s.
  CREATE OR REPLACE FUNCTION harden_locks() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off SET jit = off AS $$
  DECLARE
    v_owner  oid := pgxlock_check_owner();
    v_schema oid := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid);
    v_who    text;
    v_what   text;
  BEGIN
    -- A trigger that an open transaction has created is not visible. This waits for such
    -- transactions only; later ones have no right to create one.
    EXECUTE 'LOCK TABLE '
            || (SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname)
                  FROM pg_class c JOIN pgxlock_objects() o ON o.object = 'TABLE ' || quote_ident(c.relname::text)
                 WHERE c.relnamespace = v_schema AND c.relkind = 'r'::"char" AND o.part = '')
            || ' IN SHARE UPDATE EXCLUSIVE MODE';
    -- The owner of a function can replace it; the owner of a table can create triggers. A function is
    -- one of pgxlock's if others of them call it and the owner has no function of that name.
    SELECT string_agg(f.name || ' (owned by ' || quote_ident(pg_get_userbyid(f.owner)::text) || ')', ', ') INTO v_what
      FROM (SELECT w.name, w.owner FROM (
        SELECT c.oid::regclass::text AS name, c.relowner AS owner FROM pg_class c
         WHERE c.relnamespace = v_schema AND c.relkind IN ('r'::"char", 'v'::"char", 'S'::"char")
           AND (left(c.relname::text, 8) = 'pgxlock_'
                OR c.relname::text IN (SELECT substr(g.object, 7) FROM pgxlock_rights() g
                                        WHERE g.privileges <> 'EXECUTE'))
        UNION ALL
        SELECT p.oid::regprocedure::text, p.proowner FROM pg_proc p
         WHERE p.oid IN (SELECT to_regprocedure(substr(g.object, 10))::oid FROM pgxlock_rights() g WHERE g.privileges = 'EXECUTE')
            OR p.pronamespace = v_schema AND left(p.proname::text, 8) = 'pgxlock_'
               AND NOT EXISTS (SELECT FROM pg_proc o
                                WHERE o.pronamespace = v_schema AND o.proowner = v_owner AND o.proname = p.proname)
               AND EXISTS (SELECT FROM pg_proc o
                            WHERE o.pronamespace = v_schema
                              AND o.proowner = v_owner
                              AND position(p.proname::text || '(' IN o.prosrc) > 0)
        UNION ALL               -- what a call could resolve to as well: an overload, and an operator for the same types
        SELECT p.oid::regprocedure::text, p.proowner FROM pg_proc p JOIN pg_roles u ON u.oid = p.proowner
         WHERE p.pronamespace = v_schema AND NOT u.rolsuper
           AND EXISTS (SELECT FROM pg_proc o WHERE o.pronamespace = v_schema AND o.proowner = v_owner AND o.proname = p.proname
                          AND (left(o.proname::text, 8) = 'pgxlock_'
                               OR o.oid IN (SELECT to_regprocedure(substr(g.object, 10))::oid
                                              FROM pgxlock_rights() g
                                             WHERE g.privileges = 'EXECUTE')))
        UNION ALL
        SELECT 'operator ' || x.oid::regoperator::text, x.oprowner FROM pg_operator x JOIN pg_roles u ON u.oid = x.oprowner
         WHERE x.oprnamespace = v_schema AND NOT u.rolsuper) w
       WHERE w.owner <> v_owner ORDER BY w.name LIMIT 10) f;
    IF v_what IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: not all objects belong to %, the owner of distributed_locks: %',
          quote_ident(pg_get_userbyid(v_owner)::text), v_what
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Drop what is not yours, or ALTER ... OWNER TO one role.';
    END IF;
    -- From now on the functions run their code as their owner. They call nothing that other roles
    -- create in the schema; this check keeps such roles from trying.
    SELECT string_agg(DISTINCT w.name, ', ') INTO v_who FROM (
        SELECT 'PUBLIC' AS name FROM pg_namespace n, aclexplode(n.nspacl) x
         WHERE n.oid = v_schema AND x.grantee = 0::oid AND x.privilege_type = 'CREATE'
        UNION ALL
        SELECT quote_ident(u.rolname::text) FROM pg_roles u, pg_namespace n JOIN pg_roles s ON s.oid = n.nspowner
         WHERE n.oid = v_schema AND NOT u.rolsuper
           AND u.rolname::text <> 'pg_database_owner'         -- its member is listed by name
           AND NOT pg_has_role(u.oid, v_owner, 'MEMBER'::text)
           AND (has_schema_privilege(u.oid, v_schema, 'CREATE'::text)
                AND NOT has_schema_privilege('public'::name, v_schema, 'CREATE'::text)
                -- the owner of the schema may drop its objects, and grant itself CREATE
                OR NOT s.rolsuper AND pg_has_role(u.oid, n.nspowner, 'MEMBER'::text))) w;
    IF v_who IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: in schema % roles other than % may create objects: %',
          v_schema::regnamespace::text, quote_ident(pg_get_userbyid(v_owner)::text), v_who
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'REVOKE CREATE ON SCHEMA from them; it cannot be revoked from its owner: the schema must belong to '
                     'the owner of pgxlock (ALTER SCHEMA ... OWNER TO).';
    END IF;
    PERFORM pgxlock_check_code(NULL::text[]);
    -- Every trigger would run as the owner from now on, no matter whose function it calls. A right on a
    -- table is enough to create one; a foreign key connects the triggers of another table.
    SELECT string_agg(w.name, ', ') INTO v_what FROM (
        SELECT pg_catalog.format('trigger %I on %s', g.tgname, g.tgrelid::regclass::text) AS name
          FROM pg_trigger g JOIN pgxlock_objects() o ON o.object = 'TABLE ' || g.tgrelid::regclass::text AND o.part = ''
         WHERE NOT g.tgisinternal
        UNION ALL
        SELECT pg_catalog.format('foreign key %I of %s', k.conname, k.conrelid::regclass::text)
          FROM pg_constraint k JOIN pgxlock_objects() o ON o.object = 'TABLE ' || k.confrelid::regclass::text AND o.part = ''
         WHERE k.contype = 'f'::"char") w;
    IF v_what IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: triggers and foreign keys on the tables would run as %: %',
          quote_ident(pg_get_userbyid(v_owner)::text), v_what
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Drop them first.';
    END IF;
    PERFORM pgxlock_apply_rights(true);
  END $$;
  COMMENT ON FUNCTION harden_locks() IS
    'Least privilege: from now on the functions run with their owner''s rights. Another role has a right on the tables or '
    'functions only through a later grant_locks(). The first time no role has one: grant in the same transaction. A '
    'repeated call revokes the rights on tables, columns, views, sequences and functions that were granted in other ways, '
    'to PUBLIC too and no matter by whom; not USAGE on the schema, nor default privileges. A role that has more than half '
    'of the functions that only one kind of role may call is of that kind, and has all of its rights afterwards. Raises '
    '55000, and changes nothing, if other roles may create objects in the schema or own some of them, if a table has '
    'triggers, is the target of a foreign key or would run code of another role, or if a role was granted all functions. '
    'For the owner of the functions.';

  CREATE OR REPLACE FUNCTION soften_locks() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_check_owner();
    IF pgxlock_hardened() THEN              -- else there is nothing to undo, and rights granted otherwise stay
      PERFORM pgxlock_apply_rights(false);
    END IF;
  END $$;
  COMMENT ON FUNCTION soften_locks() IS
    'Undoes harden_locks(). The functions run with their caller''s rights, every role may call them, and roles that '
    'grant_locks() named get rights on the tables instead. For the owner of the functions.';

  -- From the hardened form roles keep what they were granted, in the new form. From the other they
  -- do not: rights on the tables, and default privileges, do not show what was meant.
  CREATE OR REPLACE FUNCTION pgxlock_apply_rights(p_hardened boolean) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    v_roles text[];
    v_kinds text[];
    v_all   text;
    r record;
  BEGIN
    IF pgxlock_hardened() THEN
      -- More than half of the functions that are for one kind alone, because others may have been dropped and made again,
      -- or be new. Those for the owner alone (no kind) come with a grant of all functions. No table counts: a grant of all
      -- tables is common.
      SELECT string_agg(w.role, ', ' ORDER BY w.role COLLATE "C") FILTER (WHERE w.kind IS NULL),
             pg_catalog.array_agg(w.role) FILTER (WHERE w.kind IS NOT NULL),
             pg_catalog.array_agg(w.kind) FILTER (WHERE w.kind IS NOT NULL)
        INTO v_all, v_roles, v_kinds
        FROM (SELECT u.rolname::text AS role, k.kind
                FROM (SELECT f.kinds[1] AS kind, to_regprocedure(substr(f.object, 10))::text AS signature,
                             count(*) OVER (PARTITION BY f.kinds[1]) AS functions
                        FROM pgxlock_rights() f
                       WHERE f.privileges = 'EXECUTE'
                         AND pg_catalog.array_to_string(f.kinds, ' ') IN ('', 'application', 'administration',
                                                                          'monitoring administration')) k
                JOIN pgxlock_grants() g ON g.object = 'FUNCTION ' || k.signature AND g.grantor IS NULL
                JOIN pg_roles u ON quote_ident(u.rolname::text) = g.grantee
               GROUP BY u.rolname, k.kind, k.functions HAVING count(*) * 2::bigint > k.functions) w;
      IF p_hardened AND v_all IS NOT NULL THEN
        RAISE EXCEPTION 'pgxlock: cannot tell what kind of role this is, because it was granted all functions: %', v_all
          USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'SELECT revoke_locks() of it, and then grant_locks() with what it is to be.';
      END IF;
    END IF;
    PERFORM pgxlock_revoke(NULL::text, false);
    FOR r IN SELECT g.object FROM pgxlock_rights() g JOIN pg_proc p ON p.oid = to_regprocedure(substr(g.object, 10))::oid
              WHERE g.privileges = 'EXECUTE'
                AND g.kinds OPERATOR(pg_catalog.<>) '{}'::text[]
                AND p.provolatile <> 'i'::"char" LOOP         -- immutable: it touches nothing
      EXECUTE 'ALTER ' || r.object || CASE WHEN p_hardened THEN ' SECURITY DEFINER' ELSE ' SECURITY INVOKER' END;
    END LOOP;
    IF NOT p_hardened THEN
      FOR r IN SELECT o.object FROM pgxlock_objects() o
                WHERE left(o.object, 9) = 'FUNCTION ' AND left(o.object, 25) <> 'FUNCTION pgxlock_adopted_' LOOP
        EXECUTE 'GRANT EXECUTE ON ' || r.object || ' TO PUBLIC';
      END LOOP;
    END IF;
    FOR r IN SELECT k.role, k.kind FROM unnest(v_roles, v_kinds) AS k (role, kind) LOOP
      PERFORM grant_locks(r.role, r.kind);
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_apply_rights(boolean) IS 'pgxlock, internal: converts all rights to the hardened form or back.';

  -- A right on a column that a role granted because it had the right on the table is revoked only
  -- together with its own right on that column.
  CREATE OR REPLACE FUNCTION pgxlock_revoke(p_grantee text, p_beyond boolean) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    r record;
  BEGIN
    FOR r IN SELECT g.privilege, g.object, g.grantee
               FROM pgxlock_grants() g
              WHERE g.grantee = coalesce(p_grantee, g.grantee) AND (g.beyond OR NOT p_beyond) LOOP
      EXECUTE 'REVOKE ' || r.privilege || ' ON ' || r.object || ' FROM ' || r.grantee || ' CASCADE';
    END LOOP;
    FOR i IN 1..100 LOOP                    -- rights passed from role to role are revoked from the first grantor on
      FOR r IN SELECT DISTINCT g.privilege, g.object, g.grantor FROM pgxlock_grants() g
                WHERE g.grantee = coalesce(p_grantee, g.grantee)
                  AND (g.beyond OR NOT p_beyond)
                  AND g.grantor IS NOT NULL
                  AND g.privilege LIKE '%(%' LOOP
        EXECUTE 'GRANT ' || r.privilege || ' ON ' || r.object || ' TO ' || r.grantor || ' WITH GRANT OPTION';
        EXECUTE 'REVOKE ' || r.privilege || ' ON ' || r.object || ' FROM ' || r.grantor || ' CASCADE';
      END LOOP;
      EXIT WHEN NOT FOUND;
    END LOOP;
    SELECT g.privilege, g.object, g.grantee, g.grantor INTO r
      FROM pgxlock_grants() g
     WHERE g.grantee = coalesce(p_grantee, g.grantee) AND (g.beyond OR NOT p_beyond)
     LIMIT 1;
    IF FOUND THEN
      RAISE EXCEPTION 'pgxlock: cannot revoke % on % from %',
          r.privilege, r.object, r.grantee || coalesce(', to which ' || r.grantor || ' granted it', '')
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'REVOKE it as that role, or as a superuser, and run this again.';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_revoke(text, boolean) IS
    'pgxlock, internal: revokes all rights of a role, or of all roles, no matter who granted them. p_beyond: only those '
    'on tables and sequences that no kind of role needs, but SELECT.';

  -- hardened: true for the hardened form, false for the other, in which PUBLIC may call every
  -- function, NULL for both. Once hardened, objects that are not listed are for the owner alone.
  CREATE OR REPLACE FUNCTION pgxlock_rights() RETURNS TABLE (hardened boolean, privileges text, object text, kinds text[])
  LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT true, 'EXECUTE', 'FUNCTION ' || f.signature, k.kinds
      FROM (VALUES
        ('{application}'::text[], '{"acquire_lock(varchar, varchar, integer, jsonb)",
          "acquire_in_turn(varchar, varchar, integer, bigint, jsonb)", "leave_queue(varchar, varchar)",
          "try_acquire_lock(varchar, varchar, interval, jsonb)", "renew_lock(varchar, varchar, bigint, interval)",
          "extend_lock(varchar, varchar, integer)", "assert_lock_held(varchar, varchar, bigint, boolean)",
          "lock_tx(text, interval, boolean, boolean)", "claim_once(text, interval, interval)",
          "claim_request(text, text, interval, interval)", "answer_request(text, text, bytea)",
          "pgxlock_renew_batch(text[], text[], bigint[], bigint[])", "pgxlock_release_batch(text[], text[], bigint[])",
          "pgxlock_acquire_one(text, text, bigint, text, bigint)", "pgxlock_release_one(text, text, bigint)",
          "pgxlock_advisory_batch(integer[], bigint[], bigint)",
          "assert_advisory_lock_held(integer, bigint, bigint, bigint)",
          "pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint, integer)",
          "pgxlock_acquire_batch(text[], text[], bigint[], text[], bigint[])",
          "pgxlock_wake_batch(integer[], text[], bigint[])", "pgxlock_withdraw_batch(integer[], text[], bigint[])",
          "pgxlock_notify_holders(integer[], bigint[])", "try_acquire_shared_lock(varchar, varchar, interval, jsonb)",
          "acquire_shared_lock(varchar, varchar, integer, jsonb)", "extend_shared_lock(varchar, varchar, integer)",
          "assert_shared_lock_held(varchar, varchar, bigint, boolean)",
          "pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[])",
          "pgxlock_share_held(text, text, bigint, text, bigint)",
          "pgxlock_change_lease(text, text, bigint, boolean, text, bigint, text)",
          "pgxlock_release_shares_batch(text[], text[], bigint[])", "pgxlock_step_downs(integer[], text[], text[])",
          "acquire_permit(varchar, varchar, integer, integer, jsonb)",
          "acquire_shared_in_turn(varchar, varchar, integer, bigint, jsonb)",
          "acquire_permits_in_turn(varchar, varchar, integer, integer, integer, bigint, jsonb)",
          "pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[], integer[])",
          "pgxlock_due_runs(text, interval, interval, text, integer, boolean, text)",
          "pgxlock_start_run(text, timestamptz, interval, interval, text, interval, text, text, text)",
          "pgxlock_finish_run(text, timestamptz, text, text, text)", "start_run(text, interval, interval, text, text)",
          "start_run_at(text, timestamptz)", "finish_run(text, timestamptz, text)",
          "allow_rate(varchar, double precision, integer, integer)",
          "reserve_rate(varchar, double precision, integer, integer, interval)",
          "pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[])",
          "pgxlock_evicted(integer[], text[], text[], bigint[])", "pgxlock_publish_names(text[], text[])",
          "pgxlock_refused_batch(integer[], text[], bigint[])", "pgxlock_waited_for(integer[], text[])",
          "pgxlock_try_in_turn(text[], text[], bigint[], text[], bigint[], boolean)"}'::text[]),
        ('{application,administration}'::text[], '{"release_lock(varchar, varchar)",
          "release_lock_fenced(varchar, varchar, bigint)", "release_all_locks(varchar)",
          "reap_expired_locks(interval, integer)", "pgxlock_reap_advisory(integer, bigint)", "wake_lock_waiter(varchar)",
          "pgxlock_reap_waiters(integer)", "release_shared_lock(varchar, varchar)",
          "pgxlock_reap_shares(interval, integer)", "ask_to_step_down(varchar, text)",
          "pgxlock_ask_to_step_down(integer, text, text, text)", "pgxlock_reap_limits(integer, integer)"}'::text[]),
        ('{application,monitoring,administration}'::text[], '{"advisory_lock_key(text)", "advisory_lock_key_in(text, text)",
          "pgxlock_version()",
          "pgxlock_holders(text)", "pgxlock_own_key(boolean, bytea)",
          "pgxlock_waiter_key(bigint)", "list_runs(text, integer)"}'::text[]),
        ('{monitoring,administration}'::text[], '{"pgxlock_is_own_key(integer, bigint)", "pgxlock_session_key(bigint)",
          "pgxlock_list_names()", "pgxlock_list_tokens()", "pgxlock_list_tickets()"}'::text[]),
        ('{administration}'::text[], '{"purge_claims(interval, integer)", "repair_lock_tokens()",
          "forget_run(text, timestamptz)", "evict_lock(varchar, varchar, bigint, text)",
          "evict_advisory_lock(integer, bigint, text, integer, text)", "reset_lock_state(text, text)"}'::text[]),
        ('{}'::text[], '{"harden_locks()", "soften_locks()", "grant_locks(text, text)", "revoke_locks(text)"}'::text[]))
          k (kinds, signatures),
        pg_catalog.unnest(k.signatures) f (signature)
    UNION ALL
    VALUES (false::boolean, 'USAGE', 'SEQUENCE pgxlock_tickets', '{application}'::text[]),
           (false, 'USAGE', 'SEQUENCE pgxlock_tokens', '{application}'::text[]),
           (false, 'SELECT', 'TABLE pgxlock_epoch', '{application}'::text[]),
           (false, 'SELECT', 'TABLE pgxlock_since_crash', '{application}'::text[]),
           (false, 'SELECT', 'TABLE distributed_lock_shares', '{monitoring}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE distributed_lock_shares', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE distributed_lock_shares', '{administration}'::text[]),
           (false, 'SELECT', 'TABLE distributed_locks', '{monitoring}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE distributed_locks', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE distributed_locks', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_holders', '{monitoring,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_leases', '{monitoring,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_shares', '{monitoring,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_waiters', '{monitoring,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_advisory_locks', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_advisory_locks', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_advisory_locks', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_claims', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE', 'TABLE pgxlock_claims', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_claims', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_evictions', '{monitoring,administration}'::text[]),
           (false, 'SELECT', 'TABLE pgxlock_evictions', '{application}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_evictions', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_limits', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_limits', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_limits', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_names', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_names', '{application}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_runs', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_runs', '{application}'::text[]),
           (false, 'SELECT, DELETE', 'TABLE pgxlock_runs', '{administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_semaphores', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_semaphores', '{application}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_step_down', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_step_down', '{application,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_waiters', '{monitoring,administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE pgxlock_waiters', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_waiters', '{administration}'::text[]) $$;
  COMMENT ON FUNCTION pgxlock_rights() IS 'pgxlock, internal: the rights that each kind of role needs.';

  CREATE OR REPLACE FUNCTION pgxlock_hardened() RETURNS boolean LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT p.prosecdef FROM pg_proc p
     WHERE p.oid = 'pgxlock_renew_batch(text[], text[], bigint[], bigint[])'::regprocedure::oid $$;
  COMMENT ON FUNCTION pgxlock_hardened() IS 'pgxlock, internal: whether harden_locks() is in force.';

  CREATE OR REPLACE FUNCTION pgxlock_objects() RETURNS TABLE (object text, part text, owner oid, acl aclitem[])
  LANGUAGE sql STABLE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
    WITH lease AS (SELECT c.relnamespace, c.relowner FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid),
    relation AS (
      SELECT c.oid,
             CASE c.relkind WHEN 'S'::"char" THEN 'SEQUENCE ' ELSE 'TABLE ' END || quote_ident(c.relname::text) AS object,
             c.relowner, c.relacl
        FROM lease t JOIN pg_class c ON c.relnamespace = t.relnamespace AND c.relowner = t.relowner
       WHERE c.relkind IN ('r'::"char", 'v'::"char", 'S'::"char")
         AND (left(c.relname::text, 8) = 'pgxlock_'
              OR c.relname::text IN (SELECT substr(g.object, 7) FROM pgxlock_rights() g WHERE g.privileges <> 'EXECUTE')))
    SELECT r.object, '', r.relowner, r.relacl FROM relation r
    UNION ALL
    SELECT r.object, ' (' || quote_ident(a.attname::text) || ')', r.relowner, a.attacl
      FROM relation r JOIN pg_attribute a ON a.attrelid = r.oid WHERE a.attacl IS NOT NULL AND NOT a.attisdropped
    UNION ALL
    SELECT 'FUNCTION ' || p.oid::regprocedure::text, '', p.proowner, coalesce(p.proacl, acldefault('f'::"char", p.proowner))
      FROM lease t JOIN pg_proc p ON p.pronamespace = t.relnamespace AND p.proowner = t.relowner
     WHERE left(p.proname::text, 8) = 'pgxlock_'
        OR p.oid IN (SELECT to_regprocedure(substr(g.object, 10))::oid FROM pgxlock_rights() g WHERE g.privileges = 'EXECUTE') $$;
  COMMENT ON FUNCTION pgxlock_objects() IS
    'pgxlock, internal: all objects of pgxlock, as GRANT names them, and each column that has rights of its own.';

  -- Without compilation, as in harden_locks().
  CREATE OR REPLACE FUNCTION pgxlock_grants()
  RETURNS TABLE (privilege text, object text, grantee text, grantor text, beyond boolean)
  LANGUAGE sql STABLE SET search_path FROM CURRENT SET quote_all_identifiers = off SET jit = off AS $$
    SELECT x.privilege_type || o.part, o.object,
           CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END,
           CASE WHEN x.grantor <> o.owner THEN quote_ident(pg_get_userbyid(x.grantor)::text) END,
           left(o.object, 9) <> 'FUNCTION ' AND x.privilege_type <> 'SELECT'
             AND NOT EXISTS (SELECT FROM pgxlock_rights() g
                              WHERE g.object = o.object AND coalesce(g.hardened = pgxlock_hardened(), true)
                                AND x.privilege_type = ANY (pg_catalog.string_to_array(g.privileges, ', ')))
      FROM pgxlock_objects() o, aclexplode(o.acl) x WHERE x.grantee <> o.owner $$;
  COMMENT ON FUNCTION pgxlock_grants() IS
    'pgxlock, internal: the rights of roles other than the owner; grantee is PUBLIC or a quoted role. beyond: one on a '
    'table or sequence that no kind of role needs, and not SELECT.';

  CREATE OR REPLACE FUNCTION pgxlock_check_owner() RETURNS oid
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_schema text := current_schema()::text;
    v_owner  oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid);
  BEGIN
    IF NOT pg_has_role(v_owner, 'USAGE'::text) THEN
      RAISE EXCEPTION 'pgxlock in schema % belongs to %', quote_ident(v_schema), quote_ident(pg_get_userbyid(v_owner)::text)
        USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to that role, and run this again.';
    END IF;
    PERFORM pgxlock_check_read_committed('pgxlock: rights are changed in READ COMMITTED: an older snapshot does not show '
                                         'them all');
    PERFORM pg_advisory_xact_lock(('x706c6a' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
        || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 5), 'hex'))::bit(64)::bigint);
    RETURN v_owner;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_owner() IS
    'pgxlock, internal: raises 42501 for a role that may not change rights; lets one change them at a time, and while no '
    'migration runs. Returns the owner.';

  -- A role that may write the leases by a right on their table may use what is made of
  -- them, and may do with shares what it may do with leases.
  IF NOT pgxlock_hardened() THEN
    FOR v_grant IN SELECT g.grantee, g.privilege AS privileges, 'TABLE distributed_lock_shares' AS object
                     FROM pgxlock_grants() g
                    WHERE g.object = 'TABLE distributed_locks' AND g.privilege IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
                   UNION ALL
                   SELECT g.grantee, r.privileges, r.object FROM pgxlock_grants() g, pgxlock_rights() r
                    WHERE g.object = 'TABLE distributed_locks'
                      AND g.privilege = 'INSERT'
                      AND 'application' = ANY (r.kinds)
                      AND r.hardened IS NOT TRUE
                      AND r.object NOT IN ('TABLE distributed_locks', 'TABLE distributed_lock_shares',
                                           'TABLE pgxlock_claims', 'TABLE pgxlock_advisory_locks') LOOP
      EXECUTE 'GRANT ' || v_grant.privileges || ' ON ' || v_grant.object || ' TO ' || v_grant.grantee;
    END LOOP;
    -- Default privileges and GRANT ALL give TRIGGER, and writing what the owner's code reads.
    PERFORM pgxlock_revoke(NULL::text, true);
  END IF;

  PERFORM pgxlock_migrate('made'::text, 8, v_path);
END $migration$;
