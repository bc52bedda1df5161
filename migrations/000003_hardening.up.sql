-- Least privilege, for who wants it: harden_locks() makes the functions run with
-- the rights of their owner and takes all other rights from everybody, so that a
-- role may lock but not write the tables; grant_locks() gives a role what its work
-- needs, in either form. Nothing is hardened until harden_locks() is called.
--
-- Also: batches as functions, because a Locker may have no right on a table; and
-- row-level security, which would hide leases and claims from who asks for them,
-- is an error instead of a lock that is granted or refused in the dark.
--
-- Needs 000002_transactions.up.sql. What is said in 000001_leases.up.sql about how
-- to run it, and the rules that its functions keep, holds here as well.
--
-- A later migration asks pgxlock_hardened() before it replaces anything, for CREATE
-- OR REPLACE makes a function run with its caller's rights again. It lists in
-- pgxlock_rights() what it adds; where it was hardened it ends as this one does:
-- with harden_locks(), which keeps what each role was granted. What touches a table
-- says SET row_security = off.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_rest   pg_catalog.text := v_path;
  v_first  pg_catalog.text;
  v_foreign pg_catalog.text;
  v_hardened boolean;
  v_function pg_catalog.text;

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
                            "revoke_locks(text)", "pgxlock_next_tokens(bigint)", "pgxlock_acquire_batch(text[], text[], bigint[], text[])"}'::text[]) f (signature)
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
  IF to_regclass(pg_catalog.format('%I.pgxlock_claims', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 2', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run 000001_leases.up.sql and 000002_transactions.up.sql first.';
  END IF;
  SELECT coalesce(bool_or(p.prosecdef), false) INTO v_hardened FROM pg_proc p
   WHERE p.oid = to_regprocedure('pgxlock_renew_batch(text[], text[], bigint[], bigint[])')::oid;         -- if this runs again

  ----------------------------------------------------------------- batches --
  -- SECURITY DEFINER, as pgxlock_next_token(), which looks at the epoch for all.
  CREATE OR REPLACE FUNCTION pgxlock_next_tokens(p_count bigint) RETURNS bigint[]
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_first bigint := pgxlock_next_token();
  BEGIN
    RETURN (SELECT pg_catalog.array_agg(CASE WHEN i = 1::bigint THEN v_first ELSE ((v_first >> 40) << 40) + nextval('pgxlock_tokens'::regclass) END)
              FROM generate_series(1::bigint, p_count) i);
  END $$;

  -- What a Locker acquires at once: one answer per entry, in order, as that of
  -- try_acquire_lock(). It does in sets what that does for a name without a row,
  -- which is nearly every one, and reads those that are held; what is expired, its
  -- caller's own, ill-formed or just changing it leaves to it.
  --
  -- A guard or pin that turns out to be of no use is kept until this ends, so it is
  -- to be a transaction of its own.
  CREATE OR REPLACE FUNCTION pgxlock_acquire_batch(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[])
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_new    bigint[];                      -- entries that have no row, and in the end those that were given one
    v_tokens bigint[];
    v_now    timestamptz;
    r        record;
  BEGIN
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'cannot acquire a lock on a standby server' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;

    -- The guard is what two inserters of one name meet on: a second INSERT would
    -- wait for the first one's transaction. Read again under it, in a snapshot that
    -- was taken after it. Above READ COMMITTED there is no such snapshot.
    WITH absent AS MATERIALIZED (
      SELECT w.n, w.name
        FROM unnest(p_names, p_holders, p_ttls, p_metadata) WITH ORDINALITY AS w (name, holder, ttl, metadata, n)
       WHERE current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
         AND char_length(w.name) BETWEEN 1 AND 255 AND char_length(w.holder) BETWEEN 1 AND 255 AND left(w.holder, 1) <> '*'
         AND w.ttl BETWEEN 1::bigint AND 3110400000000::bigint              -- 100 years of 360 days, as intervals compare
         AND CASE WHEN w.metadata IS NULL THEN true ELSE octet_length(w.metadata::jsonb::text) <= 65536 END
         AND NOT EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = w.name COLLATE "C")
    )
    SELECT pg_catalog.array_agg(a.n ORDER BY a.n) INTO v_new FROM absent a WHERE pg_try_advisory_xact_lock(pgxlock_key('guard', a.name));

    IF v_new IS NOT NULL THEN
      PERFORM pgxlock_durable();
      v_now := clock_timestamp();
      WITH absent AS MATERIALIZED (
        SELECT w.n FROM pg_catalog.unnest(v_new) AS w (n)
         WHERE NOT EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = p_names[w.n] COLLATE "C")
      ), pinned AS MATERIALIZED (
        SELECT pg_catalog.array_agg(a.n ORDER BY a.n) AS entries, count(*) AS entry_count
          FROM absent a WHERE pg_try_advisory_xact_lock(pgxlock_key('pin', p_names[a.n]))
      ), drawn AS MATERIALIZED (
        SELECT d.n, d.token FROM pinned p, unnest(p.entries, pgxlock_next_tokens(p.entry_count)) AS d (n, token) WHERE p.entry_count > 0::bigint
      ), made AS (
        INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
        SELECT p_names[d.n], p_holders[d.n], v_now, v_now + p_ttls[d.n]::float8 * interval '1 millisecond', coalesce(p_metadata[d.n]::jsonb, jsonb '{}'), d.token
          FROM drawn d
        ON CONFLICT DO NOTHING              -- a name that comes twice, or was written behind our back
        RETURNING distributed_locks.fencing_token
      )
      SELECT pg_catalog.array_agg(d.n ORDER BY d.n), pg_catalog.array_agg(d.token ORDER BY d.n) INTO v_new, v_tokens
        FROM made m JOIN drawn d ON d.token = m.fencing_token;
      IF pg_catalog.cardinality(v_new) = pg_catalog.cardinality(p_names) THEN
        RETURN QUERY SELECT true, v_tokens[w.n], w.holder, w.ttl FROM unnest(p_holders, p_ttls) WITH ORDINALITY AS w (holder, ttl, n);
        RETURN;
      END IF;
    END IF;

    v_now := clock_timestamp();
    FOR r IN
      SELECT w.name, w.holder, w.ttl, w.metadata, v.token, l.holder_id::text AS holds, l.expires_at AS expires
        FROM unnest(p_names, p_holders, p_ttls, p_metadata) WITH ORDINALITY AS w (name, holder, ttl, metadata, n)
        LEFT JOIN unnest(v_new, v_tokens) AS v (n, token) ON v.n = w.n
        LEFT JOIN distributed_locks l ON l.lock_name::text = CASE WHEN v.token IS NULL THEN w.name END COLLATE "C"
       ORDER BY w.n
    LOOP
      acquired := r.token IS NOT NULL;
      IF acquired THEN
        fencing_token := r.token; held_by := r.holder; remaining_ms := r.ttl;
      ELSIF r.expires > v_now AND r.holds <> r.holder COLLATE "C" THEN
        fencing_token := NULL; held_by := r.holds;
        remaining_ms := CASE WHEN isfinite(r.expires) THEN (date_part('epoch'::text, r.expires - v_now) * 1000::float8)::bigint END;
      ELSE
        SELECT t.acquired, t.fencing_token, t.held_by, (date_part('epoch'::text, t.remaining) * 1000::float8)::bigint
          INTO acquired, fencing_token, held_by, remaining_ms
          FROM try_acquire_lock(r.name::varchar, r.holder::varchar, r.ttl::float8 * interval '1 millisecond', r.metadata::jsonb) t;
      END IF;
      RETURN NEXT;
    END LOOP;
  END $$;

  -- What a Locker renews at once: one answer per entry, in order.
  --   renewed
  --   gone     expired, released or taken over
  --   skipped  its row is locked by somebody: to be tried again alone
  -- The rows are locked first, in one order and without waiting, so that a row
  -- which somebody keeps locked costs no other lease its renewal.
  -- To plan it for the entries at hand would take longer than all the rest. What
  -- else a plan depends on is up to the session: a Locker's own forbids whatever
  -- would read all of the table; to set that for each call would cost, too.
  CREATE OR REPLACE FUNCTION pgxlock_renew_batch(p_names text[], p_holders text[], p_tokens bigint[], p_ttls bigint[]) RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  BEGIN
    RETURN QUERY
    WITH want AS MATERIALIZED (
      SELECT w.name, w.holder, w.token, w.ttl::float8 * interval '1 millisecond' AS ttl, w.n
        FROM unnest(p_names, p_holders, p_tokens, p_ttls) WITH ORDINALITY AS w (name, holder, token, ttl, n)
    ), locked AS MATERIALIZED (
      SELECT w.n, w.name, w.ttl
        FROM want w
        JOIN distributed_locks l ON l.lock_name::text = w.name COLLATE "C"
       WHERE l.holder_id::text = w.holder COLLATE "C" AND l.fencing_token = w.token AND l.expires_at > clock_timestamp()
         AND left(w.holder, 1) <> '*' AND w.ttl > interval '0' AND w.ttl <= interval '100 years'
       ORDER BY l.lock_name::text COLLATE "C"
         FOR NO KEY UPDATE OF l SKIP LOCKED
    ), renewed AS (
      UPDATE distributed_locks l
         SET expires_at = clock_timestamp() + k.ttl
        FROM locked k
       WHERE l.lock_name::text = k.name COLLATE "C"
      RETURNING k.n
    )
    SELECT CASE WHEN r.n IS NOT NULL THEN 'renewed'
                WHEN EXISTS (SELECT FROM distributed_locks l
                              WHERE l.lock_name::text = w.name COLLATE "C" AND l.holder_id::text = w.holder COLLATE "C"
                                AND l.fencing_token = w.token AND l.expires_at > clock_timestamp()) THEN 'skipped'
                ELSE 'gone' END
      FROM want w LEFT JOIN renewed r ON r.n = w.n
     ORDER BY w.n;
  END $$;

  -- What it gives back at once; a token may be NULL: whichever the holder has.
  --   released  it was still live
  --   expired   its row was there, but it had lapsed: it goes, unless somebody has
  --             its pin, who takes it over, removes it, or asserted it
  --   gone      it was released before, or somebody has taken it over
  --   skipped   a transaction that fenced it is open, or its row is locked by
  --             somebody: to be tried again
  CREATE OR REPLACE FUNCTION pgxlock_release_batch(p_names text[], p_holders text[], p_tokens bigint[]) RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  BEGIN
    RETURN QUERY
    WITH want AS MATERIALIZED (
      SELECT w.name, w.holder, w.token, w.n
        FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n)
    ), mine AS MATERIALIZED (
      SELECT w.n, w.name, w.holder, w.token, l.expires_at > clock_timestamp() AS live
        FROM want w
        JOIN distributed_locks l ON l.lock_name::text = w.name COLLATE "C"
       WHERE l.holder_id::text = w.holder COLLATE "C" AND l.fencing_token = coalesce(w.token, l.fencing_token) AND left(w.holder, 1) <> '*'
       ORDER BY l.lock_name::text COLLATE "C"
    ), pinned AS MATERIALIZED (
      SELECT m.n, m.name, m.holder, m.token FROM mine m WHERE pg_try_advisory_xact_lock(pgxlock_key('pin', m.name))
    ), locked AS MATERIALIZED (
      SELECT p.n, p.name
        FROM pinned p
        JOIN distributed_locks l ON l.lock_name::text = p.name COLLATE "C"
       WHERE l.holder_id::text = p.holder COLLATE "C" AND l.fencing_token = coalesce(p.token, l.fencing_token)
       ORDER BY l.lock_name::text COLLATE "C"
         FOR UPDATE OF l SKIP LOCKED
    ), removed AS (
      DELETE FROM distributed_locks l
       USING locked k
       WHERE l.lock_name::text = k.name COLLATE "C"
      RETURNING k.n, l.expires_at > clock_timestamp() AS live
    )
    SELECT CASE WHEN r.live THEN 'released'
                WHEN r.n IS NOT NULL OR NOT m.live AND p.n IS NULL THEN 'expired'
                WHEN m.n IS NOT NULL THEN 'skipped'
                ELSE 'gone' END
      FROM want w LEFT JOIN mine m ON m.n = w.n LEFT JOIN pinned p ON p.n = w.n LEFT JOIN removed r ON r.n = w.n
     ORDER BY w.n;
  END $$;

  -- Who holds a lease now; metadata that is a JSON string as its text.
  CREATE OR REPLACE FUNCTION pgxlock_holders(p_name text)
  RETURNS TABLE (holder text, metadata text, fencing_token bigint, acquired_at timestamptz, expires_at timestamptz)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    RETURN QUERY
    SELECT l.holder_id::text, coalesce(CASE WHEN jsonb_typeof(l.metadata) = 'string' THEN l.metadata #>> '{}'::text[]
                                            WHEN l.metadata <> jsonb '{}' THEN l.metadata::text END, ''),
           l.fencing_token, l.acquired_at, l.expires_at
      FROM distributed_locks l
     WHERE l.lock_name::text = p_name COLLATE "C" AND l.expires_at > clock_timestamp();
  END $$;

  ------------------------------------------------------ row-level security --
  -- A policy may show a role no row, or not all of them: then a try would be
  -- granted or refused by what happens to be hidden. With row_security off
  -- PostgreSQL raises 42501 where one applies.
  FOREACH v_function IN ARRAY '{"try_acquire_lock(varchar, varchar, interval, jsonb)", "pgxlock_renew(text, text, bigint, interval)",
      "pgxlock_release(text, text, bigint)", "release_all_locks(varchar)", "assert_lock_held(varchar, varchar, bigint, boolean)",
      "reap_expired_locks(interval, integer)", "repair_lock_tokens()", "pgxlock_next_token()", "claim_once(text, interval, interval)",
      "purge_claims(interval, integer)"}'::text[] LOOP
    EXECUTE 'ALTER FUNCTION ' || v_function || ' SET row_security = off';
  END LOOP;

  ------------------------------------------------------------------ rights --
  -- Which kind of role needs what: in the hardened form, in the other one (where
  -- PUBLIC may call every function), or, for NULL, in both. What is not listed
  -- is for the owner alone once it is hardened.
  CREATE OR REPLACE FUNCTION pgxlock_rights() RETURNS TABLE (hardened boolean, privileges text, object text, kinds text[])
  LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    VALUES (true, 'EXECUTE', 'FUNCTION acquire_lock(varchar, varchar, integer, jsonb)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION try_acquire_lock(varchar, varchar, interval, jsonb)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION renew_lock(varchar, varchar, bigint, interval)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION extend_lock(varchar, varchar, integer)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION release_lock(varchar, varchar)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION release_lock_fenced(varchar, varchar, bigint)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION release_all_locks(varchar)', '{application,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION assert_lock_held(varchar, varchar, bigint, boolean)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION lock_tx(text, interval, boolean, boolean)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION claim_once(text, interval, interval)', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION reap_expired_locks(interval, integer)', '{application,administration}'::text[]),        -- a Locker's housekeeping
           (true, 'EXECUTE', 'FUNCTION purge_claims(interval, integer)', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION repair_lock_tokens()', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION advisory_lock_key(text)', '{application,monitoring,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_schema_version()', '{application,monitoring,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_renew_batch(text[], text[], bigint[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_release_batch(text[], text[], bigint[])', '{application}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_holders(text)', '{application,monitoring,administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[])', '{application}'::text[]),
           (NULL, 'SELECT', 'TABLE lock_leases', '{monitoring,administration}'::text[]),
           (NULL, 'SELECT', 'TABLE pgxlock_claims', '{monitoring,administration}'::text[]),
           (false, 'SELECT', 'TABLE distributed_locks', '{monitoring}'::text[]),
           (false, 'SELECT, INSERT, UPDATE, DELETE', 'TABLE distributed_locks', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE distributed_locks', '{administration}'::text[]),
           (false, 'SELECT, INSERT, UPDATE', 'TABLE pgxlock_claims', '{application}'::text[]),
           (false, 'SELECT, UPDATE, DELETE', 'TABLE pgxlock_claims', '{administration}'::text[]),
           (true, 'EXECUTE', 'FUNCTION harden_locks()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION soften_locks()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION grant_locks(text, text)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION revoke_locks(text)', '{}'::text[]),
           -- called by these, with the rights of the owner
           (true, 'EXECUTE', 'FUNCTION pgxlock_next_token()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_next_tokens(bigint)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_timeline()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_system_identifier()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_key(text, text)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_check(text, text)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_ttl(interval)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_durable()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_renew(text, text, bigint, interval)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_release(text, text, bigint)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_deadline(interval)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_lock_timeout(timestamptz)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_vouch()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_rights()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_hardened()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_objects()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_grants()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_owner()', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_revoke(text)', '{}'::text[]),
           (true, 'EXECUTE', 'FUNCTION pgxlock_settle(boolean)', '{}'::text[]) $$;

  CREATE OR REPLACE FUNCTION pgxlock_hardened() RETURNS boolean LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT p.prosecdef FROM pg_proc p WHERE p.oid = 'pgxlock_renew_batch(text[], text[], bigint[], bigint[])'::regprocedure::oid $$;

  -- All that is ours, as GRANT calls it, and each column that has rights of its own.
  CREATE OR REPLACE FUNCTION pgxlock_objects() RETURNS TABLE (object text, part text, owner oid, acl aclitem[])
  LANGUAGE sql STABLE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
    WITH lease AS (SELECT c.relnamespace, c.relowner FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid),
    relation AS (
      SELECT c.oid, CASE c.relkind WHEN 'S'::"char" THEN 'SEQUENCE ' ELSE 'TABLE ' END || quote_ident(c.relname::text) AS object, c.relowner, c.relacl
        FROM lease t JOIN pg_class c ON c.relnamespace = t.relnamespace AND c.relowner = t.relowner
       WHERE c.relkind IN ('r'::"char", 'v'::"char", 'S'::"char")
         AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_'))
    SELECT r.object, '', r.relowner, r.relacl FROM relation r
    UNION ALL
    SELECT r.object, ' (' || quote_ident(a.attname::text) || ')', r.relowner, a.attacl
      FROM relation r JOIN pg_attribute a ON a.attrelid = r.oid WHERE a.attacl IS NOT NULL AND NOT a.attisdropped
    UNION ALL
    SELECT 'FUNCTION ' || p.oid::regprocedure::text, '', p.proowner, coalesce(p.proacl, acldefault('f'::"char", p.proowner))
      FROM lease t JOIN pg_proc p ON p.pronamespace = t.relnamespace AND p.proowner = t.relowner
     WHERE left(p.proname::text, 8) = 'pgxlock_'
        OR p.oid IN (SELECT to_regprocedure(substr(g.object, 10))::oid FROM pgxlock_rights() g WHERE g.privileges = 'EXECUTE') $$;

  -- What others than the owner may do with it; grantee PUBLIC or a quoted role.
  CREATE OR REPLACE FUNCTION pgxlock_grants() RETURNS TABLE (privilege text, object text, grantee text, grantor text)
  LANGUAGE sql STABLE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
    SELECT x.privilege_type || o.part, o.object, CASE WHEN x.grantee = 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END,
           CASE WHEN x.grantor <> o.owner THEN quote_ident(pg_get_userbyid(x.grantor)::text) END
      FROM pgxlock_objects() o, aclexplode(o.acl) x WHERE x.grantee <> o.owner $$;

  -- Who changes rights, one at a time, and while no migration runs. Returns
  -- whose all this is.
  CREATE OR REPLACE FUNCTION pgxlock_owner() RETURNS oid
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_schema text := current_schema()::text;
    v_owner  oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid);
  BEGIN
    IF NOT pg_has_role(v_owner, 'USAGE'::text) THEN
      RAISE EXCEPTION 'pgxlock in schema % belongs to %', quote_ident(v_schema), quote_ident(pg_get_userbyid(v_owner)::text)
        USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to that role, and run this again.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'pgxlock: rights are changed in READ COMMITTED: an older snapshot does not show them all'
        USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED, and run this again.';
    END IF;
    PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
        || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
    RETURN v_owner;
  END $$;

  -- Takes rights, whoever gave them. What a role gave on a column because it had
  -- the right on the table goes only with its right on that column.
  CREATE OR REPLACE FUNCTION pgxlock_revoke(p_grantee text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    r record;
  BEGIN
    FOR r IN SELECT g.privilege, g.object, g.grantee FROM pgxlock_grants() g WHERE g.grantee = coalesce(p_grantee, g.grantee) LOOP
      EXECUTE 'REVOKE ' || r.privilege || ' ON ' || r.object || ' FROM ' || r.grantee || ' CASCADE';
    END LOOP;
    FOR i IN 1..100 LOOP                    -- what was passed on from role to role goes from its beginning
      FOR r IN SELECT DISTINCT g.privilege, g.object, g.grantor FROM pgxlock_grants() g
                WHERE g.grantee = coalesce(p_grantee, g.grantee) AND g.grantor IS NOT NULL AND g.privilege LIKE '%(%' LOOP
        EXECUTE 'GRANT ' || r.privilege || ' ON ' || r.object || ' TO ' || r.grantor || ' WITH GRANT OPTION';
        EXECUTE 'REVOKE ' || r.privilege || ' ON ' || r.object || ' FROM ' || r.grantor || ' CASCADE';
      END LOOP;
      EXIT WHEN NOT FOUND;
    END LOOP;
    SELECT g.privilege, g.object, g.grantee INTO r FROM pgxlock_grants() g WHERE g.grantee = coalesce(p_grantee, g.grantee) LIMIT 1;
    IF FOUND THEN
      RAISE EXCEPTION 'pgxlock: cannot take % on % from %', r.privilege, r.object, r.grantee USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
  END $$;

  CREATE OR REPLACE FUNCTION grant_locks(p_role text, p_as text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    v_schema oid := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid);
    v_role   oid := (SELECT u.oid FROM pg_roles u WHERE u.rolname::text = p_role);
    r record;
  BEGIN
    PERFORM pgxlock_owner();
    IF v_role IS NULL THEN
      RAISE EXCEPTION 'role % does not exist', coalesce(quote_ident(p_role), 'NULL') USING ERRCODE = 'undefined_object';
    END IF;
    IF p_as IS NULL OR p_as NOT IN ('application', 'monitoring', 'administration') THEN
      RAISE EXCEPTION 'p_as must be application, monitoring or administration, it is %', coalesce(p_as, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT has_schema_privilege(v_role, v_schema, 'USAGE'::text) THEN
      EXECUTE 'GRANT USAGE ON SCHEMA ' || v_schema::regnamespace::text || ' TO ' || quote_ident(p_role);
    END IF;
    FOR r IN SELECT g.privileges, g.object FROM pgxlock_rights() g
              WHERE p_as = ANY (g.kinds) AND coalesce(g.hardened = pgxlock_hardened(), true) LOOP
      EXECUTE 'GRANT ' || r.privileges || ' ON ' || r.object || ' TO ' || quote_ident(p_role);
    END LOOP;
  END $$;

  CREATE OR REPLACE FUNCTION revoke_locks(p_role text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    r record;
  BEGIN
    PERFORM pgxlock_owner();
    IF NOT EXISTS (SELECT FROM pg_roles u WHERE u.rolname::text = p_role) THEN
      RAISE EXCEPTION 'role % does not exist', coalesce(quote_ident(p_role), 'NULL') USING ERRCODE = 'undefined_object';
    END IF;
    PERFORM pgxlock_revoke(quote_ident(p_role));
  END $$;

  -- Brings all rights into one form or the other. Where it is hardened, roles keep
  -- what they were granted, in the new form. Where it is not, nobody does: rights
  -- on the tables, and default privileges, do not tell what was meant.
  CREATE OR REPLACE FUNCTION pgxlock_settle(p_hardened boolean) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    v_roles text[];
    v_kinds text[];
    r record;
  BEGIN
    IF pgxlock_hardened() THEN              -- what only roles of that kind have
      SELECT pg_catalog.array_agg(w.role), pg_catalog.array_agg(w.kind) INTO v_roles, v_kinds
        FROM (SELECT u.rolname::text AS role, k.kind
                FROM (VALUES ('application', 'EXECUTE', 'FUNCTION ' || 'pgxlock_renew_batch(text[], text[], bigint[], bigint[])'::regprocedure::text),
                             ('application', 'EXECUTE', 'FUNCTION ' || 'try_acquire_lock(varchar, varchar, interval, jsonb)'::regprocedure::text),
                             ('application', 'EXECUTE', 'FUNCTION ' || 'claim_once(text, interval, interval)'::regprocedure::text),
                             ('administration', 'EXECUTE', 'FUNCTION ' || 'repair_lock_tokens()'::regprocedure::text),
                             ('administration', 'EXECUTE', 'FUNCTION ' || 'purge_claims(interval, integer)'::regprocedure::text),
                             ('administration', 'EXECUTE', 'FUNCTION ' || 'release_lock(varchar, varchar)'::regprocedure::text),
                             ('monitoring', 'SELECT', 'TABLE lock_leases'),
                             ('monitoring', 'SELECT', 'TABLE pgxlock_claims'),
                             ('monitoring', 'EXECUTE', 'FUNCTION ' || 'pgxlock_holders(text)'::regprocedure::text)) k (kind, privilege, object)
                JOIN pgxlock_grants() g ON k.privilege = g.privilege AND k.object = g.object AND g.grantor IS NULL
                JOIN pg_roles u ON quote_ident(u.rolname::text) = g.grantee
               GROUP BY u.rolname, k.kind HAVING count(*) = 3::bigint) w;
    END IF;
    PERFORM pgxlock_revoke(NULL::text);
    FOR r IN SELECT g.object FROM pgxlock_rights() g JOIN pg_proc p ON p.oid = to_regprocedure(substr(g.object, 10))::oid
              WHERE g.privileges = 'EXECUTE' AND g.kinds <> '{}'::text[] AND p.provolatile <> 'i'::"char" LOOP          -- immutable: it touches nothing
      EXECUTE 'ALTER ' || r.object || CASE WHEN p_hardened THEN ' SECURITY DEFINER' ELSE ' SECURITY INVOKER' END;
    END LOOP;
    IF NOT p_hardened THEN
      FOR r IN SELECT o.object FROM pgxlock_objects() o WHERE left(o.object, 9) = 'FUNCTION ' LOOP
        EXECUTE 'GRANT EXECUTE ON ' || r.object || ' TO PUBLIC';
      END LOOP;
    END IF;
    FOR r IN SELECT k.role, k.kind FROM unnest(v_roles, v_kinds) AS k (role, kind) LOOP
      PERFORM grant_locks(r.role, r.kind);
    END LOOP;
  END $$;

  CREATE OR REPLACE FUNCTION harden_locks() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off AS $$
  DECLARE
    v_owner  oid := pgxlock_owner();
    v_schema oid := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'distributed_locks'::regclass::oid);
    v_who    text;
    v_what   text;
  BEGIN
    -- A trigger that an open transaction has made is not seen. This waits for such
    -- transactions, and for no other; and what comes after it has no right to.
    LOCK TABLE distributed_locks, pgxlock_claims, pgxlock_epoch, pgxlock_migrations IN SHARE UPDATE EXCLUSIVE MODE;
    -- Who owns one of the functions can replace it; who owns a table can make triggers.
    SELECT string_agg(w.name || ' (owned by ' || quote_ident(pg_get_userbyid(w.owner)::text) || ')', ', ') INTO v_what FROM (
        SELECT c.oid::regclass::text AS name, c.relowner AS owner FROM pg_class c
         WHERE c.relnamespace = v_schema AND c.relname::text IN ('lock_leases', 'pgxlock_claims', 'pgxlock_epoch', 'pgxlock_migrations', 'pgxlock_tokens')
        UNION ALL
        SELECT p.oid::regprocedure::text, p.proowner FROM pgxlock_rights() g JOIN pg_proc p ON p.oid = to_regprocedure(substr(g.object, 10))::oid
         WHERE g.privileges = 'EXECUTE') w
     WHERE w.owner <> v_owner;
    IF v_what IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: not all of it belongs to %, as distributed_locks does: %', quote_ident(pg_get_userbyid(v_owner)::text), v_what
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'ALTER ... OWNER TO one role.';
    END IF;
    -- From now on what runs in the functions runs as their owner. They are written
    -- to call nothing that others make in the schema; nobody shall get to try.
    SELECT string_agg(DISTINCT w.name, ', ') INTO v_who FROM (
        SELECT 'PUBLIC' AS name FROM pg_namespace n, aclexplode(n.nspacl) x
         WHERE n.oid = v_schema AND x.grantee = 0::oid AND x.privilege_type = 'CREATE'
        UNION ALL
        SELECT quote_ident(u.rolname::text) FROM pg_roles u, pg_namespace n JOIN pg_roles s ON s.oid = n.nspowner
         WHERE n.oid = v_schema AND NOT u.rolsuper AND u.rolname::text <> 'pg_database_owner'             -- who that is, is listed by name
           AND NOT pg_has_role(u.oid, v_owner, 'MEMBER'::text)
           AND (has_schema_privilege(u.oid, v_schema, 'CREATE'::text) AND NOT has_schema_privilege('public'::name, v_schema, 'CREATE'::text)
                OR NOT s.rolsuper AND pg_has_role(u.oid, n.nspowner, 'MEMBER'::text))) w;      -- its owner may drop what is in it, and grant itself CREATE
    IF v_who IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: in schema % others than % may create objects: %', v_schema::regnamespace::text, quote_ident(pg_get_userbyid(v_owner)::text), v_who
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'REVOKE CREATE ON SCHEMA from them; from its owner it cannot be taken: the schema must belong to the owner of pgxlock (ALTER SCHEMA ... OWNER TO).';
    END IF;
    -- So do triggers, which a right on a table is enough to make, and those of
    -- tables that a foreign key connects.
    SELECT string_agg(w.name, ', ') INTO v_what FROM (
        SELECT pg_catalog.format('trigger %I on %s', g.tgname, g.tgrelid::regclass::text) AS name
          FROM pg_trigger g JOIN pgxlock_objects() o ON o.object = 'TABLE ' || g.tgrelid::regclass::text AND o.part = ''
         WHERE NOT g.tgisinternal
        UNION ALL
        SELECT pg_catalog.format('foreign key %I of %s', k.conname, k.conrelid::regclass::text)
          FROM pg_constraint k JOIN pgxlock_objects() o ON o.object = 'TABLE ' || k.confrelid::regclass::text AND o.part = ''
         WHERE k.contype = 'f'::"char") w;
    IF v_what IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: what others may have made on the tables would run as %: %', quote_ident(pg_get_userbyid(v_owner)::text), v_what
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Drop them first.';
    END IF;
    PERFORM pgxlock_settle(true);
  END $$;

  CREATE OR REPLACE FUNCTION soften_locks() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_owner();
    IF pgxlock_hardened() THEN              -- else there is nothing to undo, and rights that were granted otherwise stay
      PERFORM pgxlock_settle(false);
    END IF;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 3::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON FUNCTION harden_locks() IS
    'Least privilege: the functions run with their owner''s rights from now on, and nobody else has a right on the tables or may call a function but who was granted that by grant_locks() since. The first time that is nobody: grant in the same transaction. Raises 55000 where others may create objects in the schema, or where a table has triggers or is the target of a foreign key. Again it takes what was granted by other ways. For the owner of the functions.';
  COMMENT ON FUNCTION soften_locks() IS
    'Undoes harden_locks(): the functions run with their caller''s rights, everybody may call them, and roles that grant_locks() named have rights on the tables instead. For the owner of the functions.';
  COMMENT ON FUNCTION grant_locks(text, text) IS
    'Gives a role what it needs, hardened or not, as ''application'' (locks, fences, claims), ''monitoring'' (reads lock_leases and claims) or ''administration'' (releases anybody''s locks, reaps, purges claims; hardened also repairs tokens). A role may be several. Gives USAGE on the schema as well. For the owner of the functions.';
  COMMENT ON FUNCTION revoke_locks(text) IS
    'Takes from a role every right on what is pgxlock''s, however it was given; not USAGE on the schema. For the owner of the functions.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';
  COMMENT ON FUNCTION pgxlock_next_tokens(bigint) IS 'pgxlock, internal: draws fencing tokens; call it only with their locks held.';
  COMMENT ON FUNCTION pgxlock_acquire_batch(text[], text[], bigint[], text[]) IS 'pgxlock, internal: what a Locker acquires at once. Each call in a transaction of its own.';
  COMMENT ON FUNCTION pgxlock_renew_batch(text[], text[], bigint[], bigint[]) IS 'pgxlock, internal: what a Locker renews at once.';
  COMMENT ON FUNCTION pgxlock_release_batch(text[], text[], bigint[]) IS 'pgxlock, internal: what a Locker gives back at once.';
  COMMENT ON FUNCTION pgxlock_holders(text) IS 'pgxlock, internal: who holds a lease now.';
  COMMENT ON FUNCTION pgxlock_rights() IS 'pgxlock, internal: which kind of role needs what.';
  COMMENT ON FUNCTION pgxlock_hardened() IS 'pgxlock, internal: whether harden_locks() is in force.';
  COMMENT ON FUNCTION pgxlock_objects() IS 'pgxlock, internal: all that is ours, with its rights.';
  COMMENT ON FUNCTION pgxlock_grants() IS 'pgxlock, internal: what others than the owner may do.';
  COMMENT ON FUNCTION pgxlock_revoke(text) IS 'pgxlock, internal: takes all rights of a role, or of everybody.';
  COMMENT ON FUNCTION pgxlock_owner() IS 'pgxlock, internal: raises 42501 for who may not change rights, and lets one do it at a time.';
  COMMENT ON FUNCTION pgxlock_settle(boolean) IS 'pgxlock, internal: brings all rights into the hardened form or back.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 3) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  IF v_hardened THEN
    ALTER FUNCTION pgxlock_renew_batch(text[], text[], bigint[], bigint[]) SECURITY DEFINER;
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (3, false);
END $migration$;
