-- Leases: the table distributed_locks, the functions that acquire, renew, release and
-- fence them, and the fencing tokens. A table and functions of the same names that have
-- the classic five columns are adopted in place. Lockers acquire leases in batches by
-- pgxlock_acquire_batch(), which stands with the queue of waiters, in file 4.
--
-- Run these files in order, by golang-migrate, by `psql -f` (with or without -1), by
-- `pgxlock migrate up` or by migrations.Up. They install into the schema that search_path
-- names first. Each file is ONE statement, so that it runs whole or not at all, whatever
-- the client does after an error, and so that its local settings hold for all of it.
--
-- Rules for the functions in all files:
--   * Every function pins search_path to this schema and pg_temp. PostgreSQL then
--     searches pg_catalog first without being told; naming it would put it last.
--   * Where another role may create objects in this schema, an operator or function
--     whose argument types match exactly beats one of pg_catalog that needs a cast:
--     =(varchar,varchar) would beat =(text,text). So names and holders are handled as
--     text, and no call relies on a cast.
--   * The time is clock_timestamp(), read after the lock that makes it final: now()
--     stands still in a transaction. A lease is live while expires_at > clock_timestamp().
--   * A function that locks a row or a key before it knows that it may keep it does so in
--     a subtransaction, and rolls that back by raising LK900. So a failed try leaves no
--     lock behind in the caller's transaction.
--   * A function that reads or writes a table says SET row_security = off: PostgreSQL
--     then raises 42501 where a policy would hide a lease from its caller.
--   * A table says USING heap: a default_table_access_method may lack updates and row locks.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_found  pg_catalog.name[] := pg_catalog.current_schemas(false);
  v_older  pg_catalog.name;                   -- the schema in which search_path finds distributed_locks
  v_table  pg_catalog.oid;
  v_shape  pg_catalog.text;
  v_adopts pg_catalog.bool := false;          -- distributed_locks is an older table, which becomes pgxlock's
  v_is_ours pg_catalog.bool := false;         -- distributed_locks is pgxlock's, though pgxlock_epoch is gone
  v_was_installed   pg_catalog.bool;          -- somebody dropped a part of pgxlock, which is to be made again
  v_tokens_are_gone pg_catalog.bool;
  v_expression pg_catalog.text;
  v_key        pg_catalog.int8;
  v_is_worker  pg_catalog.bool;
  r            pg_catalog.record;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  IF v_schema IS NULL OR left(v_schema, 3) = 'pg_' THEN
    RAISE EXCEPTION 'pgxlock: cannot tell which schema to install into: search_path is %, its first usable schema is %',
        quote_literal(v_path), coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'invalid_schema_name',
            HINT = 'Name an existing schema first, for example: SET search_path = public. Schemas named pg_* are refused.';
  END IF;
  -- A second table in front of one that is in use would split its callers.
  SELECT n.nspname INTO v_older
    FROM unnest(v_found) WITH ORDINALITY AS f(name, place)
    JOIN pg_namespace n ON n.nspname = f.name
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'distributed_locks'
   ORDER BY f.place LIMIT 1;
  IF v_older <> v_schema THEN
    RAISE EXCEPTION 'pgxlock: cannot tell which schema is meant: search_path finds distributed_locks in schema %, and a '
                    'new one would be made in schema %',
        quote_ident(v_older), quote_ident(v_schema)
      USING ERRCODE = 'invalid_schema_name',
            HINT = pg_catalog.format('SET search_path = %I to upgrade that one, or SET search_path = %I for a second one. '
                                     'Nothing was changed.', v_older, v_schema);
  END IF;
  IF to_regprocedure(pg_catalog.format('%I.pgxlock_schema_version()', v_schema)) IS NOT NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % has pgxlock from before its first release, which cannot be upgraded', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Remove it with the program or the down files that installed it (pgxlock migrate down), then run this '
                   'again. Nothing was changed.';
  END IF;
  IF to_regclass('pg_catalog.pg_dist_local_group') IS NOT NULL THEN
    EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_local_group g WHERE g.groupid > 0)' INTO v_is_worker;
    IF v_is_worker THEN
      RAISE EXCEPTION 'pgxlock: the server is a Citus worker, where a lock excludes no caller on another node: connect to '
                      'the coordinator'
        USING ERRCODE = 'read_only_sql_transaction', HINT = 'Nothing was changed.';
    END IF;
  END IF;
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  -- Two migrators wait for each other here, whatever tools they are, before they make anything.
  v_key := ('x706c6a' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 5), 'hex'))::bit(64)::bigint;
  PERFORM pg_advisory_xact_lock(v_key);
  -- Some engines grant every lock to every caller: there lock_tx(), and the fences of leases, would exclude nobody.
  IF NOT EXISTS (SELECT FROM pg_locks l
                  WHERE l.locktype = 'advisory' AND l.objsubid = 1::smallint AND l.pid = pg_backend_pid() AND l.granted
                    AND (l.classid::bigint << 32) | l.objid::bigint = v_key) THEN
    RAISE EXCEPTION 'pgxlock: this server grants advisory locks and does not keep them, so no lock, and no fence, would '
                    'exclude anybody: %',
        version()
      USING ERRCODE = 'feature_not_supported',
            HINT = 'Use PostgreSQL: https://github.com/pgxlock/pgxlock/blob/main/docs/engines.md. Nothing was changed.';
  END IF;
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  ------------------------------------------------------------ foreign code --
  -- A trigger runs with the rights of the role that writes its table, and so does a function that a
  -- rule, a default, a constraint, an index, a policy or a type of the table calls. GRANT ALL on a
  -- table includes TRIGGER, so a role that may do no more than use the table could have code of its
  -- own run by the owner. A foreign key of another role's table has code run with that role's rights, but
  -- in our session, where it can change search_path. Code that writes a table with the owner's rights
  -- calls this first, in the same transaction: the table lock keeps new triggers and foreign keys out
  -- until it ends. Nobody knows who attached a trigger, so one that calls a trusted function is refused
  -- too while others could have.
  CREATE OR REPLACE FUNCTION pgxlock_check_code(p_tables text[]) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off SET jit = off AS $$
  DECLARE
    v_schema oid := to_regnamespace(quote_ident(current_schema()::text))::oid;
    v_tables oid[];
    v_names  text;
    v_what   text;
  BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'pgxlock: code on the tables is looked for in READ COMMITTED: an older snapshot does not show all of it'
        USING ERRCODE = 'active_sql_transaction', HINT = 'Call it in a READ COMMITTED transaction of its own.';
    END IF;
    SELECT pg_catalog.array_agg(c.oid), string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname::text COLLATE "C")
      INTO v_tables, v_names
      FROM pg_class c
     WHERE c.relnamespace = v_schema AND c.relkind IN ('r'::"char", 'p'::"char") AND pg_has_role(c.relowner, 'USAGE'::text)
       AND CASE WHEN p_tables IS NULL THEN left(c.relname::text, 8) = 'pgxlock_'
                                           OR c.relname::text IN ('distributed_locks', 'distributed_lock_shares')
                ELSE c.relname::text = ANY (p_tables) END;
    IF v_tables IS NULL THEN
      RETURN;
    END IF;
    EXECUTE 'LOCK TABLE ' || v_names || ' IN ROW EXCLUSIVE MODE';
    WITH RECURSIVE ours AS (
      SELECT c.oid AS relation, c.relowner AS owner,
             (SELECT string_agg(DISTINCT CASE x.grantee WHEN 0::oid THEN 'PUBLIC'
                                                        ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END, ', ')
                FROM aclexplode(c.relacl) x
               WHERE x.privilege_type = 'TRIGGER'
                 AND CASE x.grantee WHEN 0::oid THEN true
                                    ELSE NOT pg_has_role(x.grantee, c.relowner, 'MEMBER'::text) END) AS triggering
        FROM pg_class c WHERE c.oid = ANY (v_tables)
    ), part (relation, class, id) AS (
      SELECT o.relation, 'pg_class'::regclass::oid, o.relation FROM ours o
      UNION ALL
      SELECT g.tgrelid, 'pg_trigger'::regclass::oid, g.oid
        FROM pg_trigger g
       WHERE g.tgrelid = ANY (v_tables) AND NOT g.tgisinternal
      UNION ALL SELECT w.ev_class, 'pg_rewrite'::regclass::oid, w.oid FROM pg_rewrite w WHERE w.ev_class = ANY (v_tables)
      UNION ALL SELECT a.adrelid, 'pg_attrdef'::regclass::oid, a.oid FROM pg_attrdef a WHERE a.adrelid = ANY (v_tables)
      UNION ALL SELECT p.polrelid, 'pg_policy'::regclass::oid, p.oid FROM pg_policy p WHERE p.polrelid = ANY (v_tables)
      UNION ALL SELECT i.indrelid, 'pg_class'::regclass::oid, i.indexrelid FROM pg_index i WHERE i.indrelid = ANY (v_tables)
      UNION ALL
      SELECT e.stxrelid, 'pg_statistic_ext'::regclass::oid, e.oid
        FROM pg_statistic_ext e
       WHERE e.stxrelid = ANY (v_tables)
      UNION ALL SELECT k.conrelid, 'pg_constraint'::regclass::oid, k.oid FROM pg_constraint k WHERE k.conrelid = ANY (v_tables)
    ), reached (relation, part_class, part, class, id) AS (
      SELECT p.relation, p.class, p.id, p.class, p.id FROM part p
      UNION
      SELECT r.relation, r.part_class, r.part, d.class, d.id
        FROM reached r, LATERAL (
          SELECT n.refclassid AS class, n.refobjid AS id
            FROM pg_depend n
           WHERE n.classid = r.class AND n.objid = r.id AND n.deptype <> 'e'::"char"
          UNION ALL
          SELECT 'pg_constraint'::regclass::oid, k.oid
            FROM pg_constraint k
           WHERE r.class = 'pg_type'::regclass::oid AND k.contypid = r.id
          UNION ALL
          SELECT 'pg_proc'::regclass::oid, a.amproc::oid
            FROM pg_opclass c JOIN pg_amproc a ON a.amprocfamily = c.opcfamily
           WHERE r.class = 'pg_opclass'::regclass::oid AND c.oid = r.id
          UNION ALL
          SELECT 'pg_operator'::regclass::oid, a.amopopr
            FROM pg_opclass c JOIN pg_amop a ON a.amopfamily = c.opcfamily
           WHERE r.class = 'pg_opclass'::regclass::oid AND c.oid = r.id) d
    ), owned (class, id, owner) AS (
      SELECT 'pg_proc'::regclass::oid, p.oid, p.proowner
        FROM pg_proc p JOIN reached r ON r.class = 'pg_proc'::regclass::oid AND r.id = p.oid
      UNION SELECT r.class, t.oid, t.typowner FROM pg_type t JOIN reached r ON r.class = 'pg_type'::regclass::oid AND r.id = t.oid
      UNION
      SELECT r.class, t.oid, t.oprowner
        FROM pg_operator t JOIN reached r ON r.class = 'pg_operator'::regclass::oid AND r.id = t.oid
      UNION
      SELECT r.class, c.oid, c.relowner
        FROM pg_class c JOIN reached r ON r.class = 'pg_class'::regclass::oid AND r.id = c.oid
    ), found (what) AS (
      SELECT pg_describe_object(r.part_class, r.part, 0) || ' uses ' || pg_describe_object(r.class, r.id, 0) || ' of '
             || quote_ident(pg_get_userbyid(w.owner)::text)
        FROM reached r JOIN ours o ON o.relation = r.relation JOIN owned w ON w.class = r.class AND w.id = r.id
       WHERE NOT pg_has_role(w.owner, o.owner, 'MEMBER'::text)
      UNION
      SELECT pg_describe_object(p.class, p.id, 0) || ' may have been made by ' || o.triggering
             || ', who may create triggers there'
        FROM part p JOIN ours o ON o.relation = p.relation
       WHERE p.class = 'pg_trigger'::regclass::oid AND o.triggering IS NOT NULL
      UNION
      SELECT pg_describe_object('pg_constraint'::regclass::oid, k.oid, 0) || ' of '
             || quote_ident(pg_get_userbyid(c.relowner)::text) || ' refers to '
             || pg_describe_object('pg_class'::regclass::oid, k.confrelid, 0)
        FROM ours o JOIN pg_constraint k ON k.confrelid = o.relation JOIN pg_class c ON c.oid = k.conrelid
       WHERE k.contype = 'f'::"char" AND NOT pg_has_role(c.relowner, o.owner, 'MEMBER'::text)
      UNION
      SELECT pg_describe_object('pg_class'::regclass::oid, h.inhrelid, 0) || ' inherits from '
             || pg_describe_object('pg_class'::regclass::oid, h.inhparent, 0)
        FROM pg_inherits h WHERE h.inhrelid = ANY (v_tables) OR h.inhparent = ANY (v_tables)
    )
    SELECT string_agg(f.what, '; ' ORDER BY f.what COLLATE "C") INTO v_what FROM found f;
    IF v_what IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: code of other roles would run with the rights of the owner of the tables in schema %: %',
          v_schema::regnamespace::text, v_what
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Drop it as the owner of the table (DROP TRIGGER ... ON ...), REVOKE TRIGGER, REFERENCES on the '
                     'table from those roles, and run this again.';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_code(text[]) IS
    'pgxlock, internal: raises 55000, with names, if a trigger, rule, default, constraint, index, policy, type or child '
    'of one of these tables, or a foreign key to it, would run code of a role other than its owner; else none can be '
    'added until the transaction ends. NULL: all tables of pgxlock.';

  -------------------------------------------------------------- migrations --
  -- Every file calls this first ('up' or 'down', with the version that the file makes or
  -- removes, and the search_path that it was run with) and last ('made' or 'removed', with
  -- the version that the schema has then).
  --
  -- A role that may create objects in the schema could create some of ours before us, with
  -- triggers on them, and would still own what CREATE OR REPLACE replaces. So objects of
  -- other roles are refused: first those with our names, for a clear answer; and last, when
  -- all is made and nothing was read or written but definitions, also each that this
  -- transaction wrote. From then on all is ours, and nobody else can change it.
  CREATE OR REPLACE FUNCTION pgxlock_migrate(p_step text, p_version integer, p_path text) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_schema  text := current_schema()::text;
    v_me      oid  := (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user);
    v_rest    text := p_path;
    v_first   text;
    v_foreign text;
    v_installed bigint := 0;                -- what the schema has
    v_recorded  bigint;                     -- what the tool that runs the file says of it
    v_needed    bigint := p_version - (p_step = 'up')::integer;
    v_now       xid8 := pg_current_xact_id();
  BEGIN
    IF p_step IN ('up', 'down') THEN
      IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'pgxlock: migrations run in READ COMMITTED: an older snapshot does not show what other roles have '
                        'created since'
          USING ERRCODE = 'active_sql_transaction',
                HINT = 'SET default_transaction_isolation = ''read committed'' before the files.';
      END IF;
      PERFORM set_config('lock_timeout', '2s', true);
      PERFORM set_config('client_min_messages', 'warning', true);
      PERFORM set_config('quote_all_identifiers', 'off', true);
      -- The schema that search_path names first must be the one that comes first.
      LOOP
        v_first := substring(v_rest FROM '^[[:space:]]*("(?:[^"]|"")*"|[^",[:space:]]+)');
        v_rest  := substring(v_rest FROM '^[[:space:]]*(?:"(?:[^"]|"")*"|[^",[:space:]]+)[[:space:]]*,(.*)$');
        v_first := CASE WHEN v_first LIKE '"%' THEN replace(substr(v_first, 2, length(v_first) - 2), '""', '"')
                        ELSE lower(v_first) END;
        EXIT WHEN v_first IS DISTINCT FROM '$user';
        v_first := current_user::text;
        EXIT WHEN EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = current_user);
      END LOOP;
      IF v_first IS DISTINCT FROM v_schema THEN
        RAISE EXCEPTION 'pgxlock: cannot tell which schema is meant: search_path is %, its first usable schema is %',
            quote_literal(p_path), quote_ident(v_schema)
          USING ERRCODE = 'invalid_schema_name', HINT = 'Name an existing schema first, for example: SET search_path = public.';
      END IF;
      -- Other migrators wait here.
      PERFORM pg_advisory_xact_lock(('x706c6a' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
          || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 5), 'hex'))::bit(64)::bigint);
    END IF;

    -- Another role may make one of ours at any time: only what belongs to this role is called.
    IF EXISTS (SELECT FROM pg_proc p WHERE p.oid = to_regprocedure('pgxlock_version()')::oid AND p.proowner = v_me) THEN
      v_installed := pgxlock_version();
    END IF;
    -- Made here, because every file changes it. A tool that another one has overtaken runs an
    -- older file again, and then goes on: that takes nothing back.
    IF p_step NOT IN ('up', 'down') THEN
      EXECUTE pg_catalog.format('CREATE OR REPLACE FUNCTION pgxlock_version() RETURNS bigint LANGUAGE sql IMMUTABLE '
                                'PARALLEL SAFE RETURN %s::bigint',
        CASE p_step WHEN 'made' THEN greatest(p_version::bigint, v_installed) ELSE p_version::bigint END);
      COMMENT ON FUNCTION pgxlock_version() IS 'pgxlock: version of this schema.';
    END IF;

    SELECT string_agg(o.name || ' (owned by ' || quote_ident(pg_get_userbyid(o.owner)::text) || ')', ', ') INTO v_foreign
      FROM (SELECT c.relname::text AS name, c.relowner AS owner, c.xmin AS writer
              FROM pg_class c
             WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
            UNION ALL
            SELECT p.oid::regprocedure::text, p.proowner, p.xmin
              FROM pg_proc p
             WHERE p.pronamespace = to_regnamespace(quote_ident(v_schema))::oid) o
     WHERE o.owner <> v_me
       -- A row that is seen and whose writer is in progress is of this transaction, or of a
       -- subtransaction, which has a later number. What others commit meanwhile is theirs.
       AND CASE WHEN p_step NOT IN ('up', 'down') AND CASE WHEN age(o.writer) <= age(v_now::xid)
                     THEN pg_xact_status((v_now::text::bigint
                                          + (age(v_now::xid) - age(o.writer)))::text::xid8) = 'in progress'
                     ELSE false END THEN true
                WHEN position('(' IN o.name) = 0 THEN          -- a table, a view, a sequence or an index
                  left(o.name, 8) = 'pgxlock_'
                    OR o.name IN ('distributed_locks', 'distributed_lock_shares', 'lock_leases', 'lock_shares',
                                  'lock_holders', 'lock_waiters')
                ELSE o.name IN (                               -- what is adopted, and what the files call before they are done
                  'acquire_lock(character varying,character varying,integer,jsonb)',
                  'release_lock(character varying,character varying)',
                  'pgxlock_version()', 'pgxlock_check_unused()', 'pgxlock_check_code(text[])', 'pgxlock_rename(text,text,text)',
                  'pgxlock_adopted_acquire_lock(character varying,character varying,integer,jsonb)',
                  'pgxlock_adopted_release_lock(character varying,character varying)', 'pgxlock_session_key(bigint)',
                  'pgxlock_hardened()', 'soften_locks()', 'grant_locks(text,text)', 'pgxlock_grants()',
                  'pgxlock_objects()', 'pgxlock_rights()', 'pgxlock_check_owner()', 'pgxlock_revoke(text,boolean)',
                  'pgxlock_apply_rights(boolean)') END;
    IF v_foreign IS NOT NULL THEN
      RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Their names are pgxlock''s. If that role is the one that owns pgxlock, or the table to adopt, SET '
                     'ROLE to it and run this again; else install into another schema, or let that role rename them.';
    END IF;
    -- the rest stays locked since
    PERFORM pgxlock_check_code(CASE WHEN p_step NOT IN ('up', 'down') THEN '{pgxlock_migrations}'::text[] END);

    IF p_step NOT IN ('up', 'down') THEN
      -- Default privileges gave these with the table; once this file commits the role could use them.
      FOR v_foreign IN
        SELECT 'REVOKE TRIGGER, TRUNCATE, REFERENCES ON ' || c.oid::regclass::text || ' FROM '
               || CASE x.grantee WHEN 0::oid THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END || ' CASCADE'
          FROM pg_class c, aclexplode(c.relacl) x
         WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid AND c.relowner = v_me AND c.relkind = 'r'::"char"
           AND (left(c.relname::text, 8) = 'pgxlock_' OR c.relname::text IN ('distributed_locks', 'distributed_lock_shares'))
           AND x.grantee <> c.relowner AND x.privilege_type IN ('TRIGGER', 'TRUNCATE', 'REFERENCES') LOOP
        EXECUTE v_foreign;
      END LOOP;
      DELETE FROM pgxlock_migrations;
      INSERT INTO pgxlock_migrations (version, dirty) VALUES (p_version, false);
      IF p_version >= 8 AND current_setting('pgxlock.hardened', true) = 'on' THEN          -- the rights come with 000008
        PERFORM set_config('lock_timeout', '1s', true);   -- for the tables that are in use
        -- what pgxlock_hardened() looks at
        ALTER FUNCTION pgxlock_renew_batch(text[], text[], bigint[], bigint[]) SECURITY DEFINER;
        PERFORM harden_locks();
      END IF;
      RETURN;
    END IF;
    -- it is empty where all files are to run again
    IF EXISTS (SELECT FROM pg_class c
                WHERE c.oid = to_regclass(quote_ident(v_schema) || '.pgxlock_migrations')::oid AND c.relowner = v_me) THEN
      v_recorded := (SELECT max(m.version) FROM pgxlock_migrations m);
    END IF;
    IF p_step = 'up' AND v_recorded > p_version THEN
      RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema), v_recorded
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
    ELSIF p_step = 'down' AND greatest(v_installed, v_recorded) > p_version THEN
      RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
        USING ERRCODE = 'object_not_in_prerequisite_state';
    ELSIF v_installed < v_needed THEN
      RAISE EXCEPTION 'pgxlock: schema % does not have version %', quote_ident(v_schema), v_needed
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run the files in order, the first one first.';
    END IF;
    IF p_step = 'down' THEN
      PERFORM pgxlock_check_unused();
    END IF;
    -- CREATE OR REPLACE makes a function run with its caller's rights again. Functions of the
    -- first file and of the one with the rights tell whether all was hardened: where the files
    -- run again one by one, the latter's are still as they were.
    IF EXISTS (SELECT FROM pg_proc p WHERE p.prosecdef AND p.oid IN (
          to_regprocedure('pgxlock_renew_batch(text[], text[], bigint[], bigint[])')::oid,
          to_regprocedure('evict_lock(varchar, varchar, bigint, text)')::oid)) THEN
      PERFORM set_config('pgxlock.hardened', 'on', true);
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_migrate(text, integer, text) IS 'pgxlock, internal: begins and ends a migration file.';
  PERFORM pgxlock_migrate('up'::text, 1, v_path);

  ------------------------------------------------------------------- table --
  v_table := to_regclass(pg_catalog.format('%I.distributed_locks', v_schema))::oid;     -- no temporary table
  v_tokens_are_gone := to_regclass(pg_catalog.format('%I.pgxlock_tokens', v_schema)) IS NULL;
  v_was_installed := NOT v_tokens_are_gone OR to_regclass(pg_catalog.format('%I.pgxlock_epoch', v_schema)) IS NOT NULL
      OR to_regprocedure(pg_catalog.format('%I.pgxlock_next_tokens(bigint)', v_schema)) IS NOT NULL;
  IF v_table IS NOT NULL AND to_regclass(pg_catalog.format('%I.pgxlock_epoch', v_schema)) IS NULL THEN   -- it is not ours, or was
    SELECT string_agg(a.attname::text || ' ' || format_type(a.atttypid, NULL::integer), ', ' ORDER BY a.attname)
           || (SELECT coalesce(string_agg(', primary key ' || k.attname::text, ''), '') FROM pg_index i
                 JOIN pg_attribute k ON k.attrelid = v_table AND k.attnum = ANY (i.indkey::int2[])
                WHERE i.indrelid = v_table AND i.indisprimary)
      INTO v_shape FROM pg_attribute a
     WHERE a.attrelid = v_table AND a.attnum > 0::int2 AND NOT a.attisdropped;
    v_is_ours := v_was_installed AND position(', fencing_token bigint' IN v_shape) > 0;
    IF v_is_ours THEN
      v_shape := replace(v_shape, ', fencing_token bigint', '');
    END IF;
    IF v_shape IS DISTINCT FROM 'acquired_at timestamp with time zone, expires_at timestamp with time zone, holder_id '
                                'character varying, '
        || 'lock_name character varying, metadata jsonb, primary key lock_name' THEN
      RAISE EXCEPTION 'pgxlock: the table %.distributed_locks exists and cannot be adopted: it has %',
          quote_ident(v_schema), v_shape
        USING ERRCODE = 'duplicate_table', HINT = 'Install into another schema, or rename that table.';
    END IF;
    -- ALTER TABLE runs expressions that the table's owner put into it.
    IF (SELECT c.relowner FROM pg_class c WHERE c.oid = v_table)
       <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user) THEN
      RAISE EXCEPTION 'pgxlock: the table %.distributed_locks belongs to another role', quote_ident(v_schema)
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'SET ROLE to its owner and run this again, or install into another schema.';
    END IF;
    v_adopts := NOT v_is_ours;
  END IF;

  -- The down file restores an adopted table and functions from the catalog, where only the owner can
  -- change them: from the columns, options and index of an empty table, and from copies of the functions.
  -- No text in a row is ever executed: a role that may write the row would say what.
  CREATE OR REPLACE FUNCTION pgxlock_rename(p_definition text, p_from text, p_to text) RETURNS text
  LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT AS $$
  BEGIN
    IF left(p_definition, length(p_from)) IS DISTINCT FROM p_from THEN
      RAISE EXCEPTION 'pgxlock: cannot adopt or restore what is defined as: %', p_definition
        USING ERRCODE = 'feature_not_supported', HINT = pg_catalog.format('It was expected to begin with: %s', p_from);
    END IF;
    RETURN p_to || substr(p_definition, length(p_from) + 1);
  END $$;
  COMMENT ON FUNCTION pgxlock_rename(text, text, text) IS
    'pgxlock, internal: a definition from the catalog for an object of another name.';
  IF v_adopts THEN
    CREATE TABLE pgxlock_adopted (LIKE distributed_locks) USING heap;
    COMMENT ON TABLE pgxlock_adopted IS
      'pgxlock: the columns, options and index that distributed_locks had before it was adopted, for the down file. It '
      'has no rows.';
    FOR r IN SELECT 'ALTER TABLE pgxlock_adopted SET (' || pg_catalog.array_to_string(c.reloptions, ', ') || ')' AS statement
               FROM pg_class c WHERE c.oid = v_table AND c.reloptions IS NOT NULL
             UNION ALL
             SELECT pgxlock_rename(pg_get_indexdef(i.indexrelid),
                                   pg_catalog.format('CREATE %sINDEX idx_locks_expires ON %I.distributed_locks ', u.word,
                                                     v_schema),
                                   pg_catalog.format('CREATE %sINDEX pgxlock_adopted_expires ON pgxlock_adopted ', u.word))
               FROM pg_index i, LATERAL (SELECT CASE WHEN i.indisunique THEN 'UNIQUE ' ELSE '' END AS word) u
              WHERE i.indexrelid = to_regclass('idx_locks_expires')::oid AND i.indrelid = v_table
             UNION ALL
             SELECT pgxlock_rename(pg_get_functiondef(p.oid),
                                   pg_catalog.format('CREATE OR REPLACE FUNCTION %I.%I(', v_schema, p.proname),
                                   pg_catalog.format('CREATE OR REPLACE FUNCTION pgxlock_adopted_%s(', p.proname))
               FROM pg_proc p
              WHERE p.oid IN (to_regprocedure('acquire_lock(varchar, varchar, integer, jsonb)')::oid,
                              to_regprocedure('release_lock(varchar, varchar)')::oid) LOOP
      EXECUTE r.statement;
    END LOOP;
    FOR r IN SELECT p.oid::regprocedure::text AS copy,
                    CASE x.grantee WHEN 0::oid THEN 'PUBLIC'
                                   ELSE quote_ident(pg_get_userbyid(x.grantee)::text) END AS grantee
               FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f'::"char", p.proowner))) x
              WHERE p.pronamespace = to_regnamespace(quote_ident(v_schema::text))::oid
                AND left(p.proname::text, 16) = 'pgxlock_adopted_'
                AND pg_get_userbyid(p.proowner) = current_user
                AND x.grantee <> p.proowner LOOP
      EXECUTE 'REVOKE ALL ON FUNCTION ' || r.copy || ' FROM ' || r.grantee;          -- a copy is not to be called
    END LOOP;
  END IF;

  -- A row exists from acquire to release. An expired row stays until a caller takes it over or
  -- reaps it. There is no index on expires_at: with one, no renewal could be a heap-only update,
  -- for which fillfactor leaves room. vacuum_truncate is off because truncating an often empty
  -- table would take an ACCESS EXCLUSIVE lock again and again.
  CREATE TABLE IF NOT EXISTS distributed_locks (
    lock_name     varchar(255) COLLATE "C" PRIMARY KEY,
    holder_id     varchar(255) NOT NULL,
    acquired_at   timestamptz  NOT NULL DEFAULT now(),
    expires_at    timestamptz  NOT NULL,
    metadata      jsonb        DEFAULT '{}',
    fencing_token bigint       NOT NULL DEFAULT 0
  ) USING heap;
  IF v_adopts THEN
    ALTER TABLE distributed_locks ADD COLUMN fencing_token bigint NOT NULL DEFAULT 0,
      ALTER COLUMN holder_id SET NOT NULL, ALTER COLUMN expires_at SET NOT NULL;
    IF EXISTS (SELECT FROM pg_index i WHERE i.indexrelid = to_regclass('idx_locks_expires')::oid AND i.indrelid = v_table) THEN
      DROP INDEX idx_locks_expires;
    END IF;
    -- Names are compared as bytes: with a collation of the C library or of ICU, an upgrade of that
    -- library corrupts the unique index, which then admits a name twice.
    BEGIN
      ALTER TABLE distributed_locks ALTER COLUMN lock_name TYPE varchar(255) COLLATE "C";
    EXCEPTION WHEN feature_not_supported THEN            -- a view or rule uses the column
      CREATE UNIQUE INDEX IF NOT EXISTS distributed_locks_lock_name_c ON distributed_locks (lock_name COLLATE "C");
      RAISE WARNING 'pgxlock: %.distributed_locks.lock_name keeps its collation, because a view or rule depends on it; a '
                    'second unique index by bytes guards it',
        quote_ident(v_schema);
    END;
  END IF;
  ALTER TABLE distributed_locks SET (fillfactor = 45, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

  -- CACHE 1 and logged: a cached or unlogged sequence is not monotonic.
  CREATE SEQUENCE IF NOT EXISTS pgxlock_tokens AS bigint MAXVALUE 1099511627775 CACHE 1;      -- 2^40 - 1
  CREATE TABLE IF NOT EXISTS pgxlock_epoch (
    singleton         boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    system_identifier bigint  NOT NULL,     -- of the cluster that the tokens were drawn on
    epoch_base        bigint  NOT NULL,     -- added to 64 times the timeline; a crash raises it, and a repair
    timeline          bigint  NOT NULL      -- highest timeline that a token was drawn on
  ) USING heap;
  -- A crash can take back what was committed without waiting for the disk: numbers that the sequence
  -- gave out, too. It also empties this table, as a promotion does and a clean restart does not. While
  -- the table is empty, tokens are drawn one epoch above epoch_base, and their transactions wait for
  -- the disk. The first of them that can also raises epoch_base and writes the row. So nobody waits
  -- for it, and tokens whose commits did not wait are below all that are drawn after a crash. A
  -- timeline counts as 64 epochs: a standby that is promoted, or a backup that is restored, may
  -- know nothing of the last crashes.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_since_crash (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton)
  ) USING heap;

  -- The version is in golang-migrate's format, so that every tool knows which files ran, whichever
  -- tool ran them.
  BEGIN
    CREATE TABLE IF NOT EXISTS pgxlock_migrations (version bigint NOT NULL PRIMARY KEY, dirty boolean NOT NULL) USING heap;
  EXCEPTION WHEN duplicate_table OR duplicate_object OR unique_violation THEN
    NULL;                                   -- golang-migrate has just created it
  END;
  COMMENT ON TABLE distributed_locks IS
    'pgxlock: leases; held while expires_at > clock_timestamp(). Write it only through the functions. Rows: one for each '
    'lease, from acquire to release; reap_expired_locks() removes those that expired.';
  COMMENT ON COLUMN distributed_locks.fencing_token IS
    'Grows with every acquisition of the name. A resource that refuses smaller tokens than it has seen cannot be written '
    'by a former holder.';
  COMMENT ON SEQUENCE pgxlock_tokens IS 'pgxlock: the low 40 bits of fencing tokens.';
  COMMENT ON TABLE pgxlock_epoch IS 'pgxlock: which cluster and timeline the fencing tokens were drawn on. Rows: one.';
  COMMENT ON TABLE pgxlock_since_crash IS
    'pgxlock: whether an epoch of fencing tokens began since the server crashed or was promoted. Rows: one if so.';
  COMMENT ON TABLE pgxlock_migrations IS 'pgxlock: version of this schema, in golang-migrate''s format. Rows: one.';

  -------------------------------------------------------------------- view --
  CREATE OR REPLACE VIEW lock_leases AS
    SELECT l.lock_name,
           CASE WHEN l.expires_at > c.clock THEN 'live'
                WHEN l.expires_at > c.clock - interval '1 hour' THEN 'expired'
                ELSE 'abandoned' END AS state,
           l.holder_id,
           l.fencing_token,
           CASE WHEN isfinite(l.acquired_at) THEN c.clock - l.acquired_at END AS held_for,
           CASE WHEN isfinite(l.expires_at) THEN l.expires_at - c.clock END AS remaining,
           l.acquired_at,
           l.expires_at,
           l.metadata
      FROM distributed_locks l, LATERAL (SELECT clock_timestamp() AS clock) c;
  COMMENT ON VIEW lock_leases IS
    'pgxlock: leases, for operators. State live; expired: may be taken over; abandoned: expired for more than an hour and '
    'not taken over.';

  ----------------------------------------------------------------- acquire --
  CREATE OR REPLACE FUNCTION acquire_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30, p_metadata jsonb DEFAULT '{}')
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT t.acquired
              FROM try_acquire_lock(p_lock_name, p_holder_id, pg_catalog.make_interval(secs => p_ttl_seconds),
                                    p_metadata) t);
  END $$;
  COMMENT ON FUNCTION acquire_lock(varchar, varchar, integer, jsonb) IS
    'Acquires the lease p_lock_name for p_ttl_seconds if it is free or expired; true if p_holder_id holds it now. Never '
    'waits. A live lease of the same holder is renewed and keeps its token; two callers with one holder id are one '
    'holder. Takes effect when the calling transaction commits. Above READ COMMITTED it may raise 40001: call it in a '
    'transaction of its own.';

  CREATE OR REPLACE FUNCTION try_acquire_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl interval DEFAULT '30 seconds', p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT fencing_token bigint, OUT expires_at timestamptz, OUT remaining interval, OUT held_by varchar)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name     text  := p_lock_name;
    v_me       text  := p_holder_id;
    v_metadata jsonb := coalesce(p_metadata, jsonb '{}');
    v_ttl      interval;
    v_now      timestamptz;
    v_exists   boolean;
    v_live     boolean;
    v_timeout  text;
    r          record;
  BEGIN
    v_ttl := pgxlock_check_try(v_name, v_me, p_ttl, v_metadata);

    acquired := false;
    FOR i IN 1..3 LOOP
      -- A plain read: a try of a held lock locks and writes nothing.
      SELECT l.holder_id::text AS holder, l.expires_at AS expires, l.fencing_token AS token INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
      v_exists := FOUND;
      v_now := clock_timestamp();
      held_by := r.holder; expires_at := r.expires; remaining := CASE WHEN isfinite(r.expires) THEN r.expires - v_now END;
      v_live := v_exists AND r.expires > v_now;
      IF v_live AND r.holder IS DISTINCT FROM v_me COLLATE "C" THEN
        RETURN;
      END IF;

      PERFORM pgxlock_durable(false);
      BEGIN
        IF v_exists THEN
          -- A live lease of the caller is renewed, which fences allow; an expired one is taken
          -- over, which they do not. The row is checked again once it is locked.
          IF v_live THEN
            SELECT l.holder_id::text AS holder, l.expires_at AS expires, l.fencing_token AS token INTO r
              FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED;
          ELSE
            IF NOT pg_try_advisory_xact_lock(pgxlock_key('pin', v_name)) THEN
              RAISE EXCEPTION USING ERRCODE = 'LK900';
            END IF;
            SELECT l.holder_id::text AS holder, l.expires_at AS expires, l.fencing_token AS token INTO r
              FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C" FOR UPDATE SKIP LOCKED;
          END IF;
          IF NOT FOUND OR v_live <> (r.expires > clock_timestamp()) OR v_live AND r.holder IS DISTINCT FROM v_me COLLATE "C" THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          IF v_live THEN
            -- The default metadata does not erase what an earlier call stored.
            -- A failover or a crash may have taken back a release, and grants behind it with greater tokens.
            fencing_token := (pgxlock_next_tokens(1::bigint))[1];
            IF fencing_token >> 40 <= r.token >> 40 THEN
              fencing_token := r.token;
            END IF;
            v_now := clock_timestamp();
            UPDATE distributed_locks l
               SET expires_at = v_now + v_ttl, metadata = CASE WHEN v_metadata = jsonb '{}' THEN l.metadata ELSE v_metadata END,
                   fencing_token = try_acquire_lock.fencing_token
             WHERE l.lock_name::text = v_name COLLATE "C";
          ELSE
            fencing_token := (pgxlock_next_tokens(1::bigint))[1];
            IF fencing_token <= r.token THEN
              RAISE EXCEPTION 'pgxlock: lock "%" carries token %, but the next one is %', v_name, r.token, fencing_token
                USING ERRCODE = 'LK003',
                      HINT = 'Rows were restored without the sequence. Run migrations.Up, or pgxlock migrate up, or '
                             'SELECT repair_lock_tokens() once.';
            END IF;
            v_now := clock_timestamp();
            UPDATE distributed_locks l
               SET holder_id = v_me, acquired_at = v_now, expires_at = v_now + v_ttl, metadata = v_metadata,
                   fencing_token = try_acquire_lock.fencing_token
             WHERE l.lock_name::text = v_name COLLATE "C";
          END IF;
        ELSE
          -- Two inserters of one name meet on the guard: otherwise the second INSERT would wait for
          -- the first one's transaction. Read again while holding it.
          IF NOT pg_try_advisory_xact_lock(pgxlock_key('guard', v_name)) THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          PERFORM FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
          IF FOUND OR NOT pg_try_advisory_xact_lock(pgxlock_key('pin', v_name)) THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
        END IF;
        acquired := true;
      EXCEPTION WHEN SQLSTATE 'LK900' THEN
        fencing_token := NULL;
      END;

      IF acquired AND NOT v_exists THEN
        -- Outside the subtransaction: inside, every acquire would use one more transaction id.
        fencing_token := (pgxlock_next_tokens(1::bigint))[1];
        v_now := clock_timestamp();
        IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
          INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
          VALUES (v_name, v_me, v_now, v_now + v_ttl, v_metadata, try_acquire_lock.fencing_token)
          ON CONFLICT DO NOTHING;
          acquired := FOUND;                -- false: written without the guard
        ELSE
          -- An old snapshot hides a newer row (40001). INSERT would first wait for a transaction
          -- that is renewing that row, so the wait is bounded.
          BEGIN
            v_timeout := current_setting('lock_timeout');
            PERFORM set_config('lock_timeout', '10ms', true);
            INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
            VALUES (v_name, v_me, v_now, v_now + v_ttl, v_metadata, try_acquire_lock.fencing_token)
            ON CONFLICT DO NOTHING;         -- 40001, not 23505
            acquired := FOUND;
            PERFORM set_config('lock_timeout', v_timeout, true);
          EXCEPTION WHEN lock_not_available THEN
            RAISE EXCEPTION 'could not serialize access: lock "%" was acquired after this transaction''s snapshot', v_name
              USING ERRCODE = 'serialization_failure';
          END;
        END IF;
      END IF;
      IF acquired THEN
        held_by := v_me; expires_at := v_now + v_ttl; remaining := v_ttl;
        RETURN;
      END IF;
      fencing_token := NULL;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION try_acquire_lock(varchar, varchar, interval, jsonb) IS
    'Like acquire_lock, and returns the fencing token. If not acquired, held_by, expires_at and remaining describe the '
    'holder (NULL while another acquisition is being committed).';

  ------------------------------------------------------------------- renew --
  CREATE OR REPLACE FUNCTION renew_lock(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint,
    p_ttl interval DEFAULT '30 seconds')
  RETURNS timestamptz LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_fencing_token IS NULL THEN
      RAISE EXCEPTION 'p_fencing_token must not be NULL'
        USING ERRCODE = 'invalid_parameter_value', HINT = 'extend_lock() renews without a token.';
    END IF;
    RETURN pgxlock_renew(p_lock_name::text, p_holder_id::text, p_fencing_token, p_ttl);
  END $$;
  COMMENT ON FUNCTION renew_lock(varchar, varchar, bigint, interval) IS
    'Sets the expiry to now + p_ttl and returns it. NULL if the lease with that token expired, was released or was taken '
    'over or, above READ COMMITTED, is not visible as held to the snapshot. Waits for another renewal of the same lease: '
    'renew several in one order, by name.';

  CREATE OR REPLACE FUNCTION extend_lock(p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN pgxlock_renew(p_lock_name::text, p_holder_id::text, NULL::bigint,
                         pg_catalog.make_interval(secs => p_ttl_seconds)) IS NOT NULL;
  END $$;
  COMMENT ON FUNCTION extend_lock(varchar, varchar, integer) IS
    'Like renew_lock, with any token of the holder; false if it no longer holds the lease.';

  -- p_token NULL: any token of the holder.
  CREATE OR REPLACE FUNCTION pgxlock_renew(p_lock_name text, p_holder_id text, p_token bigint, p_ttl interval) RETURNS timestamptz
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_expires timestamptz;
    v_ttl     interval;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', p_lock_name);
    PERFORM pgxlock_check('p_holder_id', p_holder_id);
    v_ttl := pgxlock_ttl('p_ttl (or p_ttl_seconds)', p_ttl);
    PERFORM FROM distributed_locks l
      WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
        AND (p_token IS NULL OR l.fencing_token = p_token) AND l.expires_at > clock_timestamp();
    IF NOT FOUND THEN
      RETURN NULL;
    END IF;
    PERFORM pgxlock_durable(true);
    BEGIN
      -- Lock the row, then read the clock: UPDATE alone judges by the time before its wait if the
      -- row comes back unchanged.
      PERFORM FROM distributed_locks l
        WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
          AND (p_token IS NULL OR l.fencing_token = p_token) FOR NO KEY UPDATE;
      UPDATE distributed_locks l SET expires_at = clock_timestamp() + v_ttl
       WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
         AND (p_token IS NULL OR l.fencing_token = p_token) AND l.expires_at > clock_timestamp()
      RETURNING l.expires_at INTO v_expires;
      IF NOT FOUND THEN                     -- lost during the wait: do not keep the next holder's row locked
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN NULL;
    END;
    RETURN v_expires;
  END $$;
  COMMENT ON FUNCTION pgxlock_renew(text, text, bigint, interval) IS 'pgxlock, internal: renew_lock and extend_lock.';

  ----------------------------------------------------------------- release --
  CREATE OR REPLACE FUNCTION release_lock(p_lock_name varchar, p_holder_id varchar)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN pgxlock_release(p_lock_name::text, p_holder_id::text, NULL::bigint);
  END $$;
  COMMENT ON FUNCTION release_lock(varchar, varchar) IS
    'Releases the lease. True if it was still live; false if it had expired or is not the holder''s. Raises 55P03 for a '
    'live lease while a transaction that called assert_lock_held is open, after half a second.';

  CREATE OR REPLACE FUNCTION release_lock_fenced(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_fencing_token IS NULL THEN
      RAISE EXCEPTION 'p_fencing_token must not be NULL'
        USING ERRCODE = 'invalid_parameter_value', HINT = 'release_lock() releases without a token.';
    END IF;
    RETURN pgxlock_release(p_lock_name::text, p_holder_id::text, p_fencing_token);
  END $$;
  COMMENT ON FUNCTION release_lock_fenced(varchar, varchar, bigint) IS
    'Like release_lock, only for the acquisition with that fencing token.';

  CREATE OR REPLACE FUNCTION pgxlock_release(p_lock_name text, p_holder_id text, p_token bigint) RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_live  boolean;
    v_pause float8 := 0.001;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', p_lock_name);
    PERFORM pgxlock_check('p_holder_id', p_holder_id);
    PERFORM FROM distributed_locks l
      WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
        AND (p_token IS NULL OR l.fencing_token = p_token);
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM pgxlock_durable(false);
    BEGIN
      -- Without the row's lock: an assert that is about to fail, of a former holder, has the pin for a
      -- moment, and is no reason to refuse.
      WHILE NOT pg_try_advisory_xact_lock(pgxlock_key('pin', p_lock_name)) LOOP
        PERFORM FROM distributed_locks l
          WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
            AND (p_token IS NULL OR l.fencing_token = p_token) AND l.expires_at > clock_timestamp();
        IF FOUND AND v_pause > 0.3::float8 THEN
          RAISE EXCEPTION 'lock "%" cannot be released now: a transaction that asserted it is still open', p_lock_name
            USING ERRCODE = 'lock_not_available',
                  HINT = 'Release after that transaction has ended, or inside it, or leave the lease to its expiry.';
        ELSIF NOT FOUND THEN
          -- The lease has expired: the owner of the pin removes it, takes it over or, if it asserted
          -- the lock, keeps others from the row. The row lock makes PostgreSQL compare an old
          -- snapshot with the present row (40001 if it was renewed).
          IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
            PERFORM FROM distributed_locks l WHERE l.lock_name::text = p_lock_name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED;
          END IF;
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        PERFORM pg_sleep(v_pause);
        v_pause := v_pause * 2::float8;     -- 0.5 s in all
      END LOOP;
      DELETE FROM distributed_locks l
       WHERE l.lock_name::text = p_lock_name COLLATE "C" AND l.holder_id::text = p_holder_id COLLATE "C"
         AND (p_token IS NULL OR l.fencing_token = p_token)
      RETURNING l.expires_at > clock_timestamp() INTO v_live;
      IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN false;
    END;
    RETURN v_live;
  END $$;
  COMMENT ON FUNCTION pgxlock_release(text, text, bigint) IS 'pgxlock, internal: release_lock and release_lock_fenced.';

  ------------------------------------------------------------------- fence --
  -- The pin is acquired first and the row read in a LATER statement: in one statement the snapshot
  -- would be older than the pin and hide a take-over in between.
  CREATE OR REPLACE FUNCTION assert_lock_held(
    p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint DEFAULT NULL, p_allow_expired boolean DEFAULT false)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off
  SET jit = off AS $$
  DECLARE
    v_name text := p_lock_name;
    v_me   text := p_holder_id;
    v_read_committed boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_found boolean;
    v_mine  boolean;
    v_live  boolean;
    v_timeout text;
    r      record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    IF current_setting('transaction_read_only') = 'on' THEN
      RAISE EXCEPTION 'assert_lock_held() protects writes, and this transaction is read-only'
        USING ERRCODE = 'read_only_sql_transaction',
              HINT = 'Begin a READ WRITE transaction on the primary; or leave the call out, because nothing can be written here.';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(pgxlock_key('pin', v_name)) THEN
      RAISE EXCEPTION 'lock "%" is not held by "%" for this transaction: another one is taking it over or releasing it',
          v_name, v_me
        USING ERRCODE = 'LK001';
    END IF;
    IF v_read_committed THEN
      SELECT l.fencing_token AS token, l.holder_id::text AS holder, l.expires_at AS expires INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
      v_found := FOUND;
    ELSE
      -- The row lock makes PostgreSQL compare the snapshot with the present row (40001 if another
      -- holder acquired the lock since). Renewals do not conflict with it. After a renewal it can
      -- wait for a row that was locked by hand, so the wait is bounded.
      v_timeout := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', '10ms', true);
      SELECT l.fencing_token AS token, l.holder_id::text AS holder, l.expires_at AS expires INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C" FOR KEY SHARE SKIP LOCKED;
      v_found := FOUND;
      PERFORM set_config('lock_timeout', v_timeout, true);
      IF NOT v_found THEN
        PERFORM FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
        IF NOT FOUND THEN
          RAISE EXCEPTION 'lock "%" is not visible to this transaction''s snapshot', v_name USING ERRCODE = 'LK002',
            DETAIL = 'The snapshot is older than the acquisition, or the lock was released before it.',
            HINT = 'Acquire first, then begin the transaction, and assert in its first statement.';
        END IF;
      END IF;
    END IF;
    v_mine := v_found AND r.holder = v_me COLLATE "C" AND (p_fencing_token IS NULL OR r.token = p_fencing_token);
    v_live := v_mine AND r.expires > clock_timestamp();
    IF v_mine IS NOT TRUE OR v_live IS NOT TRUE AND p_allow_expired IS NOT TRUE THEN
      IF v_mine AND NOT v_read_committed THEN
        RAISE EXCEPTION 'lock "%" had expired at %, as far as this transaction''s snapshot shows', v_name, r.expires
          USING ERRCODE = 'LK002',
                HINT = 'Later renewals are not visible to it. With p_allow_expired => true an expired lock that was not taken '
                       'over is enough.';
      END IF;
      RAISE EXCEPTION 'lock "%" is not held by "%"', v_name, v_me USING ERRCODE = 'LK001',
        DETAIL = CASE WHEN NOT v_found AND v_read_committed
                      THEN 'There is no lease of that name: it was released, or never acquired, or that has not committed.'
                      WHEN NOT v_found THEN 'Another transaction has its row locked.'
                      WHEN v_mine THEN 'It expired at ' || r.expires::text || '.'
                      ELSE pg_catalog.concat('It is held by "', r.holder, '" with token ', r.token, '.') END;
    END IF;
    RETURN r.token;
  END $$;
  COMMENT ON FUNCTION assert_lock_held(varchar, varchar, bigint, boolean) IS
    'Call it first in the transaction that writes under the lease. Returns the token; raises LK001 if the holder has lost '
    'the lease and, above READ COMMITTED, LK002 if the snapshot is older than the acquisition. Until this transaction '
    'ends no other holder can take the lease over; renewals go on. Waits for no other function of pgxlock. Rolling back '
    'to a savepoint before the call ends the protection.';

  ----------------------------------------------------------------- batches --
  -- Names without a row, which nearly all are, are acquired in sets, and held ones are only read.
  -- Names that are expired, the caller's own, invalid or being changed go to try_acquire_lock(). A
  -- guard or pin that proves useless is kept until the transaction ends.
  CREATE OR REPLACE FUNCTION pgxlock_acquire_each(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[])
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = off SET enable_bitmapscan = on AS $$
  DECLARE
    v_new    bigint[];                      -- entries without a row; later, those that were acquired
    v_tokens bigint[];
    v_now    timestamptz;
    r        record;
  BEGIN
    PERFORM pgxlock_check_primary('cannot acquire a lock on a standby server');

    -- Two inserters of one name meet on the guard, as in try_acquire_lock(). The next statement
    -- reads again, in a snapshot newer than the guard. Above READ COMMITTED there is none.
    WITH absent AS MATERIALIZED (
      SELECT w.n, w.name
        FROM unnest(p_names, p_holders, p_ttls, p_metadata) WITH ORDINALITY AS w (name, holder, ttl, metadata, n)
       WHERE current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
         AND char_length(w.name) BETWEEN 1 AND 255 AND char_length(w.holder) BETWEEN 1 AND 255 AND left(w.holder, 1) <> '*'
         AND w.ttl BETWEEN 1::bigint AND 3110400000000::bigint              -- 100 years of 360 days, as intervals compare
         AND CASE WHEN w.metadata IS NULL THEN true ELSE octet_length(w.metadata::jsonb::text) <= 2000 END
         AND NOT EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = w.name COLLATE "C")
    )
    SELECT pg_catalog.array_agg(a.n ORDER BY a.n) INTO v_new
      FROM absent a
     WHERE pg_try_advisory_xact_lock(pgxlock_key('guard', a.name));

    IF v_new IS NOT NULL THEN
      PERFORM pgxlock_durable(false);
      v_now := clock_timestamp();
      WITH absent AS MATERIALIZED (
        SELECT w.n FROM pg_catalog.unnest(v_new) AS w (n)
         WHERE NOT EXISTS (SELECT FROM distributed_locks l WHERE l.lock_name::text = p_names[w.n] COLLATE "C")
      ), pinned AS MATERIALIZED (
        SELECT pg_catalog.array_agg(a.n ORDER BY a.n) AS entries, count(*) AS entry_count
          FROM absent a WHERE pg_try_advisory_xact_lock(pgxlock_key('pin', p_names[a.n]))
      ), drawn AS MATERIALIZED (
        SELECT d.n, d.token
          FROM pinned p, unnest(p.entries, pgxlock_next_tokens(p.entry_count)) AS d (n, token)
         WHERE p.entry_count > 0::bigint
      ), made AS (
        INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
        SELECT p_names[d.n], p_holders[d.n], v_now, v_now + p_ttls[d.n]::float8 * interval '1 millisecond',
               coalesce(p_metadata[d.n]::jsonb, jsonb '{}'), d.token
          FROM drawn d
        ON CONFLICT DO NOTHING              -- a name that comes twice, or was written without the guard
        RETURNING distributed_locks.fencing_token
      )
      SELECT pg_catalog.array_agg(d.n ORDER BY d.n), pg_catalog.array_agg(d.token ORDER BY d.n) INTO v_new, v_tokens
        FROM made m JOIN drawn d ON d.token = m.fencing_token;
      IF pg_catalog.cardinality(v_new) = pg_catalog.cardinality(p_names) THEN
        RETURN QUERY SELECT true, v_tokens[w.n], w.holder, w.ttl
                       FROM unnest(p_holders, p_ttls) WITH ORDINALITY AS w (holder, ttl, n);
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
        remaining_ms := CASE WHEN isfinite(r.expires)
                             THEN (date_part('epoch'::text, r.expires - v_now) * 1000::float8)::bigint END;
      ELSE
        SELECT t.acquired, t.fencing_token, t.held_by, (date_part('epoch'::text, t.remaining) * 1000::float8)::bigint
          INTO acquired, fencing_token, held_by, remaining_ms
          FROM try_acquire_lock(r.name::varchar, r.holder::varchar, r.ttl::float8 * interval '1 millisecond',
                                r.metadata::jsonb) t;
      END IF;
      RETURN NEXT;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_acquire_each(text[], text[], bigint[], text[]) IS
    'pgxlock, internal: try_acquire_lock() for each entry, answers in order. Each call in a transaction of its own.';

  -- The rows are locked first, in one order and without waiting, so that a row that stays locked
  -- costs no other lease its renewal. Planning for the entries at hand would take longer than all
  -- the rest. The session decides what else a plan depends on: a Locker's session forbids scans of
  -- the whole table, because a setting for each call would cost time too.
  --
  -- A renewal makes no lease shorter: it may have been sent with a shorter ttl, and arrive late.
  CREATE OR REPLACE FUNCTION pgxlock_renew_batch(p_names text[], p_holders text[], p_tokens bigint[], p_ttls bigint[])
  RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  BEGIN
    IF (greatest(pg_catalog.cardinality(p_names), pg_catalog.cardinality(p_holders), pg_catalog.cardinality(p_tokens),
                 pg_catalog.cardinality(p_ttls)) <= 1000) IS NOT TRUE THEN
      PERFORM pgxlock_require(false, 'p_names, p_holders, p_tokens and p_ttls must have at most 1000 elements');
    END IF;
    IF current_setting('synchronous_commit') IN ('off', 'local') THEN
      PERFORM pgxlock_durable(true);        -- its connection may be that of asynchronous requests
    END IF;
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
         SET expires_at = greatest(l.expires_at, clock_timestamp() + k.ttl)
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
  COMMENT ON FUNCTION pgxlock_renew_batch(text[], text[], bigint[], bigint[]) IS
    'pgxlock, internal: renews leases. Returns for each entry, in order, renewed, gone (expired, released or taken over) '
    'or skipped (another transaction has the row locked: try again alone).';

  ------------------------------------------------------------ housekeeping --
  CREATE OR REPLACE FUNCTION reap_expired_locks(p_grace interval DEFAULT '1 hour', p_limit integer DEFAULT 1000)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_before timestamptz;
    v_name   text;
    v_count  bigint := 0;
  BEGIN
    v_before := pgxlock_before('p_grace', p_grace);
    PERFORM pgxlock_require(p_limit BETWEEN 1 AND 10000, 'p_limit must be between 1 and 10000');
    FOR v_name IN SELECT l.lock_name::text FROM distributed_locks l
                   WHERE l.expires_at <= v_before
                   LIMIT p_limit LOOP
      BEGIN
        IF NOT pg_try_advisory_xact_lock(pgxlock_key('pin', v_name)) THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        PERFORM FROM distributed_locks l
          WHERE l.lock_name::text = v_name COLLATE "C" AND l.expires_at <= v_before FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        DELETE FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
        v_count := v_count + 1::bigint;
      EXCEPTION WHEN SQLSTATE 'LK900' THEN
        NULL;                               -- fenced, locked, taken over or renewed
      END;
    END LOOP;
    RETURN v_count;
  END $$;
  COMMENT ON FUNCTION reap_expired_locks(interval, integer) IS
    'Housekeeping only: removes up to p_limit leases that expired more than p_grace ago; returns how many. Acquiring '
    'never needs it, and tokens do not depend on it.';

  -- The down files call this before they remove anything: the first one runs alone, though only a
  -- later one may remove what is in use. A version below the newest lacks some of the tables.
  CREATE OR REPLACE FUNCTION pgxlock_check_unused() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_schema text := quote_ident(current_schema()::text);
    v_use    record;
    v_count  bigint;
  BEGIN
    IF coalesce(current_setting('pgxlock.force', true), '') = 'on' THEN
      RETURN;
    END IF;
    FOR i IN 1..2 LOOP                      -- no caller waits for a down file that is refused anyway
      FOR v_use IN SELECT * FROM (VALUES
          ('live shares of leases', 'distributed_lock_shares', 'expires_at > clock_timestamp()',
           'Stop their holders; or remove the shares under them'),
          ('live leases', 'distributed_locks', 'expires_at > clock_timestamp()',
           'Stop their holders; or remove the leases under them'),
          ('claims', 'pgxlock_claims', 'expires_at IS NULL OR expires_at > clock_timestamp()',
           'Without them what was done once can be done again. To drop them'),
          ('runs', 'pgxlock_runs', 'keep_until > clock_timestamp()', 'Without them what has run can run again. To forget them'),
          ('advisory locks with tokens', 'pgxlock_advisory_locks',
           'NOT pg_try_advisory_xact_lock_shared(pgxlock_session_key(session))',
           'Stop their holders; or leave them without their fences')) u (what, relation, condition, remedy)
      LOOP
        IF to_regclass(v_schema || '.' || v_use.relation) IS NOT NULL THEN
          EXECUTE 'SELECT count(*) FROM ' || v_use.relation || ' WHERE ' || v_use.condition INTO v_count;
          IF v_count > 0::bigint THEN
            RAISE EXCEPTION 'pgxlock: % in schema %: %', v_use.what, v_schema, v_count
              USING ERRCODE = 'object_in_use',
                    HINT = v_use.remedy || ': pgxlock migrate down --force, or SET pgxlock.force = on before the file.';
          END IF;
        END IF;
      END LOOP;
      EXIT WHEN i = 2;
      FOR v_use IN SELECT *
                     FROM (VALUES ('distributed_locks'), ('distributed_lock_shares'), ('pgxlock_claims'),
                                  ('pgxlock_runs'), ('pgxlock_advisory_locks')) u (relation) LOOP
        IF to_regclass(v_schema || '.' || v_use.relation) IS NOT NULL THEN            -- no temporary table
          EXECUTE 'LOCK TABLE ' || v_use.relation || ' IN ACCESS EXCLUSIVE MODE';     -- keeps new users out until it is gone
        END IF;
      END LOOP;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_unused() IS
    'pgxlock, internal: raises 55006 while leases, shares, claims, runs or advisory locks with tokens are in use.';

  ------------------------------------------------------------------ tokens --
  -- Numbers begin again in a new epoch, so no number may be drawn in it by a transaction that has
  -- read the old one, nor an old number join the new epoch. Each transaction that draws keeps a
  -- lock on the table that it read the epoch from until it ends; this waits for all of those and
  -- keeps others out until the new epoch has committed. It waits for a second only, because
  -- acquires wait behind it. ALTER SEQUENCE, not setval: it is undone where this rolls back.
  CREATE OR REPLACE FUNCTION repair_lock_tokens() RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET lock_timeout = '1s' AS $$
  DECLARE
    v_epoch record;
    v_highest bigint;
    v_seen bigint;
    v_drawn bigint;
    v_lost  bigint;
    v_first bigint := 1;
    v_timeline bigint := pgxlock_timeline();
    v_system bigint := pgxlock_system_identifier();
  BEGIN
    PERFORM pgxlock_check_read_committed('pgxlock: tokens are repaired in READ COMMITTED: an older snapshot does not show '
                                         'the present epoch');
    -- Before it reads: two callers who had would wait for each other's lock on the table.
    PERFORM pg_advisory_xact_lock(pgxlock_key('repair', ''));
    FOR i IN 1..2 LOOP
      SELECT e.system_identifier, e.epoch_base, e.timeline, e.epoch_base + CASE WHEN c.singleton THEN 0 ELSE 1 END AS base
        INTO v_epoch
        FROM pgxlock_epoch e LEFT JOIN pgxlock_since_crash c ON c.singleton;
      SELECT coalesce(max(l.fencing_token), 0::bigint) INTO v_highest FROM distributed_locks l;
      SELECT s.last_value INTO STRICT v_drawn FROM pgxlock_tokens s;
      IF v_epoch.system_identifier = v_system AND v_timeline >= v_epoch.timeline
         AND v_highest <= ((v_epoch.base + v_timeline * 64) << 40) + v_drawn
         AND v_drawn < 549755813888 THEN    -- 2^39, half of the numbers
        RETURN false;
      END IF;
      EXIT WHEN i = 2;
      BEGIN
        LOCK TABLE pgxlock_epoch IN ACCESS EXCLUSIVE MODE;    -- then check again
      EXCEPTION WHEN lock_not_available THEN
        RAISE EXCEPTION 'pgxlock: a transaction that acquired a lock is still open, so no new epoch of fencing tokens can begin'
          USING ERRCODE = 'lock_not_available', HINT = 'Try again when it has ended: pg_locks shows who uses pgxlock_epoch.';
      END;
    END LOOP;
    v_seen := greatest(v_highest >> 40, v_epoch.base + greatest(v_epoch.timeline, v_timeline) * 64);
    -- Without the row nothing tells which epochs there were: the table was emptied, or the database made
    -- from a dump without rows. 64 epochs for each day since 2020 are above them, because no cluster fails
    -- over once a day, or crashes so often. If the row is lost again in the same epoch, the numbers go on
    -- above those that were drawn since, because they begin with 3 million for each second of the epoch.
    IF v_epoch.base IS NULL THEN
      v_lost  := floor((date_part('epoch'::text, clock_timestamp()) - 1577836800::float8) / 1350::float8
                       * 4294967296::float8)::bigint;
      v_seen  := greatest(v_seen, v_lost >> 32);
      v_first := (v_lost & 4294967295) + 1;
    END IF;
    IF v_seen >= 8388607 THEN
      RAISE EXCEPTION 'pgxlock: lock "%" carries token %, which leaves no room above it',
          (SELECT l.lock_name FROM distributed_locks l
          ORDER BY l.fencing_token DESC LIMIT 1), v_highest
        USING ERRCODE = 'numeric_value_out_of_range',
              HINT = 'No token of pgxlock is that high: remove the row, or set its fencing_token to 0.';
    END IF;
    PERFORM pgxlock_check_code('{pgxlock_epoch,pgxlock_since_crash}'::text[]);
    PERFORM pgxlock_durable(true);
    -- TRUNCATE, not UPDATE: an older snapshot then finds no row and is refused, instead of drawing
    -- from the old epoch.
    TRUNCATE pgxlock_epoch;
    INSERT INTO pgxlock_epoch (system_identifier, epoch_base, timeline)
    VALUES (v_system, v_seen + 1 - v_timeline * 64, v_timeline);
    INSERT INTO pgxlock_since_crash DEFAULT VALUES ON CONFLICT DO NOTHING;
    EXECUTE 'ALTER SEQUENCE pgxlock_tokens RESTART WITH ' || v_first::text;
    RETURN true;
  END $$;
  COMMENT ON FUNCTION repair_lock_tokens() IS
    'Raises the fencing tokens above every one seen. For after pg_upgrade, a restore into another cluster or from a dump '
    'without rows, when acquires raise LK003 until then, and for when half of the 2^40 numbers of an epoch are used up. '
    'Safe while locks are in use; raises 55P03 if a transaction that acquired one stays open for a second. True if '
    'a repair was needed. For the owner of the functions; hardened also for roles of the kind administration.';

  -- One statement draws all tokens of a batch: reading the epoch takes longer than drawing.
  -- SECURITY DEFINER: roles that were granted only the table have no right on the sequence.
  CREATE OR REPLACE FUNCTION pgxlock_next_tokens(p_count bigint) RETURNS bigint[]
  LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET row_security = off SET jit = off AS $$
  DECLARE
    v_epoch    record;
    v_timeline bigint := pgxlock_timeline();
  BEGIN
    -- The planner does not know that each table has at most one row, and expects hundreds of thousands
    -- of arrays: without SET jit = off it would compile the query, which takes longer than some timeouts.
    BEGIN
      SELECT e.system_identifier, e.timeline, c.singleton IS NULL AS crashed,
             e.epoch_base + CASE WHEN c.singleton THEN 0 ELSE 1 END AS base,
             ARRAY(SELECT ((e.epoch_base + CASE WHEN c.singleton THEN 0 ELSE 1 END + v_timeline * 64) << 40)
                          + nextval('pgxlock_tokens'::regclass)
                     FROM generate_series(1::bigint, p_count)) AS tokens
        INTO v_epoch FROM pgxlock_epoch e LEFT JOIN pgxlock_since_crash c ON c.singleton WHERE e.singleton;
    EXCEPTION WHEN sequence_generator_limit_exceeded THEN
      RAISE EXCEPTION 'pgxlock: the 2^40 numbers for fencing tokens are used up'
        USING ERRCODE = 'LK003',
              HINT = 'SELECT repair_lock_tokens() once, as the owner of the functions: it begins a new epoch, in which '
                     'numbers begin again.';
    END;
    IF NOT FOUND AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION 'could not serialize access: an epoch of fencing tokens began after this transaction''s snapshot'
        USING ERRCODE = 'serialization_failure';
    END IF;
    IF NOT FOUND OR v_epoch.system_identifier <> pgxlock_system_identifier() OR v_timeline < v_epoch.timeline
       OR v_epoch.base + v_timeline * 64 NOT BETWEEN 1 AND 8388607 THEN                -- 2^23 - 1: bits above the sequence
      RAISE EXCEPTION 'pgxlock: this database was moved to another cluster, restored, or made from a dump without rows; '
                      'fencing tokens drawn now could repeat earlier ones'
        USING ERRCODE = 'LK003',
              HINT = 'Run migrations.Up, or pgxlock migrate up, or SELECT repair_lock_tokens() once, as the owner of the '
                     'functions.';
    END IF;
    IF v_timeline > v_epoch.timeline OR v_epoch.crashed THEN
      PERFORM pgxlock_durable(true);
      -- The first token after a failover records the timeline, for the day a pg_upgrade starts
      -- again at timeline 1; after a crash the epoch. If another transaction has that row locked,
      -- it does so instead. One that had it may have written the row since. Above READ COMMITTED a
      -- later transaction does so, because an older snapshot can hide a trigger.
      PERFORM FROM pgxlock_epoch
       WHERE current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
         FOR UPDATE SKIP LOCKED;
      IF FOUND THEN
        PERFORM pgxlock_check_code('{pgxlock_epoch,pgxlock_since_crash}'::text[]);
        UPDATE pgxlock_epoch e SET timeline = v_timeline,
               epoch_base = e.epoch_base
                            + CASE WHEN EXISTS (SELECT FROM pgxlock_since_crash c WHERE c.singleton) THEN 0 ELSE 1 END;
        INSERT INTO pgxlock_since_crash DEFAULT VALUES ON CONFLICT DO NOTHING;
      END IF;
    END IF;
    RETURN v_epoch.tokens;
  END $$;
  COMMENT ON FUNCTION pgxlock_next_tokens(bigint) IS
    'pgxlock, internal: draws fencing tokens; call it only while holding their locks.';

  -- These distinguish a promoted standby and another cluster. Where an engine refuses what they
  -- call, that part of the token is a constant.
  BEGIN
    PERFORM pg_walfile_name(pg_current_wal_insert_lsn());
    v_expression := $$('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint$$;
  EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function OR object_not_in_prerequisite_state THEN
    RAISE WARNING 'pgxlock: this server does not report its timeline (%): fencing tokens may repeat after a failover that '
                  'loses commits',
        SQLERRM;
    v_expression := '1::bigint';
  END;
  EXECUTE 'CREATE OR REPLACE FUNCTION pgxlock_timeline() RETURNS bigint LANGUAGE sql VOLATILE RETURN ' || v_expression;
  BEGIN
    PERFORM system_identifier FROM pg_control_system();
    v_expression := '(pg_control_system()).system_identifier';
  EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RAISE WARNING 'pgxlock: this server does not report its system identifier (%): a copy of this database to another '
                  'cluster will not be noticed',
        SQLERRM;
    v_expression := '0::bigint';
  END;
  -- IMMUTABLE: a server belongs to one cluster as long as it runs, so a session reads the file
  -- with the identifier once, when it plans a call, and not for each token.
  EXECUTE 'CREATE OR REPLACE FUNCTION pgxlock_system_identifier() RETURNS bigint LANGUAGE sql IMMUTABLE RETURN ' || v_expression;
  COMMENT ON FUNCTION pgxlock_timeline() IS 'pgxlock, internal: the server''s timeline; grows with every promotion.';
  COMMENT ON FUNCTION pgxlock_system_identifier() IS 'pgxlock, internal: the system identifier of this cluster.';

  ----------------------------------------------------------------- helpers --
  CREATE OR REPLACE FUNCTION advisory_lock_key(p_name text) RETURNS bigint
  LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(convert_to(p_name, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint;
  COMMENT ON FUNCTION advisory_lock_key(text) IS
    'The bigint key of a name for PostgreSQL''s advisory lock functions. The first 8 bytes, big endian, of the SHA-256 of '
    'its UTF-8 form. The same in every database encoding and in Go (AdvisoryID).';

  CREATE OR REPLACE FUNCTION advisory_lock_key_in(p_namespace text, p_name text) RETURNS bigint
  LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
  RETURN ('x' || encode(substr(sha256(convert_to(p_namespace, 'UTF8'::name) || decode('00', 'hex')
                                      || convert_to(p_name, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint;
  COMMENT ON FUNCTION advisory_lock_key_in(text, text) IS
    'As advisory_lock_key(), in a namespace. It hashes the namespace, a zero byte and the name: so it is '
    'that of no name in another namespace or in none. The same in Go (Namespace).';

  -- The highest 24 bits of pgxlock's own advisory keys are a mark, so that the views and the Monitor
  -- recognise them. Its last bit is set in the keys that a session holds for as long as it lives, and
  -- clear in the keys of a moment: guards, pins, cleaners and the lock of migrations, held until a
  -- transaction ends at the latest. So no session that lives keeps the guard of a lease. One key of a user in
  -- 8 million carries one of the two marks by chance.
  CREATE OR REPLACE FUNCTION pgxlock_own_key(p_lasting boolean, p_content bytea) RETURNS bigint
  LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN (CASE WHEN p_lasting THEN 'x706c6b' ELSE 'x706c6a' END
               || encode(substr(sha256(p_content), 1, 5), 'hex'))::bit(64)::bigint;
  COMMENT ON FUNCTION pgxlock_own_key(boolean, bytea) IS
    'pgxlock, internal: an advisory key for its own use, a mark and 40 bits of the hash of p_content. p_lasting: a '
    'session holds it for as long as it lives; else a transaction does.';

  CREATE OR REPLACE FUNCTION pgxlock_is_own_key(p_space integer, p_key bigint) RETURNS boolean
  LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN p_space = 1 AND p_key >> 41 = pgxlock_own_key(false, ''::bytea) >> 41;
  COMMENT ON FUNCTION pgxlock_is_own_key(integer, bigint) IS
    'pgxlock, internal: whether an advisory key carries the mark of pgxlock''s own keys. p_space: as objsubid in pg_locks.';

  -- An acquire needs two of these keys, and a release one, so the hash is a cheap one (SHA-256 takes
  -- five times as long). It is seeded with the table, so that installations have different keys, and
  -- never with 0: programs lock hashtextextended(name, 0) themselves.
  --
  -- Two of them that are meant to differ are equal with odds of 1 in 2^40, 1.1 million million:
  -- where other transactions hold 1000 of them, one acquire in 500 million finds its guard or its
  -- pin taken. Then the two exclude each other until the transaction that holds the key ends, and
  -- nothing is granted that would not be: a key that is not obtained always means no.
  --   * Guards, and pins tried exclusively: the lease is busy, is not released yet, or stays to be
  --     reaped later.
  --   * Pins that a fence tries shared: LK001, and its transaction fails as if the lease were lost.
  --     Only while another transaction is acquiring, releasing or reaping the lease that has the
  --     equal key; fences do not keep each other out.
  --   * Cleaners: the next one cleans.
  -- For the keys of sessions see pgxlock_session_key() and pgxlock_waiter_key().
  CREATE OR REPLACE FUNCTION pgxlock_key(p_space text, p_name text) RETURNS bigint
  LANGUAGE sql STABLE PARALLEL SAFE
  RETURN pgxlock_own_key(false, ''::bytea) >> 40 << 40
       | (hashtextextended(p_name COLLATE "C",
                           hashtextextended(p_space COLLATE "C", 'distributed_locks'::regclass::oid::bigint))
          & 1099511627775);                 -- 2^40 - 1
  COMMENT ON FUNCTION pgxlock_key(text, text) IS
    'pgxlock, internal: the advisory keys of a moment: guards and pins of leases and shares, and cleaners. The mark of '
    'pgxlock_own_key(), and 40 bits of a hash.';

  CREATE OR REPLACE FUNCTION pgxlock_check(p_argument text, p_value text) RETURNS void
  LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_value IS NULL THEN
      RAISE EXCEPTION '% must not be NULL', p_argument USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF char_length(p_value) NOT BETWEEN 1 AND 255 THEN
      RAISE EXCEPTION '% must have 1 to 255 characters, it has %', p_argument, char_length(p_value)
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_argument = 'p_holder_id' AND left(p_value, 1) = '*' THEN
      RAISE EXCEPTION 'p_holder_id must not begin with *: such holders are reserved' USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_check(text, text) IS 'pgxlock, internal: raises 22023 for a bad name or holder.';

  CREATE OR REPLACE FUNCTION pgxlock_check_try(p_lock_name text, p_holder_id text, p_ttl interval, p_metadata jsonb)
  RETURNS interval
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  DECLARE
    v_ttl   interval;
    v_bytes integer := octet_length(p_metadata::text);
  BEGIN
    IF (char_length(p_lock_name) BETWEEN 1 AND 255
        AND char_length(p_holder_id) BETWEEN 1 AND 255
        AND left(p_holder_id, 1) <> '*') IS NOT TRUE THEN
      PERFORM pgxlock_check('p_lock_name', p_lock_name);
      PERFORM pgxlock_check('p_holder_id', p_holder_id);
    END IF;
    v_ttl := pgxlock_ttl('p_ttl (or p_ttl_seconds)', p_ttl);
    IF v_bytes > 65536 THEN
      RAISE EXCEPTION 'p_metadata must not exceed 65536 bytes, it has %', v_bytes USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- 1e65000 is stored in 22 bytes: a Monitor would make gigabytes of text of many leases.
    IF v_bytes > 2000 AND v_bytes > 8 * pg_catalog.pg_column_size(p_metadata::text::jsonb) THEN
      RAISE EXCEPTION 'p_metadata must not have numbers of thousands of zeros' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('cannot acquire a lock on a standby server');
    END IF;
    RETURN v_ttl;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_try(text, text, interval, jsonb) IS
    'pgxlock, internal: checks the arguments of a try of a lease or a share, and raises for a bad one and on a standby; '
    'returns the ttl in seconds.';

  -- Each such call costs 1 to 3 us: what every Locker calls tests first, and calls these to raise.
  CREATE OR REPLACE FUNCTION pgxlock_require(p_holds boolean, p_demand text) RETURNS void
  LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
  BEGIN
    IF p_holds IS NOT TRUE THEN
      RAISE EXCEPTION '%', p_demand USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_require(boolean, text) IS 'pgxlock, internal: raises 22023 with p_demand unless p_holds is true.';

  CREATE OR REPLACE FUNCTION pgxlock_check_primary(p_refusal text) RETURNS void
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  BEGIN
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION '%', p_refusal USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=primary.';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_primary(text) IS 'pgxlock, internal: raises 25006 on a standby server.';

  CREATE OR REPLACE FUNCTION pgxlock_check_read_committed(p_refusal text) RETURNS void
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      RAISE EXCEPTION '%', p_refusal
        USING ERRCODE = 'active_sql_transaction', HINT = 'Call it in a READ COMMITTED transaction of its own.';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_read_committed(text) IS 'pgxlock, internal: raises 25001 above READ COMMITTED.';

  -- A ttl is elapsed time: days and months do not depend on the session's time zone.
  -- Intervals compare as if months had 30 days, so what they are in seconds is compared as well: months and days of
  -- opposite signs may come to years.
  CREATE OR REPLACE FUNCTION pgxlock_ttl(p_argument text, p_ttl interval) RETURNS interval
  LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
  DECLARE
    v_ttl interval;
  BEGIN
    IF p_ttl > interval '0' AND p_ttl <= interval '100 years' THEN
      v_ttl := pg_catalog.make_interval(secs => pg_catalog.date_part('epoch'::text, p_ttl));
    END IF;
    IF (v_ttl > interval '0' AND v_ttl <= interval '876600 hours') IS NOT TRUE THEN
      RAISE EXCEPTION '% must be more than 0 and at most 100 years, it is %', p_argument, coalesce(p_ttl::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN v_ttl;
  END $$;
  COMMENT ON FUNCTION pgxlock_ttl(text, interval) IS 'pgxlock, internal: a ttl in seconds; raises 22023 for a bad one.';

  -- The time before which something is old enough to be removed. Compared as times, because months and days of opposite
  -- signs compare otherwise than they are subtracted.
  CREATE OR REPLACE FUNCTION pgxlock_before(p_argument text, p_age interval) RETURNS timestamptz
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_now    timestamptz := clock_timestamp();
    v_before timestamptz;
  BEGIN
    IF p_age >= interval '0' THEN
      v_before := v_now - least(p_age, interval '1000 years');
    END IF;
    PERFORM pgxlock_require(v_before <= v_now, p_argument || ' must be 0 or more'::text);
    RETURN v_before;
  END $$;
  COMMENT ON FUNCTION pgxlock_before(text, interval) IS
    'pgxlock, internal: what is older than that is removed; raises 22023 for a bad age.';

  -- An acknowledged lease must survive a crash, whatever the role's setting, unless a Locker said
  -- on its connection that those that it acquires and releases need not. The setting is only
  -- raised, and only until the transaction ends.
  CREATE OR REPLACE FUNCTION pgxlock_durable(p_always boolean DEFAULT false) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local')
       AND (p_always OR current_setting('pgxlock.durability', true) IS DISTINCT FROM 'async') THEN
      PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_durable(boolean) IS
    'pgxlock, internal: raises synchronous_commit for this transaction if it is off or local. Unless p_always is true, '
    'pgxlock.durability = async prevents that.';

  -------------------------------------------------------------------- rows --
  PERFORM pgxlock_migrate('made'::text, 1, v_path);

  -- The first epoch is 1. If tokens are in use and their sequence is lost, it starts again, in a new epoch
  -- that the repair makes because the recorded timeline is ahead. A lost epoch the repair makes anew.
  IF v_was_installed THEN
    IF v_tokens_are_gone THEN
      UPDATE pgxlock_epoch SET timeline = greatest(timeline, pgxlock_timeline()) + 1::bigint;
    END IF;
  ELSE                                      -- no token was drawn that a crash could have taken back
    PERFORM pgxlock_durable(true);
    INSERT INTO pgxlock_epoch (system_identifier, epoch_base, timeline)
    VALUES (pgxlock_system_identifier(), 1::bigint - pgxlock_timeline() * 64, pgxlock_timeline());
    INSERT INTO pgxlock_since_crash DEFAULT VALUES;
  END IF;
  PERFORM repair_lock_tokens();

  -- Existing holders get tokens.
  UPDATE distributed_locks SET fencing_token = (pgxlock_next_tokens(1::bigint))[1] WHERE fencing_token = 0;
END $migration$;
